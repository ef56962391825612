"""The ABI guard: whatever does not belong together is one line that names the command which mends it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import llama_cpp
import pytest
from processes import cli
from processes import refused as refused_call

import tinyserve_gguf
from tinyserve_gguf import AbiMismatchError, _llama, _shim, choices

PACKAGE = Path(tinyserve_gguf.__file__).parent
LLAMA_CPP = Path(llama_cpp.__file__).parent
SOURCES = Path(__file__).parent.parent / "shim"


@pytest.mark.parametrize(
    ("enum", "prefix", "names"),
    [
        ("tsg_policy", "TSG_POLICY_", choices.POLICIES),
        ("tsg_engine_kind", "TSG_ENGINE_", choices.ENGINES),
        ("tsg_host_rung", "TSG_HOST_", _shim.HOST_RUNGS),
    ],
)
def test_names_are_those_of_the_enums_in_their_order(enum: str, prefix: str, names: tuple[str, ...]) -> None:
    assert _shim._ffi.typeof(f"enum {enum}").elements == {i: prefix + name.upper() for i, name in enumerate(names)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of what is installed: library and header."""
    for name in ("libtsg.so", "tsg.h"):
        shutil.copy(PACKAGE / name, tmp_path)
    return tmp_path


def refused(folder: Path) -> str:
    """The line; it must name a command."""
    with pytest.raises(AbiMismatchError) as caught:
        _shim._open(folder)
    line = str(caught.value)
    assert "\n" not in line
    assert "run: pip install " in line
    assert "--force-reinstall --no-cache-dir tinyserve-gguf" in line
    assert isinstance(caught.value, ImportError)
    return line


def compile_guard(folder: Path, version: str) -> None:
    """api.c alone, as if built for another ggml: it holds the guard, and nothing else is called before that."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    define = f'-DTSG_GGML_VERSION="{version}"'
    flags = ["-std=c11", "-shared", "-fPIC", "-DTSG_BUILD", define, f"-I{LLAMA_CPP.parent / 'include'}"]
    subprocess.run([compiler, *flags, SOURCES / "api.c", LLAMA_CPP / "lib" / "libggml-base.so", "-o", folder / "libtsg.so"], check=True)


def test_what_is_installed_passes(folder: Path) -> None:
    ffi, lib = _shim._open(folder)
    assert ffi.string(lib.tsg_ggml_version()).decode() == _llama.ggml_version()


@pytest.mark.parametrize("missing", ["libtsg.so", "tsg.h"])
def test_missing(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    assert f"{missing} is missing from {folder}" in refused(folder)


def test_no_library_at_all(folder: Path) -> None:
    (folder / "libtsg.so").write_text("no library\n")
    assert "the native library does not load" in refused(folder)


def test_other_ggml_version(folder: Path) -> None:
    compile_guard(folder, "0.0.1")
    line = refused(folder)
    assert f"the shim was built for ggml 0.0.1, this llama.cpp brings ggml {_llama.ggml_version()}" in line
    assert "pip install llama-cpp-python==0.3.36" in line


@pytest.mark.parametrize("change", [(8, 0), (0, -8)])
def test_other_structures(folder: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[int, int]) -> None:
    model, context = _llama.struct_sizes()
    monkeypatch.setattr(_llama, "struct_sizes", lambda: (model + change[0], context + change[1]))
    line = refused(folder)
    assert f"llama_model_params has {model} bytes here and {model + change[0]} there" in line
    assert f"llama_context_params {context} and {context + change[1]}" in line
    assert "pip install llama-cpp-python==0.3.36" in line


def test_second_copy_of_ggml(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a system-wide llama.cpp beside the wheel's would be."""
    library = next(path for path in (LLAMA_CPP / "lib").glob("libggml-base.so*") if path.is_file())
    copy = ctypes.CDLL(shutil.copy(library, folder / "libother.so"))
    monkeypatch.setattr(_llama, "library", lambda: SimpleNamespace(ggml_version=copy.ggml_version))
    assert "two copies of ggml are loaded in this process" in refused(folder)


def test_command_line(tmp_path: Path) -> None:
    """The guard runs at import; the command line still says it in one line."""
    shutil.copytree(PACKAGE, tmp_path / "tinyserve_gguf", ignore=shutil.ignore_patterns("libtsg.so", "__pycache__"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    line = refused_call(cli("chat", "m.gguf", "-p", "hi", package=tmp_path, cwd=tmp_path))
    assert line.startswith(f"libtsg.so is missing from {tmp_path}")
