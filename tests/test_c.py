"""Builds the C tests of the shim (tests/c), with sanitizers, against the installed llama.cpp, and runs each binary."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "c"
NAMES = "slots traces engine coexec counters pager experts host resize measure group"
BINARIES = tuple(f"test_{name}" for name in NAMES.split())


def _run(*command: str | Path) -> None:
    """Runs a command; if it fails, the test fails with everything it printed."""
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=300, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{Path(command[0]).name} exited with {done.returncode}:\n{done.stdout}", pytrace=False)


def _site_packages() -> Path:
    """Where llama-cpp-python keeps ggml's CMake package."""
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the built binaries."""
    folder = tmp_path_factory.mktemp("c")
    beside_python = str(Path(sys.executable).parent)  # scripts of this environment, activated or not
    ninja = shutil.which("ninja", path=os.pathsep.join((beside_python, os.environ.get("PATH", ""))))
    assert ninja is not None, "the tests need the package ninja"
    cmake = (sys.executable, "-m", "cmake")
    _run(*cmake, "-S", SOURCE, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCMAKE_PREFIX_PATH={_site_packages()}")
    _run(*cmake, "--build", folder)
    return folder


@pytest.mark.parametrize("binary", BINARIES)
def test_c(build: Path, binary: str) -> None:
    _run(build / binary)
