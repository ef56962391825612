"""Bad files and impossible options through the command line: one line on stderr that says what to do, exit code 2, and nothing left behind."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf_files as raw
import pytest
from processes import cli, refused
from reshaped import dense, per_expert
from synthetic import split

ModelFile = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the calls run, with a small text file in it."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    (folder / "notes.txt").write_text("no model\n")
    return folder


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """`call(arguments)`: the line of a refused call. Whatever a call leaves in the folder, which is its temporary one and its home as well, fails."""
    for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(folder))

    def run(*arguments: str | Path) -> str:
        before = sorted(folder.rglob("*"))
        line = refused(cli(*arguments, cwd=folder))
        assert sorted(folder.rglob("*")) == before
        assert "Traceback" not in line
        return line

    yield run


def both(call: Callable[..., str], path: Path) -> str:
    """The line, which chat and info share."""
    line = call("chat", path, "-p", "hi")
    assert call("info", path) == line
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


# ---- files ----------------------------------------------------------------------------------------------------------------------------------


def test_missing(call: Callable[..., str], folder: Path) -> None:
    assert both(call, folder / "none.gguf") == "no such file"


def test_directory(call: Callable[..., str], folder: Path) -> None:
    assert both(call, folder) == "is a directory; give the .gguf file in it"


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"no model\n", "is not a GGUF file"), (b"PK\x03\x04" + bytes(99), "a zip archive")]
)
def test_foreign(call: Callable[..., str], folder: Path, content: bytes, message: str) -> None:
    (folder / "m.gguf").write_bytes(content)
    assert message in both(call, folder / "m.gguf")


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_truncated(call: Callable[..., str], model_file: ModelFile, folder: Path, share: float) -> None:
    data = model_file("mixtral").read_bytes()
    (folder / "m.gguf").write_bytes(data[: int(len(data) * share)])
    line = both(call, folder / "m.gguf")
    assert "copy it again" in line
    assert share < 0.1 or re.search(r"is cut off: [\d,]+ of [\d,]+ bytes are missing", line)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"GGUF\x03", b"GGUF\x63"),  # version
        (b"general.architecture", b"general.\xff\xfe\xfdhitecture"),
        (b"llama.block_count", b"llama.block_cOunt"),
        (b"llama.expert_used_count\x04\x00\x00\x00\x02", b"llama.expert_used_count\x04\x00\x00\x00\x63"),
        (b"blk.1.attn_q.weight\x02\x00\x00\x00\x40", b"blk.1.attn_q.weight\x02\x00\x00\x00\x41"),  # a shape
        (b"blk.2.ffn_down_exps.weight", b"blk.2.ffn_dOwn_exps.weight"),
        (b"blk.0.attn_norm.weight", b"blk.0.attn_nOrm.weight"),
        (b"tokenizer.ggml.model", b"tokenizer.ggml.mOdel"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tOkens"),
    ],
    ids=lambda value: value.decode("latin-1") if isinstance(value, bytes) and value[:1] != b"\x00" else None,
)
def test_corrupted(call: Callable[..., str], model_file: ModelFile, folder: Path, old: bytes, new: bytes) -> None:
    data = model_file("mixtral").read_bytes()
    assert data.count(old) == 1
    (folder / "m.gguf").write_bytes(data.replace(old, new))
    assert call("chat", folder / "m.gguf", "-p", "hi").startswith(f"{folder / 'm.gguf'}: ")


def test_other_architecture(call: Callable[..., str], folder: Path) -> None:
    path = raw.write_gguf(folder / "m.gguf", "nosuchmoe", raw.keys(), raw.rest() + raw.experts(0) + raw.experts(1))
    assert "unknown model architecture: 'nosuchmoe'" in call("chat", path, "-p", "hi")


def test_what_llama_cpp_aborts_over(call: Callable[..., str], model_file: ModelFile, folder: Path) -> None:
    """A token that comes twice, which only llama.cpp's vocabulary finds; and a width that contradicts the tensors, which only its graph finds."""
    data = bytearray(model_file("mixtral").read_bytes())
    data[data.index("\x02\0\0\0\0\0\0\0À".encode()) + 9] ^= 1
    (folder / "m.gguf").write_bytes(data)
    line = call("chat", folder / "m.gguf", "-p", "hi")
    assert line.startswith(f"{folder / 'm.gguf'}: llama.cpp gives up on it: GGML_ASSERT")
    assert line.endswith("; fetch or convert the model again")
    (folder / "m.gguf").write_bytes(model_file("gpt-oss").read_bytes().replace(b"attention.key_length", b"attention.key_lEngth"))
    done = cli("chat", folder / "m.gguf", "-p", "hi", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    (last,) = done.stderr.splitlines()
    assert last.startswith(f"error: {folder / 'm.gguf'}: llama.cpp gives up on it: GGML_ASSERT")


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_missing_shard(call: Callable[..., str], model_file: ModelFile, folder: Path, gone: int) -> None:
    shards = split(Path(shutil.copy(model_file("mixtral"), folder / "m.gguf")), 3)
    (folder / "m.gguf").unlink()
    shards[gone].unlink()
    line = call("chat", shards[(gone + 1) % 3], "-p", "hi")
    assert shards[gone].name in line


@pytest.mark.parametrize("type_id", [4, 43, 137, 200])
def test_unknown_tensor_type(call: Callable[..., str], folder: Path, type_id: int) -> None:
    bad = raw.Tensor("blk.1.ffn_up_exps.weight", (raw.EMBED, raw.FF, 4), "Q8_0", type_id=type_id)
    tensors = [bad if tensor.name == bad.name else tensor for tensor in raw.rest() + raw.experts(0) + raw.experts(1)]
    line = both(call, raw.write_gguf(folder / "m.gguf", "qwen3moe", raw.keys(), tensors))
    assert str(type_id) in line


def test_one_tensor_per_expert(call: Callable[..., str], model_file: ModelFile, folder: Path) -> None:
    line = both(call, per_expert(model_file("mixtral"), folder / "m.gguf"))
    assert "has one tensor per expert" in line
    assert "convert the original model with a current llama.cpp" in line


def test_base_model(model_file: ModelFile, folder: Path) -> None:
    """Without a chat template nothing can be chatted with. This is found once the model is loaded, so the plan stands above."""
    data = model_file("mixtral").read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_tEmplate")
    (folder / "m.gguf").write_bytes(data)
    done = cli("chat", folder / "m.gguf", "-p", "hi", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"error: {folder / 'm.gguf'} has no chat template: it is a base model, use Model.generate"
    assert "Traceback" not in done.stderr


# ---- the expert cache -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("1", "one token needs 2 experts at once: an expert cache of 1 is too small, give 2 or more"),
        ("1KiB", "an expert cache needs 229.5 KiB at least"),
        ("0", "the expert cache is all, auto, a number of experts, a share like 25% or a size like 6GiB, not '0'"),
        ("-5", "not '-5'"),
        ("0%", "not '0%'"),
        ("101%", "not '101%'"),
        ("6PiB", "not '6PiB'"),
        ("most", "not 'most'"),
        ("", "not ''"),
    ],
)
def test_expert_cache(call: Callable[..., str], model_file: ModelFile, cache: str, message: str) -> None:
    assert message in call("chat", model_file("mixtral"), "-p", "hi", "--expert-cache", cache)


