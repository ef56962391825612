"""Layers to devices, and the plan of each: pure. That llama.cpp splits in the same way is in test_devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import synthetic

from tinyserve_gguf._shim import Device
from tinyserve_gguf.devices import DeviceGroup, plan_auto, plan_on
from tinyserve_gguf.errors import CapacityError, ModelFileError, OptionError
from tinyserve_gguf.facts import ModelFacts, read_facts
from tinyserve_gguf.needs import MIB, context_bytes, weight_bytes
from tinyserve_gguf.plan import CacheSpec, DeviceFacts, Plan
from tinyserve_gguf.planner import make_plan
from tinyserve_gguf.split import SplitPlan, check_split_mode, layer_devices, parse_split, part_of, plan_split, replan_all, shares_of

N_CTX = 256


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """24 layers of two layouts, which the tests take for a hundred times larger."""
    changes = {"embd": 256, "ff": 256, "gate": ("Q4_0", "Q5_0"), "up": ("Q4_0", "Q5_0"), "down": ("Q8_0", "Q4_0")}
    small = read_facts(synthetic.build("qwen3moe", tmp_path_factory.mktemp("split") / "two.gguf", layers=24, **changes))
    assert len(small.groups) == 2
    grown = {tensor.name: replace(tensor, n_bytes=tensor.n_bytes * 100) for tensor in small.tensors}
    parts = {
        layer.block: replace(layer, parts=tuple(replace(part, weight=grown[part.weight.name]) for part in layer.parts))
        for layer in small.expert_layers
    }
    groups = tuple(replace(group, layers=tuple(parts[layer.block] for layer in group.layers)) for group in small.groups)
    return replace(small, tensors=tuple(grown.values()), expert_layers=tuple(parts[layer.block] for layer in small.expert_layers), groups=groups)


def plan_part(facts: ModelFacts, spec: CacheSpec, device: DeviceFacts, n_ubatch: int | None) -> Plan:
    return make_plan(facts, spec, device, n_ctx=N_CTX, n_ubatch=n_ubatch)


def gpus(*free: int) -> list[DeviceFacts]:
    return [DeviceFacts(f"CUDA{i}", n, is_cpu=False) for i, n in enumerate(free)]


def planned(facts: ModelFacts, cache: str, free: Sequence[int], shares: tuple[float, ...] | None = None) -> SplitPlan:
    devices = gpus(*free)
    return plan_split(facts, CacheSpec.parse(cache), devices, [device.name for device in devices], plan_part, shares=shares, n_ubatch=512)


def room(facts: ModelFacts, share: float) -> int:
    """Free memory for so much of a model, as `auto` counts: the reserve comes on top."""
    rest = weight_bytes(facts) + context_bytes(facts, N_CTX, 512)
    return 512 * MIB + int(share * (rest + 1.3 * facts.expert_bytes))


# ---- shares ----


@pytest.mark.parametrize(("text", "shares"), [("3,1", (3, 1)), ("0.5/0.25/0.25", (0.5, 0.25, 0.25)), ("1", (1,))])
def test_shares_are_read(text: str, shares: tuple[float, ...]) -> None:
    assert parse_split(text) == shares


@pytest.mark.parametrize("text", ["", "1,", "a,b", "1,0", "1,-2", "nan,1", "inf,1", "3;1"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(OptionError, match="--tensor-split"):
        parse_split(text)


def test_layers_in_order() -> None:
    assert layer_devices(4, (1, 1)) == (0, 0, 0, 1, 1)  # at 2/5 the first half is not over: llama.cpp gives it three of five
    assert layer_devices(4, (3, 2)) == (0, 0, 0, 1, 1)
    assert layer_devices(4, (1, 4)) == (0, 1, 1, 1, 1)
    assert layer_devices(3, (1, 1, 2)) == (0, 1, 2, 2)


@pytest.mark.parametrize("n_blocks", [1, 3, 24, 36, 61, 94, 200])
def test_whole_numbers_are_counts(n_blocks: int) -> None:
    """What is planned as so many layers is so many layers in C's floats, too."""
    for first in range(1, n_blocks + 1):
        owners = layer_devices(n_blocks, (first, n_blocks + 1 - first))
        assert owners.count(0) == first


