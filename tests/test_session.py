"""Sessions and conversations on synthetic models: what is reused, interrupted, stopped or refused never changes what comes out."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tinyserve_gguf import ContextFullError, Conversation, Model, OptionError, Sampling, Session, _llama, _sampler, load
from tinyserve_gguf._llama import NativeContext
from tinyserve_gguf.text import until

ModelFile = Callable[..., Path]

GREEDY = Sampling(temp=0)
RECURRENT = ("nemotron_h_moe", "qwen35moe")
WINDOW = 32  # of the sliding-window models
N_CTX = 512


def opened(path: Path, **options: object) -> Model:
    """Small steps, so that a prompt takes several."""
    return load(path, **{"expert_cache": "50%", "device": "CPU", "n_ctx": N_CTX, "n_ubatch": 32, "n_threads": 1, **options})  # type: ignore[arg-type]


@pytest.fixture
def model(model_file: ModelFile) -> Iterator[Model]:
    with opened(plain(model_file, "mixtral")) as found:
        yield found


def plain(model_file: ModelFile, name: str) -> Path:
    """The model in F32: no quantised activations, so that other batch sizes change nothing or only the last bits."""
    return model_file(name, gate="F32", up="F32", down="F32", dense="F32")


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 300) for _ in range(n)]


def logits_of(session: Session, prompt: list[int]) -> np.ndarray:
    session.read(prompt)
    return np.asarray(session.logits())


def assert_same(session: Session, prompt: list[int], model: Model) -> None:
    """The session holds what a new one holds after `prompt`: the logits after it are equal, up to what other batch sizes do to the last bits, and
    so is the text that follows."""
    assert session.tokens == tuple(prompt)
    fresh = model.session()
    expected = logits_of(fresh, prompt)
    assert np.abs(np.asarray(session.logits()) - expected).max() < 1e-3 * expected.std()
    assert list(session.generate(prompt, 8, GREEDY)) == list(fresh.generate(prompt, 8, GREEDY))
    fresh.close()


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts whose sliding-window caches hold little more than the window, 256 cells here, as llama.cpp's own programs make them."""
    defaults = _llama.C.llama_context_default_params

    def changed() -> object:
        params = defaults()
        params.swa_full = False
        return params

    monkeypatch.setattr(_llama.C, "llama_context_default_params", changed)


# ---- reuse ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "gemma4", "deepseek2", *RECURRENT])
def test_prompt_that_goes_on_is_not_read_again(model_file: ModelFile, name: str) -> None:
    with opened(plain(model_file, name)) as model:
        session, prompt = model.session(), tokens(150)
        assert session.read(prompt[:70]) == 0
        assert session.read(prompt[:71]) == 70
        assert session.read(prompt) == 71
        assert_same(session, prompt, model)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "gemma4", "deepseek2", *RECURRENT])
@pytest.mark.parametrize("same", [1, 64, 100, 149])
def test_other_end(model_file: ModelFile, name: str, same: int) -> None:
    """Back to what both prompts share. Recurrent states cannot go back: they are read again."""
    with opened(plain(model_file, name)) as model:
        session, prompt = model.session(), tokens(150)
        session.read(prompt)
        other = prompt[:same] + tokens(40, seed=1)
        assert session.read(other) == (0 if name in RECURRENT else same)
        assert_same(session, other, model)


@pytest.mark.parametrize("name", ["mixtral", *RECURRENT])
def test_same_prompt_again(model_file: ModelFile, name: str) -> None:
    """At least one token must be computed, to have logits."""
    with opened(plain(model_file, name)) as model:
        session, prompt = model.session(), tokens(50)
        session.read(prompt)
        assert session.read(prompt) == (0 if name in RECURRENT else 49)
        assert_same(session, prompt, model)
        assert session.read(prompt[:20]) == (0 if name in RECURRENT else 19)
        assert_same(session, prompt[:20], model)


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("name", ["gpt-oss", "gemma4"])
@pytest.mark.parametrize(("same", "reused"), [(60, 0), (44 + WINDOW - 2, 0), (44 + WINDOW, 44 + WINDOW), (200, 200), (299, 299)])
def test_cache_of_a_sliding_window(model_file: ModelFile, name: str, same: int, reused: int) -> None:
    """256 cells of 300 tokens: positions from 44 on are left. Going back so far that the window would reach beyond them means reading again."""
    with opened(plain(model_file, name)) as model:
        session, prompt = model.session(), tokens(300)
        session.read(prompt)
        assert _llama.C.llama_memory_seq_pos_min(session._context._memory, 0) == 44
        other = prompt[:same] + tokens(40, seed=1)
        assert session.read(other) == reused
        assert_same(session, other, model)


