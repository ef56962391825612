"""What `doctor` finds out without measuring: software, processor, memory, driver.

Each check gives findings. Those that need llama.cpp or the shim import them themselves: a broken installation is a finding, too.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve_gguf import host
from tinyserve_gguf.errors import AbiMismatchError
from tinyserve_gguf.needs import MIB
from tinyserve_gguf.plan import GIB, size

if TYPE_CHECKING:
    from tinyserve_gguf._shim import Device

OK, WARNING, BROKEN = "ok", "warning", "broken"
LLAMA = "0.3.36"  # of llama-cpp-python, as pyproject pins it
REBUILD = f"pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python=={LLAMA}"
REBUILD_CUDA = f'CMAKE_ARGS="-DGGML_CUDA=on" {REBUILD}'
LEAST_CAPABILITY = (7, 5)  # of a GPU, for the kernels of the device engine
LEAST_CUDA = (11, 8)  # of the driver
SLOW_LINK = 6e9  # bytes per second: below PCIe 3.0 x8, where fetching misses loses to computing them
SLOW_DISK = 500e6
VECTORS = {"avx": "AVX", "avx2": "AVX2", "f16c": "F16C", "fma": "FMA", "avx512f": "AVX512"}  # flag of the processor -> ggml's name for it
EXPERT = {"type_id": 12, "ne0": 2048, "ne1": 2048, "n_expert": 64, "n_used": 8}  # Q4_K, 2.4 MB each: together more than caches hold


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `fix`: what to do; empty if nothing is wrong."""

    name: str
    status: str  # OK, WARNING or BROKEN
    text: str
    fix: str = ""


# ---- software -------------------------------------------------------------------------------------------------------------------------------


def python() -> Iterator[Finding]:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {' '.join(platform.libc_ver()) or 'no glibc'}"
    if platform.system() != "Linux":
        yield Finding("Python", WARNING, f"{text}: only Linux was tried", "use Linux, or WSL on Windows")
    else:
        yield Finding("Python", OK, text)


def llama_cpp() -> Iterator[Finding]:
    """Its version, and how it was built: for this processor, for CUDA."""
    try:
        found = version("llama-cpp-python")
    except PackageNotFoundError:
        yield Finding("llama-cpp-python", BROKEN, "is not installed", f"pip install llama-cpp-python=={LLAMA}")
        return
    if found != LLAMA:
        yield Finding("llama-cpp-python", BROKEN, f"{found}, and only {LLAMA} fits", f"pip install llama-cpp-python=={LLAMA}")
        return
    try:
        from tinyserve_gguf import _llama
    except (ImportError, OSError, RuntimeError) as error:
        yield Finding("llama-cpp-python", BROKEN, f"{found} does not load: {' '.join(str(error).split())}", REBUILD)
        return
    yield from vectors(found, _llama.ggml_version(), features(_llama.C.llama_print_system_info().decode()), host.cpu_flags())
    yield from cuda_build(bool(_llama.C.llama_supports_gpu_offload()), host.driver_version())


def features(info: str) -> dict[str, str]:
    """ "CPU : AVX2 = 1 | FMA = 1 | " as {"AVX2": "1", "FMA": "1"}."""
    pairs = (part.rpartition(":")[2].partition("=") for part in info.split("|") if "=" in part)
    return {name.strip(): value.strip() for name, _, value in pairs}


def vectors(found: str, ggml: str, built: dict[str, str], flags: frozenset[str]) -> Iterator[Finding]:
    """Whether ggml was built for this processor. `built`: its features; `flags`: those of the processor."""
    missing = [name for flag, name in VECTORS.items() if flag in flags and built.get(name, "0") == "0"]
    used = [name for name in VECTORS.values() if built.get(name, "0") != "0"]
    text = f"{found}, ggml {ggml}, built with {', '.join(used) or 'no vector instructions'}"
    if "AVX2" in missing or "AVX" in missing:
        text += f", but without {', '.join(missing)}, which this processor has: several times slower"
        yield Finding("llama-cpp-python", WARNING, text, REBUILD)
    else:
        yield Finding("llama-cpp-python", OK, text + (f"; the processor also has {', '.join(missing)}" if missing else ""))


def cuda_build(has_gpu: bool, driver_found: str | None) -> Iterator[Finding]:
    if has_gpu:
        yield Finding("GPU build", OK, "llama.cpp can use a GPU")
    elif driver_found:
        yield Finding("GPU build", WARNING, "there is an NVIDIA driver, and llama.cpp was built without CUDA: all runs on the CPU", REBUILD_CUDA)
    else:
        yield Finding("GPU build", OK, "CPU only, and no NVIDIA driver is loaded")


def shim() -> Iterator[Finding]:
    """The native library belongs to this llama.cpp."""
    try:
        from tinyserve_gguf import _llama, _shim  # noqa: F401 (loading it is the check)
    except AbiMismatchError as error:
        problem, _, fix = str(error).partition("; run: ")
        yield Finding("native library", BROKEN, problem, fix)
        return
    yield Finding("native library", OK, f"built for ggml {_llama.ggml_version()}, which is loaded")


# ---- system ---------------------------------------------------------------------------------------------------------------------------------


def system(root: Path = host.ROOT) -> Iterator[Finding]:
    cores, limit = host.n_cores(), host.cpu_limit(root)
    text = f"{host.cpu_name(root)}, {cores} processors"
    if limit is not None and limit < cores:
        fix = f"give -t {max(1, int(limit))}, or start the container with more --cpus"
        yield Finding("processor", WARNING, f"{text}, of which the container grants {limit:g}", fix)
    else:
        yield Finding("processor", OK, text)
    if host.is_wsl(root):
        fix = "put memory=... into %UserProfile%\\.wslconfig, then run: wsl --shutdown"
        yield Finding("WSL", WARNING, "page-locks about half of the memory at most", fix)


def memory(root: Path = host.ROOT) -> Iterator[Finding]:
    found = host.host_memory(root)
    text = f"{size(found.available)} of {size(found.total)} available"
    if found.limit is not None and found.limit < found.total:
        fix = "start the container with a larger --memory"
        yield Finding("memory", WARNING, f"{text}; the container's limit is {size(found.limit)}", fix)
    elif found.available < 2 * GIB:
        yield Finding("memory", WARNING, text, "close other programs")
    else:
        yield Finding("memory", OK, text)


def driver(root: Path = host.ROOT) -> Iterator[Finding]:
    """The NVIDIA driver, and which CUDA it speaks."""
    from tinyserve_gguf.cuda_driver import cuda_version

    found, cuda = host.driver_version(root), cuda_version()
    if found is None and cuda is None:
        yield Finding("driver", OK, "no NVIDIA driver")
    elif cuda is None:
        fix = "install the driver's libraries (libcuda.so.1), or start the container with --gpus all"
        yield Finding("driver", WARNING, f"NVIDIA {found}, but its library does not load", fix)
    elif cuda < LEAST_CUDA:
        text = f"NVIDIA {found or ''}, CUDA {cuda[0]}.{cuda[1]}"
        yield Finding("driver", WARNING, f"{text}: the device engine wants {LEAST_CUDA[0]}.{LEAST_CUDA[1]}", "update the NVIDIA driver")
    else:
        yield Finding("driver", OK, f"NVIDIA {found or 'driver'}, CUDA {cuda[0]}.{cuda[1]}")


def expected_memory(device: Device) -> int:
    """How much page-locked memory is tried: what a plan would lock, 16 GiB at most."""
    return min(host.lockable(), 16 * GIB) if not device.is_cpu else min(host.lockable(), host.memlock_limit() or 64 * MIB, 64 * MIB)
