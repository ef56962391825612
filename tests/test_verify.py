"""verify: it holds where it must, and each of its checks can fail."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFReader
from processes import cli, error_line, refused
from reshaped import dense
from synthetic import IQ_TYPES, MODELS, TYPES, typed

from tinyserve_gguf import float64, load, read_facts, verify_kernels, verify_types
from tinyserve_gguf import verify as verify_module
from tinyserve_gguf._matmul import ExpertMatmul
from tinyserve_gguf._ops import features
from tinyserve_gguf._types import dequantize, quantize, weight_types
from tinyserve_gguf.cli import main
from tinyserve_gguf.placement import pick_device
from tinyserve_gguf.verify import Report, VerifyOptions, verify
from tinyserve_gguf.verify_kernels import KernelRow, threshold
from tinyserve_gguf.verify_logits import Difference, near_limit

ModelFile = Callable[..., Path]


def checked(path: Path, **options: object) -> Report:
    given = {"device": "CPU", "quick": True, "n_threads": 1, **options}
    return verify(VerifyOptions(str(path), **given), lambda _text, _done: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_holds(model_file: ModelFile, name: str) -> None:
    report = checked(model_file(name))
    facts = report.facts
    assert report.holds
    assert [(row.cache, row.policy) for row in report.paged] == [("minimum", "lfru"), ("50%", "lfru")]
    assert [row.slots_checked for row in report.paged] == [row.n_slots for row in report.paged]
    assert {row.type for row in report.kernels} == {part.weight.type for layer in facts.expert_layers for part in layer.parts}
    assert all(set(row.by_batch) == {1, 4, 32} and row.nmse > 0 for row in report.kernels)


def test_everything_is_checked_unless_quick(model_file: ModelFile) -> None:
    seen: list[tuple[str, float]] = []
    report = verify(VerifyOptions(str(model_file("mixed")), device="CPU", n_threads=1), lambda text, done: seen.append((text, done)))
    assert report.holds
    assert [(row.cache, row.policy) for row in report.paged] == [
        *((cache, policy) for cache in ("minimum", "25%", "50%") for policy in ("lfru", "lru")),
        ("all", "lfru"),
    ]
    assert sum(row.n_tensors for row in report.kernels) == 4 * 3
    assert report.paged[-1].bytes_checked == report.facts.expert_bytes
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < fractions[-1] < 1


@pytest.mark.parametrize(("name", "tensor", "layer"), [("mixtral", "blk.1.ffn_up_exps.weight", 1), ("mixed", "blk.2.ffn_down_exps.weight", 2)])
def test_a_changed_byte_is_found(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tensor: str, layer: int) -> None:
    """What is paged is another file than what llama.cpp read: other logits from that layer on, and other bytes in the slots."""
    path = model_file(name)
    changed = Path(shutil.copy(path, tmp_path / "changed.gguf"))
    data = next(one.data for one in GGUFReader(changed, "r+").tensors if one.name == tensor)
    data.reshape(len(data), -1)[:, -2] ^= 1 << 4
    del data  # unmapped: written
    monkeypatch.setattr(verify_module, "load", lambda _path, **options: load(changed, **options))
    report = checked(path, caches=("all",))
    row = report.paged[0]
    assert not report.holds
    assert row.difference is not None
    assert row.difference.largest > 0
    assert row.first_layer == layer
    assert {text.partition(",")[0] for text in row.wrong_bytes} == {tensor}
    assert len(row.wrong_bytes) == report.facts.n_expert
    text = "; ".join(row.problems())
    assert f"first seen in block {layer}" in text
    assert "does not hold what the file holds" in text


def test_nan_is_reported(model_file: ModelFile, tmp_path: Path) -> None:
    """NaN on both sides is the same bits, and yet no model that works."""
    changed = Path(shutil.copy(model_file("gpt-oss-f32"), tmp_path / "m.gguf"))
    data = next(one.data for one in GGUFReader(changed, "r+").tensors if one.name == "blk.0.ffn_gate_exps.weight")
    data[:, :, 0] = np.nan
    del data
    report = checked(changed)
    assert not report.finite
    assert not report.holds
    assert all(row.difference is None for row in report.paged)
    assert any(row.nmse == float("inf") for row in report.kernels)


@pytest.mark.parametrize(("miss", "change", "holds"), [("cpu", 1e-4, True), ("split", 1e-4, True), ("fetch", 1e-4, False), ("cpu", 1.0, False)])
def test_misses_on_the_cpu_beside_a_gpu_need_only_be_near(
    model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, miss: str, change: float, holds: bool
) -> None:
    """A CPU that calls itself a GPU, and a last norm that is a little other, for what a GPU's own rounding does."""
    path = model_file("mixtral")
    changed = Path(shutil.copy(path, tmp_path / "changed.gguf"))
    data = next(one.data for one in GGUFReader(changed, "r+").tensors if one.name == "output_norm.weight")
    data += np.float32(change) * np.random.default_rng(0).standard_normal(data.shape, dtype=np.float32)
    del data  # unmapped: written
    right = verify_module.plan_for
    gpu = replace(pick_device("CPU"), is_cpu=False)
    monkeypatch.setattr(verify_module, "plan_for", lambda *given, **options: (right(*given, **options)[0], gpu))
    monkeypatch.setattr(verify_module, "load", lambda _path, **options: load(changed, **options))
    report = checked(path, miss=miss)
    assert report.holds == holds
    for row in report.paged:
        assert row.difference is not None
        assert row.is_near == holds
        assert row.first_layer is None  # what the blocks give is the same
        assert (row.difference.typical < 0.05) == (change < 1)
        assert row.difference.same_likeliest > 0.9 or change == 1
        assert ("differ by" in "".join(row.problems())) != holds


