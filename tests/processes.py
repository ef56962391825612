"""The command line as a process of its own, with the package that the tests test, wherever it runs; and what it says when it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.testing import Result

import tinyserve_gguf

PACKAGE = Path(tinyserve_gguf.__file__).parent.parent


def environment(package: Path = PACKAGE, **changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", "")))), **changes}


def cli(
    *arguments: str | Path, stdin: str | bytes = "", cwd: Path, package: Path = PACKAGE, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """`python -m tinyserve_gguf ARGUMENTS` to its end."""
    command = [sys.executable, "-m", "tinyserve_gguf", *map(str, arguments)]
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(command, input=data, capture_output=True, cwd=cwd, env=environment(package), timeout=timeout_s, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def error_line(done: subprocess.CompletedProcess[str] | Result) -> str:
    """All that a refused call wrote to stderr: one line."""
    status = done.exit_code if isinstance(done, Result) else done.returncode
    assert status == 2, (status, done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.endswith("\n")
    return done.stderr


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a refused call, without "error: "."""
    return error_line(done).removeprefix("error: ").rstrip("\n")
