"""Damages the header of a GGUF where it has a structure: types, dimensions, offsets, counts, strings, alignment. One seed, one damage."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf

U32, STRING, ARRAY = 4, 8, 9
MAX_DATA = 1 << 23  # bytes
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # enum gguf_type -> bytes
NUMBERS = (0, 1, 2, 3, 7, 31, 255, 512, 513, 1024, 1025, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = (b"", b"a" * 63, b"a" * 64, b"a" * 5000, b"\xff\xfe", b"nul\0nul", b"blk.0.ffn_gate_exps.weight", b"blk.0.ffn_up_exps.bias",
         b"blk.999.ffn_down_exps.weight", b"blk.0.ffn_gate_up_exps.weight", b"blk.0.ffn_up_chexps.weight", b"blk.0.ffn_down_exps.scale",
         b"blk.18446744073709551616.ffn_up_exps.weight", b"output.weight", b"blk.0.ffn_up.0.weight")  # fmt: skip


@dataclass
class Pair:
    key: bytes
    kind: int
    value: bytes  # as in the file


@dataclass
class Info:
    name: bytes
    shape: list[int]
    type_id: int
    offset: int
    n_dims: int | None = None  # written in place of the number of dimensions


@dataclass
class Parsed:
    """A header taken apart, and the data behind it."""

    version: int
    pairs: list[Pair]
    tensors: list[Info]
    data: bytes
    n_pairs: int | None = None  # written in place of the true numbers
    n_tensors: int | None = None
    magic: bytes = b"GGUF"
    tail: list[Callable[[bytearray], None]] = field(default_factory=list)  # damage to the finished bytes

    def to_bytes(self) -> bytes:
        n_tensors, n_pairs = (len(found) if n is None else n for found, n in ((self.tensors, self.n_tensors), (self.pairs, self.n_pairs)))
        out = bytearray(self.magic + struct.pack("<IQQ", self.version % 2**32, n_tensors % 2**64, n_pairs % 2**64))
        for pair in self.pairs:
            out += _text(pair.key) + struct.pack("<I", pair.kind % 2**32) + pair.value
        for info in self.tensors:
            n_dims = len(info.shape) if info.n_dims is None else info.n_dims
            out += _text(info.name) + struct.pack("<I", n_dims % 2**32) + b"".join(struct.pack("<Q", n % 2**64) for n in info.shape)
            out += struct.pack("<IQ", info.type_id % 2**32, info.offset % 2**64)
        out += bytes(-len(out) % 32) + self.data
        for damage in self.tail:
            damage(out)
        return bytes(out)


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def parse(path: Path) -> Parsed:
    """A well-formed GGUF with the usual alignment."""
    raw, at = path.read_bytes(), 4

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, raw, at)
        at += struct.calcsize("<" + form)
        return int(value)

    def text() -> bytes:
        nonlocal at
        n = take("Q")
        at += n
        return raw[at - n : at]

    def skip(kind: int) -> None:
        nonlocal at
        if kind == STRING:
            text()
        elif kind == ARRAY:
            inner, n = take("I"), take("Q")
            for _ in range(n):
                skip(inner)
        else:
            at += WIDTHS[kind]

    version, n_tensors, n_pairs = take("I"), take("Q"), take("Q")
    pairs, tensors = [], []
    for _ in range(n_pairs):
        key, kind, start = text(), take("I"), at
        skip(kind)
        pairs.append(Pair(key, kind, raw[start:at]))
    for _ in range(n_tensors):
        name, n_dims = text(), take("I")
        tensors.append(Info(name, [take("Q") for _ in range(n_dims)], take("I"), take("Q")))
    return Parsed(version, pairs, tensors, raw[at + -at % 32 :])


# ---- damage ---------------------------------------------------------------------------------------------------------------------------------


def _other(rng: random.Random, n: int) -> int:
    return rng.choice([*NUMBERS, n + 1, n - 1, n * 2, n // 2, n + 32, -1])


def _pair(rng: random.Random, file: Parsed) -> Pair:
    """Mostly one that says what the model is; the vocabulary has its turn too."""
    plain = [pair for pair in file.pairs if not pair.key.startswith(b"tokenizer.")]
    return rng.choice(plain if plain and rng.random() < 0.8 else file.pairs)


def number(rng: random.Random, file: Parsed) -> None:
    pair = rng.choice([pair for pair in file.pairs if pair.kind in WIDTHS])
    width = WIDTHS[pair.kind]
    value = _other(rng, int.from_bytes(pair.value[:width], "little"))
    pair.value = (value % 2 ** (8 * width)).to_bytes(width, "little")


def kind(rng: random.Random, file: Parsed) -> None:
    """Another type of value: over the same bytes, or with a value to match."""
    pair = _pair(rng, file)
    pair.kind = rng.choice([*WIDTHS, STRING, ARRAY, 13, 2**31, 2**32 - 1])
    if rng.random() < 0.7:
        if pair.kind in WIDTHS:
            pair.value = rng.randbytes(WIDTHS[pair.kind])
        elif pair.kind == STRING:
            pair.value = _text(rng.choice(NAMES))
        elif pair.kind == ARRAY:
            inner, n = rng.choice(list(WIDTHS)), rng.choice((0, 1, 3, 600))
            pair.value = struct.pack("<IQ", inner, n) + rng.randbytes(n * WIDTHS[inner])


def array(rng: random.Random, file: Parsed) -> None:
    """Another length, or another type of elements, over the same bytes."""
    found = [pair for pair in file.pairs if pair.kind == ARRAY and len(pair.value) >= 12]
    if found:
        pair = rng.choice(found)
        inner, n = struct.unpack_from("<IQ", pair.value)
        if rng.random() < 0.5:
            inner = rng.choice([*WIDTHS, STRING, ARRAY, 99])
        else:
            n = _other(rng, n)
        pair.value = struct.pack("<IQ", inner, n % 2**64) + pair.value[12:]


def string(rng: random.Random, file: Parsed) -> None:
    """Other text, or a length that is not that of the text."""
    pair = rng.choice([pair for pair in file.pairs if pair.kind == STRING and len(pair.value) >= 8])
    pair.value = _text(rng.choice(NAMES)) if rng.random() < 0.5 else struct.pack("<Q", _other(rng, len(pair.value)) % 2**64) + pair.value[8:]


def key(rng: random.Random, file: Parsed) -> None:
    """A key is gone, there twice, empty, or another one's."""
    at = file.pairs.index(_pair(rng, file))
    how = rng.randrange(4)
    if how == 0:
        del file.pairs[at]
    elif how == 1:
        file.pairs.append(Pair(file.pairs[at].key, file.pairs[at].kind, file.pairs[at].value))
    else:
        file.pairs[at].key = rng.choice([*NAMES, rng.choice(file.pairs).key]) if how == 2 else _flipped(rng, file.pairs[at].key)


