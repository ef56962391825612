"""`Llama` does what llama_cpp.Llama does, with the same text, logprobs, embeddings and states, at every size of the expert cache."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_speculative as speculative
import numpy as np
import pytest
from encoders import build_encoder
from llamas import COMMON, SIZES, answer, answers, logits_of, opened, paged, stock, tokens_of
from synthetic import split
from test_pitfalls import write_adapter
from test_threads import entries, resident_bytes

from tinyserve_gguf import Llama, ModelFileError, OptionError, TinyserveError, UnknownOptionError, offload
from tinyserve_gguf.errors import EngineError
from tinyserve_gguf.llama_options import PagedOptions

ModelFile = Callable[..., Path]

PROMPT = "The quick brown fox jumps over the lazy dog. "
LONG = [random.Random(1).randrange(5, 300) for _ in range(150)]
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n", "ok"]}
TOOL: Any = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA}}
GRAMMAR = 'root ::= ("ab" | "cd"){3}'

# Each one takes a model with logits_all and gives all that it said.
CALLS: dict[str, Callable[[Any], Any]] = {
    "completion": lambda m: answer(m.create_completion(PROMPT, max_tokens=12, temperature=0.0)),
    "logprobs": lambda m: answer(m(PROMPT, max_tokens=12, logprobs=5, seed=7, echo=True)),
    "stream": lambda m: answers(m.create_completion(PROMPT, max_tokens=12, seed=3, logprobs=2, stream=True)),
    "sampling": lambda m: answer(m(PROMPT, max_tokens=12, seed=5, top_k=9, min_p=0.1, repeat_penalty=1.3, logit_bias={70: 5.0})),
    "mirostat": lambda m: answer(m(PROMPT, max_tokens=12, seed=5, mirostat_mode=2)),
    "stop": lambda m: answer(m(PROMPT, max_tokens=40, temperature=0.0, stop=["e", "t"])),
    "grammar": lambda m: answer(m(PROMPT, max_tokens=12, seed=2, grammar=llama_cpp.LlamaGrammar.from_string(GRAMMAR, verbose=False))),
    "chat": lambda m: answer(m.create_chat_completion(CHAT, max_tokens=12, seed=4, logprobs=True, top_logprobs=3)),
    "chat stream": lambda m: answers(m.create_chat_completion(CHAT, max_tokens=12, seed=4, stream=True)),
    "json": lambda m: answer(m.create_chat_completion(CHAT, max_tokens=60, seed=4, response_format={"type": "json_object", "schema": SCHEMA})),
    "long": lambda m: answer(m.create_completion(LONG, max_tokens=20, temperature=0.0)),
    "again": lambda m: answer(m.create_completion(LONG[:100], max_tokens=20, temperature=0.0)),  # reuses a part of what it holds
}


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek2", "qwen35moe", "mixtral"])
def test_says_the_same(model_file: ModelFile, name: str) -> None:
    with opened(stock(model_file(name), logits_all=True)) as theirs:
        expected = {key: call(theirs) for key, call in CALLS.items()}
        logits = logits_of(theirs, LONG)
    for cache in SIZES:
        with opened(paged(model_file(name), cache, logits_all=True)) as ours:
            for key, call in CALLS.items():
                assert call(ours) == expected[key], (cache, key)
            np.testing.assert_array_equal(logits_of(ours, LONG), logits)
            ours.check_integrity()
            pager = ours.stats().pager
            assert pager is not None
            assert pager.decode.lookups == pager.decode.hits + pager.decode.misses > 0
            assert (pager.decode.misses == 0) == (cache == "all")


def test_tools(model_file: ModelFile) -> None:
    """chatml-function-calling makes a grammar of the tools."""
    said = []
    for kind in (stock, paged):
        with opened(kind(model_file("gpt-oss"), chat_format="chatml-function-calling", n_ctx=1024)) as model:
            choice: Any = {"type": "function", "function": {"name": "look"}}
            message = model.create_chat_completion(CHAT, tools=[TOOL], tool_choice=choice, max_tokens=60, seed=1)["choices"][0]["message"]
            said.append([call["function"] for call in message["tool_calls"]])
    assert said[0] == said[1]
    assert said[0][0]["name"] == "look"


def test_chat_format_and_handler(model_file: ModelFile) -> None:
    heard = []

    def handler(*, llama: Any, messages: Any, **_rest: Any) -> Any:
        heard.append((llama, messages))
        return {"choices": []}

    with opened(paged(model_file("gpt-oss"), chat_format="alpaca"), paged(model_file("gpt-oss"), chat_handler=handler)) as (alpaca, handled):
        assert alpaca.chat_format == "alpaca"
        assert alpaca.create_chat_completion(CHAT, max_tokens=2)["choices"]
        assert handled.create_chat_completion(CHAT) == {"choices": []}
        assert heard == [(handled, CHAT)]


@pytest.mark.parametrize("pooling", [llama_cpp.LLAMA_POOLING_TYPE_NONE, llama_cpp.LLAMA_POOLING_TYPE_MEAN, llama_cpp.LLAMA_POOLING_TYPE_LAST])
def test_embeddings(model_file: ModelFile, pooling: int) -> None:
    texts = ["one text", "another, longer text", "x"]
    options = {"embedding": True, "pooling_type": pooling}
    with opened(stock(model_file("gpt-oss"), **options)) as theirs:
        expected, total = theirs.embed(texts, normalize=True, return_count=True)
        single = theirs.create_embedding(texts[1])["data"]
    for cache in SIZES:
        with opened(paged(model_file("gpt-oss"), cache, **options)) as ours:
            assert ours.embed(texts, normalize=True, return_count=True) == (expected, total)
            assert ours.create_embedding(texts[1])["data"] == single


@pytest.mark.parametrize("experts", [0, 8])
def test_encoders(tmp_path: Path, experts: int) -> None:
    """They have no KV cache and write no text."""
    path = build_encoder(tmp_path / "encoder.gguf", experts)
    texts = ["one text", "another, longer text", "x"]
    options: dict[str, Any] = {"embedding": True, "n_ctx": 128}
    with opened(stock(path, **options)) as theirs:
        expected = theirs.embed(texts)
    assert len(np.unique(expected)) > 100
    for cache in SIZES if experts else ("auto",):
        with opened(paged(path, cache, **options)) as ours:
            assert ours.is_paged == (experts > 0)
            assert ours.embed(texts) == expected
            with opened(ours.new_context()) as other:
                assert other.embed(texts) == expected


@pytest.mark.parametrize("name", ["gpt-oss", "qwen35moe"])
def test_states_go_round(model_file: ModelFile, name: str) -> None:
    """Also from stock to paged and back: the state of a context knows nothing of slots."""
    path = model_file(name)
    with opened(stock(path), paged(path), paged(path, "all")) as models:
        for source in models:
            source.reset()
            source.eval(LONG[:60])
            state = source.save_state()
            replies = []
            for target in models:
                target.load_state(state)
                replies.append(tokens_of(target, LONG[:60], 8))
                assert target.n_tokens == 60 + 7
            assert replies[0] == replies[1] == replies[2]


def test_cache_of_states(model_file: ModelFile) -> None:
    cache = llama_cpp.LlamaRAMCache()
    with opened(stock(model_file("gpt-oss")), paged(model_file("gpt-oss"))) as (theirs, ours):
        ours.set_cache(cache)
        for prompt in (LONG[:50], LONG[50:100], LONG[:50]):
            assert answer(ours(prompt, max_tokens=6, temperature=0.0)) == answer(theirs(prompt, max_tokens=6, temperature=0.0))
        assert cache.cache_size > 0


def test_speculative(model_file: ModelFile) -> None:
    """Drafts of several tokens: the batches of decode are of every size up to 11."""
    said = []
    for model in (stock, paged):
        with opened(model(model_file("gpt-oss"), draft_model=speculative.LlamaPromptLookupDecoding(num_pred_tokens=10))) as llama:
            said.append(tokens_of(llama, [*LONG[:20] * 3], 40))
    with opened(stock(model_file("gpt-oss"))) as alone:
        assert said[0] == said[1] == tokens_of(alone, [*LONG[:20] * 3], 40)


@pytest.mark.parametrize("names", [("attn_q.weight",), ("ffn_up_exps.weight", "ffn_down_exps.weight")], ids=["attention", "experts"])
def test_adapter(model_file: ModelFile, tmp_path: Path, names: tuple[str, ...]) -> None:
    path = model_file("mixtral")
    options = {"lora_path": str(write_adapter(tmp_path / "lora.gguf", path, names)), "lora_scale": 0.5, "logits_all": True}
    with opened(stock(path, logits_all=True), stock(path, **options), paged(path, **options)) as (plain, theirs, ours):
        expected = logits_of(theirs, LONG)
        assert (logits_of(plain, LONG) != expected).any()
        np.testing.assert_array_equal(logits_of(ours, LONG), expected)
        with opened(ours.new_context()) as other:
            ours.close()
            np.testing.assert_array_equal(logits_of(other, LONG), expected)


def test_adapter_of_another_model(model_file: ModelFile, tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "lora.gguf", model_file("deepseek2"), ("attn_q_a.weight",))
    with pytest.raises(ModelFileError, match=r"lora\.gguf: is an adapter for deepseek2, and "):
        paged(model_file("mixtral"), lora_path=str(file))
    for scale in (1.0, 0.0):  # with 0 it changes nothing, but llama-cpp-python opens it
        with pytest.raises(ModelFileError, match=r"wider\.gguf: llama\.cpp cannot load this adapter: .* incorrect shape"):
            paged(
                model_file("mixtral"),
                lora_path=str(write_adapter(tmp_path / "wider.gguf", model_file("mixtral", embd=128), ("attn_q.weight",))),
                lora_scale=scale,
            )


def test_one_expert_more_or_less_per_token(model_file: ModelFile) -> None:
    """An override of the top-k changes how many slots a token needs."""
    path = model_file("qwen3moe")
    for n_used in (1, 4, 8):
        options = {"logits_all": True, "kv_overrides": {"qwen3moe.expert_used_count": n_used}}
        with opened(stock(path, **options), Llama(path, expert_cache=str(n_used), device="CPU", **COMMON | options)) as (theirs, ours):
            np.testing.assert_array_equal(logits_of(ours, LONG), logits_of(theirs, LONG))
            assert tokens_of(ours, LONG, 8) == tokens_of(theirs, LONG, 8)
            assert ours.plan.n_slots == n_used


def test_kv_types_by_name(model_file: ModelFile) -> None:
    q8_0 = llama_cpp.GGML_TYPE_Q8_0
    path = model_file("gpt-oss")
    options: dict[str, Any] = {"logits_all": True}
    with opened(stock(path, type_k=q8_0, type_v=q8_0, flash_attn=True, **options), paged(path, kv_type="q8_0", **options)) as (theirs, ours):
        np.testing.assert_array_equal(logits_of(ours, LONG), logits_of(theirs, LONG))
        assert any("q8_0" in line for line in ours.lines())
    with opened(stock(path, type_k=q8_0, **options), paged(path, kv_type="q8_0", kv_type_v="f16", flash_attn=False, **options)) as (theirs, ours):
        np.testing.assert_array_equal(logits_of(ours, LONG), logits_of(theirs, LONG))


def test_keys_and_values_outside_the_device(model_file: ModelFile) -> None:
    """offload_kqv=False cuts every graph at the attention."""
    with opened(stock(model_file("gpt-oss"), logits_all=True), paged(model_file("gpt-oss"), logits_all=True, offload_kqv=False)) as (theirs, ours):
        np.testing.assert_array_equal(logits_of(ours, LONG), logits_of(theirs, LONG))
        assert tokens_of(ours, LONG, 12) == tokens_of(theirs, LONG, 12)


@pytest.mark.parametrize("miss", ["cpu", "auto"])
def test_misses(model_file: ModelFile, miss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with opened(stock(model_file("gpt-oss")), paged(model_file("gpt-oss"), miss=miss)) as (theirs, ours):
        assert tokens_of(ours, LONG, 60) == tokens_of(theirs, LONG, 60)
        if miss == "cpu":
            pager = ours.stats().pager
            assert pager is not None
            assert pager.decode.cpu_rows > 0
        assert any(line.startswith("misses: ") and ("auto" if miss == "auto" else "CPU") in line for line in ours.lines())


# ---- files ----------------------------------------------------------------------------------------------------------------------------------


def test_dense(dense_file: Path) -> None:
    """A dense model simply runs, and has no experts."""
    with opened(stock(dense_file, logits_all=True), Llama(dense_file, **COMMON, logits_all=True)) as (theirs, ours):
        assert answer(ours(PROMPT, max_tokens=8, temperature=0.0)) == answer(theirs(PROMPT, max_tokens=8, temperature=0.0))
        assert not ours.is_paged
        assert ours.stats().as_dict() == {"device": "CPU", "paged": False, "window": None}
        with pytest.raises(OptionError, match="dense"):
            _ = ours.experts
        with opened(ours.new_context()) as other:
            assert tokens_of(other, LONG, 8) == tokens_of(theirs, LONG, 8)
    for options in ({"expert_cache": "25%"}, {"miss": "cpu"}):
        with pytest.raises(OptionError, match="dense"):
            Llama(dense_file, **options, **COMMON)


def test_any_shard(model_file: ModelFile, tmp_path: Path) -> None:
    whole = tmp_path / "model.gguf"
    whole.write_bytes(model_file("gpt-oss").read_bytes())
    second = split(whole, 2)[1]
    with opened(stock(whole), paged(second)) as (theirs, ours):
        assert tokens_of(ours, LONG, 8) == tokens_of(theirs, LONG, 8)
        assert ours.model_path == str(second)


def test_vocabulary_alone(model_file: ModelFile) -> None:
    with opened(Llama(model_file("gpt-oss"), vocab_only=True, verbose=False)) as model:
        assert model.detokenize(model.tokenize(b"Hello")) == b"Hello"
        with pytest.raises(OptionError, match="vocab_only"):
            _ = model.plan
        with pytest.raises(OptionError, match="vocab_only"):
            model.new_context()
    with pytest.raises(OptionError, match="nothing to page"):
        Llama(model_file("gpt-oss"), vocab_only=True, expert_cache="25%", verbose=False)


def test_files_that_cannot_be(model_file: ModelFile, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        Llama(tmp_path / "none.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model_file("gpt-oss").read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match=r"cut\.gguf"):
        Llama(cut)


# ---- options --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"expert_cach": "25%"}, "no option 'expert_cach'; did you mean expert_cache"),
        ({"n_gpu_layer": 3}, "did you mean n_gpu_layers"),
        ({"mul_mat_q": True}, "no option 'mul_mat_q'"),
    ],
)
def test_unknown_options(options: dict[str, Any], problem: str) -> None:
    """llama_cpp.Llama swallows them."""
    for kind in (UnknownOptionError, TypeError, TinyserveError):
        with pytest.raises(kind, match=problem):
            Llama("model.gguf", **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"expert_cache": "1"}, "too small"),
        ({"expert_cache": "much"}, "the expert cache is"),
        ({"policy": "best"}, "the policy is one of"),
        ({"device": "CUDA7"}, "no device 'CUDA7'"),
        ({"miss": "ignore"}, "--miss is one of"),
        ({"sinks": 4}, "need a window"),
        ({"window": 1}, "2 or more"),
        ({"window": 64, "n_ctx": 64}, "not both"),
        ({"window": 64, "logits_all": True}, "logits_all"),
        ({"window": 64, "draft_model": speculative.LlamaPromptLookupDecoding()}, "draft_model"),
        ({"kv_type": "q9_9"}, "--kv-type is one of"),
        ({"kv_type_v": "q8_0"}, "give kv_type too"),
        ({"kv_type": "q8_0", "type_k": 1}, "the same thing"),
        ({"kv_type": "q8_0", "flash_attn": False}, "need flash attention"),
        ({"device": "CPU", "n_gpu_layers": 3}, "leave one of them out"),
        ({"split_mode": llama_cpp.LLAMA_SPLIT_MODE_ROW}, "cuts every expert over all devices"),
        ({"tensor_split": [0.5, 0.5]}, "is for several devices"),
        ({"main_gpu": 1}, "device='CUDA1'"),
        ({"kv_overrides": {"qwen3moe.expert_count": 4}}, "what the experts are"),
        ({"kv_overrides": {"qwen3moe.expert_used_count": 9}}, "1 to 8"),
        ({"type_v": llama_cpp.GGML_TYPE_Q8_0}, "cannot make this context"),
    ],
)
def test_options_that_cannot_be(model_file: ModelFile, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        Llama(model_file("qwen3moe"), n_threads=1, verbose=False, **options)


def test_what_was_decided_is_said(model_file: ModelFile, capfd: pytest.CaptureFixture[str]) -> None:
    with opened(paged(model_file("qwen3moe"), verbose=True)) as model:
        err = capfd.readouterr().err
        assert "expert cache: 6 of 24 experts resident" in err
        assert "llama_model_loader" in err  # llama.cpp's own log, where llama-cpp-python sends it
        assert model.lines()[1] in err
    capfd.readouterr()
    with opened(paged(model_file("qwen3moe"))) as model:
        model(PROMPT, max_tokens=2)
    assert capfd.readouterr() == ("", "")


def test_signature() -> None:
    """Every option of the base by name, with its default, beside ours."""
    theirs, ours = (inspect.signature(kind).parameters for kind in (llama_cpp.Llama, Llama))
    added = {field.name: field.default for field in fields(PagedOptions)}
    assert {"expert_cache", "policy", "window", "sinks", "kv_type", "device"} < set(added)
    assert set(ours) == set(theirs) - {"kwargs"} | set(added)
    assert {name: ours[name].default for name in added} == added
    assert {name: parameter.default for name, parameter in inspect.signature(offload).parameters.items()} == added
    assert all(ours[name].default == theirs[name].default for name in set(theirs) - {"kwargs"})


def test_context_of_the_model(model_file: ModelFile) -> None:
    with opened(paged(model_file("qwen3moe"), n_ctx=0), paged(model_file("qwen3moe"), n_ctx=4096)) as (own, longer):
        assert (own.n_ctx(), longer.n_ctx()) == (2048, 4096)
        assert tokens_of(own, LONG, 4) == tokens_of(longer, LONG, 4)


def test_no_model(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is said when what was never begun is dropped."""
    with pytest.raises(TypeError, match="model_path"):
        Llama()  # type: ignore[call-arg]
    gc.collect()
    assert capfd.readouterr() == ("", "")


