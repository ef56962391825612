"""Reads GGUF headers through ggml's own reader, so that what is accepted here is what llama.cpp accepts; finds the shards of a split model.

Only small metadata and the tensor table cross into Python; a vocabulary of 200,000 tokens stays in C and costs milliseconds.
Source: `gguf.h` of ggml 0.25.3.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tinyserve_gguf import _llama
from tinyserve_gguf.errors import ModelFileError

Scalar = int | float | bool | str
Value = Scalar | tuple[int | float | bool, ...]

MAX_ARRAY = 1024  # longer arrays belong to the vocabulary; per-layer ones have at most LLAMA_MAX_LAYERS = 512 elements
MAX_DIMS = 4

# enum gguf_type -> how its values lie in memory
_NUMBERS: dict[int, Any] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    6: ctypes.c_float,
    7: ctypes.c_bool,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
    12: ctypes.c_double,
}
_STRING, _ARRAY = 8, 9

# First bytes of files that people take for a GGUF. ggml's oldest formats stored their magic as a little-endian number, so it reads backwards.
_FOREIGN = (
    (b"lmgg", "an old GGML file (before GGUF); convert the original model with a current llama.cpp"),
    (b"fmgg", "an old GGMF file (before GGUF); convert the original model with a current llama.cpp"),
    (b"tjgg", "an old GGJT file (before GGUF); convert the original model with a current llama.cpp"),
    (b"algg", "an old GGML LoRA adapter; give a model in GGUF format"),
    (b"PK\x03\x04", "a zip archive (PyTorch checkpoints are one); convert the model to GGUF with llama.cpp's convert_hf_to_gguf.py"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"\xfd7zXZ", "an xz archive; unpack it first"),
    (b"version https://git-lfs", "a Git LFS pointer and not the file itself; fetch it with `git lfs pull`"),
    (b"<!DOCTYPE", "a web page; the download went wrong, fetch the file again"),
    (b"<html", "a web page; the download went wrong, fetch the file again"),
)


class _InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table."""

    name: str
    type_id: int  # enum ggml_type
    type: str  # its name in capitals, "Q4_K"
    shape: tuple[int, ...]  # ggml order, ne0 first, without trailing ones
    n_bytes: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class Header:
    """What one file's header says. `metadata` leaves out arrays of strings and arrays longer than MAX_ARRAY."""

    path: Path
    file_bytes: int
    metadata: dict[str, Value]
    kinds: dict[str, str]  # key -> type as stored: "u16", "str", "arr"
    tensors: tuple[TensorInfo, ...]


@cache
def _gguf() -> SimpleNamespace:
    """The functions of gguf.h, with their prototypes."""
    pointer: Any
    pointer, i64, size, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p
    return _llama.bind(
        ("gguf_init_from_file", pointer, [text, _InitParams]),
        ("gguf_free", None, [pointer]),
        ("gguf_type_name", text, [ctypes.c_int]),
        ("gguf_get_data_offset", size, [pointer]),
        ("gguf_get_n_kv", i64, [pointer]),
        ("gguf_get_key", text, [pointer, i64]),
        ("gguf_get_kv_type", ctypes.c_int, [pointer, i64]),
        ("gguf_get_arr_type", ctypes.c_int, [pointer, i64]),
        ("gguf_get_arr_n", size, [pointer, i64]),
        ("gguf_get_arr_data", pointer, [pointer, i64]),
        ("gguf_get_val_data", pointer, [pointer, i64]),
        ("gguf_get_val_str", text, [pointer, i64]),
        ("gguf_get_n_tensors", i64, [pointer]),
        ("gguf_get_tensor_name", text, [pointer, i64]),
        ("gguf_get_tensor_type", ctypes.c_int, [pointer, i64]),
        ("gguf_get_tensor_ne", ctypes.POINTER(i64), [pointer, i64]),
        ("gguf_get_tensor_size", size, [pointer, i64]),
        ("gguf_get_tensor_offset", size, [pointer, i64]),
        ("ggml_type_name", text, [ctypes.c_int]),
    )


