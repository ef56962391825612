"""What the operating system says of this machine: memory, limits of its container, processor. Reads files of the kernel only."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
LOCKABLE = 0.9  # locked memory is lost for everybody else, and the kernel would kill rather than refuse: leave a tenth
_NO_LIMIT = 1 << 60  # version 1 of control groups says "no limit" with a number of about 2**63


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes."""

    total: int
    available: int  # to this process, within the limits of its container
    limit: int | None  # of the container; None: there is none


def host_memory(root: Path = ROOT) -> HostMemory:
    """`root`: where /proc and /sys are. Zeros where /proc does not say."""
    lines = _lines(root / "proc/meminfo")
    values = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1 and line.split()[1].isdecimal()}
    total, available = values.get("MemTotal", 0), values.get("MemAvailable", 0)
    limit, used = _group_memory(root)
    if limit is not None and limit < total:
        available = min(available, max(0, limit - used))
    return HostMemory(total, available, limit)


def lockable(root: Path = ROOT) -> int:
    """Bytes that may be page-locked with some sense. Many systems grant less, which only a try shows."""
    return int(LOCKABLE * host_memory(root).available)


def _group_memory(root: Path) -> tuple[int | None, int]:
    """(limit, in use without what the kernel can take back) of the tightest control group of this process."""
    found: list[tuple[int, int]] = []
    for folder in _groups(root, "memory"):
        limit = _number(folder / "memory.max")
        limit = _number(folder / "memory.limit_in_bytes") if limit is None else limit
        used = _number(folder / "memory.current")
        used = _number(folder / "memory.usage_in_bytes") if used is None else used
        stat = {line.split()[0]: int(line.split()[1]) for line in _lines(folder / "memory.stat") if len(line.split()) == 2}
        files = stat.get("total_cache", stat.get("file", 0))  # pages of files, which leave when memory is wanted
        if limit is not None and limit < _NO_LIMIT:
            found.append((limit, max(0, (used or 0) - files)))
    return min(found, key=lambda pair: pair[0] - pair[1]) if found else (None, 0)


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of the groups that this process is in, the innermost first, up to the root."""
    folders: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, names, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" or controller in names.split(","):
            base = root / "sys/fs/cgroup" / ("" if number == "0" else controller)
            inner = base / path.lstrip("/")
            folders += [folder for folder in (inner, *inner.parents) if folder == base or base in folder.parents]
    return folders or [root / "sys/fs/cgroup"]


def cpu_limit(root: Path = ROOT) -> float | None:
    """Processors that the container grants; None: no limit."""
    found = []
    for folder in _groups(root, "cpu"):
        quota, period = [*_words(folder / "cpu.max"), "", ""][:2]
        if not quota:
            quota, period = (" ".join(_words(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found) if found else None


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Of the first processor: "avx2", "avx512f", "f16c"."""
    line = next((line for line in _lines(root / "proc/cpuinfo") if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def cpu_name(root: Path = ROOT) -> str:
    line = next((line for line in _lines(root / "proc/cpuinfo") if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or "unknown processor"


def is_wsl(root: Path = ROOT) -> bool:
    """Windows Subsystem for Linux, which page-locks about half of the memory at most."""
    return "microsoft" in " ".join(_lines(root / "proc/version")).lower()


def is_container(root: Path = ROOT) -> bool:
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()


def memlock_limit() -> int | None:
    """RLIMIT_MEMLOCK in bytes; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def n_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def driver_version(root: Path = ROOT) -> str | None:
    """Of the NVIDIA kernel module; None: not loaded."""
    line = next(iter(_lines(root / "proc/driver/nvidia/version")), "")
    words = line.split()
    return next((word for word in words if word[:1].isdecimal() and "." in word), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdecimal() else None
