"""Bugs that others had, as far as no other file has a test of their kind."""

from __future__ import annotations

import ctypes
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import exact
import llama_cpp.llama_cpp as C
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from synthetic import encode, finish, split

from tinyserve_gguf import load, read_facts
from tinyserve_gguf._llama import NativeContext, NativeModel
from tinyserve_gguf.cli import main
from tinyserve_gguf.demo import copy_metadata

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


def write_adapter(path: Path, model: Path, names: tuple[str, ...], rank: int = 4, kind: str = "F32") -> Path:
    """A LoRA adapter for these tensors of `model`, random and large enough to matter."""
    facts = read_facts(model)
    writer = GGUFWriter(path, facts.architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    rng = np.random.default_rng(0)

    def add(name: str, shape: tuple[int, ...], std: float) -> None:
        data = encode(rng.standard_normal(shape, dtype=np.float32) * np.float32(std), kind)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])

    for tensor in facts.tensors:
        if tensor.name.endswith(names):
            ne0, ne1, *experts = tensor.shape
            add(f"{tensor.name}.lora_a", (*experts, rank, ne0), ne0**-0.5)
            add(f"{tensor.name}.lora_b", (*experts, ne1, rank), 1)
    finish(writer)
    return path


def adapter_of(native: NativeModel, path: Path) -> object | None:
    """The adapter as llama.cpp opened it; None if it refuses."""
    return C.llama_adapter_lora_init(native.handle, str(path).encode()) or None


def adapted(native: NativeModel, files: Sequence[tuple[Path, float]], monkeypatch: pytest.MonkeyPatch) -> str:
    """Hash of the logits of a prompt and some decoded tokens, with these adapters, at their scales, in every context that is made."""
    handles, scales, n = [adapter_of(native, file) for file, _ in files], [scale for _, scale in files], len(files)
    make = NativeContext.__init__

    def with_adapters(self: NativeContext, *arguments: object) -> None:
        make(self, *arguments)  # type: ignore[arg-type]
        assert C.llama_set_adapters_lora(self.handle, (C.llama_adapter_lora_p_ctypes * n)(*handles), n, (ctypes.c_float * n)(*scales)) == 0

    with monkeypatch.context() as patch:
        patch.setattr(NativeContext, "__init__", with_adapters)
        return exact.run(native, 40, 8)


@pytest.mark.parametrize("cache", ["25%", "all"])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek2"])
def test_adapters_on_attention(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cache: str) -> None:
    path = model_file(name)
    file = write_adapter(tmp_path / "lora.gguf", path, ("attn_q.weight", "attn_q_a.weight", "attn_output.weight"))
    assert_adapted(path, file, monkeypatch, expert_cache=cache)


@pytest.mark.parametrize("cache", ["25%", "all"])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek2-fused", "gemma4", "scaled", "nemotron_h_moe", "grovemoe"])
def test_adapters_on_experts(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cache: str) -> None:
    """llama.cpp puts their tensors where the weight lies that they change, and looks them up with the router's ids, whatever slots there are."""
    path = model_file(name)
    file = write_adapter(tmp_path / "lora.gguf", path, ("exps.weight", "attn_q.weight"))
    assert_adapted(path, file, monkeypatch, expert_cache=cache)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_adapters_on_one_part_of_experts(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, kind: str) -> None:
    path = model_file("mixtral")
    assert_adapted(path, write_adapter(tmp_path / "lora.gguf", path, (f"{part}_exps.weight",), 32, kind), monkeypatch, expert_cache="25%")


