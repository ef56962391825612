"""MUL_MAT_ID of expert weights on a device against the same in float64, from the bytes of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tinyserve_gguf._matmul import ExpertMatmul
from tinyserve_gguf._ops import features
from tinyserve_gguf._shim import Device
from tinyserve_gguf._types import dequantize
from tinyserve_gguf.facts import ExpertLayer, ModelFacts, PartFacts
from tinyserve_gguf.float64 import Multiply, reference_maths

BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)  # tokens
BATCHES_QUICK = (1, 4, 32)
MAX_ROWS = 128  # of each expert, drawn at random, that are compared; all are computed
# Normalised mean squared errors. Weights count as exact, so what is left is how kernels round the activations: to TF32 at most beside F32, to 16 bits
# with 16-bit sums in cuBLAS beside F16 and BF16, to 8 bits beside quantised weights (llama.cpp's own test-backend-ops allows the same 5e-4).
_THRESHOLDS = {"F32": 1e-6, "F16": 1e-4, "BF16": 1e-4}
_THRESHOLD_QUANTISED = 5e-4
_THRESHOLD_FP4 = 2e-2  # where a GPU's FP4 units are used, activations are rounded to 4 bits as well; test-backend-ops allows as much there
_FP4 = ("MXFP4", "NVFP4")
_FP4_UNITS = "BLACKWELL_NATIVE_FP4"  # what ggml-cuda calls it if it was built for them


@dataclass(slots=True)
class KernelRow:
    """What was found for one type."""

    type: str
    threshold: float  # NMSE
    reference: str = ""  # whose dequantiser: "gguf" or "ggml"
    maths: str = ""  # who multiplied in float64: "torch" or "numpy", and its version
    n_tensors: int = 0
    worst: str = ""  # tensor with the largest NMSE
    by_batch: dict[int, float] = field(default_factory=dict)  # tokens -> largest NMSE of any tensor
    unsupported: list[int] = field(default_factory=list)  # batch sizes that the device has no kernel for

    @property
    def nmse(self) -> float:
        return max(self.by_batch.values(), default=0.0)

    @property
    def holds(self) -> bool:
        return bool(self.by_batch) and not self.unsupported and self.nmse <= self.threshold

    def problem(self) -> str:
        """What is wrong, for people; "" if it holds."""
        if self.holds:
            return ""
        if self.unsupported:
            return f"the device has no kernel for batches of {', '.join(map(str, self.unsupported))}"
        return f"NMSE {self.nmse:.1e} of {self.worst} is above {self.threshold:.0e}"


def threshold(kind: str, device: Device) -> float:
    """Largest NMSE for this type of weight."""
    if kind in _FP4 and _FP4_UNITS in features(device.handle):
        return _THRESHOLD_FP4
    return _THRESHOLDS.get(kind, _THRESHOLD_QUANTISED)


def parts_to_check(facts: ModelFacts, quick: bool) -> list[tuple[ExpertLayer, PartFacts]]:
    """Every expert tensor; when quick, one of each type and shape."""
    found: dict[object, tuple[ExpertLayer, PartFacts]] = {}
    for layer in facts.expert_layers:
        for part in layer.parts:
            w = part.weight
            found.setdefault((w.type, w.ne(0), w.ne(1), part.role == "down") if quick else w.name, (layer, part))
    return list(found.values())


def check_kernels(
    facts: ModelFacts, device: Device, *, quick: bool, n_threads: int, show: Callable[[str, float], None], batches: Sequence[int] = ()
) -> list[KernelRow]:
    """A row for every type of expert weight in the model."""
    rows: dict[str, KernelRow] = {}
    parts = parts_to_check(facts, quick)
    for i, (layer, part) in enumerate(parts):
        w = part.weight
        show(f"{w.name}, {w.type}", i / len(parts))
        row = rows.setdefault(w.type, KernelRow(w.type, threshold(w.type, device)))
        before = row.nmse
        check_part(facts, device, layer, part, batches or (BATCHES_QUICK if quick else BATCHES), row, n_threads)
        if row.nmse > before:
            row.worst = w.name
    return list(rows.values())


def check_part(
    facts: ModelFacts, device: Device, layer: ExpertLayer, part: PartFacts, batches: Sequence[int], row: KernelRow, n_threads: int
) -> None:
    """One tensor: experts drawn at random lie in slots in another order than in the file, and random tokens are routed to random slots."""
    w = part.weight
    row.maths, multiply = reference_maths()
    rng = np.random.default_rng([layer.block, w.ne(0), w.ne(1)])
    n_slots = min(layer.n_expert, max(8, 2 * layer.n_used))
    experts = rng.permutation(layer.n_expert)[:n_slots]
    data = np.memmap(facts.shards[w.shard], np.uint8, "r", w.offset, (layer.n_expert, w.ne(1), w.n_bytes // (layer.n_expert * w.ne(1))))
    slots = data[experts]
    sample = np.sort(rng.permutation(w.ne(1))[:MAX_ROWS])
    exact = []
    for rows in slots[:, sample]:
        values, row.reference = dequantize(rows, w.type_id)
        exact.append(values.astype(np.float64))
    row.n_tensors += 1
    most = max(batches)  # smaller batches are the first tokens of the largest
    x = rng.uniform(-1, 1, (most, layer.n_used if part.role == "down" else 1, w.ne(0))).astype(np.float32)  # as in test-backend-ops
    ids = np.stack([rng.permutation(n_slots)[: layer.n_used] for _ in range(most)]).astype(np.int32)
    products = _products(multiply, exact, x, ids)
    with ExpertMatmul(device.handle, w.type_id, slots, w.ne(0), n_threads) as matmul:
        for tokens in batches:
            out = matmul.multiply(x[:tokens], ids[:tokens])
            if out is None:
                if tokens not in row.unsupported:
                    row.unsupported.append(tokens)
                continue
            row.by_batch[tokens] = max(row.by_batch.get(tokens, 0.0), nmse(out[:, :, sample], products[:tokens]))


def _products(
    multiply: Multiply, exact: Sequence[npt.NDArray[np.float64]], x: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """[tokens, used, rows]: `x`, [tokens, 1 or used, columns], times the `exact` weights of the slots `ids`, [rows, columns] each."""
    wide = np.broadcast_to(x, (*ids.shape, x.shape[2])).astype(np.float64)
    out = np.empty((*ids.shape, len(exact[0])))
    for slot in np.unique(ids):
        out[ids == slot] = multiply(wide[ids == slot], exact[slot])
    return out


def nmse(found: npt.NDArray[np.float32], exact: npt.NDArray[np.float64]) -> float:
    """Mean squared error over mean square; infinite where something is not finite."""
    error = float(np.square(found - exact).sum())
    size = float(np.square(exact).sum())
    if not np.isfinite(error) or not np.isfinite(size):
        return float("inf")
    return error / size if size else error


def unequal_slots(facts: ModelFacts, resident: Iterator[tuple[ExpertLayer, int, dict[str, npt.NDArray[np.uint8]]]]) -> tuple[int, int, list[str]]:
    """(experts, bytes, weights that differ from the file): what lies in slots, given as (layer, expert, bytes by role)."""
    n, n_bytes, wrong = 0, 0, []
    for layer, expert, held in resident:
        n += 1
        for part in layer.parts:
            w, found = part.weight, held[part.role]
            file = np.fromfile(facts.shards[w.shard], np.uint8, found.nbytes, offset=w.offset + expert * found.nbytes)
            n_bytes += found.nbytes
            if not np.array_equal(file, found.reshape(-1)):
                wrong.append(f"{w.name}, expert {expert}")
    return n, n_bytes, wrong