def test_parts_are_the_whole(facts: ModelFacts) -> None:
    owners = layer_devices(facts.n_blocks, (2, 1, 2))
    parts = [part_of(facts, owners, i) for i in range(3)]
    assert sorted(tensor.name for part in parts for tensor in part.tensors) == sorted(tensor.name for tensor in facts.tensors)
    assert sum(part.expert_bytes for part in parts) == facts.expert_bytes
    assert sum(part.device_bytes for part in parts) == facts.device_bytes
    assert [part.input_bytes for part in parts] == [0, 0, facts.input_bytes]
    assert [layer.block for part in parts for layer in part.expert_layers] == list(range(24))
    assert all(group.layers for part in parts for group in part.groups)


# ---- plans ----


def test_each_within_its_budget(facts: ModelFacts) -> None:
    for free in ((room(facts, 0.4), room(facts, 0.4)), (room(facts, 0.2), room(facts, 0.6)), (room(facts, 0.7), room(facts, 0.3))):
        plan = planned(facts, "auto", free)
        for part, n in zip(plan.parts, free, strict=True):
            assert part.total_bytes + 512 * MIB <= n
        assert plan.n_slots == sum(part.n_slots for part in plan.parts)
        assert layer_devices(facts.n_blocks, plan.shares) == plan.devices


def test_the_split_is_the_best_there_is(facts: ModelFacts) -> None:
    """Beside every other one: the device that keeps the smallest share of its experts keeps the most."""
    free = (room(facts, 0.35), room(facts, 0.55))

    def least(plan: SplitPlan) -> float:
        return min(part.share for part in plan.parts)

    shares = []
    for first in range(1, facts.n_blocks):
        with contextlib.suppress(CapacityError):
            shares.append(least(planned(facts, "auto", free, (first, facts.n_blocks + 1 - first))))
    assert least(planned(facts, "auto", free)) > max(shares) - 0.001
    assert len({round(share, 3) for share in shares}) > 5


def test_a_small_device_gets_fewer_layers(facts: ModelFacts) -> None:
    """By free memory alone it would get a third, and what every device needs leaves it next to nothing."""
    free = (1160 * MIB, 2000 * MIB)
    plan = planned(facts, "auto", free)
    assert layer_devices(facts.n_blocks, free).count(0) > plan.devices.count(0) >= 1


def test_given_shares_are_kept_or_refused(facts: ModelFacts) -> None:
    free = (room(facts, 0.1), room(facts, 1.5))
    assert planned(facts, "auto", free).n_slots > 0
    assert planned(facts, "auto", free, (1, 24)).devices.count(0) == 1
    with pytest.raises(CapacityError, match=r"CUDA0, with 23 of 25 layers: .* does not fit on CUDA0: .* are free"):
        planned(facts, "auto", free, (23, 2))


def test_no_device_is_large_enough(facts: ModelFacts) -> None:
    with pytest.raises(CapacityError, match=r"CUDA\d, with \d+ of 25 layers: "):
        planned(facts, "auto", (520 * MIB, 520 * MIB))