def assert_adapted(path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    """The logits with an adapter, and without it before and after, are llama.cpp's."""
    native = NativeModel(str(path), None, extra_bufts=False)
    plain, expected = exact.run(native, 40, 8), adapted(native, [(file, 0.5)], monkeypatch)
    native.close()
    assert plain != expected
    with load(path, device="CPU", n_threads=1, **options) as model:  # type: ignore[arg-type]
        assert exact.run(model.native, 40, 8) == plain
        assert adapted(model.native, [(file, 0.5)], monkeypatch) == expected
        assert exact.run(model.native, 40, 8) == plain
        model.check_integrity()


@pytest.mark.parametrize(("names", "reason"), [(("attn_q.weight",), ""), (("up_exps.weight",), "row by row"), (("down_exps.weight",), "row by row")])
def test_adapters_and_misses_on_the_cpu(
    model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], reason: str
) -> None:
    """What an adapter adds within the experts the CPU does not compute: misses are fetched, and it is said."""
    path = model_file("qwen3moe")
    file = write_adapter(tmp_path / "lora.gguf", path, names)
    native = NativeModel(str(path), None, extra_bufts=False)
    expected = adapted(native, [(file, 0.5)], monkeypatch)
    native.close()
    with load(path, expert_cache="25%", device="CPU", n_threads=1, miss="cpu") as model:
        assert adapted(model.native, [(file, 0.5)], monkeypatch) == expected
        pager = model.stats().pager
        assert pager is not None
        assert (pager.decode.cpu_rows == 0) == pager.miss.startswith("fetched") == bool(reason)
        assert reason in pager.miss


# ---- what llama.cpp turns off by itself ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["25%", "all"])
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek2", "qwen35moe"])
def test_fused_operations_stay_on(model_file: ModelFile, caplog: pytest.LogCaptureFixture, name: str, cache: str) -> None:
    """llama.cpp asks where a layer's nodes would run, and without a word but in its log it does without flash attention or a fused operation where
    that is not the device of the layer."""
    path = model_file(name)

    def chosen(native: NativeModel) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "tinyserve_gguf.llama"):
            NativeContext(native, exact.options(256)).close()
        return [line for line in caplog.messages if re.search("resolve_fused_ops: .*(enabled|disabled)", line)]

    native = NativeModel(str(path), None, extra_bufts=False)
    expected = chosen(native)
    native.close()
    assert any("Flash Attention enabled" in line for line in expected)
    with load(path, expert_cache=cache, device="CPU", n_threads=1) as model:
        assert chosen(model.native) == expected


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


def with_template(model: Path, path: Path, template: str) -> Path:
    """`model` written again with another chat template."""
    writer, reader = GGUFWriter(path, "llama"), GGUFReader(model)
    copy_metadata(reader, writer, ("tokenizer.chat_template",))
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return path


def test_template_that_asks_for_the_date(model_file: ModelFile, tmp_path: Path) -> None:
    """Llama 3.1 and gpt-oss call strftime_now."""
    template = "{{ strftime_now('%Y-%m-%d') }}: {% for message in messages %}{{ message['content'] }}{% endfor %}"
    with load(with_template(model_file("mixtral"), tmp_path / "m.gguf", template), device="CPU", n_threads=1) as model:
        text = model.render([{"role": "user", "content": "hi"}])
    date, _, rest = text.partition(": ")
    assert rest == "hi"
    assert [part.isdecimal() for part in date.split("-")] == [True] * 3


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% for message in messages %}", "the chat template in the file is broken, line 2: Unexpected end of template"),
        ("{{ messages[0 }}", "the chat template in the file is broken, line 1: unexpected '}'"),
        ("{{ messages | nofilter }}", "the chat template in the file is broken, line 1: No filter named 'nofilter'"),
        ("{{ messages[0].none.content }}", "the chat template refuses these messages: 'dict object' has no attribute 'none'"),
        ("{{ messages[0].content + 1 }}", "the chat template refuses these messages: can only concatenate str"),
        ("{{ 1 // (messages | length - 1) }}", "the chat template refuses these messages: integer division or modulo by zero"),
        ("{{ raise_exception('only the assistant may speak') }}", "the chat template refuses these messages: only the assistant may speak"),
    ],
)
def test_template_that_is_broken(model_file: ModelFile, tmp_path: Path, template: str, message: str) -> None:
    path = with_template(model_file("mixtral"), tmp_path / "m.gguf", template)
    done = CliRunner().invoke(main, ["chat", str(path), "-p", "x", "--device", "CPU", "-t", "1"])
    assert done.exit_code == 2
    assert not done.stdout
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")
