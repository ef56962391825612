"""Every MoE architecture of llama.cpp 0.3.36: the very logits of stock llama.cpp, at the minimum, half and the whole pool."""

from __future__ import annotations

from pathlib import Path

import pytest
from archs import DIFFUSION, NEVER_COMPUTED, build_arch, descriptions, shapes
from exact import paged, stock

from tinyserve_gguf import Model, ModelFileError, load, read_facts
from tinyserve_gguf.plan import minimum
from tinyserve_gguf.verify import VerifyOptions, verify

ARCHS = [arch for arch in descriptions() if arch not in DIFFUSION]
PROMPTS, DECODE = (1, 7, 40), 6
PLAIN: dict[str, object] = {}
OTHER: dict[str, object] = {"experts": 12, "used": 3, "types": ("Q8_0", "Q4_0"), "scales": True}


def opened(path: Path, cache: str) -> Model:
    if cache == "least":
        cache = str(sum(minimum(group) for group in read_facts(path).groups))
    return load(path, expert_cache=cache, device="CPU", n_threads=1)


@pytest.mark.parametrize("changes", [PLAIN, OTHER], ids=["plain", "other"])
@pytest.mark.parametrize("arch", ARCHS)
def test_same_logits(tmp_path: Path, arch: str, changes: dict[str, object]) -> None:
    """Eight experts in F32, and twelve of two types with scales of their own, of which three are used."""
    path = build_arch(arch, tmp_path / "m.gguf", **changes)  # type: ignore[arg-type]
    try:
        facts = read_facts(path)
        assert facts.is_moe
        assert facts.architecture == arch
        expected = stock(path, DECODE, PROMPTS)
        assert len(set(expected.values())) == len(PROMPTS)
        for cache in ("least", "50%", "all"):
            with opened(path, cache) as model:
                assert paged(model, DECODE, PROMPTS) == expected, cache
                pager = model.stats().pager
                assert pager is not None
                assert (pager.decode.lookups > 0) == (arch not in NEVER_COMPUTED)
                assert (pager.decode.misses > 0) == (cache != "all" and arch not in NEVER_COMPUTED)
    finally:
        path.unlink()  # 20 MB each


@pytest.mark.parametrize("arch", ARCHS)
def test_facts_find_every_expert(tmp_path: Path, arch: str) -> None:
    """Whatever is called an expert weight, and only that, is paged."""
    named = {name for name in shapes(descriptions()[arch], 8) if name.endswith("exps.weight") and "norm" not in name}
    path = build_arch(arch, tmp_path / "m.gguf")
    facts = read_facts(path)
    path.unlink()
    assert {part.weight.name for layer in (*facts.expert_layers, *facts.idle_layers) for part in layer.parts} == named


@pytest.mark.parametrize("arch", DIFFUSION)
def test_diffusion_models_are_refused(tmp_path: Path, arch: str) -> None:
    path = build_arch(arch, tmp_path / "m.gguf")
    for refused in (lambda: load(path, device="CPU"), lambda: verify(VerifyOptions(str(path), device="CPU"), lambda _text, _done: None)):
        with pytest.raises(ModelFileError, match="does not write text token by token"):
            refused()
    path.unlink()
