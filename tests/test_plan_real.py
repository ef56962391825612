"""The plan against what llama.cpp and the pager then take: weights, KV cache, compute buffers, pools, within 3 %."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from archs import build_arch
from synthetic import MODELS, build

from tinyserve_gguf import CapacityError, ModelFileError, load, read_facts
from tinyserve_gguf._llama import NativeModel
from tinyserve_gguf.context import ContextSpec
from tinyserve_gguf.dryrun import DryRun, buffers, listening
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.kv import KvOptions
from tinyserve_gguf.needs import MIB, Setting, estimated_needs
from tinyserve_gguf.placement import pick_device, plan_for
from tinyserve_gguf.plan import GIB, Budget
from tinyserve_gguf.serve import open_llama

ModelFile = Callable[..., Path]

ROUNDING = MIB // 100  # of a size in llama.cpp's log
ARCHS = ("deepseek32", "deepseek4", "kimi-linear", "lfm2moe", "minimax-01", "qwen4exp", "gpt-oss", "laguna")  # what the synthetic ones lack


NO_FLASH = Setting(2048, 512, KvOptions(flash="off"), flash=False)


def near(n_bytes: int) -> object:
    return pytest.approx(n_bytes, rel=0.03, abs=ROUNDING)


def weights(path: Path) -> int:
    """That llama.cpp allocates for the whole model, with what it keeps twice."""
    with listening() as lines:
        NativeModel(str(path), None, extra_bufts=False, mmap=False).close()
        return sum(buffer.n_bytes for buffer in buffers(lines) if buffer.kind == "model")


def expected_weights(facts: ModelFacts) -> int:
    """By the plan: on the device and in host memory, and the experts; without the second copy of a tied embedding, which there is only on a GPU."""
    names = {tensor.name: tensor.n_bytes for tensor in facts.tensors}
    tied = 0 if "output.weight" in names else names["token_embd.weight"]
    experts = sum(part.weight.n_bytes for layer in facts.expert_layers for part in layer.parts)
    needs = estimated_needs(facts, Setting(256, 32))
    return needs.weights + needs.host_weights + experts - tied


def check(path: Path, **options: object) -> None:
    """Load with a quarter and with all of the experts, and compare."""
    for cache in ("25%", "auto") if read_facts(path).is_moe else ("auto",):
        with load(path, expert_cache=cache, device="CPU", n_threads=1, **options) as model, listening() as lines:  # type: ignore[arg-type]
            model.session()
            found = buffers(lines)
            plan, pager = model.plan, model.stats().pager
            assert plan.needs.is_exact
            assert plan.needs.kv == near(sum(buffer.n_bytes for buffer in found if buffer.kind in ("KV", "RS")))
            assert plan.needs.compute == near(sum(buffer.n_bytes for buffer in found if buffer.kind == "compute"))
            if pager:
                assert plan.device_bytes == near(pager.pool_bytes + pager.stage_bytes)
                assert (plan.host.rung == "none") == pager.all_resident
    assert expected_weights(read_facts(path)) == near(weights(path))


@pytest.mark.parametrize("name", MODELS)
def test_synthetic_models(model_file: ModelFile, name: str) -> None:
    check(model_file(name), n_ctx=1000)


@pytest.mark.parametrize("arch", ARCHS)
def test_other_kinds_of_memory(tmp_path: Path, arch: str) -> None:
    path = build_arch(arch, tmp_path / "m.gguf")
    check(path, n_ubatch=64)
    path.unlink()


@pytest.mark.parametrize("options", [{"kv_type": "q8_0"}, {"flash_attn": "off"}, {"window": 256}, {"n_ubatch": 32}, {"miss": "cpu"}], ids=str)
def test_other_options(model_file: ModelFile, options: dict[str, object]) -> None:
    check(model_file("qwen3moe"), **options)


def test_a_dense_model(tmp_path: Path, model_file: ModelFile) -> None:
    from reshaped import dense

    check(dense(model_file("mixtral"), tmp_path / "dense.gguf"))


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "qwen35moe"])
def test_several_contexts_of_a_server(model_file: ModelFile, name: str) -> None:
    """Each takes a KV cache and compute buffers of its own."""
    with listening() as lines:
        llama, said = open_llama(str(model_file(name)), n_parallel=3, device="CPU", n_ctx=1000, n_threads=1)
        others = [llama.new_context() for _ in range(2)]
        found = buffers(lines)
    one = llama.plan
    for context in (*others, llama):
        context.close()
    plan, _ = plan_for(one.facts, device="CPU", context=ContextSpec(1000), n_ubatch=one.n_ubatch, n_contexts=3)
    cache = sum(buffer.n_bytes for buffer in found if buffer.kind in ("KV", "RS"))
    compute = sum(buffer.n_bytes for buffer in found if buffer.kind == "compute")
    for needed, planned in ((cache, plan.needs.kv), (compute, plan.needs.compute)):
        assert 0.97 * needed <= planned <= 1.4 * needed  # estimated
    assert plan.needs.weights == one.needs.weights
    assert any(line.startswith("3 contexts: memory of CPU: ") and "KV cache (3 x -c 1000)" in line for line in said)


def test_the_demo_model(demo_model: Path) -> None:
    check(demo_model)


# ---- llama.cpp asked, and the estimate beside it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2", "gemma4", "qwen35moe", "mixtral"])
def test_the_estimate_is_on_the_safe_side(model_file: ModelFile, name: str) -> None:
    """Of what the header alone lets expect: never far below, and not twice as much."""
    facts = read_facts(model_file(name))
    with DryRun(facts, pick_device("CPU")) as dry:
        for setting in (
            Setting(2048, 512),
            Setting(2048, 64),
            Setting(512, 512, KvOptions("q8_0", "q8_0")),
            Setting(2048, 512, KvOptions(flash="off"), False),
        ):
            asked, estimated = dry.needs(setting), estimated_needs(facts, setting)
            assert 0.9 * asked.device <= estimated.device <= 1.5 * asked.device, (setting, asked, estimated)
            assert asked.weights == near(estimated.weights)


def test_a_dry_run_takes_no_memory_and_needs_no_vocabulary(tmp_path: Path) -> None:
    """No weight is read: the file holds none."""
    path = build("qwen3moe", tmp_path / "m.gguf", experts=64)
    facts = read_facts(path)
    data = path.read_bytes()
    start = min(tensor.offset for tensor in facts.tensors)
    with path.open("wb") as file:
        file.write(data[:start])
        file.truncate(len(data))
    with DryRun(facts, pick_device("CPU")) as dry:
        assert dry.needs(Setting(1024, 512)).kv == 3 * 2 * 64 * 1024 * 2


def test_a_dry_run_refuses_what_a_load_refuses(tmp_path: Path) -> None:
    path = build_arch("llada-moe", tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match="does not write text token by token"):
        DryRun(read_facts(path), pick_device("CPU"))


# ---- budgets on a real device ---------------------------------------------------------------------------------------------------------------


def test_vram_bounds_what_is_taken(model_file: ModelFile) -> None:
    path = model_file("mixed", layers=8)
    facts = read_facts(path)
    everything, _ = plan_for(facts, device="CPU", ask=True)
    tight = (everything.total_bytes - 8 * facts.groups[0].bytes_per_expert) / GIB
    with load(path, device="CPU", vram=tight, vram_reserve=0.001) as model:
        pager = model.stats().pager
        assert pager and not pager.all_resident
        assert model.plan.total_bytes + 0.001 * GIB <= tight * GIB
        assert pager.pool_bytes + pager.stage_bytes <= model.plan.device_bytes * 1.03
    with pytest.raises(CapacityError, match=r"does not fit on CPU: .* are free; what fits: "):
        load(path, device="CPU", vram=15 / 1024, n_ctx=2048, vram_reserve=0.0001)


def test_a_budget_beyond_the_device_is_an_error(model_file: ModelFile) -> None:
    from tinyserve_gguf import OptionError

    with pytest.raises(OptionError, match=r"CPU has .* GiB in all: give --vram less; info --vram plans for another machine"):
        plan_for(read_facts(model_file("qwen3moe")), device="CPU", budget=Budget.of(vram=1 << 20))
