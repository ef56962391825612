"""Tiny MoE GGUFs that llama.cpp loads: seeded random weights of sensible scale, every expert different, a byte-level tokenizer with a chat template.

For example: build("gpt-oss", folder / "model.gguf", experts=16, used=4, **typed("Q8_0"))
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, TokenType
from synthetic_archs import MODELS, Description, Tensor, metadata, tensors

from tinyserve_gguf import _llama
from tinyserve_gguf.demo import copy_metadata

__all__ = ["IQ_TYPES", "MODELS", "TYPES", "Description", "build", "describe", "finish", "split", "typed"]

FREQUENT = "etaoinshrdlcumwfgypbvkxjqz"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Every weight type that the gguf package can write and ggml can quantise to; for the second group ggml first builds tables, up to 7 s a type.
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "NVFP4", "Q1_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
IQ_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0")


def typed(kind: str, **changes: object) -> dict[str, object]:
    """Changes that give all experts one type, with widths that its blocks divide."""
    block = block_size(kind)
    widths = {"embd": block, "ff": block} if block > 32 else {}
    return {"gate": kind, "up": kind, "down": kind} | widths | changes


def describe(name: str, **changes: object) -> Description:
    """The description `name` of `MODELS`, with some fields changed."""
    return replace(MODELS[name], **changes)  # type: ignore[arg-type]


def add_metadata(writer: GGUFWriter, arch: str, values: Mapping[str, Any]) -> None:
    """Each value with the type that fits it. A dict names the type of an array: {"uint8": [...]}."""
    for key, value in values.items():
        key = f"{arch}.{key}"
        if isinstance(value, dict):
            ((kind, items),) = value.items()
            writer.add_key_value(key, items, GGUFValueType.ARRAY, sub_type=GGUFValueType[kind.upper()])
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
        else:
            writer.add_float32(key, value)


def build(name: str, path: Path, **changes: object) -> Path:
    """Write model `name` of `MODELS`, with some fields of its description changed, and return `path`."""
    description = describe(name, **changes)
    writer = GGUFWriter(path, description.arch)
    writer.add_name(f"synthetic {name}")
    add_metadata(writer, description.arch, metadata(description))
    _add_tokenizer(writer, description.vocab)
    for tensor in tensors(description):
        writer.add_tensor(tensor.name, encode(_numbers(tensor, description), tensor.type), raw_dtype=GGMLQuantizationType[tensor.type])
    finish(writer)
    return path


def split(path: Path, n_shards: int) -> list[Path]:
    """Write `path` again as the shards STEM-0000i-of-0000n.gguf beside it, dealing the tensors out in turn: with two shards or more, a weight and
    its bias, which follow each other, always part. As in llama.cpp's own splits, only the first shard has the model's metadata."""
    reader = GGUFReader(path)
    shards = []
    for number in range(n_shards):
        shard = path.with_name(gguf.gguf_writer.SHARD_NAME_FORMAT.format(path.stem, number + 1, n_shards))
        writer = GGUFWriter(shard, str(reader.fields["general.architecture"].contents()))
        if number == 0:
            copy_metadata(reader, writer)
        else:
            writer.kv_data[0].clear()
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", n_shards)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::n_shards]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
        shards.append(shard)
    return shards


def finish(writer: GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- numbers --------------------------------------------------------------------------------------------------------------------------------


def _numbers(tensor: Tensor, description: Description) -> npt.NDArray[np.float32]:
    """Float32 numbers in numpy order. Seeded by the tensor's name, so that a change elsewhere in the description leaves them alone."""
    rng = np.random.default_rng([description.seed, zlib.crc32(tensor.name.encode())])
    std = tensor.shape[0] ** -0.5 if tensor.std is None else tensor.std
    data = rng.standard_normal(tensor.shape[::-1], dtype=np.float32) * np.float32(std) + np.float32(tensor.mean)
    if tensor.name == "output.weight":
        data[-len(CONTROL) :] = 0  # their logits are 0, far from the maximum: greedy text does not end early
    return data


def encode(data: npt.NDArray[np.float32], kind: str) -> npt.NDArray[np.generic]:
    """`data` as ggml's own quantiser writes it, rows as bytes; uniform importance, for the types that ask for one."""
    if kind == "F32":
        return data
    lib = _llama.library()
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    number, ne0 = GGMLQuantizationType[kind], data.shape[-1]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    if ne0 % block:
        raise ValueError(f"rows of {ne0} numbers cannot be {kind}, whose blocks hold {block}")
    out = np.empty((*data.shape[:-1], ne0 // block * block_bytes), np.uint8)
    importance = np.ones(ne0, np.float32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (data, out, importance)]
    rows = data.size // ne0
    written = lib.ggml_quantize_chunk(
        ctypes.c_int(number), pointers[0], pointers[1], ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(ne0), pointers[2]
    )
    assert written == out.nbytes, (kind, written, out.nbytes)
    return out


def block_size(kind: str) -> int:
    return gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]


# ---- tokenizer ------------------------------------------------------------------------------------------------------------------------------


def _byte_letters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of the bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = itertools.count(256)
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def _add_tokenizer(writer: GGUFWriter, vocab: int) -> None:
    """256 bytes, pairs of frequent letters up to the vocabulary's size, and the control tokens of ChatML."""
    letters = _byte_letters()
    merges = [first + " " + second for first, second in itertools.product(FREQUENT, repeat=2)][: vocab - len(letters) - len(CONTROL)]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), *CONTROL]
    if len(tokens) != vocab:
        raise ValueError(f"the vocabulary can have {256 + len(CONTROL) + 1} to {256 + len(CONTROL) + len(FREQUENT) ** 2} tokens, not {vocab}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * (vocab - len(CONTROL)) + [TokenType.CONTROL] * len(CONTROL))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
