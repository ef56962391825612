"""The PTX in the tree is that of the kernels in the tree, and drivers from CUDA 11.8 on, for GPUs from Turing on, take it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SHIM = Path(__file__).parent.parent / "shim"
SOURCES = ("resident.cu", "copy.cuh", "victims.cuh", "resident.h", "policy.h")  # as in scripts/make-ptx
PTX = (SHIM / "resident.ptx").read_text("ascii")


def read(name: str) -> str:
    return (SHIM / name).read_text("utf-8")


def only(pattern: str) -> tuple[str, ...]:
    """The groups of the one line of the PTX that is `pattern`."""
    found = [match.groups() for match in re.finditer(f"^{pattern}$", PTX, re.MULTILINE)]
    assert len(found) == 1, f"{pattern}: {found}"
    return found[0]


def test_it_was_made_from_these_sources() -> None:
    digest = hashlib.sha256(b"".join((SHIM / name).read_bytes() for name in SOURCES)).hexdigest()
    assert PTX.splitlines()[0] == f"// sources sha256 {digest}", "the kernels changed: run scripts/make-ptx"


def test_what_the_hash_leaves_out_is_the_same() -> None:
    """Beside those hashed only tsg.h is included. It is the whole C API, so the few numbers that the kernels take from it stand here."""
    included = {header for name in SOURCES for header in re.findall(r'^#include "(.+)"', read(name), re.MULTILINE)}
    assert included - set(SOURCES) == {"tsg.h"}
    numbers = {
        name: int(value) for name, value in re.findall(r"\b(TSG_(?:MAX_\w+|POLICY_\w+|ATTENTION|LOOKUP|COPY|EXPERTS)) += (\d+),", read("tsg.h"))
    }
    used = {name for name in numbers for source in SOURCES if re.search(rf"\b{name}\b", read(source))}
    baked = {"TSG_MAX_EXPERTS": 4096, "TSG_MAX_PARTS": 4}
    baked |= {f"TSG_POLICY_{policy}": value for value, policy in enumerate(("LFRU", "LRU", "SLRU", "LFU", "FIFO"))}
    baked |= {f"TSG_{stretch}": value for value, stretch in enumerate(("ATTENTION", "LOOKUP", "COPY", "EXPERTS"))}
    assert {name: numbers[name] for name in used} == baked, "run scripts/make-ptx, then change the numbers here"


def test_old_drivers_and_gpus_take_it() -> None:
    major, minor = only(r"\.version (\d+)\.(\d+)")
    assert (int(major), int(minor)) <= (7, 8)
    assert only(r"\.target (\w+)") == ("sm_75",)
    assert only(r"\.address_size (\d+)") == ("64",)


def test_every_kernel_that_is_looked_up_is_there() -> None:
    wanted = re.findall(r'\bmodule_function\([^;"]*"(\w+)"', read("cuda.c"))
    assert "tsg_step" in wanted
    assert sorted(re.findall(r"^\.visible \.entry (\w+)\(", PTX, re.MULTILINE)) == sorted(wanted)
