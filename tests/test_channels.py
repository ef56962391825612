"""Thoughts and answers of reasoning models, told apart by marker tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tinyserve_gguf.channels import MARKERS, Channels


class Vocabulary:
    """Single bytes are tokens 0 to 255, the given markers follow; the rest of the markers is text."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special
        tokens = list[int]()
        while text:
            marker = next((m for m in self._markers if parse_special and text.startswith(m)), None)
            tokens += [256 + self._markers.index(marker)] if marker else list(text[0].encode())
            text = text[len(marker) if marker else 1 :]
        return tokens

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


def sorted_out(text: str, *markers: str, prompt: str = "") -> tuple[str, str]:
    """(thoughts, answer) of a reply that is written out with its markers."""
    vocabulary = Vocabulary(*markers)
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    pieces = list(Channels(vocabulary).split(tokens, prompt))  # type: ignore[arg-type]
    assert all(piece for _, piece in pieces)
    return "".join(p for said, p in pieces if not said), "".join(p for said, p in pieces if said)


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("Paris.", "", "Paris."),
        ("<think>\nFrance, 猫…</think>\n\nParis, naïve 猫.\n", "\nFrance, 猫…", "Paris, naïve 猫.\n"),
        ("<think>\n\n</think>\n\nParis.", "\n\n", "Paris."),
        ("<think>no end", "no end", ""),
        ("one <think>two</think> three", "two", "one three"),
        ("<|channel|>analysis<|message|>Hm: 1.<|end|><|start|>assistant<|channel|>final<|message|>Paris.", "Hm: 1.", "Paris."),
        ("<|channel|>final<|message|>Paris.", "", "Paris."),
        ("<|channel|>commentary to=functions.x<|message|>{}<|end|><|start|>assistant<|channel|>final <|message|>Yes", "{}", "Yes"),
        ("<|message|>no channel", "", "no channel"),
        ("<|start|>assistant<|message|>no channel either", "", "no channel either"),
        ("<|channel|>analysis<|message|>cut", "cut", ""),
        ("<|channel|>ana", "", ""),
    ],
)
def test_what_is_said_to_whom(text: str, thoughts: str, answer: str) -> None:
    assert sorted_out(text, *MARKERS) == (thoughts, answer)


def test_a_template_may_open_the_thoughts_itself() -> None:
    assert sorted_out("hm</think>Paris", *MARKERS, prompt="<|im_start|>assistant\n<think>\n") == ("hm", "Paris")


def test_markers_that_are_no_tokens_are_text() -> None:
    text = "<think>a</think>b<|channel|>final<|message|>c"
    assert sorted_out(text) == ("", text)
    assert sorted_out(text, "<|channel|>") == ("", "<think>a</think>b")  # what follows names a channel that never opens


def test_characters_split_over_tokens_come_whole() -> None:
    pieces = list(Channels(Vocabulary()).split("猫!".encode()))  # type: ignore[arg-type]
    assert pieces == [(True, "猫"), (True, "!")]
    assert list(Channels(Vocabulary()).split("猫".encode()[:2])) == [(True, "\ufffd")]  # type: ignore[arg-type]


def test_a_conversation_keeps_thoughts_out_of_its_messages(model_file: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyserve_gguf import Conversation, load
    from tinyserve_gguf.session import Session

    with load(model_file("qwen3moe"), device="CPU", n_ctx=512, n_threads=1) as model:  # type: ignore[arg-type]
        talk, thoughts = Conversation(model), list[str]()
        think, answer = model.tokenize("hm", add_bos=False), model.tokenize("Paris", add_bos=False)
        begin, end = model.native.n_vocab - 2, model.native.n_vocab - 1  # two tokens of the vocabulary stand for the markers
        talk._channels._marker = {begin: "<think>", end: "</think>"}
        talk.on_thought = thoughts.append
        monkeypatch.setattr(Session, "generate", lambda _self, _tokens, _n, _sampling: iter([begin, *think, end, *answer]))
        assert "".join(talk.reply("Where?")) == "Paris"
        assert "".join(thoughts) == "hm\n"
        assert talk.messages == [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Paris"}]
        talk.on_thought = None
        assert "".join(talk.reply("Again?")) == "Paris"
