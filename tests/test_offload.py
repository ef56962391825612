"""`offload()`: models that other code opens through llama_cpp.Llama are paged inside the block, and nowhere else."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from llamas import COMMON, answer, opened, plain_kernels, stock, tokens_of

from tinyserve_gguf import Llama, OptionError, offload

ModelFile = Callable[..., Path]

STOCK_INIT = llama_cpp.Llama.__init__
PROMPT = list(range(10, 60))
QUESTION = "What is the capital of France?"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Every test leaves llama-cpp-python as it was."""
    yield
    assert llama_cpp.Llama.__init__ is STOCK_INIT
    assert "__init__" in vars(llama_cpp.Llama)


def made(path: Path, **options: Any) -> Any:
    """As code makes it that knows nothing of this package."""
    return llama_cpp.Llama(model_path=str(path), **COMMON | options)


def slots(model: Any) -> int | None:
    """None for one that is not paged."""
    return model.plan.n_slots if isinstance(model, Llama) else None


def test_inside_and_outside(model_file: ModelFile) -> None:
    path = model_file("qwen3moe")
    before = made(path)
    with offload(expert_cache="25%", device="CPU", policy="lru"):
        inside = made(path)
    after = made(path)
    with opened(before, inside, after, stock(path)) as (_, _, _, theirs):
        assert [slots(model) for model in (before, inside, after)] == [None, 6, None]
        assert type(inside) is Llama
        assert inside.stats().policy == "lru"
        assert answer(inside(PROMPT, max_tokens=8, seed=3)) == answer(theirs(PROMPT, max_tokens=8, seed=3))
        with opened(pickle.loads(pickle.dumps(inside)), inside.new_context()) as others:
            assert [slots(model) for model in others] == [6, 6]


def test_nesting_and_exceptions(model_file: ModelFile) -> None:
    path = model_file("qwen3moe")
    found = []

    def note() -> None:
        with opened(made(path)) as model:
            found.append(slots(model))

    note()
    with offload(expert_cache="25%", device="CPU"):
        note()
        with pytest.raises(ZeroDivisionError), offload(expert_cache="50%", device="CPU"):
            note()
            with offload(expert_cache="all", device="CPU"):
                note()
            note()
            _ = 1 / 0
        note()
        with pytest.raises(ValueError, match="no such file"):
            made(path.with_name("none.gguf"))
        with pytest.raises(OptionError, match="the policy is one of"), offload(policy="best"):
            pytest.fail("it was opened")
        note()
    note()
    assert found == [None, 6, 12, 24, 12, 6, 6, None]


