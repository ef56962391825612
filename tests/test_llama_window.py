"""A `Llama` with a window: it goes on without end, as sessions of a `Model` with the same window do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from llamas import answer, answers, opened, tokens_of

from tinyserve_gguf import Llama, OptionError, Sampling, load

ModelFile = Callable[..., Path]

WINDOW = 64
PROMPT = [random.Random(2).randrange(5, 300) for _ in range(150)]


def windowed(path: Path, **options: Any) -> Llama:
    given: dict[str, Any] = {"window": WINDOW, "n_batch": 32, "flash_attn": True, "expert_cache": "25%", "device": "CPU"}
    return Llama(path, **given | options, n_threads=1, n_threads_batch=1, verbose=False)


def session_tokens(path: Path, prompts: list[list[int]], n: int) -> tuple[list[list[int]], Any]:
    """What a session says to one prompt after the other, and what its window did."""
    with load(path, expert_cache="25%", device="CPU", window=WINDOW, n_ubatch=32, flash_attn="on", n_threads=1) as model:
        session = model.session()
        said = [list(session.generate(prompt, n, Sampling(temp=0))) for prompt in prompts]
        return said, model.stats().window


@pytest.mark.parametrize("name", ["mixtral", "deepseek2", "qwen35moe"])
def test_goes_on_as_a_session_does(model_file: ModelFile, name: str) -> None:
    """Prompts longer than the window, and replies: what stays, what leaves and what is reused is the same. deepseek2's positions do move, those of
    qwen35moe (M-RoPE, and a recurrent state) stay and start again."""
    path = model_file(name)
    prompts = [PROMPT, [*PROMPT, *PROMPT[:30]], PROMPT[:20]]
    expected, counts = session_tokens(path, prompts, 60)
    with opened(windowed(path)) as model:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert tokens_of(model, prompt, 60) == tokens
        assert model.stats().window == counts
        assert counts.evicted_tokens > 300
        assert any(line.startswith("window: 64 tokens, 4 sinks") for line in model.lines())
        model.reset_stats()
        assert model.stats().window.evicted_tokens == 0  # type: ignore[union-attr]


def test_completions_without_end(model_file: ModelFile) -> None:
    """The base refuses prompts that do not fit and shortens replies; with a window all fit."""
    with opened(windowed(model_file("mixtral"))) as model:
        whole = answer(model(PROMPT, max_tokens=100, temperature=0.0))
        assert whole["usage"] == {"prompt_tokens": 150, "completion_tokens": 100, "total_tokens": 250}
        model.reset()
        chunks = answers(model(PROMPT, max_tokens=100, temperature=0.0, stream=True))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        endless = model(PROMPT, max_tokens=None, temperature=0.0, stream=True, logit_bias={70: 100.0})  # the same letter for ever
        assert len(list(itertools.islice(endless, 300))) == 300


def test_state_with_a_window(model_file: ModelFile) -> None:
    path = model_file("mixtral")
    with opened(windowed(path), windowed(path, expert_cache="all"), windowed(path, window=None, n_ctx=256)) as (one, two, plain):
        list(itertools.islice(one.generate(PROMPT, temp=0.0), 20))
        state = one.save_state()
        fresh = plain.save_state()
        history = one.input_ids[: one.n_tokens].tolist()
        expected = tokens_of(one, history, 30)
        two.eval(PROMPT[:10])
        two.load_state(state)
        assert two.n_tokens == len(history)
        assert tokens_of(two, history, 30) == expected
        with pytest.raises(OptionError, match="saved with a window"):
            plain.load_state(state)
        with pytest.raises(OptionError, match="saved without a window"):
            one.load_state(fresh)


def test_cache_of_states_with_a_window(model_file: ModelFile) -> None:
    with opened(windowed(model_file("mixtral")), windowed(model_file("mixtral"))) as (cached, plain):
        cached.set_cache(llama_cpp.LlamaRAMCache())
        for prompt in (PROMPT, PROMPT[:40], PROMPT):
            plain.reset()
            assert answer(cached(prompt, max_tokens=9, temperature=0.0))["choices"] == answer(plain(prompt, max_tokens=9, temperature=0.0))["choices"]


def test_embeddings_with_a_window(model_file: ModelFile) -> None:
    """They take the cache for themselves; afterwards it begins anew."""
    with opened(windowed(model_file("mixtral"), embedding=True), windowed(model_file("mixtral"), embedding=True)) as (model, fresh):
        tokens_of(model, PROMPT, 20)
        assert model.embed("some text") == fresh.embed("some text")
        assert tokens_of(model, PROMPT, 20) == tokens_of(fresh, PROMPT, 20)


def test_tokens_taken_back_by_hand(model_file: ModelFile) -> None:
    """Apps set n_tokens and cut the cache themselves; where that cannot be because too much has left, what is missing is read again."""
    with opened(windowed(model_file("mixtral")), windowed(model_file("mixtral"))) as (model, fresh):
        for n in (150, 40, 3):
            model.eval(PROMPT[model.n_tokens :])
            model.n_tokens = n
            model._ctx.kv_cache_seq_rm(-1, n, -1)
            model.eval([7])
            fresh.reset()
            fresh.eval([*PROMPT[:n], 7])
            assert model.input_ids[: n + 1].tolist() == [*PROMPT[:n], 7]
            if n != 150:  # else it was not read anew, and what left is not seen
                assert model.sample(temp=0.0) == fresh.sample(temp=0.0)


def test_contexts_with_windows_at_once(model_file: ModelFile) -> None:
    with opened(windowed(model_file("mixtral"))) as alone:
        expected = tokens_of(alone, PROMPT, 60)
    first = windowed(model_file("mixtral"))
    models = [first, *(first.new_context() for _ in range(3))]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda model: tokens_of(model, PROMPT, 60), models)) == [expected] * 4
    counts = first.stats().window
    assert counts is not None
    for model in models[:3]:
        model.close()
    assert models[3].stats().window == counts  # those of closed contexts too
    models[3].close()