def test_clear(model: Model) -> None:
    session = model.session()
    session.read(tokens(40))
    session.clear()
    assert session.tokens == ()
    assert session.read(tokens(40)) == 0
    assert_same(session, tokens(40), model)


@pytest.mark.parametrize("name", ["mixtral", *RECURRENT])
def test_reply_is_reused(model_file: ModelFile, name: str) -> None:
    """Prompt and reply, except its last token, are in the cache when the next prompt goes on from them."""
    with opened(plain(model_file, name)) as model:
        session, prompt = model.session(), tokens(40)
        reply = list(session.generate(prompt, 20, GREEDY))
        longer = prompt + reply + tokens(5, seed=1)
        assert session.tokens == tuple(prompt + reply[:-1])
        assert session.read(longer) == len(prompt) + 19
        assert_same(session, longer, model)


# ---- interrupts -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    """`interrupt(n, late)`: Ctrl-C before the n-th decode from now, or right after it computed."""
    decode = NativeContext.decode

    def arm(n: int, late: bool) -> None:
        calls = itertools.count()

        def interrupted(self: NativeContext, *arguments: object, **options: object) -> None:
            now = next(calls) == n
            if now and not late:
                raise KeyboardInterrupt
            decode(self, *arguments, **options)  # type: ignore[arg-type]
            if now:
                raise KeyboardInterrupt

        monkeypatch.setattr(NativeContext, "decode", interrupted)

    return arm


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", *RECURRENT])
def test_interrupt_while_the_prompt_is_read(model_file: ModelFile, interrupt: Callable[[int, bool], None], name: str, late: bool) -> None:
    with opened(plain(model_file, name)) as model:
        session, prompt = model.session(), tokens(150)
        interrupt(2, late)
        with pytest.raises(KeyboardInterrupt):
            list(session.generate(prompt, 10, GREEDY))
        assert session.tokens == tuple(prompt[:64])  # two steps of 32
        assert session.last is not None
        assert (session.last.finish, session.last.reply_tokens) == ("interrupted", 0)
        assert session.read(prompt) == (0 if late and name in RECURRENT else 64)
        assert_same(session, prompt, model)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", *RECURRENT])
def test_interrupt_between_tokens(model_file: ModelFile, interrupt: Callable[[int, bool], None], name: str, late: bool) -> None:
    with opened(plain(model_file, name)) as model:
        expected = list(model.session().generate(tokens(40), 20, GREEDY))
        session, made = model.session(), []
        interrupt(2 + 7, late)
        with pytest.raises(KeyboardInterrupt):
            made.extend(session.generate(tokens(40), 20, GREEDY))  # extends nothing: the exception comes out of the iterator
        assert session.last is not None
        assert session.last.finish == "interrupted"
        assert session.tokens == tuple(tokens(40) + expected[:7])
        rest = list(session.generate(tokens(40) + expected[:8], 12, GREEDY))
        assert expected[:8] + rest == expected


@pytest.mark.parametrize("name", ["mixtral", *RECURRENT])
def test_reply_closed_early(model_file: ModelFile, name: str) -> None:
    with opened(plain(model_file, name)) as model:
        expected = list(model.session().generate(tokens(40), 20, GREEDY))
        session = model.session()
        reply = session.generate(tokens(40), 20, GREEDY)
        begun = list(itertools.islice(reply, 8))
        reply.close()  # type: ignore[attr-defined]
        assert session.last is not None
        assert (session.last.finish, session.last.reply_tokens, session.last.prompt_tokens) == ("interrupted", 8, 40)
        assert begun + list(session.generate(tokens(40) + begun, 12, GREEDY)) == expected
        assert session.last.reused_tokens == 40 + 7


# ---- limits ---------------------------------------------------------------------------------------------------------------------------------