def test_dense_model_with_a_cache(call: Callable[..., str], model_file: ModelFile, folder: Path) -> None:
    path = dense(model_file("mixtral"), folder / "dense.gguf")
    line = call("chat", path, "-p", "hi", "--expert-cache", "25%")
    assert line == "synthetic mixtral is dense: there are no experts to cache, drop --expert-cache 25%"
    done = cli("chat", path, "-p", "hi", "-n", "3", "--temp", "0", cwd=folder)
    assert done.returncode == 0
    assert done.stdout
    assert "synthetic mixtral: dense llama, nothing to page" in done.stderr


# ---- options --------------------------------------------------------------------------------------------------------------------------------


def test_unknown_device(call: Callable[..., str], model_file: ModelFile) -> None:
    line = call("chat", model_file("mixtral"), "-p", "hi", "--device", "CUDA99")
    assert line.startswith("there is no device 'CUDA99' here; there is: ")
    assert "CPU" in line


@pytest.mark.parametrize(
    "options",
    ["-c -1", "-b 0", "-t 0", "-t 100000", "-n 0", "-n -2", "--temp -1", "--temp nan", "--top-p 0", "--min-p 2", "--repeat-penalty 0", "--seed x",
     "--policy best", "--no-such-option", "second.gguf"],
)  # fmt: skip
def test_impossible_values(call: Callable[..., str], model_file: ModelFile, options: str) -> None:
    name = options.split()[0]
    assert name in call("chat", model_file("mixtral"), "-p", "hi", *options.split())


def test_context_that_cannot_be_had(model_file: ModelFile) -> None:
    """1.5 TiB of KV cache: the plan refuses it, with the arithmetic."""
    path = model_file("mixtral", context=2**23, heads=64, kv_heads=64, head_dim=256)
    done = cli("chat", path, "-p", "hi", "-c", "0", "--expert-cache", "all", cwd=path.parent)
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: synthetic mixtral does not fit on CPU: ")
    assert "1.50 TiB KV cache (-c 8388608)" in last
    assert "Traceback" not in done.stderr
