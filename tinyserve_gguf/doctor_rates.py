"""What `doctor` measures: the link, memory, expert matmuls, page-locking, the disk."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tinyserve_gguf import host
from tinyserve_gguf._measure import Measure
from tinyserve_gguf._shim import Device, devices
from tinyserve_gguf.cuda_driver import cuda_devices
from tinyserve_gguf.doctor_checks import EXPERT, LEAST_CAPABILITY, OK, SLOW_DISK, SLOW_LINK, WARNING, Finding, expected_memory
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.needs import MIB
from tinyserve_gguf.placement import default_threads, pick_device
from tinyserve_gguf.plan import GIB, size

LINK_BYTES, LINK_REPEATS = 256 * MIB, 8
MEMORY_BYTES = 256 * MIB
PREFILL_TOKENS = 512
DISK_BYTES, DISK_SECONDS = GIB, 3.0


def gpus() -> Iterator[Finding]:
    """Every GPU that llama.cpp sees, with its compute capability."""
    found = [device for device in devices() if not device.is_cpu]
    capabilities = {device.name: device.capability for device in cuda_devices()}
    for device in found:
        text = f"{device.description}, {size(device.memory_free)} of {size(device.memory_total)} free"
        capability = capabilities.get(device.description)
        if capability and capability < LEAST_CAPABILITY:
            least = "{}.{}".format(*LEAST_CAPABILITY)
            text += f", compute capability {capability[0]}.{capability[1]}: below {least} the host-driven engine runs"
            yield Finding(device.name, WARNING, text, "nothing mends it; decode is slower, and exact")
        elif device.memory_free < GIB:
            yield Finding(device.name, WARNING, text, "close what else uses the GPU (nvidia-smi lists it)")
        else:
            yield Finding(device.name, OK, text + (f", compute capability {capability[0]}.{capability[1]}" if capability else ""))
    if not found:
        yield Finding("GPU", OK, "none that llama.cpp can use; the CPU takes its place")


def measure(rates: dict[str, float], show: Callable[[str], None]) -> Iterator[Finding]:
    """Measure, and put into `rates` what an estimate needs. Some seconds, and 1 GiB of memory on both sides."""
    device, n_threads = pick_device("auto"), default_threads()
    cpu = next(found for found in devices() if found.is_cpu)
    if not device.is_cpu:
        show("link")
        yield from _link(device, Measure(device, n_threads), rates)
        show("GPU memory")
        yield from _gpu_memory(device, Measure(device, n_threads), rates)
    show("page-locking")
    yield _lockable(device, Measure(device, n_threads))
    show("host memory")
    yield from _host(cpu, rates, n_threads, has_gpu=not device.is_cpu)


def _link(device: Device, measure: Measure, rates: dict[str, float]) -> Iterator[Finding]:
    n = min(LINK_BYTES, device.memory_free // 4)
    ways = [(to_device, pinned) for pinned in (True, False) for to_device in (True, False)]
    found = {way: measure.copy(to_device=way[0], pinned=way[1], size=n, repeats=LINK_REPEATS if way[1] else 2) for way in ways}
    text = ", ".join(
        f"{'page-locked' if pinned else 'pageable'} {found[True, pinned] / 1e9:.1f} GB/s there and {found[False, pinned] / 1e9:.1f} back"
        for pinned in (True, False)
    )
    best = found[True, True] or found[True, False]
    if best:
        rates["link"] = best
    if not found[True, True]:
        fix = "close other programs; in a virtual machine or WSL give it more memory"
        yield Finding(f"link of {device.name}", WARNING, f"{text}: no page-locked memory was granted", fix)
    elif best < SLOW_LINK:
        fix = "use a PCIe slot with more lanes; or chat --miss auto, which lets the CPU compute what the cache misses"
        yield Finding(f"link of {device.name}", WARNING, f"{text}: slower than the CPU computes experts", fix)
    else:
        yield Finding(f"link of {device.name}", OK, text)


def _gpu_memory(device: Device, measure: Measure, rates: dict[str, float]) -> Iterator[Finding]:
    rate = measure.device_memory(min(GIB, device.memory_free // 8), 8)
    if rate:
        rates["gpu"] = rate
        yield Finding(f"memory of {device.name}", OK, f"{rate / 1e9:.0f} GB/s, read and written by a copy")
    else:
        yield Finding(f"memory of {device.name}", WARNING, "could not be measured: there is too little free", "close what else uses the GPU")


def _lockable(device: Device, measure: Measure) -> Finding:
    most, limit = expected_memory(device), host.memlock_limit()
    piece = 4 * MIB if device.is_cpu else 256 * MIB
    got = measure.lockable(most, piece)
    limits = f"RLIMIT_MEMLOCK is {'unlimited' if limit is None else size(limit)}"
    if device.is_cpu:
        return Finding("page-locking", OK, f"{size(got)} of {size(most)} tried; {limits}; nothing needs it without a GPU")
    text = f"{size(got)} of {size(most)} tried through {device.name}; {limits}"
    if got + piece <= most:
        fix = "chat says how experts are read then (pageable, slower); in WSL raise memory= in .wslconfig, elsewhere run: ulimit -l unlimited"
        return Finding("page-locking", WARNING, text, fix)
    return Finding("page-locking", OK, text)


def _host(cpu: Device, rates: dict[str, float], n_threads: int, *, has_gpu: bool) -> Iterator[Finding]:
    memory = Measure(cpu, n_threads).host_memory(MEMORY_BYTES, 4)
    if memory:
        rates["memory"] = memory
        yield Finding("host memory", OK, f"{memory / 1e9:.1f} GB/s, read by {n_threads} threads")
    n_bytes = EXPERT["n_used"] * EXPERT["ne1"] * EXPERT["ne0"] // 256 * 144  # Q4_K: 144 bytes for 256 numbers
    tried = {n: Measure(cpu, n).experts(**EXPERT, n_tokens=1, repeats=12) for n in {n_threads, max(1, n_threads // 2)}}
    # Threads wait for each other after every matmul: beside other programs fewer can be faster
    if times := {n: seconds for n, seconds in tried.items() if seconds}:
        best = min(times, key=lambda n: times[n])
        rates["cpu"] = n_bytes / times[best]
        yield Finding("experts on the CPU", OK, f"{rates['cpu'] / 1e9:.1f} GB/s of Q4_K weights by {best} threads, in a matmul of one token")
        if best < n_threads:
            fix = f"close other programs, or give -t {best}"
            yield Finding("threads", WARNING, f"{n_threads} threads are slower than {best}, at {n_bytes / tried[n_threads] / 1e9:.1f} GB/s", fix)
    if not has_gpu and (seconds := Measure(cpu, n_threads).experts(**EXPERT, n_tokens=PREFILL_TOKENS, repeats=1)):
        rates["prefill"] = PREFILL_TOKENS * EXPERT["n_used"] * EXPERT["ne0"] * EXPERT["ne1"] / seconds
        yield Finding("prefill on the CPU", OK, f"{rates['prefill'] / 1e9:.0f} G multiply-adds a second, in a matmul of {PREFILL_TOKENS} tokens")


# ---- disk -----------------------------------------------------------------------------------------------------------------------------------


def disk(facts: ModelFacts) -> Iterator[Finding]:
    """How fast the model's file is read, past the page cache where the file system allows, and whether memory holds its experts."""
    rate, direct = read_rate(max(facts.shards, key=lambda path: path.stat().st_size))
    text = f"{rate / 1e6:,.0f} MB/s{'' if direct else ', maybe from the page cache'}; {size(facts.file_bytes)} take {facts.file_bytes / rate:.0f} s"
    if rate < SLOW_DISK and direct:
        yield Finding("disk of the model", WARNING, text, "copy the model to a local SSD")
    else:
        yield Finding("disk of the model", OK, text)
    found = host.host_memory()
    if facts.expert_bytes > found.total:
        text = f"{size(facts.expert_bytes)} of experts, and {size(found.total)} of memory: they are read from the disk again and again"
        yield Finding("memory for the model", WARNING, text, "take a smaller quantisation, or a smaller model")


def read_rate(path: Path) -> tuple[float, bool]:
    """Bytes per second of a file, over a GiB or three seconds of it, and whether the disk itself was read."""
    block, done = 8 * MIB, 0
    with mmap.mmap(-1, block) as buffer:  # page-aligned, as O_DIRECT asks for
        direct = True
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # file systems in memory have no such thing
            direct, file = False, os.open(path, os.O_RDONLY)
        try:
            start = time.perf_counter()
            while done < DISK_BYTES and time.perf_counter() - start < DISK_SECONDS:
                n = os.preadv(file, [buffer], done)
                if n <= 0:
                    break
                done += n
                if n < block:  # the end
                    break
            seconds = time.perf_counter() - start
        finally:
            os.close(file)
    return done / max(seconds, 1e-9), direct