def test_limits(model: Model) -> None:
    session = model.session()
    for limit in (1, 2, 17):
        assert len(list(session.generate(tokens(40), limit, GREEDY))) == limit
        assert session.last is not None
        assert (session.last.finish, session.last.reply_tokens) == ("length", limit)
    for limit in (0, -2):
        with pytest.raises(OptionError, match=f"1 or more, or -1 for no limit, not {limit}"):
            list(session.generate(tokens(40), limit, GREEDY))


def test_reply_until_the_context_is_full(model: Model) -> None:
    session = model.session()
    assert session.n_ctx == N_CTX
    reply = list(session.generate(tokens(500), -1, GREEDY))
    assert len(reply) == N_CTX - 500 + 1  # the last one needs no place
    assert session.last is not None
    assert session.last.finish == "context"
    assert session.last.line().endswith("context is full")
    assert session.tokens == tuple(tokens(500) + reply[:-1])
    assert len(list(session.generate(tokens(20), 5, GREEDY))) == 5  # it goes on
    assert len(list(session.generate(tokens(N_CTX), -1, GREEDY))) == 1


def test_prompt_longer_than_the_context(model: Model) -> None:
    session = model.session()
    session.read(tokens(40))
    with pytest.raises(ContextFullError, match=f"{N_CTX + 1} tokens do not fit into the context of {N_CTX}: give a larger -c, or --window"):
        session.read(tokens(N_CTX + 1))
    assert session.tokens == tuple(tokens(40))
    assert session.read(tokens(41)) == 40


def test_end_token(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = model.session()
    reply = list(session.generate(tokens(40), 20, GREEDY))
    end = next(i for i in range(5, 20) if reply[i] not in reply[:i])
    monkeypatch.setattr(model.native, "is_end", lambda token: token == reply[end])
    assert list(session.generate(tokens(40), 20, GREEDY)) == reply[:end]
    assert session.last is not None
    assert (session.last.finish, session.last.reply_tokens) == ("stop", end)
    assert session.tokens == tuple(tokens(40) + reply[:end])


def test_impossible_prompts(model: Model) -> None:
    session = model.session()
    with pytest.raises(OptionError, match="the prompt is empty"):
        session.read([])
    for token in (-1, model.native.n_vocab, 2**31):
        with pytest.raises(OptionError, match=f"token {token} is outside the vocabulary of {model.native.n_vocab}"):
            session.read([5, token])
        with pytest.raises(OptionError, match=f"token {token} is outside the vocabulary of {model.native.n_vocab}"):
            model.detokenize([5, token])
    with pytest.raises(OptionError, match="outside the vocabulary"):
        list(session.generate([-1], 5, GREEDY))
    assert session.tokens == ()
    with pytest.raises(OptionError, match="no logits"):
        session.logits()


def test_impossible_options(model_file: ModelFile) -> None:
    path = model_file("mixtral")
    sizes = ({"n_ctx": -1}, {"n_ubatch": 0}, {"n_threads": 0}, {"expert_cache": "some"}, {"expert_cache": "0"})
    for options in (*sizes, {"policy": "best"}, {"device": "TPU9"}):
        with pytest.raises(OptionError):
            opened(path, **options)
    for field, value in (("temp", -1), ("top_p", 0), ("min_p", 2), ("top_k", -1), ("repeat_penalty", 0), ("seed", 2**32)):
        with pytest.raises(OptionError, match=field):
            Sampling(**{field: value})


def test_context_is_at_most_the_models(model_file: ModelFile) -> None:
    path = model_file("mixtral", context=1024)
    for asked, given in ((0, 1024), (256, 256), (100_000, 1024)):
        with opened(path, n_ctx=asked) as model:
            assert model.n_ctx == given
            assert model.session().n_ctx == given
            said = [line for line in model.lines() if line.startswith("context: ")]
            assert said == (["context: 1,024 tokens in place of -c 100000, as the model was trained with no more"] if asked > given else [])


# ---- sampling -------------------------------------------------------------------------------------------------------------------------------


def test_seeds(model: Model) -> None:
    session = model.session()

    def drawn(seed: int) -> list[int]:
        return list(session.generate(tokens(40), 20, Sampling(temp=1.5, top_k=0, top_p=1, min_p=0, seed=seed)))

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(-1) != drawn(-1)


def test_repeat_penalty(model: Model) -> None:
    session = model.session()
    plain = list(session.generate(tokens(40), 60, GREEDY))
    varied = list(session.generate(tokens(40), 60, Sampling(temp=0, repeat_penalty=100.0, repeat_last_n=-1)))
    assert not set(varied) & set(tokens(40))  # the prompt counts too
    assert len(set(varied)) == 60 > len(set(plain))


# ---- text -----------------------------------------------------------------------------------------------------------------------------------


def test_characters_over_several_tokens(model: Model) -> None:
    text = "naïve 猫 🦙 done"
    made = model.tokenize(text)
    assert len(made) > len(text)  # bytes
    pieces = list(model.text(iter(made)))
    assert "".join(pieces) == text
    assert "🦙" in pieces
    assert all(pieces)
    assert "".join(model.text(iter(made[: len(model.tokenize("naïve 猫 ")) + 2]))) == "naïve 猫 \ufffd"  # cut within the last
    assert model.detokenize(made) == text


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["ab", "cd", "ef"], [], ["ab", "cd", "ef"]),
        (["ab", "cd", "ef"], ["d"], ["ab", "c"]),
        (["ab", "cd", "ef"], ["bcd"], ["a"]),
        (["ab", "cd", "ef"], ["bcx"], ["a", "bcd", "ef"]),
        (["ab", "cd", "ef"], ["ef", "cd"], ["ab"]),
        (["ab", "cd", "ef"], ["fg"], ["ab", "cd", "e", "f"]),
        (["aaab"], ["aab"], ["a"]),
        (["a", "a", "a", "b"], ["aab"], ["a"]),
        (["ab"], ["ab"], []),
    ],
)
def test_stop_strings(pieces: list[str], stop: list[str], expected: list[str]) -> None:
    assert list(until(iter(pieces), stop)) == expected


