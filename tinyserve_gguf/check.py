"""Looks for weights that are no numbers: blocks whose scale is NaN or infinite, as quantising with a broken imatrix leaves them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from tinyserve_gguf import _llama
from tinyserve_gguf.facts import ModelFacts

CHUNK = 1 << 26  # bytes of a tensor that is no expert's, looked at in one go; rows are never cut


@dataclass(frozen=True, slots=True)
class Broken:
    """A tensor, or one expert's part of it, that holds NaN or infinite numbers."""

    tensor: str
    block: int | None  # of the model; None where it belongs to none
    expert: int | None  # None where the tensor is no expert's

    def line(self) -> str:
        where = f"block {self.block}, expert {self.expert}: {self.tensor}" if self.expert is not None else self.tensor
        return f"{where} holds NaN or infinite numbers"


@cache
def _ggml() -> SimpleNamespace:
    return _llama.bind(("ggml_validate_row_data", ctypes.c_bool, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]))


def find_broken(facts: ModelFacts, show: Callable[[str, float], None]) -> list[Broken]:
    """Reads every weight of the file once. `show` hears (tensor, 0..1). What is found is in the order of the file."""
    layers = [*facts.expert_layers, *facts.idle_layers]
    experts = {tensor.name: layer for layer in layers for part in layer.parts for tensor in (part.weight, part.bias, part.scale) if tensor}
    total, done, found = sum(tensor.n_bytes for tensor in facts.tensors), 0, []
    for tensor in facts.tensors:
        layer = experts.get(tensor.name)
        rows = layer.n_expert if layer else max(1, tensor.ne(1) * tensor.ne(2) * tensor.ne(3))
        size = tensor.n_bytes // rows
        step = 1 if layer else max(1, CHUNK // max(1, size))
        data = np.memmap(facts.shards[tensor.shard], np.uint8, "r", tensor.offset, (rows, size))
        for at in range(0, rows, step):
            show(tensor.name, (done + at * size) / total)
            if not _is_finite(tensor.type_id, data[at : at + step]):
                found.append(Broken(tensor.name, layer.block if layer else None, at if layer else None))
                if not layer:
                    break
        done += tensor.n_bytes
    return found


def _is_finite(type_id: int, part: npt.NDArray[np.uint8]) -> bool:
    with _quiet():
        return bool(_ggml().ggml_validate_row_data(type_id, part.ctypes.data, part.nbytes))


@contextmanager
def _quiet() -> Iterator[None]:
    """ggml writes what it finds to file 2, block by block."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
