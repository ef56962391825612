"""Models and sessions in threads, created and closed in any order, beside stock llama.cpp models; nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import exact
import pytest

from tinyserve_gguf import Model, OptionError, Sampling, Session, load
from tinyserve_gguf._llama import NativeModel
from tinyserve_gguf.errors import EngineError

ModelFile = Callable[..., Path]

PROMPTS = (7, 40, 200)
STEPS = 16


def opened(path: Path, cache: str = "25%", miss: str = "fetch") -> Model:
    """One thread each: these tests run several models at once."""
    return load(path, expert_cache=cache, device="CPU", n_ctx=256, n_threads=1, miss=miss)


def text(session: Session, seed: int) -> list[int]:
    """A random prompt and the greedy reply to it."""
    rng = random.Random(seed)
    prompt = [rng.randrange(5, 300) for _ in range(30 + seed)]
    return list(session.generate(prompt, STEPS, Sampling(temp=0)))


@pytest.fixture(scope="module")
def alone(model_file: ModelFile) -> dict[str, list[list[int]]]:
    """The replies of models that are alone in the process."""
    found = {}
    for name in ("gpt-oss", "deepseek2", "mixed"):
        with opened(model_file(name), "all") as model:
            session = model.session()
            found[name] = [text(session, seed) for seed in range(4)]
    return found


def at_once(*tasks: Callable[[], None]) -> None:
    """Run the tasks in threads that start together. The first exception is raised here."""
    barrier = threading.Barrier(len(tasks))

    def started(task: Callable[[], None]) -> None:
        barrier.wait(30)
        task()

    with ThreadPoolExecutor(len(tasks)) as threads:
        for future in [threads.submit(started, task) for task in tasks]:
            future.result(120)


@pytest.mark.parametrize("miss", ["fetch", "cpu"])
def test_two_models_with_two_contexts_each(model_file: ModelFile, miss: str) -> None:
    """Four contexts, two of them over one slot pool each, give the logits that stock llama.cpp gives."""
    names = ("gpt-oss", "deepseek2")
    expected = {name: exact.stock(model_file(name), STEPS, PROMPTS) for name in names}
    with opened(model_file(names[0]), miss=miss) as one, opened(model_file(names[1]), "50%", miss) as two:

        def task(model: Model, name: str, prompts: tuple[int, ...]) -> Callable[[], None]:
            def run() -> None:
                for _ in range(2):
                    for prompt in prompts:
                        assert exact.run(model.native, prompt, STEPS, threads=1) == expected[name][prompt]

            return run

        at_once(*(task(model, name, order) for model, name in zip((one, two), names, strict=True) for order in (PROMPTS, PROMPTS[::-1])))
        for model in (one, two):
            model.check_integrity()
            pager = model.stats().pager
            assert pager is not None
            assert pager.decode.hits + pager.decode.misses == pager.decode.lookups > 0


def test_sessions_of_one_model_take_turns(model_file: ModelFile, alone: dict[str, list[list[int]]]) -> None:
    """Token by token in turns in one thread: each session has a KV cache of its own and they share the slots."""
    with opened(model_file("gpt-oss")) as model:
        sessions = [model.session() for _ in range(3)]
        rng = [random.Random(seed) for seed in range(3)]
        prompts = [[rng[seed].randrange(5, 300) for _ in range(30 + seed)] for seed in range(3)]
        replies = [session.generate(prompt, STEPS, Sampling(temp=0)) for session, prompt in zip(sessions, prompts, strict=True)]
        assert list(zip(*replies, strict=True)) == list(zip(*alone["gpt-oss"][:3], strict=True))


def test_by_hand_while_it_runs(model_file: ModelFile, alone: dict[str, list[list[int]]]) -> None:
    """Pin, prefetch, evict, read slots and counters from another thread: the replies stay the same."""
    done = threading.Event()
    with opened(model_file("gpt-oss")) as model:

        def generate() -> None:
            session = model.session()
            try:
                for _ in range(3):
                    assert [text(session, seed) for seed in range(4)] == alone["gpt-oss"]
            finally:
                done.set()

        def meddle() -> None:
            rng = random.Random(0)
            while not done.is_set():
                expert = model.experts[rng.randrange(3), rng.randrange(8)]
                expert.prefetch()
                expert.pin()
                assert (expert.gate.in_slot() == expert.gate.raw).all()  # type: ignore[union-attr]
                expert.unpin()
                expert.evict()
                model.set_policy(rng.choice(("lfru", "lru", "slru", "lfu", "fifo")))
                model.check_integrity()

        at_once(generate, meddle)


# ---- life and death -------------------------------------------------------------------------------------------------------------------------


def session_first(path: Path, seed: int) -> list[int]:
    model = opened(path)
    session = model.session()
    found = text(session, seed)
    session.close()
    model.close()
    return found


def model_first(path: Path, seed: int) -> list[int]:
    model = opened(path, "50%")
    session = model.session()
    found = text(session, seed)
    model.close()
    session.close()
    return found


def second_model_between(path: Path, seed: int) -> list[int]:
    """The first model is closed while the second, of the same file, is in the middle of a reply."""
    first = opened(path, "all")
    first_session = first.session()
    assert len(text(first_session, seed)) == STEPS
    second = opened(path)
    session = second.session()
    rng = random.Random(seed)
    reply = session.generate([rng.randrange(5, 300) for _ in range(30 + seed)], STEPS, Sampling(temp=0))
    found = [next(reply)]
    first.close()
    found += reply
    second.close()
    return found


def abandoned_reply(path: Path, seed: int) -> list[int]:
    """A reply that nobody reads to its end, a session that nobody closes."""
    with opened(path) as model:
        next(model.session().generate([10, 20, 30], 5, Sampling(temp=0)))
        return text(model.session(), seed)


LIVES = (session_first, model_first, second_model_between, abandoned_reply)


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_orders_of_closing(model_file: ModelFile, alone: dict[str, list[list[int]]], life: Callable[[Path, int], list[int]]) -> None:
    for name, replies in alone.items():
        assert life(model_file(name), 1) == replies[1]


def test_create_run_destroy_in_threads(model_file: ModelFile, alone: dict[str, list[list[int]]]) -> None:
    def task(number: int) -> Callable[[], None]:
        def run() -> None:
            rng = random.Random(number)
            for _ in range(8):
                name, seed = rng.choice(list(alone)), rng.randrange(4)
                assert rng.choice(LIVES)(model_file(name), seed) == alone[name][seed]

        return run

    for name in alone:
        model_file(name)
    at_once(*(task(number) for number in range(4)))


def test_failed_loads_between(model_file: ModelFile, tmp_path: Path, alone: dict[str, list[list[int]]]) -> None:
    """Loads that are stopped half-way or refused leave nothing that disturbs the next one."""
    path = model_file("gpt-oss")
    for _ in range(3):
        with pytest.raises(EngineError, match="loading was stopped"):
            load(path, device="CPU", expert_cache="25%", progress=lambda fraction: fraction < 0.5)
        with pytest.raises(OptionError, match="too small"):
            load(path, device="CPU", expert_cache="1")
        with pytest.raises(ValueError, match="no such file"):
            load(tmp_path / "none.gguf")
        assert session_first(path, 2) == alone["gpt-oss"][2]


def test_closed_is_an_error(model_file: ModelFile) -> None:
    """Not a crash in C."""
    model = opened(model_file("gpt-oss"))
    session = model.session()
    expert = model.experts[0, 0]
    reply = session.generate([10, 20, 30], 5, Sampling(temp=0))
    next(reply)
    model.close()
    model.close()
    with pytest.raises(OptionError, match="closed"):
        next(reply)
    with pytest.raises(OptionError, match="closed"):
        session.read([10, 20, 40])
    with pytest.raises(OptionError, match="closed"):
        session.logits()
    with pytest.raises(OptionError, match="closed"):
        model.session()
    with pytest.raises(OptionError, match="closed"):
        model.experts[0, 0]
    for use in (lambda: expert.slot, lambda: expert.pin(), lambda: expert.down.raw):  # type: ignore[union-attr]
        with pytest.raises(OptionError, match="closed"):
            use()


# ---- stock models beside ours ---------------------------------------------------------------------------------------------------------------


def test_stock_model_in_the_same_process(model_file: ModelFile) -> None:
    """The proxy device is in no registry: a stock model neither sees it nor changes its logits, also while a paged one computes."""
    path, other = model_file("gpt-oss"), model_file("deepseek2")
    before = exact.stock(path, STEPS, PROMPTS)
    expected = exact.stock(other, STEPS, PROMPTS)
    with opened(other) as paged:
        stock = NativeModel(str(path), None, extra_bufts=False)
        try:

            def run(native: NativeModel, hashes: dict[int, str]) -> Callable[[], None]:
                def task() -> None:
                    for prompt in (*PROMPTS, *PROMPTS):
                        assert exact.run(native, prompt, STEPS, threads=1) == hashes[prompt]

                return task

            at_once(run(stock, before), run(paged.native, expected))
        finally:
            stock.close()
        pager = paged.stats().pager
        assert pager is not None
        assert pager.host_tensors == sum(len(layer.parts) for layer in paged.facts.expert_layers)


# ---- leaks ----------------------------------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Of this process, without what malloc holds back, which in a long test run moves by one and a half slot pools from cycle to cycle."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def entries(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def cycles(path: Path, miss: str) -> Iterator[None]:
    """Each one loads the model, runs it in two sessions and closes everything."""
    while True:
        with opened(path, miss=miss) as model:
            for seed in range(2):
                text(model.session(), seed)
        gc.collect()
        yield


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("miss", ["fetch", "cpu"])
def test_nothing_leaks(model_file: ModelFile, miss: str) -> None:
    path = model_file("qwen3moe", embd=256, ff=512, experts=16, gate="Q8_0", up="Q8_0", down="Q8_0")
    size = path.stat().st_size
    assert size > 20e6
    cycle = cycles(path, miss)
    for _ in range(5):
        next(cycle)
    memory, files, threads = resident_bytes(), entries("/proc/self/fd"), entries("/proc/self/task")
    for _ in range(20):
        next(cycle)
    assert resident_bytes() - memory < size / 2  # one leaked slot pool of 20 would be more
    assert entries("/proc/self/fd") == files
    assert entries("/proc/self/task") == threads


def test_sessions_do_not_pile_up(model_file: ModelFile) -> None:
    """A server makes one for every request."""
    with opened(model_file("gpt-oss")) as model:
        for seed in range(3):
            session = model.session()
            text(session, seed)
            session.close()
        assert not model._sessions
