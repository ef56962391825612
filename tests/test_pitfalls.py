"""Bugs that others had, as far as no other file has a test of their kind."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import exact
import llama_cpp.llama_cpp as C
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from synthetic import finish, split

from tinyserve_gguf import load, read_facts
from tinyserve_gguf._llama import NativeContext, NativeModel

ModelFile = Callable[..., Path]


# ---- experts that nobody asked for ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek2-fused", "nemotron_h_moe"])
def test_slots_of_unused_experts_may_hold_nan(model_file: ModelFile, tmp_path: Path, name: str) -> None:
    """Experts that the router never picks hold nothing but NaN patterns, and lie in slots: nothing of them reaches the logits."""
    path = Path(shutil.copy(model_file(name, experts=64), tmp_path / "m.gguf"))
    tokens = 12
    with load(path, expert_cache="75%", device="CPU", n_threads=1) as model:
        expected = exact.run(model.native, tokens, 4)
        unused = {key: [i for i, one in enumerate(states) if not one.hits + one.misses] for key, states in model.experts.states().items()}
    assert all(unused.values())
    for tensor in GGUFReader(path, "r+").tensors:
        if match := re.fullmatch(r"blk\.(\d+)\.ffn_\w+_exps\.(weight|bias)", tensor.name):
            tensor.data[unused[int(match[1]), "exps"]] = np.nan if tensor.data.dtype == np.float32 else 0xFF
    with load(path, expert_cache="75%", device="CPU", n_threads=1) as model:
        for (block, family), numbers in unused.items():
            for number in numbers[:4]:
                model.experts[block, number, family].pin()
        assert exact.run(model.native, tokens, 4) == expected
    assert exact.stock(path, 4, (tokens,))[tokens] == expected


# ---- adapters -------------------------------------------------------------------------------------------------------------------------------


def write_adapter(path: Path, model: Path, names: tuple[str, ...], rank: int = 4) -> Path:
    """A LoRA adapter for these tensors of `model`, random and large enough to matter."""
    facts = read_facts(model)
    writer = GGUFWriter(path, facts.architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    rng = np.random.default_rng(0)
    for tensor in facts.tensors:
        if tensor.name.endswith(names):
            ne0, ne1, *experts = tensor.shape
            writer.add_tensor(f"{tensor.name}.lora_a", rng.standard_normal((*experts, rank, ne0), dtype=np.float32) * np.float32(ne0**-0.5))
            writer.add_tensor(f"{tensor.name}.lora_b", rng.standard_normal((*experts, ne1, rank), dtype=np.float32))
    finish(writer)
    return path


def adapter_of(native: NativeModel, path: Path) -> object | None:
    """The adapter as llama.cpp opened it; None if it refuses."""
    return C.llama_adapter_lora_init(native.handle, str(path).encode()) or None


def adapted(native: NativeModel, adapter: object, monkeypatch: pytest.MonkeyPatch) -> str:
    """Hash of the logits of a prompt and some decoded tokens, with the adapter in every context that is made."""
    make = NativeContext.__init__

    def with_adapter(self: NativeContext, *arguments: object) -> None:
        make(self, *arguments)  # type: ignore[arg-type]
        adapters = (C.llama_adapter_lora_p_ctypes * 1)(adapter)
        assert C.llama_set_adapters_lora(self.handle, adapters, 1, (ctypes.c_float * 1)(0.5)) == 0

    with monkeypatch.context() as patch:
        patch.setattr(NativeContext, "__init__", with_adapter)
        return exact.run(native, 40, 8)


@pytest.mark.parametrize("cache", ["25%", "all"])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek2"])
def test_adapters_on_attention(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cache: str) -> None:
    path = model_file(name)
    file = write_adapter(tmp_path / "lora.gguf", path, ("attn_q.weight", "attn_q_a.weight", "attn_output.weight"))
    native = NativeModel(str(path), None, extra_bufts=False)
    plain, expected = exact.run(native, 40, 8), adapted(native, adapter_of(native, file), monkeypatch)
    native.close()
    assert plain != expected
    with load(path, expert_cache=cache, device="CPU", n_threads=1) as model:
        assert adapted(model.native, adapter_of(model.native, file), monkeypatch) == expected
        assert exact.run(model.native, 40, 8) == plain
        model.check_integrity()


@pytest.mark.parametrize(("cache", "miss"), [("25%", "fetch"), ("all", "fetch"), ("25%", "cpu")])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek2-fused"])
def test_adapters_on_experts(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cache: str, miss: str) -> None:
    """llama.cpp puts their tensors where the experts lie, and multiplies them by the router's own ids, not by slots."""
    path = model_file(name)
    file = write_adapter(tmp_path / "lora.gguf", path, ("ffn_up_exps.weight", "ffn_gate_up_exps.weight", "ffn_down_exps.weight"))
    native = NativeModel(str(path), None, extra_bufts=False)
    plain, expected = exact.run(native, 40, 8), adapted(native, adapter_of(native, file), monkeypatch)
    native.close()
    assert plain != expected
    with load(path, expert_cache=cache, device="CPU", n_threads=1, miss=miss) as model:
        assert adapted(model.native, adapter_of(model.native, file), monkeypatch) == expected
        assert exact.run(model.native, 40, 8) == plain
        model.check_integrity()


# ---- files ----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.gguf", "My Model (Q8_0).GGUF", "ünïcode.gguf"])
def test_one_shard_of_one(model_file: ModelFile, tmp_path: Path, name: str) -> None:
    """`-00001-of-00001`, and names as people have them."""
    path = model_file("gpt-oss")
    whole = Path(shutil.copy(path, tmp_path / name))
    (shard,) = split(whole, 1)
    assert shard.name.endswith("-00001-of-00001.gguf")
    for given in (whole, shard):
        with load(given, expert_cache="25%", device="CPU", n_threads=1) as model:
            assert exact.paged(model, 4, (7,)) == exact.stock(path, 4, (7,))


# ---- chat templates -------------------------------------------------------------------------------------------------------------------------


def test_template_that_asks_for_the_date(model_file: ModelFile, tmp_path: Path) -> None:
    """Llama 3.1 and gpt-oss call strftime_now."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    reader = GGUFReader(model_file("mixtral"))
    from tinyserve_gguf.demo import copy_metadata

    copy_metadata(reader, writer, ("tokenizer.chat_template",))
    writer.add_chat_template("{{ strftime_now('%Y-%m-%d') }}: {% for message in messages %}{{ message['content'] }}{% endfor %}")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    with load(tmp_path / "m.gguf", device="CPU", n_threads=1) as model:
        text = model.render([{"role": "user", "content": "hi"}])
    date, _, rest = text.partition(": ")
    assert rest == "hi"
    assert [part.isdecimal() for part in date.split("-")] == [True] * 3
