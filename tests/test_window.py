"""Windows: which tokens stay, at which positions, what a session reuses afterwards; pure, then on synthetic models."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tinyserve_gguf import ContextFullError, Conversation, Model, OptionError, Sampling, Session, load
from tinyserve_gguf._llama import NativeContext
from tinyserve_gguf.window import Track, Window, WindowCounts

ModelFile = Callable[..., Path]

GREEDY = Sampling(temp=0)
SIZE, SINKS = 64, 4
BLOCK = 15  # a quarter of what may leave


def opened(path: Path, **options: object) -> Model:
    defaults = {"expert_cache": "50%", "device": "CPU", "window": SIZE, "n_ubatch": 32, "n_threads": 1}
    return load(path, **{**defaults, **options})  # type: ignore[arg-type]


@pytest.fixture
def model(model_file: ModelFile) -> Iterator[Model]:
    with opened(model_file("mixtral", gate="F32", up="F32", down="F32", dense="F32")) as found:
        yield found


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 300) for _ in range(n)]


# ---- arithmetic -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5, 16, 64, 100])
@pytest.mark.parametrize("most", [1, 7, 512])
def test_what_is_read_always_fits(size: int, most: int) -> None:
    """Whatever is held, what `step` gives fits once `leaving` have left, the sinks stay, and half of the window at least is held then."""
    for sinks in range(size // 2 + 1):
        window = Window(size, sinks)
        for held in range(size + 1):
            step = window.step(held, most)
            assert 1 <= step <= most
            leaving = window.leaving(held, step)
            assert leaving % window.block == 0
            assert held - leaving + step <= size
            assert held - leaving >= min(held, sinks)
            assert leaving == 0 or held + step > size


def test_a_block_is_a_quarter_of_what_may_leave() -> None:
    assert (Window().size, Window().sinks, Window().block) == (2048, 4, 511)
    assert [Window(SIZE, sinks).block for sinks in (0, SINKS, 32)] == [16, BLOCK, 8]
    assert Window(2, 1).block == 1


@pytest.mark.parametrize(("size", "sinks", "message"), [(1, 0, "2 or more"), (64, -1, "0 or more"), (64, 33, "33 sinks are more than half of a")])
def test_impossible_windows(size: int, sinks: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Window(size, sinks)


@pytest.mark.parametrize("moves", [True, False])
def test_track_against_a_list_of_pairs(moves: bool) -> None:
    """The same bookkeeping the slow way: (token, position) of everything that is held."""
    rng = random.Random(1)
    window, track, pairs, counter = Window(SIZE, SINKS), Track(SINKS), list[tuple[int, int]](), itertools.count()
    for _ in range(400):
        n = rng.randrange(1, window.step(track.n_held, 32) + 1)
        if lost := window.leaving(track.n_held, n):
            track.lose(lost, moves=moves)
            rest = [(token, at - lost if moves else at) for token, at in pairs[SINKS + lost :]]
            pairs = pairs[:SINKS] + rest
        for _ in range(n):
            pairs.append((next(counter), pairs[-1][1] + 1 if pairs else 0))
            assert track.next == pairs[-1][1]
            track.tokens.append(pairs[-1][0])
        if rng.random() < 0.2:
            keep = track.reachable(max(0, len(track.tokens) - rng.randrange(40)), SIZE // 2)
            position = track.cut(keep)
            pairs = [pair for pair in pairs if pair[1] < position]
            assert len(track.tokens) == keep
            if not pairs or pairs[-1][0] + 1 != keep:
                assert keep <= SINKS
            counter = itertools.count(keep)
        assert track.held == [token for token, _ in pairs]
        assert track.n_held == len(pairs) <= SIZE


def test_cutting_back_to_what_is_missed() -> None:
    track = Track(SINKS, list(range(100)))
    track.lose(60, moves=True)  # 0-3 and 64-99 are held
    assert [track.reachable(n, 32) for n in (100, 99, 92, 91, 64, 30, 4, 2)] == [100, 99, 92, 4, 4, 4, 4, 2]
    assert track.cut(4) == 4
    assert (track.held, track.lost) == ([0, 1, 2, 3], 0)


# ---- sessions -------------------------------------------------------------------------------------------------------------------------------


def expected(sequence: list[int], sinks: int = SINKS) -> tuple[int, ...]:
    """What a window holds of a sequence that was read at once: the sinks, and the rest in whole blocks from the end of what left."""
    held = len(sequence)
    while held > SIZE:
        held -= BLOCK
    return tuple(sequence[:sinks] + sequence[len(sequence) - held + sinks :])


@pytest.mark.parametrize("n", [SIZE - 1, SIZE, SIZE + 1, SIZE + BLOCK, SIZE + BLOCK + 1, 1000])
def test_sinks_and_the_newest_are_held(model: Model, n: int) -> None:
    session, prompt = model.session(), tokens(n)
    assert session.read(prompt) == 0
    assert session.tokens[:SINKS] == tuple(prompt[:SINKS])
    assert session.tokens == expected(prompt)
    counts = model.stats().window
    assert counts is not None
    assert (counts.evicted_tokens, counts.rereads) == (n - len(session.tokens), 0)
    assert counts.shifts == counts.evicted_tokens // BLOCK
    assert np.isfinite(session.logits()).all()


def test_cost_is_linear(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of a long prompt is computed once, at positions below the size of the window."""
    calls = list[tuple[int, int]]()
    decode = NativeContext.decode

    def counted(self: NativeContext, tokens: list[int], position: int, **options: bool) -> None:
        calls.append((len(tokens), position))
        decode(self, tokens, position, **options)

    monkeypatch.setattr(NativeContext, "decode", counted)
    model.session().read(tokens(2000))
    assert sum(n for n, _ in calls) == 2000
    assert max(position + n for n, position in calls) <= SIZE
    assert len(calls) <= 2000 / BLOCK