@pytest.mark.parametrize(
    ("shares", "message"),
    [((1, 1, 1), "gives 3 shares, and there are 2 devices"), ((100, 1), "leaves no block for CUDA1")],
)
def test_shares_that_cannot_be(facts: ModelFacts, shares: tuple[float, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        planned(facts, "25%", (1 << 33, 1 << 33), shares)


def test_more_devices_than_can_be(facts: ModelFacts) -> None:
    with pytest.raises(OptionError, match="over 16 devices at most, not 17"):
        planned(facts, "25%", [1 << 33] * 17)
    with pytest.raises(OptionError, match="has 3 blocks, too few for 4 devices"):
        planned(replace(facts, n_blocks=3), "25%", [1 << 33] * 4)


def test_sizes_are_spread(facts: ModelFacts) -> None:
    free = (1 << 33, 1 << 33)
    for cache, n in (("96", 96), ("7%", None)):
        plan = planned(facts, cache, free, (3, 1))
        shares = [part.share for part in plan.parts]
        assert n is None or plan.n_slots <= n
        assert max(shares) - min(shares) < 0.15
    whole, half = planned(facts, "all", free), planned(facts, f"{facts.expert_bytes // 2 // MIB}MiB", free)
    assert whole.share == 1.0
    assert 0 < half.device_bytes <= facts.expert_bytes // 2
    with pytest.raises(OptionError, match=r"one token needs \d+ \+ \d+ = (\d+) experts at once on these devices.* give \1 or more"):
        planned(facts, "3", free)


def test_a_part_without_experts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Blocks before the first expert layer may be all that a device has."""
    dense_first = read_facts(synthetic.build("deepseek2", tmp_path_factory.mktemp("split") / "deepseek2.gguf", layers=4))
    assert dense_first.expert_layers[0].block == 1
    plan = planned(dense_first, "50%", (1 << 33, 1 << 33), (1, 4))
    assert [len(part.pools) > 0 for part in plan.parts] == [False, True]
    assert "block 0; no experts there" in plan.lines()[2]


def test_lines_name_each_device(facts: ModelFacts) -> None:
    lines = planned(facts, "25%", (1 << 33, 1 << 33), (3, 1)).lines()
    assert "on CUDA0,CUDA1" in lines[0]
    assert lines[2].startswith("CUDA0: blocks 0 to 18; ")
    assert lines[3].startswith("CUDA1: blocks 19 to 23 and the output; ")
    assert all("of slots" in line and "experts resident" in line for line in lines[1:4])
    assert [line.split(":")[0] for line in lines[4:]] == ["memory of CUDA0", "memory of CUDA1"]


def test_replanning_keeps_the_layers(facts: ModelFacts) -> None:
    plan = planned(facts, "25%", (1 << 33, 1 << 33), (3, 1))
    new = replan_all(plan, CacheSpec.parse("50%"), [1 << 33, 1 << 33])
    assert isinstance(new, SplitPlan)
    assert (new.devices, new.shares, shares_of(new)) == (plan.devices, plan.shares, (3, 1))
    assert new.n_slots > plan.n_slots
    small = planned(facts, "4%", (1 << 33, 1 << 33), (1, 4))
    with pytest.raises(CapacityError, match=r"CUDA1: an expert cache of all takes .* too few"):
        replan_all(small, CacheSpec.parse("all"), [1 << 33, 0])


def test_other_split_modes() -> None:
    check_split_mode("layer")
    for mode in ("row", "tensor"):
        with pytest.raises(OptionError, match=f"--split-mode {mode} cuts every expert over all devices.*use --split-mode layer"):
            check_split_mode(mode)
    with pytest.raises(OptionError, match="not 'diagonal'"):
        check_split_mode("diagonal")


# ---- devices ----


class Gpu(Device):
    """One that is not here."""

    def multiplies(self, *_arguments: int) -> bool:
        return True


def gpu(i: int, free: int) -> Device:
    return Gpu(1000 + i, f"CUDA{i}", "a GPU", free, free, is_cpu=False)


PROCESSOR = Device(1, "CPU", "a CPU", 1 << 36, 1 << 36, is_cpu=True)


def auto(facts: ModelFacts, cache: str, devices: Sequence[Device], split: tuple[float, ...] | None = None) -> tuple[Plan, Device]:
    spec = CacheSpec.parse(cache)
    plan_one = one_of(facts, spec)
    return plan_auto(facts, spec, devices, plan_part, plan_one, check=lambda _facts, _device: None, tensor_split=split, n_ubatch=512)


def one_of(facts: ModelFacts, spec: CacheSpec) -> Callable[[Device], Plan]:
    return lambda device: plan_part(facts, spec, DeviceFacts(device.name, device.memory_free, device.is_cpu), 512)


def test_auto_is_one_gpu_if_it_does(facts: ModelFacts) -> None:
    two = [PROCESSOR, gpu(0, room(facts, 1)), gpu(1, room(facts, 2))]
    for cache in ("auto", "25%", "all"):
        plan, device = auto(facts, cache, two)
        assert device.name == "CUDA1"
        assert not isinstance(plan, SplitPlan)
    assert auto(facts, "25%", [PROCESSOR])[1].name == "CPU"


def test_auto_is_all_gpus_if_one_does_not_do(facts: ModelFacts) -> None:
    plan, device = auto(facts, "auto", [gpu(0, room(facts, 0.6)), gpu(1, room(facts, 0.7)), PROCESSOR])
    spec = CacheSpec.parse("auto")
    alone = plan_on(facts, spec, gpu(1, room(facts, 0.7)), plan_part, one_of(facts, spec), n_ubatch=512)
    assert device.name == "CUDA0,CUDA1"
    assert plan.n_slots > alone.n_slots
    assert plan.reason == f"auto: CUDA1 alone holds {alone.share:.0%} of the experts"
    # one that is too small for anything is left out
    plan, device = auto(facts, "auto", [gpu(0, room(facts, 0.7)), gpu(1, 520 * MIB), gpu(2, room(facts, 0.6))])
    assert device.name == "CUDA0,CUDA2"
    with pytest.raises(CapacityError, match=r"CUDA0.* all GPUs together do not do either"):
        auto(facts, "auto", [gpu(0, 520 * MIB), gpu(1, 520 * MIB)])
    with pytest.raises(CapacityError):
        auto(facts, "auto", [gpu(0, 520 * MIB)])


def test_auto_with_a_split_is_all_gpus(facts: ModelFacts) -> None:
    two = [gpu(0, room(facts, 2)), gpu(1, room(facts, 2))]
    plan, device = auto(facts, "25%", two, (3, 1))
    assert (device.name, shares_of(plan)) == ("CUDA0,CUDA1", (3, 1))
    for devices in ([PROCESSOR], two[:1]):
        with pytest.raises(OptionError, match="--tensor-split is for several devices"):
            auto(facts, "25%", devices, (3, 1))


def test_auto_asks_whether_the_devices_can(facts: ModelFacts) -> None:
    def check(_facts: ModelFacts, device: Device) -> None:
        raise ModelFileError(f"{device.name} has no kernels")

    with pytest.raises(ModelFileError, match="CUDA1 has no"):
        spec = CacheSpec.parse("25%")
        plan_auto(facts, spec, [gpu(0, 1 << 30), gpu(1, 1 << 33)], plan_part, one_of(facts, spec), check=check)


def test_groups() -> None:
    group = DeviceGroup.of([gpu(0, 5), gpu(1, 7)])
    assert (group.name, group.labels, group.memory_free, group.is_cpu) == ("CUDA0,CUDA1", ("CUDA0", "CUDA1"), 12, False)
    offload = group.offload((3, 1))
    assert offload
    assert (offload.device, offload.others, offload.split) == (1000, (1001,), (3, 1))
    twice = DeviceGroup.of([PROCESSOR, PROCESSOR])
    assert (twice.name, twice.labels, twice.memory_free, twice.offload()) == ("CPU,CPU", ("CPU 0", "CPU 1"), 1 << 36, None)
    for devices, message in (([gpu(0, 1), PROCESSOR], "over GPUs only"), ([gpu(0, 1), gpu(0, 1)], "CUDA0 is there twice")):
        with pytest.raises(OptionError, match=message):
            DeviceGroup.of(devices)