def _flipped(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw or b"x")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def dims(rng: random.Random, file: Parsed) -> None:
    info = rng.choice(file.tensors)
    how = rng.randrange(5)
    if how <= 2:
        i = rng.randrange(len(info.shape))
        info.shape[i] = _other(rng, info.shape[i])
    elif how == 3:
        rng.shuffle(info.shape)
    else:
        info.n_dims = rng.choice((0, 1, 2, 3, 4, 5, 9, 2**31, 2**32 - 1))


def tensor_type(rng: random.Random, file: Parsed) -> None:
    rng.choice(file.tensors).type_id = rng.choice([*range(45), 100, 137, 200, 2**31, 2**32 - 1])


def offset(rng: random.Random, file: Parsed) -> None:
    info = rng.choice(file.tensors)
    info.offset = rng.choice((_other(rng, info.offset), rng.choice(file.tensors).offset, info.offset + 1))


def name(rng: random.Random, file: Parsed) -> None:
    """A tensor has another name: that of another one, no proper one, or nearly its own."""
    info, other = rng.choice(file.tensors), rng.choice(file.tensors)
    how = rng.randrange(4)
    if how == 0:
        info.name, other.name = other.name, info.name
    else:
        info.name = (other.name, rng.choice(NAMES), _flipped(rng, info.name))[how - 1]