# ---- life -----------------------------------------------------------------------------------------------------------------------------------


class Mine(Llama):
    """As apps have them."""


def test_pickles(model_file: ModelFile) -> None:
    """What is unpickled loads the model again, with the same options."""
    options: dict[str, Any] = {"policy": "slru", "kv_type": "q8_0", "n_batch": 64, "seed": 11}
    model = Mine(model_file("gpt-oss"), expert_cache="50%", **options, **COMMON)
    with opened(model, pickle.loads(pickle.dumps(model)), copy.copy(model)) as (_, *others):
        for other in others:
            assert type(other) is Mine
            assert (other.plan.n_slots, other.stats().policy, other.n_batch) == (model.plan.n_slots, "slru", 64)
            assert other.model is not model.model
            assert other.__getstate__() == model.__getstate__()
            assert answer(other(LONG, max_tokens=6)) == answer(other.new_context()(LONG, max_tokens=6))
    with opened(Llama(model_file("gpt-oss"), window=64, n_threads=1, verbose=False)) as model, opened(pickle.loads(pickle.dumps(model))) as other:
        assert other.__getstate__()["window"] == 64


def test_closed_is_an_error(model_file: ModelFile) -> None:
    """Not a crash in C, as with llama_cpp.Llama."""
    model = paged(model_file("gpt-oss"))
    reply = model.generate(LONG)
    next(reply)
    expert = model.experts[0, 0]
    model.close()
    model.close()
    uses: list[Callable[[], object]] = [
        lambda: next(reply),
        lambda: model(PROMPT),
        lambda: model.create_chat_completion(CHAT),
        lambda: model.eval([1]),
        lambda: model.tokenize(b"x"),
        lambda: model.save_state(),
        lambda: model.n_ctx(),
        lambda: model.stats(),
        lambda: model.plan,
        lambda: model.new_context(),
        lambda: expert.slot,
    ]
    for use in uses:
        with pytest.raises(OptionError, match="closed"):
            use()