def test_generation_goes_on_without_end(model: Model) -> None:
    session = model.session()
    reply = list(session.generate(tokens(40), 4 * SIZE, GREEDY))
    assert len(reply) == 4 * SIZE
    assert session.last is not None
    assert session.last.finish == "length"
    assert session.tokens[:SINKS] == tuple(tokens(40)[:SINKS])
    assert session.tokens[-20:] == tuple(reply[-21:-1])
    assert len(session.tokens) <= SIZE
    assert session.last.evicted_tokens == BLOCK * session.last.shifts == 40 + len(reply) - 1 - len(session.tokens)
    assert f"{session.last.evicted_tokens} tok left the window" in session.last.line()
    assert session.last.as_dict()["shifts"] == session.last.shifts > 10


def test_counters(model: Model) -> None:
    first, second = model.session(), model.session()
    first.read(tokens(100))
    first.close()
    second.read(tokens(200))
    counts = model.stats().window
    assert counts == WindowCounts(shifts=3 + 10, evicted_tokens=(3 + 10) * BLOCK)
    assert model.stats().lines()[-1] == f"window: {13 * BLOCK} tokens left, 13 shifts"
    assert model.stats().as_dict()["window"] == {"shifts": 13, "evicted_tokens": 13 * BLOCK, "rereads": 0}
    model.reset_stats()
    assert model.stats().window == WindowCounts()
    second.read(tokens(200) + tokens(15, seed=1))
    assert model.stats().window == WindowCounts(shifts=1, evicted_tokens=BLOCK)


def test_without_a_window_there_are_no_such_counters(model_file: ModelFile) -> None:
    with opened(model_file("mixtral"), window=None) as model:
        assert model.stats().window is None
        assert model.stats().as_dict()["window"] is None
        with pytest.raises(OptionError, match="sinks need a window"):
            model.session().set_sinks(8)


# ---- reuse after eviction -------------------------------------------------------------------------------------------------------------------