def table(rng: random.Random, file: Parsed) -> None:
    """A tensor is gone, or there twice; its data stays."""
    at = rng.randrange(len(file.tensors))
    if rng.random() < 0.5:
        del file.tensors[at]
    else:
        info = file.tensors[at]
        file.tensors.append(Info(info.name, list(info.shape), info.type_id, info.offset))


def counts(rng: random.Random, file: Parsed) -> None:
    if rng.random() < 0.5:
        file.n_tensors = _other(rng, len(file.tensors))
    else:
        file.n_pairs = _other(rng, len(file.pairs))


def alignment(rng: random.Random, file: Parsed) -> None:
    width = rng.choice((U32, U32, U32, 10, 5))
    value = rng.choice((0, 1, 2, 3, 8, 16, 31, 33, 64, 4096, 2**31, 2**32 - 1))
    file.pairs.insert(rng.randrange(len(file.pairs) + 1), Pair(b"general.alignment", width, value.to_bytes(8, "little")[: WIDTHS[width]]))


def version(rng: random.Random, file: Parsed) -> None:
    if rng.random() < 0.8:
        file.version = rng.choice((0, 1, 2, 4, 3 << 24, 2**32 - 1))
    else:
        file.magic = rng.choice((b"GGUf", b"FUGG", b"\0\0\0\0"))


def split(rng: random.Random, file: Parsed) -> None:
    """It calls itself a shard."""
    for suffix in (b"no", b"count", b"tensors.count"):
        width = rng.choice((2, 4, 5))
        file.pairs.append(Pair(b"split." + suffix, width, rng.choice((0, 1, 2, 65535)).to_bytes(8, "little")[: WIDTHS[width]]))


def cut(rng: random.Random, file: Parsed) -> None:
    """The file ends early, anywhere; or there is more."""
    share = rng.random()

    def damage(out: bytearray) -> None:
        if share < 0.8:
            del out[int(len(out) * share / 0.8) :]
        else:
            out.extend(bytes(int(share * 5000)))

    file.tail.append(damage)


def bits(rng: random.Random, file: Parsed) -> None:
    """A few bits flip anywhere in the header."""
    places = [(rng.random(), rng.randrange(8)) for _ in range(rng.choice((1, 1, 2, 8)))]

    def damage(out: bytearray) -> None:
        end = len(out) - len(file.data)
        for where, bit in places:
            if end > 0:
                out[int(where * end)] ^= 1 << bit

    file.tail.append(damage)


def laid_out(file: Parsed) -> None:
    """Put the tensors one behind the other again, whatever their types and dimensions became, with data to match: what only contradicts itself in
    places that ggml's own reader looks at never comes to the checks behind it."""
    at = 0
    for info in file.tensors:
        block, size = gguf.GGML_QUANT_SIZES.get(info.type_id, (1, 4))  # type: ignore[call-overload]
        n_bytes = math.prod(info.shape) // block * size
        if not 0 <= at + n_bytes < MAX_DATA:
            return
        info.offset = at
        at += n_bytes + -n_bytes % 32
    file.data = file.data[:at] + bytes(max(0, at - len(file.data)))


MUTATIONS = (number, number, number, kind, array, string, key, dims, dims, tensor_type, tensor_type, offset, name, table, counts, alignment, version,
             split, cut, bits)  # fmt: skip


def damaged(base: Path, seed: int, index: int) -> tuple[bytes, str]:
    """The file `index` of `seed`: its bytes, and what was done to `base`."""
    rng, file = random.Random(f"{seed}/{index}"), parse(base)
    done = [rng.choice(MUTATIONS) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    for mutation in done:
        if file.pairs and file.tensors:
            mutation(rng, file)
    if rng.random() < 0.5:
        laid_out(file)
    return file.to_bytes(), ", ".join(mutation.__name__ for mutation in done)