def read_header(path: Path) -> Header:
    """The header of one GGUF file.

    Raises ModelFileError when the file is missing, is no GGUF, has a header that ggml refuses (the message carries ggml's reason), or ends before
    its last tensor does.
    """
    file_bytes = _check_file(path)
    gguf = _gguf()
    with _llama.explained() as cause:
        context = gguf.gguf_init_from_file(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
        if not context:
            raise ModelFileError(f"{path}: {_advice(cause())}")
    try:
        metadata, kinds = _read_metadata(gguf, context)
        header = Header(path, file_bytes, metadata, kinds, _read_tensors(gguf, context))
    finally:
        gguf.gguf_free(context)
    needed = max((tensor.offset + tensor.n_bytes for tensor in header.tensors), default=0)
    if needed > file_bytes:
        raise ModelFileError(f"{path}: is cut off: {needed - file_bytes:,} of {needed:,} bytes are missing; download or copy it again")
    return header


def _check_file(path: Path) -> int:
    """Size in bytes of a readable regular file that starts like a GGUF."""
    try:
        status = path.stat()
        head = b""
        if stat.S_ISREG(status.st_mode):
            with path.open("rb") as file:
                head = file.read(32)
    except (FileNotFoundError, ValueError):  # ValueError: a NUL character in the path
        raise ModelFileError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise ModelFileError(f"{path}: is a directory; give the .gguf file in it")
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path}: is not a regular file")
    if not head:
        raise ModelFileError(f"{path}: is empty; download or copy it again")
    if not head.startswith(b"GGUF"):
        raise ModelFileError(f"{path}: is not a GGUF file{_foreign(head)}")
    return status.st_size


def _foreign(head: bytes) -> str:
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            return f" but {what}"
    if head[8:9] == b"{":  # after the length of its JSON header
        return " but a safetensors file; convert the model to GGUF with llama.cpp's convert_hf_to_gguf.py"
    return f" (it starts with {head[:4]!r} in place of b'GGUF')"


def _advice(cause: str) -> str:
    """ggml's reason for refusing a header, and what to do about it."""
    if "invalid ggml type" in cause or "block size (0)" in cause:  # never known, or removed from ggml
        return f"has a tensor type that llama.cpp does not know, of a fork or another version ({cause}); get the model in a standard quantisation"
    if "has offset" in cause:
        return f"has tensors that overlap or leave gaps ({cause}); download or convert the file again"
    if "only supports up to version" in cause:
        return f"is made for a newer llama.cpp ({cause}); get the model as GGUF version 3"
    if "GGUFv1" in cause:
        return "is a GGUF of version 1, which llama.cpp no longer reads; convert the original model again"
    if "endianness" in cause:
        return "is for machines of the other byte order; get the file without big-endian in its name, or convert the original model here"
    return f"has a damaged or incomplete header ({cause}); download or convert the file again"


def _read_metadata(gguf: SimpleNamespace, context: int) -> tuple[dict[str, Value], dict[str, str]]:
    metadata: dict[str, Value] = {}
    kinds: dict[str, str] = {}
    for i in range(gguf.gguf_get_n_kv(context)):
        key = gguf.gguf_get_key(context, i).decode("utf-8", "replace")
        kind = gguf.gguf_get_kv_type(context, i)
        kinds[key] = gguf.gguf_type_name(kind).decode()
        if kind == _STRING:
            metadata[key] = gguf.gguf_get_val_str(context, i).decode("utf-8", "replace")
        elif kind == _ARRAY:
            element, n = gguf.gguf_get_arr_type(context, i), gguf.gguf_get_arr_n(context, i)
            if element in _NUMBERS and n <= MAX_ARRAY:
                metadata[key] = _numbers(gguf.gguf_get_arr_data(context, i), element, n)
        else:
            metadata[key] = _numbers(gguf.gguf_get_val_data(context, i), kind, 1)[0]
    return metadata, kinds


