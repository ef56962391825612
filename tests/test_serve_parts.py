"""The parts of the server that need no model: text from tokens, the queue, what a request may say."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from pydantic import ValidationError

from tinyserve_gguf import Sampling
from tinyserve_gguf.serve_prepare import UNSUPPORTED, _keywords, _schema_grammar
from tinyserve_gguf.serve_queue import ClosingError, Dispatcher, QueueFullError
from tinyserve_gguf.serve_reply import Choice, Piece, ReplyText
from tinyserve_gguf.serve_request import ChatRequest, CompletionRequest, RequestError

# ---- text -----------------------------------------------------------------------------------------------------------------------------------


def sent(pieces: list[bytes], stops: tuple[str, ...] = ()) -> list[Piece]:
    reply = ReplyText(stops)
    return [*(reply.add(piece, Choice(piece, -1.0)) for piece in pieces), reply.finish()]


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def random_cuts(data: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.sample(range(1, len(data)), rng.randrange(len(data))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(200))
def test_text_is_the_same_however_it_is_cut(seed: int) -> None:
    """Every part is whole characters, and what stands before the first stop string is all that is ever sent."""
    rng = random.Random(seed)
    text = "".join(rng.choice("ab你好🙂é👩‍👩‍👧") for _ in range(rng.randrange(1, 30)))
    stops = tuple({"".join(rng.choice("ab你好🙂") for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(3))})
    parts = sent(random_cuts(text.encode(), rng), stops) if len(text.encode()) > 1 else sent([text.encode()], stops)
    expected = text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]
    # a stop string that is whole earlier ends the reply, though a longer one may have begun before it
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if ends:
        first_end = min(end for end, _ in ends)
        assert joined(parts) in {text[:start] for end, start in ends if end == first_end} | {expected}
    else:
        assert joined(parts) == text
    assert "\ufffd" not in joined(parts)


def test_bytes_that_are_no_text_are_left_out_like_in_llama_cpp_python() -> None:
    data = b"a\xff\xe4\xbd\xa0\xe4\xbdz\xf0\x9f"
    assert joined(sent([data[i : i + 1] for i in range(len(data))])) == data.decode("utf-8", "ignore") == "a你z"


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    parts = sent(["好".encode(), "吗".encode()[:2], "吗".encode()[2:], b"x"], ("好吗!",))
    assert [part.text for part in parts] == ["", "", "", "好吗x", ""]
    assert [part.text for part in sent(["你好".encode()], ("好吗",))] == ["你", "好"]


def test_tokens_stay_with_their_text() -> None:
    """All tokens of a reply are shown once and in order, and none of what a stop string cut off."""
    pieces = [b"The ", "é".encode()[:1], "é".encode()[1:], b" en", b"d. No"]
    for stops, shown in (((), 5), (("nd.",), 4), (("end.",), 4), ((" end",), 3)):
        parts = sent(pieces, stops)
        assert [choice.piece for part in parts for choice in part.choices] == pieces[:shown]
        assert [offset for part in parts for offset in part.offsets] == [0, 4, 4, 5, 8][:shown]


def test_half_a_character_at_the_end_is_a_token_without_text() -> None:
    parts = sent([b"a", b"\xf0\x9f"])
    assert joined(parts) == "a"
    assert [choice.piece for part in parts for choice in part.choices] == [b"a", b"\xf0\x9f"]


# ---- queue ----------------------------------------------------------------------------------------------------------------------------------


def test_queue_is_bounded_and_forgets_what_is_cancelled() -> None:
    go = threading.Event()
    dispatcher = Dispatcher(["a", "b"], 1)
    running = [dispatcher.submit(lambda _: go.wait(60)) for _ in range(2)]
    waits = dispatcher.submit(lambda context: context)
    with pytest.raises(QueueFullError):
        dispatcher.submit(lambda context: context)
    assert waits.cancel()
    last = dispatcher.submit(lambda context: context)
    go.set()
    assert all(future.result(60) for future in running)
    assert last.result(60) in ("a", "b")
    dispatcher.close()
    with pytest.raises(ClosingError):
        dispatcher.submit(lambda context: context)


def test_work_that_fails_gives_its_context_back() -> None:
    dispatcher = Dispatcher(["only"], 4)
    with pytest.raises(ZeroDivisionError):
        dispatcher.submit(lambda _: 1 // 0).result(60)
    assert dispatcher.submit(lambda context: context).result(60) == "only"
    dispatcher.close()


def test_the_idle_context_that_fits_best_is_taken() -> None:
    dispatcher = Dispatcher([[1, 2], [1, 2, 3], [4]], 0, lambda context, tokens: len(set(context) & set(tokens)))
    assert dispatcher.submit(lambda context: context, [1, 2, 3, 9]).result(60) == [1, 2, 3]
    assert dispatcher.submit(lambda context: context, [4]).result(60) == [4]
    dispatcher.close()


def test_draining_lets_what_runs_finish() -> None:
    go, begun = threading.Event(), threading.Event()

    def work(context: str) -> str:
        begun.set()
        assert go.wait(60)
        return context

    dispatcher = Dispatcher(["only"], 4)
    runs = dispatcher.submit(work)
    waits = dispatcher.submit(work)
    assert begun.wait(60)
    dispatcher.drain()
    assert waits.cancelled()
    assert not runs.done()
    go.set()
    dispatcher.close()
    assert runs.result() == "only"
    assert (dispatcher.running, dispatcher.waiting) == (0, 0)


# ---- requests -------------------------------------------------------------------------------------------------------------------------------

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"wish": 1}, "wish"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "older name"),
        ({"seed": 2**32}, "seed"),
        ({"stop": ["a", ""]}, "empty"),
        ({"stop": [str(i) for i in range(17)]}, "16"),
        ({"stream_options": {"include_usage": True}}, "needs stream"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "auto"}, "need tools"),
        ({"tools": [TOOL], "grammar": "root ::= x"}, "tools"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "tools"),
        ({"grammar": "root ::= x", "response_format": {"type": "json_object"}}, "not both"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"mirostat_tau": 3.0}, "mirostat_mode"),
        ({"logit_bias": {"5": 101.0}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"audio": {}}, "audio"),
        ({"stop": "\ud83d"}, "half a character"),
        ({"tools": [TOOL | {"function": {"name": "a", "description": "\udc00"}}]}, "half a character"),
        ({"functions": []}, "functions"),
    ],
)
def test_what_a_chat_request_cannot_say(changes: dict[str, Any], about: str) -> None:
    with pytest.raises(ValidationError, match=about):
        ChatRequest.model_validate(HELLO | changes)


def test_nulls_are_as_good_as_nothing() -> None:
    fields = dict.fromkeys(name for name in ChatRequest.model_fields if name != "messages")
    assert ChatRequest.model_validate(HELLO | fields).sampling(Sampling()) == ChatRequest.model_validate(HELLO).sampling(Sampling())


def test_defaults_of_the_sampler_are_those_of_the_server() -> None:
    made = ChatRequest.model_validate(HELLO | {"top_k": 5}).sampling(Sampling(temp=0.1, top_k=7, min_p=0.2))
    assert (made["temperature"], made["top_k"], made["min_p"], made["presence_penalty"]) == (0.1, 5, 0.2, 0.0)


def test_messages_for_templates() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    plain = [message.plain() for message in ChatRequest.model_validate({"messages": messages}).messages]
    assert plain[0] == {"role": "system", "content": "Be brief."}
    assert plain[1]["content"] == ""
    assert plain[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert plain[2] == {"role": "tool", "tool_call_id": "1", "content": "4"}


@pytest.mark.parametrize(
    ("prompt", "expected"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])]
)
def test_prompts(prompt: object, expected: list[object]) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompts == expected


@pytest.mark.parametrize(
    "changes", [{"prompt": []}, {"best_of": 2}, {"suffix": "x"}, {"echo": True, "logprobs": 1}, {"prompt": ["a"] * 65, "n": 2}, {"prompt": [-1]}]
)
def test_what_a_completion_request_cannot_say(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "a"} | changes)


# ---- schemas --------------------------------------------------------------------------------------------------------------------------------


def test_keywords_of_a_schema_are_not_names_of_properties() -> None:
    schema = {
        "type": "object",
        "properties": {"minimum": {"type": "array", "items": {"type": "integer", "maximum": 3}}},
        "$defs": {"not": {"type": "null"}},
    }
    assert _keywords(schema) & UNSUPPORTED == {"maximum"}


@pytest.mark.parametrize(
    ("schema", "strict", "about"),
    [
        ({"type": "integer", "minimum": 1}, True, "minimum"),
        ({"type": "nothing"}, False, "nothing"),
        ({"$ref": "#/$defs/none"}, False, "grammar"),
        ({"$ref": "https://localhost/x"}, False, "remote"),
        ({"type": "string", "pattern": "a"}, False, "attern"),
    ],
)
def test_a_schema_that_replies_cannot_be_held_to_is_refused(schema: dict[str, Any], strict: bool, about: str) -> None:
    """llama-cpp-python would go on with any JSON instead."""
    with pytest.raises(RequestError, match=about):
        _schema_grammar(schema, strict=strict, param="x")


def test_a_schema_that_refers_to_itself_without_end_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    for _ in range(5000):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(RequestError, match="grammar"):
        _schema_grammar(schema, strict=True, param="x")