def test_near_is_measured_beside_llama_cpp_with_its_experts_on_the_cpu() -> None:
    """A GPU's kernels round some types ten times as much as the CPU's: what llama.cpp itself loses there, twice, is near."""
    own = Difference(largest=1.0, in_deviations=0.4, prompt=7, step=1, same_likeliest=0.97, typical=0.2)
    assert near_limit(None) == 0.05
    assert near_limit(own) == 0.4
    assert Difference(1.0, 0.9, 7, 1, 0.97, typical=0.39).is_near(own)
    assert not Difference(1.0, 0.9, 7, 1, 0.97, typical=0.41).is_near(own)
    assert not Difference(1.0, 0.9, 7, 1, 0.97, typical=0.06).is_near(None)


# ---- kernels --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "MXFP4", "Q1_0"])
@pytest.mark.parametrize("wrong", ["slot", "scale", "row"])
def test_wrong_products_are_above_the_limit(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch, kind: str, wrong: str) -> None:
    """The slots of other experts, a scale 4 % off, the last row of ten wrong."""
    right = ExpertMatmul.multiply

    def multiply(self: ExpertMatmul, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        if wrong == "slot":
            return right(self, x, (ids + 1) % ids.max())  # type: ignore[return-value]
        out = right(self, x, ids)
        assert out is not None
        if wrong == "scale":
            return out * np.float32(1.04)
        out[:, :, ::10] = 0
        return out

    monkeypatch.setattr(ExpertMatmul, "multiply", multiply)
    facts = read_facts(model_file("qwen3moe", **typed(kind, layers=2)))
    (row,) = verify_kernels.check_kernels(facts, pick_device("CPU"), quick=False, n_threads=1, show=lambda _text, _done: None)
    assert not row.holds
    assert all(value > row.threshold for batch, value in row.by_batch.items() if batch > 3)
    assert "is above" in row.problem()


def test_a_batch_without_a_kernel_is_named(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ExpertMatmul.multiply
    monkeypatch.setattr(ExpertMatmul, "multiply", lambda self, x, ids: None if len(ids) == 4 else right(self, x, ids))
    (row,) = checked(model_file("mixtral")).kernels
    assert not row.holds
    assert row.problem() == "the device has no kernel for batches of 4"


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "MXFP4", "NVFP4"])
def test_both_dequantisers_agree(kind: str) -> None:
    """gguf's, which is the reference, and ggml's, which stands in where gguf has none."""
    of_type = weight_types()[kind]
    raw = quantize(np.random.default_rng(0).standard_normal((4, 256), dtype=np.float32), of_type, np.ones(256, np.float32))
    values, whose = dequantize(raw, of_type.type_id)
    own = np.empty_like(values)
    from tinyserve_gguf._types import _ggml

    _ggml().ggml_get_type_traits(of_type.type_id).contents.to_float(raw.ctypes.data, own.ctypes.data, own.size)
    assert whose == "gguf"
    assert np.allclose(values, own, rtol=1e-6, atol=1e-7)


