"""What the system says of itself, from files as kernels write them: limits of containers, WSL, processors, drivers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyserve_gguf import host
from tinyserve_gguf.host import cpu_flags, cpu_limit, cpu_name, driver_version, host_memory, is_wsl, lockable

GIB = 1 << 30
MEMINFO = f"MemTotal:       {64 << 20} kB\nMemFree:        {10 << 20} kB\nMemAvailable:   {48 << 20} kB\n"


def tree(root: Path, **files: str) -> Path:
    """Writes files; names with __ for slashes and _DOT_ for dots."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_container(tmp_path: Path) -> None:
    found = host_memory(tree(tmp_path, proc__self__cgroup="0::/user.slice\n", sys__fs__cgroup__user_DOT_slice__memory_DOT_max="max\n"))
    assert (found.total, found.available, found.limit) == (64 * GIB, 48 * GIB, None)
    assert lockable(tmp_path) == int(0.9 * 48 * GIB)
    assert cpu_limit(tmp_path) is None


def test_the_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    """What is used counts without pages of files: they leave when memory is wanted."""
    found = host_memory(
        tree(
            tmp_path,
            proc__self__cgroup="0::/docker/app\n",
            sys__fs__cgroup__docker__memory_DOT_max=f"{32 * GIB}\n",
            sys__fs__cgroup__docker__app__memory_DOT_max=f"{16 * GIB}\n",
            sys__fs__cgroup__docker__app__memory_DOT_current=f"{12 * GIB}\n",
            sys__fs__cgroup__docker__app__memory_DOT_stat=f"anon {2 * GIB}\nfile {10 * GIB}\n",
            sys__fs__cgroup__docker__app__cpu_DOT_max="250000 100000\n",
        )
    )
    assert (found.available, found.limit) == (14 * GIB, 16 * GIB)
    assert cpu_limit(tmp_path) == 2.5


def test_version_1(tmp_path: Path) -> None:
    found = host_memory(
        tree(
            tmp_path,
            proc__self__cgroup="5:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n",
            sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
            sys__fs__cgroup__memory__box__memory_DOT_limit_in_bytes=f"{8 * GIB}\n",
            sys__fs__cgroup__memory__box__memory_DOT_usage_in_bytes=f"{3 * GIB}\n",
            sys__fs__cgroup__memory__box__memory_DOT_stat=f"cache 1\ntotal_cache {1 * GIB}\n",
            sys__fs__cgroup__cpu__box__cpu_DOT_cfs_quota_us="400000\n",
            sys__fs__cgroup__cpu__box__cpu_DOT_cfs_period_us="100000\n",
        )
    )
    assert (found.available, found.limit) == (6 * GIB, 8 * GIB)
    assert cpu_limit(tmp_path) == 4


def test_unlimited_quota_of_version_1(tmp_path: Path) -> None:
    quota = {"sys__fs__cgroup__cpu__cpu_DOT_cfs_quota_us": "-1\n", "sys__fs__cgroup__cpu__cpu_DOT_cfs_period_us": "100000\n"}
    tree(tmp_path, proc__self__cgroup="3:cpu:/\n", **quota)
    assert cpu_limit(tmp_path) is None


def test_nothing_readable(tmp_path: Path) -> None:
    found = host_memory(tmp_path)
    assert (found.total, found.available, found.limit) == (0, 0, None)
    assert (cpu_limit(tmp_path), cpu_flags(tmp_path), is_wsl(tmp_path), driver_version(tmp_path)) == (None, frozenset(), False, None)


def test_processor_and_driver(tmp_path: Path) -> None:
    tree(
        tmp_path,
        proc__cpuinfo="processor\t: 0\nmodel name\t: Fast 9000\nflags\t\t: fpu avx avx2 f16c\n",
        proc__version="Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x)\n",
        proc__driver__nvidia__version="NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version:\n",
    )
    assert cpu_name(tmp_path) == "Fast 9000"
    assert cpu_flags(tmp_path) == {"fpu", "avx", "avx2", "f16c"}
    assert is_wsl(tmp_path)
    assert driver_version(tmp_path) == "550.54.15"


def test_this_machine() -> None:
    found = host_memory()
    assert 0 < found.available <= found.total
    assert host.n_cores() >= 1


@pytest.mark.parametrize("soft", [8 << 20, -1])
def test_memlock(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda _what: (soft, -1))
    assert host.memlock_limit() == (None if soft == -1 else soft)
