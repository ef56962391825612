"""The `info` command: a report for people, one JSON object for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gguf_files import EMBED, FF, Tensor, experts, fused, keys, rest, write_gguf, write_shards

from tinyserve_gguf.cli.info import context_lines, info, placement_lines, ranges
from tinyserve_gguf.errors import ModelFileError, OptionError
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.plan import size


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(info, [str(argument) for argument in arguments])


def lines(*arguments: str | Path) -> list[str]:
    """The report with runs of blanks made one."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.output.splitlines()]


def mixed(folder: Path) -> Path:
    tensors = rest(5, shared=True) + experts(0, bias=True) + experts(1, bias=True) + experts(2, down="Q4_0", scale=True) + fused(3) + experts(4)
    return write_gguf(folder / "m.gguf", "glm4moe", keys(5, nextn_predict_layers=1), tensors)


def test_report(tmp_path: Path) -> None:
    path = mixed(tmp_path)
    report = lines(path)
    facts = read_facts(path)
    assert report[:8] == [
        "model Tiny (glm4moe)",
        f"file {path}, {size(facts.file_bytes)}",
        "context 256 tokens trained, embedding 64",
        "blocks 5, the last 1 for multi-token prediction (not loaded)",
        "MoE blocks 0-3",
        "experts 4 per block, top-2",
        "per expert weights and biases and scales",
        f"shared experts {size(facts.shared_expert_bytes)}",
    ]
    each = size(facts.groups[0].bytes_per_expert)
    assert f"0-1 gate Q8_0 64x32+bias, up Q8_0 64x32+bias, down Q8_0 32x64+bias 8 {each} {size(8 * facts.groups[0].bytes_per_expert)}" in report
    assert any(line.startswith("2 gate Q8_0 64x32+scale, up Q8_0 64x32+scale, down Q4_0 32x64+scale 4 ") for line in report)
    assert any(line.startswith("3 gate_up Q8_0 64x64, down Q8_0 32x64 4 ") for line in report)
    assert any(line.startswith("Q8_0 ") and line.endswith(" % yes") for line in report)
    assert any(line.startswith("F16 ") and line.endswith(" %") for line in report)
    start = report.index("placement") + 1
    assert report[start : start + 4] == placement_lines(facts)
    start = report.index("context") + 1
    assert report[start : start + len(context_lines(facts))] == context_lines(facts)
    plan = report[report.index("chat on this machine") + 1 :]
    assert plan[0].startswith("Tiny: glm4moe, 4 MoE layers of 4 experts, top-2, on ") and "expert cache: 16 of 16 experts" in " ".join(plan)
    estimate = next(i for i, line in enumerate(plan) if line.startswith("on this machine with "))
    assert plan[estimate + 1].startswith("yes: ~") and " tok/s decode" in plan[estimate + 1]


def test_report_is_plain_and_whole_without_a_terminal(tmp_path: Path) -> None:
    path = mixed(tmp_path / ("long folder name " * 12))
    output = run(path).output
    assert output.isascii()
    assert "".join(str(path).split()) in "".join(output.split())


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "[red]m[/red].gguf", "qwen3moe", {**keys(), "general.name": "[bold]Tiny :smile:"}, rest() + experts(0) + experts(1))
    assert lines(path)[0] == "model [bold]Tiny :smile: (qwen3moe)"
    assert "[red]m[/red].gguf" in run(path).output


def test_dense(tmp_path: Path) -> None:
    metadata = {"block_count": 2, "context_length": 8, "embedding_length": EMBED}
    report = lines(write_gguf(tmp_path / "m.gguf", "qwen3", metadata, rest()))
    assert "experts none: a dense model, there is nothing to page" in report
    assert "host pool: nothing; a dense model has no experts to page" in report
    assert not any("layout groups" in line for line in report)


def test_placement(tmp_path: Path) -> None:
    facts = read_facts(mixed(tmp_path))
    n_bytes, each = size(facts.expert_bytes), ", ".join(sorted({size(group.bytes_per_expert) for group in facts.groups}))
    assert placement_lines(facts) == [
        f"host pool: {n_bytes} in 16 experts of {each}; the device caches them in slots",
        f"device: {size(facts.device_bytes)}, of which {size(facts.shared_expert_bytes)} shared experts; and the KV cache and compute buffers",
        "host memory: 12.5 KiB embedding tables, which llama.cpp reads row by row on the CPU",
        f"not loaded: {size(facts.idle_bytes)} in blocks for multi-token prediction",
    ]


