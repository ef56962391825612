"""llama-cpp-python's own tests, fetched once from its sdist, and a model for them. They are not copied into this repository, because they need a
vocabulary of 700 kB that is under another licence than they are; and so those of the installed version run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from synthetic import _add_tokenizer, add_metadata, finish

from tinyserve_gguf.demo import demo_path

VERSION = "0.3.36"
PARTS = ("tests/", "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf")


def fetch_suite() -> Path:
    """The folder to run the tests in: in the user's cache, beside the demo model. pip downloads the sdist (77 MB) the first time, or has it still
    from the installation."""
    name = f"llama_cpp_python-{VERSION}"
    folder = demo_path().parent / f"{name}-tests"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", work]
            subprocess.run([*pip, f"llama-cpp-python=={VERSION}"], check=True, timeout=600)
            with tarfile.open(Path(work) / f"{name}.tar.gz") as sdist:
                wanted = [member for member in sdist if member.isfile() and member.name.removeprefix(f"{name}/").startswith(PARTS)]
                sdist.extractall(work, wanted, filter="data")
            (Path(work) / name).rename(folder)
    return folder


def build_mamba(path: Path) -> Path:
    """A tiny recurrent model, which has no experts."""
    width, inner, state, rank, vocab = 64, 128, 16, 4, 320
    writer = GGUFWriter(path, "mamba")
    writer.add_name("tiny mamba")
    sizes = {"conv_kernel": 4, "inner_size": inner, "state_size": state, "time_step_rank": rank}
    shape = {"context_length": 2048, "embedding_length": width, "feed_forward_length": 0, "block_count": 2, "attention.head_count": 0}
    add_metadata(writer, "mamba", shape | {f"ssm.{key}": value for key, value in sizes.items()} | {"attention.layer_norm_rms_epsilon": 1e-5})
    _add_tokenizer(writer, vocab)
    rng = np.random.default_rng(0)

    def add(name: str, *ne: int, mean: float = 0.0, std: float | None = None) -> None:
        numbers = rng.standard_normal(ne[::-1], dtype=np.float32) * np.float32(ne[0] ** -0.5 if std is None else std)
        writer.add_tensor(name, numbers + np.float32(mean))

    add("token_embd.weight", width, vocab)
    add("output_norm.weight", width, mean=1.0, std=0.1)
    add("output.weight", width, vocab)
    for block in ("blk.0.", "blk.1."):
        add(f"{block}attn_norm.weight", width, mean=1.0, std=0.1)
        add(f"{block}ssm_in.weight", width, 2 * inner)
        add(f"{block}ssm_conv1d.weight", 4, inner)
        add(f"{block}ssm_conv1d.bias", inner, std=0.1)
        add(f"{block}ssm_x.weight", inner, rank + 2 * state)
        add(f"{block}ssm_dt.weight", rank, inner)
        add(f"{block}ssm_dt.bias", inner, std=0.1)
        add(f"{block}ssm_a", state, inner, mean=-1.0, std=0.1)
        add(f"{block}ssm_d", inner, std=0.1)
        add(f"{block}ssm_out.weight", inner, width)
    finish(writer)
    return path