def test_generate_until_a_stop_string(model: Model) -> None:
    whole = "".join(model.generate("Once upon", max_tokens=40, sampling=GREEDY))
    stop = whole[20:23]
    found = "".join(model.generate("Once upon", max_tokens=40, sampling=GREEDY, stop=[stop]))
    assert found == whole[: whole.index(stop)]


def test_generate_reuses_its_own_session(model: Model) -> None:
    first = "".join(model.generate("Once upon a time", max_tokens=5, sampling=GREEDY))
    again = "".join(model.generate("Once upon a time", max_tokens=5, sampling=GREEDY))
    assert first == again
    assert model._own is not None
    assert model._own.last is not None
    assert model._own.last.reused_tokens == len(model.tokenize("Once upon a time")) - 1


# ---- conversations --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", *RECURRENT])
def test_turns_reuse_all_that_was_said(model_file: ModelFile, name: str) -> None:
    with opened(plain(model_file, name)) as model:
        conversation = Conversation(model, "Be brief.")
        held = 0
        for text in ("first", "second", "third"):
            reply = "".join(conversation.reply(text, 12, GREEDY))
            assert conversation.last is not None
            assert conversation.last.reused_tokens == held
            held = conversation.last.prompt_tokens + 11  # all but the last token of the reply
            assert conversation.messages[-2:] == [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        assert conversation.messages[0] == {"role": "system", "content": "Be brief."}


@contextmanager
def saying(model: Model, text: str) -> Iterator[None]:
    """The model says `text` and then ends its turn: what random weights say is no text that could be tokenized anew."""
    made = iter([*model.tokenize(text, add_bos=False), *model.tokenize("<|im_end|>", add_bos=False, special=True)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sampler.Sampler, "sample", lambda _self, _context: next(made))
        yield


def assert_answers_like_a_fresh_model(model: Model, conversation: Conversation) -> None:
    """The next reply is that of a model which reads the whole conversation for the first time."""
    then = "".join(conversation.reply("and then?", 12, GREEDY))
    with opened(model.facts.path) as fresh:
        assert "".join(fresh.chat(conversation.messages[:-1], max_tokens=12, sampling=GREEDY)) == then


def test_turn_equals_a_fresh_reading(model: Model) -> None:
    conversation = Conversation(model, "Be brief.")
    for text in ("first", "second"):
        with saying(model, f"an answer to the {text}, naïve 猫"):
            assert "".join(conversation.reply(text, -1, GREEDY)) == f"an answer to the {text}, naïve 猫"
        assert conversation.last is not None
        assert conversation.last.finish == "stop"
    assert_answers_like_a_fresh_model(model, conversation)
    assert conversation.last.reused_tokens > 60


def test_interrupted_reply_stays(model: Model) -> None:
    conversation = Conversation(model)
    with saying(model, "the whole answer"):
        reply = conversation.reply("first", -1, GREEDY)
        begun = next(reply) + next(reply)
        reply.close()
    assert conversation.messages == [{"role": "user", "content": "first"}, {"role": "assistant", "content": begun}]
    assert "the whole answer".startswith(begun)
    assert conversation.last is not None
    assert conversation.last.finish == "interrupted"
    assert_answers_like_a_fresh_model(model, conversation)


def test_interrupt_before_the_first_word_takes_the_question_back(model: Model, interrupt: Callable[[int, bool], None]) -> None:
    conversation = Conversation(model)
    with saying(model, "an answer"):
        "".join(conversation.reply("first", -1, GREEDY))
    before, last = list(conversation.messages), conversation.last
    interrupt(1, False)
    with pytest.raises(KeyboardInterrupt):
        "".join(conversation.reply("a question of many tokens, so that reading it takes several steps", -1, GREEDY))
    assert conversation.messages == before
    assert conversation.last is last
    assert_answers_like_a_fresh_model(model, conversation)


def test_reply_interrupted_within_a_character(model: Model, interrupt: Callable[[int, bool], None]) -> None:
    """The half of it that was never shown is not in the conversation either."""
    conversation = Conversation(model)
    with saying(model, "a猫b"):
        reply = conversation.reply("first", -1, GREEDY)
        assert next(reply) == "a"
        interrupt(2, False)  # two more tokens, of the three that make the character
        with pytest.raises(KeyboardInterrupt):
            next(reply)
    assert conversation.messages[-1]["content"] == "a"
    assert "\ufffd" in model.detokenize(conversation._session.tokens)
    assert_answers_like_a_fresh_model(model, conversation)
    assert "\ufffd" not in model.detokenize(conversation._session.tokens[: conversation.last.prompt_tokens])  # type: ignore[union-attr]


def test_context_full_keeps_the_conversation(model: Model) -> None:
    conversation = Conversation(model)
    "".join(conversation.reply("first", 12, GREEDY))
    before = list(conversation.messages)
    with pytest.raises(ContextFullError, match="give a larger -c, or --window to go on without end, or /reset"):
        "".join(conversation.reply("x" * 2 * N_CTX, 12, GREEDY))
    assert conversation.messages == before
    assert "".join(conversation.reply("second", 12, GREEDY))
    conversation.reset()
    assert conversation.messages == []
    assert "".join(conversation.reply("first", 12, GREEDY)) == before[-1]["content"]


def test_new_system_prompt(model: Model) -> None:
    conversation = Conversation(model, "One.")
    "".join(conversation.reply("first", 6, GREEDY))
    conversation.set_system("Two.")
    assert [message["content"] for message in conversation.messages][:2] == ["Two.", "first"]
    then = "".join(conversation.reply("second", 6, GREEDY))
    with opened(model.facts.path) as fresh:
        assert "".join(fresh.chat(conversation.messages[:-1], max_tokens=6, sampling=GREEDY)) == then
    conversation.set_system(None)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2


def test_the_template_is_compiled_once_a_model(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def counted(template: str, **options: str) -> Callable[[list[dict[str, str]]], str]:
        compiled.append(template)
        return compile_(template, **options)

    compile_ = _llama.chat_formatter
    monkeypatch.setattr(_llama, "chat_formatter", counted)
    messages = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "second"}]
    texts = [model.render(messages[:n]) for n in (1, 3)]
    assert compiled == [model.chat_template]
    bos, eos = model.native.bos_text(), model.native.eos_text()
    assert texts == [compile_(compiled[0], bos=bos, eos=eos)(messages[:n]) for n in (1, 3)]
    with opened(model.facts.path) as other:
        assert other.render(messages) == texts[1]
    assert len(compiled) == 2
    with pytest.raises(OptionError, match="closed"):
        other.render(messages)


def test_save(model: Model, tmp_path: Path) -> None:
    conversation = Conversation(model, "Sé breve. 猫")
    "".join(conversation.reply("first", 6, GREEDY))
    conversation.save(tmp_path / "chat.json")
    assert json.loads((tmp_path / "chat.json").read_text("utf-8")) == conversation.messages
    with pytest.raises(OptionError, match="cannot write"):
        conversation.save(tmp_path / "none" / "chat.json")
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]