def test_json(tmp_path: Path) -> None:
    path = mixed(tmp_path)
    facts = read_facts(path)
    found = json.loads(run(path, "--json").output)
    assert found["path"] == str(path)
    assert found["shards"] == [str(path)]
    for key in (
        "architecture",
        "name",
        "n_blocks",
        "n_idle_blocks",
        "n_expert",
        "n_used",
        "context_length",
        "embedding_length",
        "is_moe",
        "file_bytes",
    ):
        assert found[key] == getattr(facts, key), key
    for key in ("expert_bytes", "resident_bytes", "device_bytes", "input_bytes", "shared_expert_bytes", "idle_bytes", "types"):
        assert found[key] == getattr(facts, key), key
    assert [[layer["block"] for layer in group["layers"]] for group in found["groups"]] == [[0, 1], [2], [3]]
    assert found["groups"][1]["parts"][2] == {
        "role": "down",
        "type": "Q4_0",
        "ne0": FF,
        "ne1": EMBED,
        "bias": False,
        "scale": True,
        "bytes_per_expert": FF * EMBED // 32 * 18 + 4,
    }
    assert sum(layer["bytes"] for group in found["groups"] for layer in group["layers"]) == facts.expert_bytes
    assert [layer["block"] for layer in found["idle_layers"]] == [4]
    assert found["placement"] == placement_lines(facts)
    assert found["context"] == context_lines(facts)


# ---- other machines -------------------------------------------------------------------------------------------------------------------------


def estimate(path: Path, *options: str) -> dict[str, Any]:
    result = run(path, "--json", *options)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout)["estimate"])


@pytest.fixture
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("nothing_measured")
def test_another_machine(tmp_path: Path) -> None:
    path = mixed(tmp_path)
    report = lines(path, "--vram", "8", "--ram", "32", "-c", "128", "--link-gbps", "12", "--mem-gbps", "60", "--gpu-gbps", "288")
    assert "chat on this machine" not in report
    at = report.index("on a machine with 8.00 GiB of GPU memory and 32.00 GiB of memory")
    assert report[at + 1].startswith("yes: ~")
    text = " ".join(report[at:])
    for part in (
        "link 12.0 GB/s (given)",
        "GPU memory 288.0 GB/s (given)",
        "expert cache: 16 of 16 experts",
        "compute buffers (-b ",
        "doctor measures",
    ):
        assert part in text
    found = estimate(path, "--vram", "8", "--ram", "32", "-c", "0", "--kv-type", "q8_0", "-b", "64", "--vram-reserve", "1")
    assert found["fits"]
    assert (found["plan"]["n_ctx"], found["plan"]["n_ubatch"], found["plan"]["device_free"]) == (256, 64, 8 << 30)
    assert found["machine"]["vram"] == 8 << 30
    assert found["machine"]["rates"]["link"] == {"per_second": 12e9, "source": "assumed"}
    assert (found["plan"]["n_slots"], found["plan"]["host_rung"], found["plan"]["is_exact"]) == (16, "none", False)
    assert "context: 256 tokens in place of -c 300, as the model was trained with no more" in lines(path, "--vram", "8", "-c", "300")


@pytest.mark.usefixtures("nothing_measured")
def test_a_machine_that_is_too_small(tmp_path: Path) -> None:
    path = mixed(tmp_path)
    found = estimate(path, "--vram", "0.4", "--ram", "32")
    assert not found["fits"]
    assert found["plan"] is None
    assert "does not fit on the GPU: " in found["reason"] and "0.4" not in found["reason"]
    assert any(line.startswith("no: Tiny does not fit on the GPU: ") for line in lines(path, "--vram", "0.4"))


@pytest.mark.usefixtures("nothing_measured")
def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    path = mixed(tmp_path)
    assert "on a machine with no GPU and 16.00 GiB of memory" in lines(path, "--vram", "0", "--ram", "16")
    for option in ("--link-gbps", "--gpu-gbps", "--vram-reserve"):
        refused = run(path, "--vram", "0", option, "5")
        assert isinstance(refused.exception, OptionError)
    for wrong in (("--vram", "-1"), ("--ram", "0"), ("--mem-gbps", "0"), ("--link-gbps", "nan"), ("--vram", "inf")):
        assert run(path, *wrong).exit_code == 2


def test_split_model(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "M x", [rest(), experts(0) + experts(1)])
    assert lines(paths[1])[1].startswith(f"file {paths[0]} and 1 more shard, ")
    assert json.loads(run("--json", paths[1]).output)["shards"] == [str(path) for path in paths]


def test_chunk_experts(tmp_path: Path) -> None:
    chunk = [Tensor(tensor.name.replace("exps", "chexps"), tensor.shape, tensor.type) for tensor in experts(0, n=2)]
    path = write_gguf(tmp_path / "m.gguf", "grovemoe", keys(1, 8, 3, experts_per_group=4), rest(1) + experts(0, n=8) + chunk)
    assert "experts 8 per block, top-3; 2 per block, top-2 (chexps)" in lines(path)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_bad_file_is_the_callers_one_error(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = run(tmp_path / "no.gguf", *options)
    assert isinstance(result.exception, ModelFileError)
    assert result.stdout == ""


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([2, 0, 1, 5], "0-2, 5")])
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
