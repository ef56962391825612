"""One MUL_MAT_ID on a device, as llama.cpp submits it for routed experts, outside of any model."""

from __future__ import annotations

import ctypes
from functools import cache
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyserve_gguf import _llama
from tinyserve_gguf.errors import CapacityError, EngineError

_F32, _I32 = 0, 26


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@cache
def _ggml() -> SimpleNamespace:
    pointer: Any
    pointer, i64, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    return _llama.bind(
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_3d", pointer, [pointer, ctypes.c_int, i64, i64, i64]),
        ("ggml_mul_mat_id", pointer, [pointer, pointer, pointer, pointer]),
        ("ggml_new_graph", pointer, [pointer]),
        ("ggml_build_forward_expand", None, [pointer, pointer]),
        ("ggml_backend_dev_init", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_free", None, [pointer]),
        ("ggml_backend_dev_backend_reg", pointer, [pointer]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_alloc_ctx_tensors", pointer, [pointer, pointer]),
        ("ggml_backend_buffer_free", None, [pointer]),
        ("ggml_backend_dev_supports_op", ctypes.c_bool, [pointer, pointer]),
        ("ggml_backend_tensor_set", None, [pointer, pointer, size, size]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
        ("ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer]),
    )


class _Tensors:
    """A ggml_context whose tensors get memory on the backend at once."""

    def __init__(self) -> None:
        self.context = _ggml().ggml_init(_InitParams(mem_size=1 << 20, mem_buffer=None, no_alloc=True))
        self._buffer: int | None = None

    def allocate(self, backend: int) -> None:
        """CapacityError if the device has no room."""
        self._buffer = _ggml().ggml_backend_alloc_ctx_tensors(self.context, backend)
        if not self._buffer:
            raise CapacityError("there is no room on the device for the weights of a few experts; free device memory")

    def close(self) -> None:
        if self._buffer:
            _ggml().ggml_backend_buffer_free(self._buffer)
        _ggml().ggml_free(self.context)
        self._buffer = self.context = None


class ExpertMatmul:
    """Weights of a few experts in consecutive slots of a device, to multiply with. Use it as a context manager."""

    def __init__(self, device: int, type_id: int, slots: npt.NDArray[np.uint8], columns: int, n_threads: int) -> None:
        """`device`: a ggml_backend_dev_t. `slots`: [slots, rows, bytes of a row], rows of `columns` numbers."""
        ggml = _ggml()
        self._device, self._shape = device, slots.shape
        self._backend = ggml.ggml_backend_dev_init(device, None)
        set_threads = ggml.ggml_backend_reg_get_proc_address(ggml.ggml_backend_dev_backend_reg(device), b"ggml_backend_set_n_threads")
        if set_threads:  # the CPU's
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(set_threads)(self._backend, n_threads)
        self._tensors = _Tensors()
        try:
            self._columns = columns
            self._weights = ggml.ggml_new_tensor_3d(self._tensors.context, type_id, columns, slots.shape[1], slots.shape[0])
            self._tensors.allocate(self._backend)
            _put(self._weights, slots)
        except BaseException:
            self.close()
            raise

    def multiply(self, x: npt.NDArray[np.float32], ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32] | None:
        """[tokens, used, rows]: for every token the products of the slots `ids` [tokens, used] with `x`, which is [tokens, 1, columns], the same for
        all slots, or [tokens, used, columns]. None if the device has no kernel for it."""
        ggml, work = _ggml(), _Tensors()
        try:
            tokens, used = ids.shape
            b = ggml.ggml_new_tensor_3d(work.context, _F32, self._columns, x.shape[1], tokens)
            i = ggml.ggml_new_tensor_3d(work.context, _I32, used, tokens, 1)
            node = ggml.ggml_mul_mat_id(work.context, self._weights, b, i)
            if not ggml.ggml_backend_dev_supports_op(self._device, node):
                return None
            graph = ggml.ggml_new_graph(work.context)
            ggml.ggml_build_forward_expand(graph, node)
            work.allocate(self._backend)
            _put(b, x)
            _put(i, ids)
            status = ggml.ggml_backend_graph_compute(self._backend, graph)
            if status != 0:
                raise EngineError(f"the device failed to multiply {tokens} tokens with experts: ggml_status {status}")
            out = np.empty((tokens, used, self._shape[1]), np.float32)
            ggml.ggml_backend_tensor_get(node, out.ctypes.data, 0, out.nbytes)
            return out
        finally:
            work.close()

    def close(self) -> None:
        self._tensors.close()
        _ggml().ggml_backend_free(self._backend)

    def __enter__(self) -> ExpertMatmul:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _put(tensor: int, data: npt.NDArray[Any]) -> None:
    data = np.ascontiguousarray(data)
    _ggml().ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
