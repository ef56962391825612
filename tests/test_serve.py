"""The server as OpenAI's own client sees it: every feature, beside llama-cpp-python on the same file.

A tiny model says noise, or what a grammar wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import openai
import pytest
from serving import Server, serving

ModelFile = Callable[..., Path]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "sure": {"type": "boolean"}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
SAID = "你好🙂, 👩‍👩‍👧 née!"  # of characters that the vocabulary splits over tokens


def says(text: str) -> dict[str, str]:
    """A grammar that leaves the model no choice."""
    return {"grammar": f'root ::= "{text}"'}


@pytest.fixture(scope="module")
def tiny(model_file: ModelFile) -> Path:
    return model_file("qwen3moe")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    with serving(tiny, "--parallel", "2", "--expert-cache", "50%", "-c", "1024", "-t", "1", "--alias", "tiny", "--temp", "0") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def stock(tiny: Path) -> Iterator[llama_cpp.Llama]:
    # by itself it would take its own ChatML for such templates, which begins with an empty system message
    options: Any = {"n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "verbose": False}
    model = llama_cpp.Llama(str(tiny), n_ctx=1024, logits_all=True, chat_format="chat_template.default", **options)
    yield model
    model.close()


def streamed(chunks: Any) -> tuple[str, list[Any]]:
    """The text of a stream of chat chunks, and the chunks."""
    chunks = list(chunks)
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), chunks


# ---- chat -----------------------------------------------------------------------------------------------------------------------------------


def test_a_reply_is_llama_cpp_pythons(client: openai.OpenAI, stock: llama_cpp.Llama) -> None:
    expected: Any = stock.create_chat_completion(QUESTION, temperature=0, max_tokens=24)
    reply = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=24)
    assert reply.choices[0].message.content == expected["choices"][0]["message"]["content"] != ""
    assert reply.choices[0].finish_reason == expected["choices"][0]["finish_reason"] == "length"
    assert reply.model == "tiny"
    usage: Any = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected["usage"]["prompt_tokens"], 24)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    paging = usage.model_extra["tinyserve"]
    assert 0 < paging["hit_rate"] < 1
    assert paging["mb_per_token"] > 0


def test_the_demo_model(demo_model: Path) -> None:
    """It ends by itself, and knows something."""
    with serving(demo_model, "--expert-cache", "25%", "-c", "512", "--temp", "0", key=None) as server, server.client() as client:
        name = client.models.list().data[0].id
        text, chunks = streamed(client.chat.completions.create(model=name, messages=QUESTION, stream=True))
        assert text == "The capital of France is Paris."
        assert chunks[-1].choices[0].finish_reason == "stop"
        texts = ["The cat sat on the mat.", "A cat sits on a rug.", "Interest rates rose again."]
        cats, cat, rates = (np.array(one.embedding) for one in client.embeddings.create(model=name, input=texts).data)
        assert cats @ cat > cats @ rates


def test_a_stream_is_the_reply_in_parts(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, "seed": 1}
    whole = client.chat.completions.create(**ask)
    text, chunks = streamed(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert text == whole.choices[0].message.content
    assert len(chunks) > 6
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None] * (len(chunks) - 2) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens  # type: ignore[union-attr]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    without = list(client.chat.completions.create(**ask, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in without)


def test_a_seed_gives_the_same_reply_and_its_choices_are_those_of_the_next_seeds(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 12, "temperature": 1.5}
    several = client.chat.completions.create(**ask, seed=7, n=3)
    alone = [client.chat.completions.create(**ask, seed=seed) for seed in (7, 8, 9)]
    texts = [reply.choices[0].message.content for reply in alone]
    assert [choice.message.content for choice in several.choices] == texts
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert several.usage and [reply.usage for reply in alone]
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens  # type: ignore[union-attr]
    assert several.usage.completion_tokens == sum(reply.usage.completion_tokens for reply in alone)  # type: ignore[union-attr]
    parts: dict[int, str] = {}
    for chunk in client.chat.completions.create(**ask, seed=7, n=3, stream=True):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
    assert [parts[index] for index in range(3)] == texts


def test_without_a_seed_replies_differ_and_the_prompt_is_not_read_again(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": [*QUESTION, {"role": "assistant", "content": "Hm."}, *QUESTION], "max_tokens": 12, "temperature": 2.0}
    replies = [client.chat.completions.create(**ask) for _ in range(4)]
    assert len({reply.choices[0].message.content for reply in replies}) > 1
    reused = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]  # type: ignore[union-attr]
    assert max(reused) == replies[0].usage.prompt_tokens - 1  # type: ignore[union-attr]
    afresh = client.chat.completions.create(**ask, seed=3)
    assert afresh.usage.prompt_tokens_details.cached_tokens == 0  # type: ignore[union-attr]


def test_stop_strings(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 60, "extra_body": says("The capital of France is Paris.")}
    for stop, expected in ((" is", "The capital of France"), (["nothing", "of Fr"], "The capital "), ("T", "")):
        reply = client.chat.completions.create(**ask, stop=stop)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (expected, "stop")
        assert reply.usage
        assert reply.usage.completion_tokens <= len(expected) + 5  # it ends there
        assert streamed(client.chat.completions.create(**ask, stop=stop, stream=True))[0] == expected
    assert client.chat.completions.create(**ask, stop="Rome").choices[0].message.content == "The capital of France is Paris."


# ---- characters -----------------------------------------------------------------------------------------------------------------------------


def test_characters_that_are_split_over_tokens_are_whole(client: openai.OpenAI, stock: llama_cpp.Llama) -> None:
    assert len(stock.tokenize(SAID.encode(), add_bos=False)) > len(SAID)
    ask: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 80, "extra_body": says(SAID)}
    assert client.chat.completions.create(**ask).choices[0].message.content == SAID
    text, chunks = streamed(client.chat.completions.create(**ask, stream=True))
    assert text == SAID
    assert len(chunks) > 6
    text, chunks = streamed(client.chat.completions.create(**ask, stream=True, logprobs=True))
    tokens = [token for chunk in chunks for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content]
    assert text == SAID
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == SAID


def test_what_was_held_back_for_a_stop_string_is_whole_too(client: openai.OpenAI) -> None:
    """llama-cpp-python sends the last held tokens one by one, and drops what is no character by itself."""
    ask: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 80, "stop": ["👩‍👩‍👧🙂"], "extra_body": says("好👩‍👩‍👧")}
    assert streamed(client.chat.completions.create(**ask, stream=True))[0] == "好👩‍👩‍👧"
    assert client.chat.completions.create(**ask).choices[0].message.content == "好👩‍👩‍👧"


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_the_limit_holds_within_a_character(client: openai.OpenAI, n: int) -> None:
    reply = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=n, extra_body=says("🙂🙂🙂🙂🙂"))
    assert reply.usage and reply.usage.completion_tokens == n
    assert reply.choices[0].finish_reason == "length"
    assert set(reply.choices[0].message.content or "🙂") == {"🙂"}


# ---- what replies must be -------------------------------------------------------------------------------------------------------------------


def test_json_schema(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    reply = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=60, response_format=wanted, temperature=1, seed=3)
    answer = json.loads(reply.choices[0].message.content or "")
    assert set(answer) == {"city", "sure"}
    assert answer["city"] in ("Paris", "Rome")
    assert isinstance(answer["sure"], bool)
    bare: Any = {"type": "json_object", "schema": SCHEMA}
    again = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=60, response_format=bare, temperature=1, seed=3)
    assert again.choices[0].message.content == reply.choices[0].message.content


def test_json_object(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=12, response_format={"type": "json_object"}, seed=1)
    assert (text.choices[0].message.content or "").startswith("{")


def test_a_bias_keeps_tokens_out(client: openai.OpenAI, stock: llama_cpp.Llama) -> None:
    ask: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 8, "logprobs": True, "top_logprobs": 2, "seed": 1}

    def tokens(**changes: Any) -> list[bytes]:
        shown = client.chat.completions.create(**ask, **changes).choices[0].logprobs
        assert shown
        return [bytes(token.bytes or ()) for token in shown.content or ()]

    first = tokens()[0]
    token = stock.tokenize(first, add_bos=False)
    assert len(token) == 1
    others = tokens(logit_bias={str(token[0]): -100})
    assert first not in others
    assert tokens(logit_bias={str(stock.tokenize(others[0], add_bos=False)[0]): -100})[0] == first


def test_llama_cpps_samplers(client: openai.OpenAI) -> None:
    ask: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 16, "temperature": 5.0, "seed": 4}
    greedy = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=16).choices[0].message.content
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        assert client.chat.completions.create(**ask, extra_body=extra).choices[0].message.content == greedy
    loose = client.chat.completions.create(**ask, extra_body={"top_k": 0, "min_p": 0.0}, top_p=1).choices[0].message.content
    assert loose != greedy


# ---- tools ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "weather"}}, "required"])
def test_a_tool_that_must_be_called(client: openai.OpenAI, choice: Any) -> None:
    ask: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 40, "tools": [LOOK], "tool_choice": choice, "seed": 2}
    reply = client.chat.completions.create(**ask).choices[0]
    assert reply.finish_reason == "tool_calls"
    assert reply.message.content is None
    assert reply.message.tool_calls
    call: Any = reply.message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    chunks = list(client.chat.completions.create(**ask, stream=True))
    parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(part.function.arguments or "" for part in parts if part.function) == call.function.arguments
    assert {part.index for part in parts} == {0}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    reply = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2, tools=[LOOK], tool_choice=named)
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("choice", ["functions", "message"])
def test_the_model_may_choose_a_tool_or_answer(client: openai.OpenAI, stock: llama_cpp.Llama, choice: str) -> None:
    """Its first token decides, which a bias turns here. Calls are held to the names and arguments there are."""
    letter = {"functions": b"m", "message": b"f"}[choice]  # the one that it does not begin with
    bias = {str(token): -100 for token in range(stock.n_vocab()) if stock.detokenize([token])[:1] == letter}
    ask: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 60, "tools": [LOOK, CLOCK], "seed": 5, "logit_bias": bias}
    whole = client.chat.completions.create(**ask)
    message, finish = whole.choices[0].message, whole.choices[0].finish_reason
    calls: list[Any] = list(message.tool_calls or ())
    assert bool(calls) == (choice == "functions")
    assert bool(message.content) == (choice == "message")
    assert whole.usage
    assert whole.usage.completion_tokens <= 60
    for number, call in enumerate(calls):
        assert call.function.name in ("weather", "clock")
        if number < len(calls) - 1 or finish == "tool_calls":
            assert set(json.loads(call.function.arguments)) <= {"city"}
    chunks = list(client.chat.completions.create(**ask, stream=True))
    parts: list[Any] = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (message.content or "")
    assert [(part.index, part.function.name, part.function.arguments) for part in parts] == [
        (number, call.function.name, call.function.arguments) for number, call in enumerate(calls)
    ]
    assert chunks[-1].choices[0].finish_reason == finish


def test_the_result_of_a_tool_is_read(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    said: Any = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    results: Any = [[{"role": "tool", "tool_call_id": "call_1", "content": text}] for text in ("sun", "rain, and a very strong wind from the sea")]
    for choice in ("auto", "none"):
        counts = [
            client.chat.completions.create(model="tiny", messages=said + result, tools=[LOOK], tool_choice=choice, max_tokens=1).usage
            for result in results
        ]
        assert counts[1].prompt_tokens > counts[0].prompt_tokens + 4  # type: ignore[union-attr]


# ---- log probabilities ----------------------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_llama_cpp(client: openai.OpenAI, stock: llama_cpp.Llama) -> None:
    reply = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=5, logprobs=True, top_logprobs=3, seed=1)
    assert reply.choices[0].logprobs and reply.choices[0].logprobs.content
    tokens = reply.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode("utf-8", "ignore") == reply.choices[0].message.content
    expected: Any = stock.create_chat_completion(QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3)
    for ours, theirs in zip(tokens, expected["choices"][0]["logprobs"]["content"], strict=True):
        assert bytes(ours.bytes or ()).decode("utf-8", "ignore") == theirs["token"]
        assert ours.logprob == pytest.approx(theirs["logprob"], abs=1e-3)
        assert [top.logprob for top in ours.top_logprobs] == sorted((top.logprob for top in ours.top_logprobs), reverse=True)
        assert next(top.token for top in ours.top_logprobs) == ours.token  # it is greedy
        assert len(ours.top_logprobs) == 3


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt="The capital of France is", max_tokens=4, logprobs=2, seed=1)
    shown: Any = reply.choices[0].logprobs
    assert "".join(shown.tokens) == reply.choices[0].text
    assert [top[token] for top, token in zip(shown.top_logprobs, shown.tokens, strict=True)] == shown.token_logprobs
    assert shown.text_offset[0] == len("The capital of France is")
    assert shown.text_offset == sorted(shown.text_offset)


# ---- completions ----------------------------------------------------------------------------------------------------------------------------


def test_completions(client: openai.OpenAI, stock: llama_cpp.Llama) -> None:
    prompt = "The capital of Italy is"
    expected: Any = stock.create_completion(prompt, temperature=0, max_tokens=16)
    reply = client.completions.create(model="tiny", prompt=prompt)
    assert reply.choices[0].text == expected["choices"][0]["text"]
    assert reply.usage and reply.usage.completion_tokens == expected["usage"]["completion_tokens"] <= 16
    chunks = list(client.completions.create(model="tiny", prompt=prompt, stream=True, echo=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == prompt + reply.choices[0].text
    assert client.completions.create(model="tiny", prompt=prompt, echo=True).choices[0].text == prompt + reply.choices[0].text
    tokens = stock.tokenize(prompt.encode())
    assert client.completions.create(model="tiny", prompt=tokens).choices[0].text == reply.choices[0].text
    several = client.completions.create(model="tiny", prompt=[prompt, "Once upon a"], n=2, max_tokens=4)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == client.completions.create(model="tiny", prompt=prompt, max_tokens=4).choices[0].text
    assert several.usage and several.usage.prompt_tokens == len(tokens) + len(stock.tokenize(b"Once upon a"))


# ---- embeddings -----------------------------------------------------------------------------------------------------------------------------


def test_embeddings(client: openai.OpenAI, tiny: Path) -> None:
    texts = ["The cat sat on the mat.", "A cat sits on a rug.", "Interest rates rose again."]
    reply = client.embeddings.create(model="tiny", input=texts)  # base64, where numpy is installed
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    vectors = np.array([one.embedding for one in reply.data])
    assert np.allclose(vectors, np.array([one.embedding for one in plain.data]), atol=1e-6)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    embedder = llama_cpp.Llama(str(tiny), n_ctx=512, embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN, flash_attn=True, verbose=False)
    expected = np.array(embedder.embed(texts, normalize=True))
    embedder.close()
    assert np.allclose(vectors, expected, atol=1e-3)
    assert np.allclose(client.embeddings.create(model="tiny", input=texts[2]).data[0].embedding, vectors[2], atol=1e-3)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 30


# ---- the rest -------------------------------------------------------------------------------------------------------------------------------


def test_models_and_health(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with server.http(headers={}) as http:
        assert http.get("/health").json() == {"status": "ok"}


def test_metrics_count(server: Server, client: openai.OpenAI) -> None:
    before = server.metrics()
    usage = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=6, seed=1).usage
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=0)
    after = server.metrics()
    assert usage

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown('tinyserve_tokens_total{phase="prefill"}') == usage.prompt_tokens
    assert grown('tinyserve_tokens_total{phase="decode"}') == usage.completion_tokens
    assert grown('tinyserve_requests_total{path="/v1/chat/completions",status="200"}') == 1
    assert grown('tinyserve_errors_total{status="400"}') == 1
    hits, misses = (grown(f'tinyserve_expert_lookups_total{{phase="decode",result="{result}"}}') for result in ("hit", "miss"))
    assert hits + misses == 3 * 2 * (usage.completion_tokens - 1)  # layers, top-2, and the first token is prefill's
    assert 0 < after['tinyserve_expert_hit_rate{phase="decode"}'] < 1
    assert grown('tinyserve_link_bytes_total{phase="decode"}') > 0
    assert (after['tinyserve_expert_slots{state="total"}'], after['tinyserve_expert_slots{state="resident"}']) == (12, 12)
    assert after['tinyserve_tokens_per_second{phase="decode"}'] > 0
    assert (after["tinyserve_queue_length"], after["tinyserve_requests_running"]) == (0, 0)