def same(session: Session, fresh: Session, prompt: list[int]) -> None:
    """Both hold the same and go on alike. The logits differ by what rotating the keys anew does to f16."""
    assert session.tokens == fresh.tokens
    logits = np.asarray(fresh.logits())
    assert np.abs(np.asarray(session.logits()) - logits).max() < 0.02 * logits.std()
    assert list(session.generate(prompt, 4, GREEDY)) == list(fresh.generate(prompt, 4, GREEDY))


@pytest.mark.parametrize("n", [10, SIZE, 150, 500])
def test_what_goes_on_is_not_read_again(model: Model, n: int) -> None:
    """In the same steps: then the same tokens leave at the same time, and everything is equal."""
    session, fresh, prompt = model.session(), model.session(), tokens(n) + tokens(40, seed=1)
    session.read(prompt[:n])
    assert session.read(prompt) == n
    fresh.read(prompt[:n])
    assert fresh.read(prompt) == n
    same(session, fresh, prompt)


@pytest.mark.parametrize("back", [1, 10, 20])
def test_going_back_a_little(model: Model, back: int) -> None:
    """To a place that the window still reaches: what was held before it stays, at its positions."""
    session, prompt = model.session(), tokens(150)
    session.read(prompt)
    held = session.tokens
    other = prompt[: 150 - back] + tokens(5, seed=1)
    assert session.read(other) == 150 - back
    assert session.tokens == held[: len(held) - back] + tuple(other[150 - back :])
    # a fresh context with the same tokens at the same positions; keys of deeper layers have seen what left, so it is only near
    assert list(session.generate(other, 4, GREEDY))
    assert session.last is not None
    assert session.last.reused_tokens == len(other) - 1


@pytest.mark.parametrize("keep", [3, SINKS, 30, 100])
def test_going_back_to_what_has_left(model: Model, keep: int) -> None:
    """Nothing but the sinks is left of it: all the rest is read again, as by a session that never read anything else."""
    session, fresh, other = model.session(), model.session(), tokens(500)[:keep] + tokens(100, seed=1)
    session.read(tokens(500))
    assert session.read(other) == min(keep, SINKS)
    fresh.read(other[: min(keep, SINKS)])
    fresh.read(other)
    same(session, fresh, other)


def test_same_prompt_again(model: Model) -> None:
    session, prompt = model.session(), tokens(300)
    session.read(prompt)
    held, logits = session.tokens, np.asarray(session.logits())
    assert session.read(prompt) == 299
    assert session.tokens == held
    assert np.abs(np.asarray(session.logits()) - logits).max() < 1e-3 * logits.std()


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4", "qwen35moe", "nemotron_h_moe"])
def test_reuse_on_other_memories(model_file: ModelFile, name: str) -> None:
    """A sliding-window cache, and states that cannot go back: then all is read again."""
    with opened(model_file(name)) as model:
        session, fresh, prompt = model.session(), model.session(), tokens(200)
        session.read(prompt)
        longer = prompt + tokens(30, seed=1)
        assert session.read(longer) == 200
        other = longer[:-5] + tokens(10, seed=2)
        reused = session.read(other)
        assert reused == (0 if name in ("qwen35moe", "nemotron_h_moe") else 225)
        assert session.tokens[:SINKS] == tuple(prompt[:SINKS])
        assert session.tokens[-15:] == tuple(other[-15:])
        if reused == 0:
            fresh.read(other)
            same(session, fresh, other)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", ["decode", "remove", "move"])