def test_full_context_is_an_error(model_file: ModelFile) -> None:
    with opened(paged(model_file("gpt-oss"))) as model, pytest.raises(EngineError, match="llama_decode"):
        for _ in range(300):
            model.eval([5])


@pytest.mark.parametrize("cache", ["25%", "all"])
def test_contexts_at_once(model_file: ModelFile, cache: str) -> None:
    """Four contexts over one pager, in four threads: each says what it says alone, from its seed on. They are closed one by one."""
    prompts = [LONG[: 30 + 20 * i] for i in range(4)]

    def say(model: Any, i: int) -> list[Any]:
        return [answer(model(prompts[i], max_tokens=16, logprobs=2)) for _ in range(3)]

    alone = []
    for i in range(4):
        with opened(paged(model_file("gpt-oss"), cache, logits_all=True, seed=3)) as model:
            alone.append(say(model, i))
    first = paged(model_file("gpt-oss"), cache, logits_all=True, seed=3)
    first(LONG, max_tokens=4)
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(lambda _: first.new_context(), range(4)))
        first.close()
        assert list(threads.map(say, models, range(4))) == alone
    models[0].check_integrity()
    for i, model in enumerate(models):
        assert say(model, i)
        assert model.stats().pager is not None
        model.close()


def test_contexts_of_contexts(model_file: ModelFile) -> None:
    """The counters are those of all; each context has its own tokens."""
    with opened(paged(model_file("gpt-oss"))) as first, opened(first.new_context().new_context()) as third:
        first.eval(LONG[:20])
        assert (first.n_tokens, third.n_tokens) == (20, 0)
        assert third.stats() == first.stats()
        first.reset_stats()
        first.set_policy("lru")
        assert third.stats().policy == "lru"
        assert third.experts[0, 0].pager is first.experts[0, 0].pager


def test_nothing_leaks(model_file: ModelFile) -> None:
    """A server makes a context for every request: what is closed is gone, and so is a model that nobody closed."""
    path = model_file("qwen3moe", embd=256, ff=512, experts=16, gate="Q8_0", up="Q8_0", down="Q8_0")

    def use(model: Llama) -> weakref.ref[Llama]:
        model(LONG[:20], max_tokens=2)
        return weakref.ref(model)

    def cycle() -> None:
        first = paged(path, "50%", n_ctx=1024)
        gone = []
        for _ in range(2):
            other = first.new_context()
            gone.append(use(other))
            other.close()
        del other
        gone.append(use(first))
        del first
        gc.collect()
        assert [model() for model in gone] == [None] * 3

    for _ in range(2):
        cycle()
    memory, files, threads = resident_bytes(), entries("/proc/self/fd"), entries("/proc/self/task")
    for _ in range(5):
        cycle()
    assert resident_bytes() - memory < path.stat().st_size / 2  # one slot pool that stayed of each would be more than twice the file
    assert (entries("/proc/self/fd"), entries("/proc/self/task")) == (files, threads)