def test_constructors_that_others_exchanged(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tracing packages do: theirs runs inside and outside, and is there afterwards."""
    seen = []

    def traced(self: Any, *arguments: Any, **options: Any) -> None:
        seen.append(type(self))
        STOCK_INIT(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp.Llama, "__init__", traced)
        with offload(expert_cache="25%", device="CPU"), opened(made(model_file("qwen3moe"))) as model:
            assert slots(model) == 6
        with opened(made(model_file("qwen3moe"))) as model:
            assert slots(model) is None
        assert llama_cpp.Llama.__init__ is traced
    assert seen == [Llama, llama_cpp.Llama]


def test_other_threads(model_file: ModelFile) -> None:
    """Each thread has its own block, or none; they open and close in any order."""
    path = model_file("qwen3moe")
    turn = threading.Barrier(3, timeout=60)

    def task(cache: str | None) -> list[int | None]:
        found = []

        def note() -> None:
            with opened(made(path)) as model:
                found.append(slots(model))

        turn.wait()
        if cache is None:
            note()
            turn.wait()
            note()
        else:
            with offload(expert_cache=cache, device="CPU"):
                note()
                turn.wait()
                note()
        note()
        return found

    with offload(expert_cache="all", device="CPU"), ThreadPoolExecutor(3) as threads:
        found = list(threads.map(task, ("25%", None, "50%")))
    assert found == [[6, 6, None], [None, None, None], [12, 12, None]]


def test_other_tasks(model_file: ModelFile) -> None:
    """One thread, several tasks that wait inside their blocks; a task and a thread that a block started and that outlive it."""
    path = model_file("qwen3moe")

    async def one(cache: str | None, entered: asyncio.Event, go: asyncio.Event) -> int | None:
        if cache is None:
            entered.set()
            await go.wait()
            return noted()
        with offload(expert_cache=cache, device="CPU"):
            entered.set()
            await go.wait()
            return noted()

    def noted() -> int | None:
        with opened(made(path)) as model:
            return slots(model)

    async def later(go: asyncio.Event) -> int | None:
        await go.wait()
        return noted()

    async def run() -> list[int | None]:
        go = asyncio.Event()
        tasks = []
        for cache in ("25%", None, "50%"):
            entered = asyncio.Event()
            tasks.append(asyncio.create_task(one(cache, entered, go)))
            await entered.wait()
        with offload(expert_cache="all", device="CPU"):
            tasks.append(asyncio.create_task(later(go)))
            in_thread = await asyncio.to_thread(noted)
        go.set()
        return [in_thread, *(await asyncio.gather(*tasks))]

    assert asyncio.run(run()) == [None, 6, None, 12, None]


def test_block_that_another_task_closes(model_file: ModelFile) -> None:
    """As fixtures of async test frameworks do."""
    path = model_file("qwen3moe")

    async def run() -> None:
        block = offload(expert_cache="25%", device="CPU")

        async def enter() -> None:
            block.__enter__()

        async def leave() -> None:
            block.__exit__(None, None, None)

        await asyncio.create_task(enter())
        await asyncio.create_task(leave())
        with opened(made(path)) as model:
            assert slots(model) is None

    asyncio.run(run())


class Theirs(llama_cpp.Llama):
    """A framework's own kind."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), **COMMON)
        self.extra = 1

    def shout(self) -> str:
        return str(self(PROMPT, max_tokens=4)["choices"][0]["text"]).upper()


def test_subclasses(model_file: ModelFile) -> None:
    with offload(expert_cache="25%", device="CPU"):
        model = Theirs(model_file("qwen3moe"))
    with opened(model):
        assert isinstance(model, Theirs)
        assert isinstance(model, Llama)
        assert (model.extra, slots(model)) == (1, 6)
        assert isinstance(model.shout(), str)


def test_what_code_inside_gives(model_file: ModelFile, dense_file: Path) -> None:
    """Keyword arguments that nobody knows, its own n_ctx with a window, dense models, vocabularies, our own class with its own options."""
    path = model_file("qwen3moe")
    with offload(expert_cache="25%", device="CPU", window=64, miss="cpu", miss_threads=1):
        moe, dense = made(path, mul_mat_q=True, rpc_servers=None), made(dense_file)
        words, ours = made(path, vocab_only=True), Llama(path, expert_cache="50%", device="CPU", **COMMON)
        with pytest.raises(TypeError, match="model_path"):
            llama_cpp.Llama(n_ctx=5)
        with pytest.raises(OptionError, match="leave one of them out"):
            made(path, n_gpu_layers=7)
    with offload(expert_cache="25%"):
        on_cpu = made(path, n_gpu_layers=0)
    with opened(moe, dense, words, ours, on_cpu):
        assert slots(moe) == slots(on_cpu) == 6
        assert moe.stats().window is not None
        assert len(tokens_of(moe, PROMPT, 100)) == 100
        assert not dense.is_paged
        assert words.tokenize(b"x")
        assert slots(ours) == 12
        assert ours.stats().window is None
        assert on_cpu.plan.device.name == "CPU"


# ---- real packages --------------------------------------------------------------------------------------------------------------------------


def test_server_of_llama_cpp_python(model_file: ModelFile) -> None:
    """Its loader passes options that the constructor swallows."""
    from llama_cpp.server.model import LlamaProxy
    from llama_cpp.server.settings import ModelSettings

    settings = ModelSettings(model=str(model_file("qwen3moe")), n_ctx=256, n_threads=1, verbose=False, n_gpu_layers=-1)
    with offload(expert_cache="25%"):
        proxy = LlamaProxy([settings])
    assert slots(proxy()) == 6
    assert proxy()(PROMPT, max_tokens=4)["choices"]
    proxy.free()


@pytest.mark.filterwarnings("ignore:`langchain-community` is being sunset:DeprecationWarning")
def test_langchain(demo_model: Path) -> None:
    from langchain_community.chat_models import ChatLlamaCpp

    def opened_by_it() -> Any:
        return ChatLlamaCpp(model_path=str(demo_model), n_ctx=512, n_batch=64, n_threads=2, max_tokens=20, temperature=0, verbose=False)

    with plain_kernels():
        plain = opened_by_it()
    with offload(expert_cache="25%", device="CPU"):
        model = opened_by_it()
    with opened(plain.client, model.client):
        assert (slots(plain.client), slots(model.client)) == (None, 60)
        reply = model.invoke(QUESTION).content
        assert reply == plain.invoke(QUESTION).content == "The capital of France is Paris."
        assert "".join(chunk.content for chunk in model.stream(QUESTION)) == reply


def test_haystack(demo_model: Path) -> None:
    from haystack.dataclasses import ChatMessage
    from haystack_integrations.components.generators.llama_cpp import LlamaCppChatGenerator

    generator = LlamaCppChatGenerator(str(demo_model), n_ctx=512, n_batch=64, model_kwargs={"n_threads": 2, "verbose": False})
    with offload(expert_cache="25%", device="CPU"):
        generator.warm_up()
    model = generator._model
    with opened(model):
        assert slots(model) == 60
        reply = generator.run([ChatMessage.from_user(QUESTION)], generation_kwargs={"max_tokens": 20, "temperature": 0})["replies"][0]
        assert reply.text == "The capital of France is Paris."