def without_torch(monkeypatch: pytest.MonkeyPatch, folder: Path | None = None) -> None:
    """As if torch were not installed, or were what lies in `folder`."""
    monkeypatch.setattr(float64, "_torch", cache(float64._Torch))  # not the one that is known
    if folder:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    else:
        monkeypatch.setitem(sys.modules, "torch", None)


def kernel_row(path: Path) -> KernelRow:
    (row,) = verify_kernels.check_kernels(read_facts(path), pick_device("CPU"), quick=False, n_threads=1, show=lambda _text, _done: None)
    return row


def test_torch_multiplies_where_it_is_installed(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as numpy's, to the rounding of float64, so the same errors of the kernels."""
    torch = pytest.importorskip("torch", reason="torch is not installed: scripts/test --torch")
    name, multiply = float64.reference_maths()
    assert name == f"torch {torch.__version__}"
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((3, 40, 256))[:, ::2][1], rng.standard_normal((100, 256))
    product = multiply(x, weights)
    assert (product.dtype, product.shape) == (np.float64, (20, 100))
    assert np.allclose(product, x @ weights.T, rtol=1e-13, atol=1e-13)
    path = model_file("qwen3moe", **typed("F32", layers=2))
    by_torch = kernel_row(path)
    without_torch(monkeypatch)
    by_numpy = kernel_row(path)
    assert (by_torch.maths, by_numpy.maths) == (name, f"numpy {np.__version__}")
    assert by_torch.by_batch.keys() == by_numpy.by_batch.keys()
    assert all(by_torch.by_batch[n] == pytest.approx(by_numpy.by_batch[n], rel=1e-6) for n in by_numpy.by_batch)


@pytest.mark.parametrize("torch", ["raise OSError('libcudart.so.12: cannot open shared object file')", "import os; os.abort()"])
def test_numpy_multiplies_where_torch_does_not(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str) -> None:
    path = model_file("qwen3moe", **typed("Q8_0", layers=2))
    without_torch(monkeypatch)
    assert kernel_row(path).maths == f"numpy {np.__version__}"
    (tmp_path / "torch.py").write_text(torch)
    without_torch(monkeypatch, tmp_path)
    row = kernel_row(path)
    assert row.holds
    assert row.maths == f"numpy {np.__version__}, as torch does not load"


# ---- types ----------------------------------------------------------------------------------------------------------------------------------


def test_types_of_this_version() -> None:
    assert set(weight_types()) == {*TYPES, *IQ_TYPES, "Q2_0"}
    assert [name for name, kind in weight_types().items() if kind.needs_imatrix] == ["IQ2_XXS", "IQ2_XS", "IQ1_S"]


def test_every_type(tmp_path: Path) -> None:
    """Nothing left out: every batch size, every cache."""
    done = cli("verify", "--types", "all", "--device", "CPU", "-t", "1", "--json", cwd=tmp_path, timeout_s=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["holds"]
    assert [row["type"] for row in found["types"]] == list(weight_types())
    assert all(row["supported"] and row["identical"] and 0 < row["nmse"] < row["threshold"] for row in found["types"])
    assert {row["type"] for row in found["types"] if row["reference"] == "ggml"} == {"Q1_0", "Q2_0"}
    assert {row["maths"] for row in found["types"]} == {float64.reference_maths()[0]}


def test_what_is_run_for_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[VerifyOptions] = []
    monkeypatch.setattr(verify_types, "verify", lambda options, show: seen.append(options) or verify(options, show))
    for quick in (False, True):
        row = verify_types.check_type(tmp_path, "Q8_0", VerifyOptions("", device="CPU", n_threads=1, quick=quick))
        assert row.holds
        assert row.identical
    whole, sample = seen
    assert (whole.batches, whole.caches) == (tuple(range(1, 65)), ("minimum", "50%", "all"))
    assert (sample.batches, sample.caches) == ((1, 2, 3, 4, 5, 8, 9, 32, 33, 64), ("minimum",))


def test_a_type_without_kernels_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyserve_gguf._shim.Device.multiplies", lambda *_arguments: False)
    row = verify_types.check_type(tmp_path, "TQ1_0", VerifyOptions("", device="CPU"))
    assert (row.supported, row.identical, row.holds) == (False, False, True)
    assert row.reason == "CPU has no kernels for it: such experts are refused there"


def test_a_process_that_hangs_or_dies_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next type gets a new one."""
    rows = verify_types.verify_types(["Q4_0", "Q8_0"], VerifyOptions("", device="CPU", policies=3), lambda _text, _done: None)  # type: ignore[arg-type]
    assert [(row.type, row.holds, row.reason) for row in rows] == [(name, False, "the process ended with 1") for name in ("Q4_0", "Q8_0")]
    monkeypatch.setattr(verify_types, "LIMIT_S", 0.01)
    rows = verify_types.verify_types(["Q4_0", "Q8_0"], VerifyOptions("", device="CPU"), lambda _text, _done: None)
    assert [(row.type, row.holds, row.reason) for row in rows] == [(name, False, "not done after 0.01 s") for name in ("Q4_0", "Q8_0")]


# ---- command line ---------------------------------------------------------------------------------------------------------------------------


def test_command(model_file: ModelFile, tmp_path: Path) -> None:
    options = ("--device", "CPU", "-t", "1", "--quick", "--expert-cache", "minimum,3,all", "--policy", "fifo")
    done = cli("verify", model_file("gpt-oss"), *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "verified: everything above holds"
    assert done.stdout.count("identical") == 3
    found = json.loads(cli("verify", model_file("gpt-oss"), *options, "--miss", "cpu", "--json", cwd=tmp_path).stdout)
    assert found["holds"]
    assert [(row["cache"], row["policy"], row["identical"]) for row in found["paged"]] == [(c, "fifo", True) for c in ("minimum", "3", "all")]
    assert found["kernels"][0]["by_batch"].keys() == {"1", "4", "32"}


def test_exit_code_of_a_difference(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify_kernels._THRESHOLDS, "F32", 0.0)
    for style in ([], ["--json"]):
        done = CliRunner().invoke(main, ["verify", str(model_file("gpt-oss-f32")), "--quick", "--device", "CPU", "-t", "1", *style])
        assert done.exit_code == 1
        assert ("NOT verified" in done.stdout) != bool(style)
        assert not style or json.loads(done.stdout)["holds"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a MODEL, or --types all"),
        (("{moe}", "--types", "all"), "not both"),
        (("--types", "Q4_9"), "weights cannot be of type Q4_9 in this llama.cpp; they can be F32, F16"),
        (("--types", "Q8_K"), "weights cannot be of type Q8_K"),
        (("--types", "F16", "--device", "CUDA99"), "there is no device 'CUDA99'"),
        (("{moe}", "--expert-cache", "some"), "not 'some'; or minimum"),
        (("{moe}", "--expert-cache", "1"), "one token needs 2 experts at once"),
        (("{moe}", "--policy", "lfru,best"), "'best' is not one of"),
        (("{moe}", "--miss", "auto"), "'auto' is not one of"),
        (("{dense}",), "is dense: nothing is paged, so there is nothing to verify"),
        (("none.gguf",), "none.gguf: no such file"),
    ],
)
def test_refused(model_file: ModelFile, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    path = dense(model_file("mixtral"), tmp_path / "dense.gguf")
    given = [argument.format(moe=model_file("mixtral"), dense=path) for argument in arguments]
    assert message in refused(cli("verify", *given, cwd=tmp_path))


def test_a_device_without_room_is_refused(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp alone has to fit on a GPU."""
    small = replace(pick_device("CPU"), is_cpu=False, memory_free=1 << 20)
    right = verify_module.plan_for
    monkeypatch.setattr(verify_module, "plan_for", lambda *given, **options: (right(*given, **options)[0], small))
    done = CliRunner().invoke(main, ["verify", str(model_file("mixtral")), "--device", "CPU"])
    assert "llama.cpp with everything on CPU is the reference, and it needs" in error_line(done)


def test_fp4_has_a_wider_limit_only_where_its_units_round_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pick_device("CPU")
    assert threshold("MXFP4", cpu) == threshold("Q4_0", cpu) == 5e-4
    monkeypatch.setattr("tinyserve_gguf.verify_kernels.features", lambda _device: {"BLACKWELL_NATIVE_FP4": "1"})
    assert threshold("MXFP4", cpu) == 2e-2
    assert threshold("Q4_0", cpu) == 5e-4


def test_features_are_those_that_llama_cpp_prints() -> None:
    found = features(pick_device("CPU").handle)
    said = llama_cpp.llama_print_system_info().decode()  # "CPU : SSE3 = 1 | ..."
    assert found
    assert all(f"{name} = {value}" in said for name, value in found.items())