def test_interrupts_leave_what_is_true(model: Model, monkeypatch: pytest.MonkeyPatch, method: str, late: bool) -> None:
    """Ctrl-C before or after any native call of a long prompt: the next read gives what a session gives that was never interrupted."""
    whole, calls = getattr(NativeContext, method), itertools.count()

    def interrupted(self: NativeContext, *arguments: object, **options: object) -> None:
        now = next(calls) == 3
        if now and not late:
            raise KeyboardInterrupt
        whole(self, *arguments, **options)
        if now:
            raise KeyboardInterrupt

    session, fresh, prompt = model.session(), model.session(), tokens(300)
    with monkeypatch.context() as patch:
        patch.setattr(NativeContext, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.read(prompt)
    session.read(prompt)
    fresh.read(prompt)
    same(session, fresh, prompt)


# ---- the system prompt stays ----------------------------------------------------------------------------------------------------------------


def test_conversation_keeps_the_system_prompt(model_file: ModelFile) -> None:
    with opened(model_file("mixtral"), window=200) as model:
        system = "Answer like a sailor of the old days."
        talk = Conversation(model, system, keep_system=True)
        for turn in range(6):
            "".join(talk.reply(f"what about {turn}, or {turn + 1}?", 40, GREEDY))
        held = model.detokenize(talk._session.tokens)
        assert held.startswith(model.detokenize(model.prompt_tokens(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")))
        assert "what about 0" not in held
        assert "what about 5" in held
        assert model.stats().window.evicted_tokens > 0  # type: ignore[union-attr]
        forgetful = Conversation(model, system)
        for turn in range(6):
            "".join(forgetful.reply(f"what about {turn}, or {turn + 1}?", 40, GREEDY))
        assert "sailor" not in model.detokenize(forgetful._session.tokens)

        talk.set_system("Be brief.")
        "".join(talk.reply("and now?", 10, GREEDY))
        assert model.detokenize(talk._session.tokens).startswith(model.detokenize(model.prompt_tokens("<|im_start|>system\nBe brief.<|im_end|>")))
        with pytest.raises(OptionError, match=r"the system prompt takes \d+ tokens, more than half of the window of 200"):
            talk.set_system("word " * 100)
        assert talk.messages[0]["content"] == "Be brief."
        "".join(talk.reply("still there?", 10, GREEDY))


def test_system_prompt_that_is_too_long(model_file: ModelFile) -> None:
    with opened(model_file("mixtral")) as model, pytest.raises(OptionError, match="more than half of the window of 64: give a larger --window"):
        Conversation(model, "word " * 50, keep_system=True)
    with opened(model_file("mixtral"), window=None) as model, pytest.raises(OptionError, match="--keep-system needs --window"):
        Conversation(model, "Be brief.", keep_system=True)


# ---- what cannot be -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": None, "sinks": 4}, "--sinks needs --window"),
        ({"n_ctx": 512}, "give it or -c, not both"),
        ({"window": 1}, "--window is 2 or more"),
        ({"window": 64, "sinks": 40}, "more than half"),
        ({"window": 4000}, "--window 4000 is more than the 2048 positions that the model knows"),
    ],
)
def test_impossible_options(model_file: ModelFile, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        opened(model_file("mixtral"), **options)


def test_end_of_the_context_without_a_window(model_file: ModelFile) -> None:
    """Says what to do, and the session goes on."""
    with opened(model_file("mixtral"), window=None, n_ctx=256) as model:
        session = model.session()
        session.read(tokens(40))
        with pytest.raises(ContextFullError, match="257 tokens do not fit into the context of 256: give a larger -c, or --window to go on"):
            session.read(tokens(257))
        assert session.tokens == tuple(tokens(40))
        assert session.read(tokens(50)) == 40


@pytest.mark.parametrize("n_ctx", [1, 99, 257])
def test_context_that_is_no_multiple_of_256(model_file: ModelFile, n_ctx: int) -> None:
    """llama.cpp would take the length asked for as its batch, round the context up, and abort on the first longer batch."""
    with opened(model_file("mixtral"), window=None, n_ctx=n_ctx, n_ubatch=512) as model:
        session = model.session()
        assert session.n_ctx == -(-n_ctx // 256) * 256
        session.read(tokens(session.n_ctx))
        assert len(session.tokens) == session.n_ctx