def _numbers(address: int | None, kind: int, n: int) -> tuple[int | float | bool, ...]:
    return tuple((_NUMBERS[kind] * n).from_address(address)) if address and n else ()


def _read_tensors(gguf: SimpleNamespace, context: int) -> tuple[TensorInfo, ...]:
    data = gguf.gguf_get_data_offset(context)
    tensors = []
    for i in range(gguf.gguf_get_n_tensors(context)):
        shape = list(gguf.gguf_get_tensor_ne(context, i)[:MAX_DIMS])
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        type_id = gguf.gguf_get_tensor_type(context, i)
        tensors.append(
            TensorInfo(
                name=gguf.gguf_get_tensor_name(context, i).decode("utf-8", "replace"),
                type_id=type_id,
                type=gguf.ggml_type_name(type_id).decode().upper(),
                shape=tuple(shape),
                n_bytes=gguf.gguf_get_tensor_size(context, i),
                offset=data + gguf.gguf_get_tensor_offset(context, i),
            )
        )
    return tuple(tensors)


# ---- split models ---------------------------------------------------------------------------------------------------------------------------

_SHARD_NAME = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf", re.IGNORECASE | re.DOTALL)


def read_shards(path: Path) -> tuple[Header, ...]:
    """The headers of every file of a model, first shard first, whichever of them `path` names.

    Raises ModelFileError as read_header does, and when a shard is missing, renamed, of another model, or incomplete.
    """
    given = read_header(path)
    if given.metadata.get("split.count", 0) in (0, 1):
        return (given,)
    index, count = _split_place(given)
    paths = _shard_paths(path, index, count)
    missing = [shard.name for shard in paths if not shard.exists()]
    if missing:
        raise ModelFileError(f"{path}: is one of {count} shards, and {', '.join(missing)} is missing; put all shards into one folder")
    headers = tuple(given if i == index else read_header(shard) for i, shard in enumerate(paths))
    for i, header in enumerate(headers):
        if _split_place(header) != (i, count):
            other, others = _split_place(header)
            raise ModelFileError(f"{header.path}: has the wrong name or is of another model: its header says shard {other + 1} of {others}")
    _check_tensor_table(headers)
    return headers


def _split_place(header: Header) -> tuple[int, int]:
    """(index from 0, number of shards) of one shard."""
    index, count = header.metadata.get("split.no"), header.metadata.get("split.count")
    # llama.cpp reads both as u16, and aborts the process on another type of split.no
    if header.kinds.get("split.no") != "u16" or header.kinds.get("split.count") != "u16" or not isinstance(index, int) or not isinstance(count, int):
        raise ModelFileError(f"{header.path}: is not a proper shard: split.no and split.count must be there as u16; split the model again")
    if index >= count:
        raise ModelFileError(f"{header.path}: is not a proper shard: split.no {index} is not below split.count {count}; split the model again")
    return index, count


def _shard_paths(path: Path, index: int, count: int) -> list[Path]:
    """Paths of all shards beside `path`, by the naming that llama.cpp insists on."""
    match = _SHARD_NAME.fullmatch(path.name)
    prefix = match[1] if match else path.stem
    paths = [path.with_name(f"{prefix}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if path != paths[index]:
        raise ModelFileError(f"{path}: is shard {index + 1} of {count}, and llama.cpp finds shards by name; rename it to {paths[index].name}")
    return paths


def _check_tensor_table(headers: tuple[Header, ...]) -> None:
    seen: dict[str, Path] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in seen:
                raise ModelFileError(f"{header.path}: tensor {tensor.name} is also in {seen[tensor.name].name}; the shards are not of one model")
            seen[tensor.name] = header.path
    wanted = headers[0].metadata.get("split.tensors.count", len(seen))
    if wanted != len(seen):
        raise ModelFileError(
            f"{headers[0].path}: split.tensors.count says {wanted} tensors but the shards hold {len(seen)}; get all shards of one model"
        )
