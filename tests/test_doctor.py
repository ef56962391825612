"""doctor: every check on this machine, each of its complaints, and what info makes of the rates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from processes import cli
from test_host import GIB, tree

import tinyserve_gguf
from tinyserve_gguf import _llama, doctor_checks, doctor_rates, host
from tinyserve_gguf._measure import Measure
from tinyserve_gguf._shim import Device, devices
from tinyserve_gguf.cli.doctor import doctor
from tinyserve_gguf.cli.info import info
from tinyserve_gguf.doctor import Report, examine
from tinyserve_gguf.doctor_checks import BROKEN, OK, WARNING, Finding
from tinyserve_gguf.errors import ModelFileError
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.machine import MEMORY
from tinyserve_gguf.needs import MIB

ModelFile = Callable[..., Path]
PACKAGE = Path(tinyserve_gguf.__file__).parent


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little memory is moved, and what is remembered goes to a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor_rates, "MEMORY_BYTES", 4 * MIB)
    monkeypatch.setattr(doctor_rates, "EXPERT", {"type_id": 12, "ne0": 256, "ne1": 64, "n_expert": 8, "n_used": 2})
    monkeypatch.setattr(doctor_rates, "PREFILL_TOKENS", 32)


def only(findings: Any) -> Finding:
    (found,) = findings
    assert isinstance(found, Finding)
    assert bool(found.fix) == (found.status != OK)
    return found


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(doctor, [str(argument) for argument in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


# ---- this machine ---------------------------------------------------------------------------------------------------------------------------


def test_everything_on_this_machine(model_file: ModelFile) -> None:
    heard: list[str] = []
    report = examine(str(model_file("qwen3moe")), heard.append)
    assert not report.is_broken
    names = [finding.name for finding in report.findings]
    for name in ("Python", "llama-cpp-python", "GPU build", "native library", "processor", "memory", "driver", "page-locking", "host memory"):
        assert name in names
    assert "experts on the CPU" in names and "disk of the model" in names
    assert {"memory", "cpu"} <= set(report.rates)
    assert all(1e6 < rate < 1e15 for rate in report.rates.values())
    assert {"software", "system", "page-locking", "host memory", "disk"} <= set(heard)


def test_lines_and_memory(tmp_path: Path) -> None:
    status, out = run()
    assert status == 0
    assert "ok" in out and "experts on the CPU" in out and "everything runs, on " in out
    assert f"measured rates are kept in {tmp_path / 'cache' / 'tinyserve-gguf' / 'machine.json'}; info uses them" in out
    assert MEMORY.path.is_file()


def test_json() -> None:
    status, out = run("--json")
    found = json.loads(out)
    assert status == 0
    assert found["broken"] is False
    assert found["remembered"] == str(MEMORY.path)
    assert all(set(finding) == {"name", "status", "text", "fix"} for finding in found["findings"])
    assert found["works"].startswith("everything runs, on ")


def test_info_uses_what_was_measured(model_file: ModelFile) -> None:
    def estimate(*options: str) -> dict[str, Any]:
        result = CliRunner().invoke(info, [str(model_file("qwen3moe")), "--json", *options], catch_exceptions=False)
        return dict(json.loads(result.stdout)["estimate"])

    assert {rate["source"] for rate in estimate()["machine"]["rates"].values()} == {"assumed"}
    rates = json.loads(run("--json")[1])["rates"]
    found = estimate()["machine"]["rates"]
    assert found["memory"]["per_second"] == rates["memory"]
    assert found["cpu"]["source"].startswith("measured here on 2")
    other = estimate("--vram", "8", "--mem-gbps", "77")["machine"]["rates"]
    assert other["memory"] == {"per_second": 77e9, "source": "given"}
    assert other["cpu"]["source"] == "assumed"


def test_a_model_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError):
        examine(str(tmp_path / "no.gguf"), lambda _what: None)


# ---- what is broken -------------------------------------------------------------------------------------------------------------------------


def test_a_missing_library_is_broken_and_names_the_command(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "tinyserve_gguf", ignore=shutil.ignore_patterns("libtsg.so", "__pycache__"))
    done = cli("doctor", package=tmp_path, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "broken" in done.stdout and "libtsg.so is missing from" in done.stdout
    assert "mend it: pip install --force-reinstall --no-cache-dir tinyserve-gguf" in done.stdout
    assert "nothing runs until what is broken is mended" in done.stdout
    assert "experts on the CPU" not in done.stdout


def test_another_llama_cpp_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "version", lambda _name: "0.3.40")
    found = only(doctor_checks.llama_cpp())
    assert (found.status, found.fix) == (BROKEN, "pip install llama-cpp-python==0.3.36")

    def missing(name: str) -> str:
        raise doctor_checks.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_checks, "version", missing)
    assert only(doctor_checks.llama_cpp()).text == "is not installed"
    status, out = run()
    assert status == 1
    assert "is not installed" in out
    assert not MEMORY.path.exists()


# ---- what is slow ---------------------------------------------------------------------------------------------------------------------------


def test_a_build_without_the_processors_instructions() -> None:
    flags = frozenset({"avx", "avx2", "f16c", "fma", "avx512f"})
    whole = dict.fromkeys(("AVX", "AVX2", "F16C", "FMA", "AVX512"), "1")
    assert only(doctor_checks.vectors("0.3.36", "0.25.3", whole, flags)).status == OK
    without = only(doctor_checks.vectors("0.3.36", "0.25.3", {"SSE3": "1", "AVX2": "0"}, flags))
    assert without.status == WARNING
    assert "without AVX, AVX2, F16C, FMA, AVX512, which this processor has" in without.text
    assert "--no-binary llama-cpp-python" in without.fix
    assert only(doctor_checks.vectors("0.3.36", "0.25.3", {**whole, "AVX512": "0"}, flags)).status == OK
    assert only(doctor_checks.vectors("0.3.36", "0.25.3", {}, frozenset())).status == OK


def test_features_of_this_build() -> None:
    assert doctor_checks.features("CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | ") == {"SSE3": "1", "AVX2": "1", "AVX512": "0"}
    assert doctor_checks.features(_llama.C.llama_print_system_info().decode())


def test_a_driver_without_a_build_for_it() -> None:
    assert only(doctor_checks.cuda_build(True, "550.54")).status == OK
    assert only(doctor_checks.cuda_build(False, None)).status == OK
    found = only(doctor_checks.cuda_build(False, "550.54"))
    assert found.status == WARNING
    assert found.fix.startswith('CMAKE_ARGS="-DGGML_CUDA=on" pip install --force-reinstall --no-cache-dir')


@pytest.mark.parametrize(
    ("kernel", "cuda", "status", "text"),
    [
        ("", None, OK, "no NVIDIA driver"),
        ("550.54.15", None, WARNING, "its library does not load"),
        ("450.80.02", (11, 0), WARNING, "the device engine wants 11.8"),
        ("550.54.15", (12, 4), OK, "NVIDIA 550.54.15, CUDA 12.4"),
    ],
)
def test_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, cuda: tuple[int, int] | None, status: str, text: str) -> None:
    if kernel:
        tree(tmp_path, proc__driver__nvidia__version=f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {kernel}  Tue\n")
    monkeypatch.setattr("tinyserve_gguf.cuda_driver.cuda_version", lambda: cuda)
    found = only(doctor_checks.driver(tmp_path))
    assert (found.status, text in found.text) == (status, True), found


def test_containers_and_wsl(tmp_path: Path) -> None:
    tree(
        tmp_path,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memory_DOT_max=f"{4 * GIB}\n",
        sys__fs__cgroup__cpu_DOT_max="50000 100000\n",
        proc__version="Linux version 5.15-microsoft-standard-WSL2\n",
    )
    memory = only(doctor_checks.memory(tmp_path))
    assert memory.status == WARNING
    assert "the container's limit is 4.00 GiB" in memory.text and "--memory" in memory.fix
    processor, wsl = doctor_checks.system(tmp_path)
    assert processor.status == WARNING
    assert "the container grants 0.5" in processor.text and "-t 1" in processor.fix
    assert wsl.status == WARNING
    assert ".wslconfig" in wsl.fix


def fake_gpu(**changes: Any) -> Device:
    cpu = next(device for device in devices() if device.is_cpu)
    return replace(cpu, **({"name": "CUDA0", "description": "NVIDIA X", "memory_free": 8 * GIB, "memory_total": 8 * GIB, "is_cpu": False} | changes))


def link(monkeypatch: pytest.MonkeyPatch, pinned: float, pageable: float) -> tuple[Finding, dict[str, float]]:
    monkeypatch.setattr(Measure, "copy", lambda _self, *, to_device, pinned, size, repeats: pinned_rate if pinned else pageable)  # noqa: ARG005
    pinned_rate, found = pinned, dict[str, float]()
    return only(doctor_rates._link(fake_gpu(), Measure(fake_gpu(), 1), found)), found


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    good, found = link(monkeypatch, 25e9, 9e9)
    assert (good.status, found) == (OK, {"link": 25e9})
    assert good.text == "page-locked 25.0 GB/s there and 25.0 back, pageable 9.0 GB/s there and 9.0 back"
    slow, _ = link(monkeypatch, 3e9, 2e9)
    assert slow.status == WARNING
    assert "--miss auto" in slow.fix
    unlocked, found = link(monkeypatch, 0, 9e9)
    assert (unlocked.status, found) == (WARNING, {"link": 9e9})
    assert "no page-locked memory was granted" in unlocked.text


def test_page_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "lockable", lambda: 12 * GIB)
    for granted, status in ((12 * GIB, OK), (6 * GIB, WARNING)):
        monkeypatch.setattr(Measure, "lockable", lambda _self, most, piece, granted=granted: min(most, granted) // piece * piece)
        found = only([doctor_rates._lockable(fake_gpu(), Measure(fake_gpu(), 1))])
        assert found.status == status
        assert f"{granted / GIB:.2f} GiB of 12.00 GiB tried through CUDA0; RLIMIT_MEMLOCK is " in found.text


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyserve_gguf.cuda_driver import CudaDevice

    monkeypatch.setattr(doctor_rates, "devices", lambda: [fake_gpu(), fake_gpu(name="CUDA1", description="old", memory_free=7 * GIB)])
    monkeypatch.setattr(doctor_rates, "cuda_devices", lambda: [CudaDevice("NVIDIA X", (8, 9)), CudaDevice("old", (6, 1))])
    new, old = doctor_rates.gpus()
    assert (new.status, old.status) == (OK, WARNING)
    assert "compute capability 8.9" in new.text and "6.1: below 7.5 the host-driven engine runs" in old.text
    monkeypatch.setattr(doctor_rates, "devices", lambda: [fake_gpu(memory_free=GIB // 2)])
    assert "nvidia-smi" in only(doctor_rates.gpus()).fix
    monkeypatch.setattr(doctor_rates, "devices", list)
    assert only(doctor_rates.gpus()).text.startswith("none that llama.cpp can use")


def test_fewer_threads_are_better_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other programs, whose threads keep those of a matmul waiting."""

    def experts(self: Measure, **load: Any) -> float:
        return {8: 0.010, 4: 0.002}[self._n_threads] * load["n_tokens"]

    monkeypatch.setattr(Measure, "experts", experts)
    rates: dict[str, float] = {}
    findings = {finding.name: finding for finding in doctor_rates._host(fake_gpu(), rates, 8, has_gpu=True)}
    assert findings["threads"].status == WARNING
    assert findings["threads"].fix == "close other programs, or give -t 4"
    assert rates["cpu"] == pytest.approx(2 * 64 * 144 / 0.002)
    assert "prefill" not in rates


def test_disks(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = read_facts(model_file("qwen3moe"))
    rate, _ = doctor_rates.read_rate(facts.path)
    assert rate > 0
    monkeypatch.setattr(doctor_rates, "read_rate", lambda _path: (100e6, True))
    assert only(doctor_rates.disk(facts)).status == WARNING
    monkeypatch.setattr(doctor_rates, "read_rate", lambda _path: (100e6, False))
    assert "maybe from the page cache" in only(doctor_rates.disk(facts)).text
    monkeypatch.setattr(host, "host_memory", lambda: host.HostMemory(1000, 1000, None))
    *_, memory = doctor_rates.disk(facts)
    assert memory.status == WARNING
    assert "read from the disk again and again" in memory.text


def test_what_works_is_said() -> None:
    assert Report([Finding("x", WARNING, "", "y")], device="CUDA0").works == "everything runs, on CUDA0"
    assert Report([Finding("x", BROKEN, "", "y")], device="CPU").works == "nothing runs until what is broken is mended"
