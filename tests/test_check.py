"""info --check: experts whose weights are no numbers are named, for every type."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from processes import cli
from synthetic import MODELS, split, typed

from tinyserve_gguf import read_facts
from tinyserve_gguf._types import weight_types
from tinyserve_gguf.check import Broken, find_broken
from tinyserve_gguf.micro import write_micro

ModelFile = Callable[..., Path]

# Bytes of a block that make its scale NaN when all their bits are set. NVFP4's scales have no NaN that ggml reads as one.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "Q1_0", "Q2_0"), (0, 1)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (2, 3)),  # the minimum
    "F32": (0, 1, 2, 3),
    "F16": (0, 1),
    "BF16": (0, 1),
    "Q2_K": (80, 81),
    "Q3_K": (108, 109),
    "Q6_K": (208, 209),
    "IQ1_M": tuple(range(48, 56)),
    "TQ1_0": (52, 53),
    "TQ2_0": (64, 65),
    "MXFP4": (0,),
}


def found(path: Path) -> list[Broken]:
    return find_broken(read_facts(path), lambda _text, _done: None)


def poison(path: Path, tensor: str, expert: int, at: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """All bits of these bytes of one expert's last block but one are set."""
    facts = next(one for one in read_facts(path).tensors if one.name == tensor)
    kind = weight_types()[facts.type]
    experts = facts.shape[-1]
    with path.open("r+b") as file:
        for byte in at:
            file.seek(facts.offset + (expert + 1) * facts.n_bytes // experts - kind.block_bytes + byte)
            file.write(b"\xff")


@pytest.mark.parametrize("name", MODELS)
def test_whole_models(model_file: ModelFile, name: str) -> None:
    assert found(model_file(name)) == []


@pytest.mark.parametrize("kind", weight_types())
def test_every_type(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_micro(tmp_path / "m.gguf", weight_types()[kind])
    assert found(path) == []
    if kind not in SCALES:
        assert kind == "NVFP4"
        return
    poison(path, "blk.1.ffn_down_exps.weight", 6, SCALES[kind])
    poison(path, "blk.0.ffn_up_exps.weight", 0, SCALES[kind])
    assert found(path) == [Broken("blk.0.ffn_up_exps.weight", 0, 0), Broken("blk.1.ffn_down_exps.weight", 1, 6)]
    assert capfd.readouterr() == ("", "")  # ggml's own lines


def test_biases_scales_and_other_tensors(model_file: ModelFile, tmp_path: Path) -> None:
    for name, tensor, expert in (("gpt-oss", "blk.2.ffn_gate_exps.bias", 5), ("scaled", "blk.1.ffn_down_exps.scale", 7)):
        path = Path(shutil.copy(model_file(name), tmp_path / f"{name}.gguf"))
        poison(path, tensor, expert)
        assert found(path) == [Broken(tensor, int(tensor[4]), expert)]
    path = Path(shutil.copy(model_file("mixtral"), tmp_path / "m.gguf"))
    data = next(one.data for one in GGUFReader(path, "r+").tensors if one.name == "blk.0.attn_q.weight")
    data[3, 5] = -np.inf
    del data  # unmapped: written
    assert [one.line() for one in found(path)] == ["blk.0.attn_q.weight holds NaN or infinite numbers"]


def test_split_and_idle_blocks(model_file: ModelFile, tmp_path: Path) -> None:
    path = Path(shutil.copy(model_file("deepseek2-mtp"), tmp_path / "m.gguf"))
    poison(path, "blk.3.ffn_up_exps.weight", 2)
    shards = split(path, 3)
    assert found(shards[1]) == found(path) == [Broken("blk.3.ffn_up_exps.weight", 3, 2)]


def test_command(model_file: ModelFile, tmp_path: Path) -> None:
    path = Path(shutil.copy(model_file("qwen3moe", **typed("Q4_K")), tmp_path / "m.gguf"))
    done = cli("info", path, "--check", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].strip() == "every weight is a finite number"
    assert json.loads(cli("info", path, "--check", "--json", cwd=tmp_path).stdout)["broken"] == []
    assert "broken" not in json.loads(cli("info", path, "--json", cwd=tmp_path).stdout)
    poison(path, "blk.1.ffn_gate_exps.weight", 4, (0, 1))
    done = cli("info", path, "--check", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].strip() == "block 1, expert 4: blk.1.ffn_gate_exps.weight holds NaN or infinite numbers"
    done = cli("info", path, "--check", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["broken"] == [{"tensor": "blk.1.ffn_gate_exps.weight", "block": 1, "expert": 4}]
