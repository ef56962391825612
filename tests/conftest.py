"""Fixtures that several test files share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

# Read by libgomp when llama.cpp is loaded, so before that. By default threads spin while they wait for each other; tiny models do nothing but wait,
# and beside other work on two cores test_every_pool_size took 398 s instead of 78 s.
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["XDG_CONFIG_HOME"] = mkdtemp()  # no test sees the config file of who runs it; Chromium and matplotlib write there
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # it would call home

from reshaped import dense
from synthetic import build

from tinyserve_gguf.demo import build_demo

ModelFile = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def config_home() -> Iterator[None]:
    """The folder above goes with the tests."""
    yield
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"], ignore_errors=True)  # Chromium may still be writing


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """`model_file(name, **changes)`: a synthetic model (see synthetic.build), written once. Do not change the file."""
    folder = tmp_path_factory.mktemp("models")
    paths: dict[str, Path] = {}

    def made(name: str, **changes: object) -> Path:
        key = repr((name, sorted(changes.items())))
        if key not in paths:
            paths[key] = build(name, folder / f"{len(paths)}-{name}.gguf", **changes)
        return paths[key]

    return made


@pytest.fixture(scope="session")
def dense_file(model_file: ModelFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with a tokenizer. Do not change the file."""
    return dense(model_file("mixtral"), tmp_path_factory.mktemp("dense") / "dense.gguf")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model in the user's own cache: 6 s to build the first time, nothing after."""
    return build_demo()
