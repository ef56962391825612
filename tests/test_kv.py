"""Types of the KV cache: bit for bit as in stock llama.cpp, and what does not go with a model or a device is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_files import experts, keys, rest, write_gguf

from tinyserve_gguf import OptionError, _ops, load, read_facts
from tinyserve_gguf._llama import NativeContext, NativeModel
from tinyserve_gguf.attention import Attention, read_attention
from tinyserve_gguf.choices import KV_TYPES
from tinyserve_gguf.cli.info import context_lines
from tinyserve_gguf.kv import KvOptions, check_kv, keep_window, why_no_shift, why_no_window
from tinyserve_gguf.needs import kv_bytes_per_token
from tinyserve_gguf.placement import pick_device
from tinyserve_gguf.window import Window

ModelFile = Callable[..., Path]

PLAIN = read_attention(
    "qwen3moe",
    {
        "qwen3moe.attention.head_count": 8,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.embedding_length": 1024,
        "qwen3moe.context_length": 4096,
    },
    {"blk.0.attn_k.weight"},
)


def yes(*_: object) -> bool:
    return True


def no(*_: object) -> bool:
    return False


# ---- what llama.cpp runs --------------------------------------------------------------------------------------------------------------------

PAIRS = [(kind, kind) for kind in KV_TYPES] + [("q8_0", "f16"), ("f16", "q4_0"), ("q8_0", "q4_0"), ("f32", "bf16")]


@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_same_bits_as_stock_llama(model_file: ModelFile, k: str, v: str) -> None:
    """And not those of f16: the types do arrive."""
    path, prompt = model_file("qwen3moe"), list(range(5, 105))

    def logits(native: NativeModel, options: object) -> np.ndarray:
        context = NativeContext(native, options)  # type: ignore[arg-type]
        for at in range(0, 100, 50):
            context.decode(prompt[at : at + 50], at, want_logits=True)
        found = context.logits()
        context.close()
        return found

    with load(path, expert_cache="25%", device="CPU", n_ctx=256, n_threads=1, n_ubatch=50, kv_type=k, kv_type_v=v) as model:
        paged, options = logits(model.native, model.context.options), model.context.options
    stock = NativeModel(str(path), None, extra_bufts=False)
    assert np.array_equal(paged, logits(stock, options))
    plain = logits(stock, replace(options, type_k=1, type_v=1))
    assert np.array_equal(paged, plain) == (k in ("f16", "f32") and v == k)  # flash attention casts f32 to f16
    assert np.abs(paged - plain).max() < 3 * plain.std()
    stock.close()


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4", "deepseek2", "qwen35moe", "nemotron_h_moe"])
@pytest.mark.parametrize("kind", ["q8_0", "iq4_nl"])
def test_other_architectures(model_file: ModelFile, name: str, kind: str) -> None:
    with load(model_file(name), expert_cache="25%", device="CPU", n_ctx=256, n_threads=1, n_ubatch=50, kv_type=kind) as model:
        session = model.session()
        session.read(list(range(5, 105)))
        assert np.isfinite(session.logits()).all()
        assert f"KV cache: {kind} keys and values; flash attention on: {kind} values need it" in model.lines()


@pytest.mark.parametrize("flash", ["auto", "on", "off"])
def test_flash_attention(model_file: ModelFile, flash: str) -> None:
    with load(model_file("qwen3moe"), device="CPU", n_ctx=256, n_threads=1, kv_type="f32", flash_attn=flash) as model:
        why = {"auto": "on: there is a kernel", "on": "on: as asked", "off": "off: as asked"}[flash]
        assert f"KV cache: f32 keys and values; flash attention {why}" in model.lines()


def test_devices_are_asked() -> None:
    """On the CPU there is a kernel for everything; the question itself is built for every shape that models have."""
    cpu = pick_device("CPU").handle
    for kind in KV_TYPES.values():
        for lengths in ((64, 64), (128, 128), (192, 128), (576, 512)):
            assert _ops.has_flash_attention(
                cpu,
                n_head=16,
                n_head_kv=2,
                key_length=lengths[0],
                value_length=lengths[1],
                type_k=kind.type_id,
                type_v=kind.type_id,
                mla=lengths[0] == 576,
            )
        assert _ops.has_cast(cpu, kind.type_id, 128)


def test_bytes(model_file: ModelFile) -> None:
    """The plan counts what llama.cpp allocates."""
    facts = read_facts(model_file("qwen3moe"))
    numbers = 3 * 64  # of keys, and as many of values, in three blocks of one head
    assert kv_bytes_per_token(facts) == 2 * 2 * numbers
    assert kv_bytes_per_token(facts, KvOptions("q8_0", "q8_0")) == 2 * numbers * 34 // 32
    assert kv_bytes_per_token(facts, KvOptions("f32", "q4_0")) == 4 * numbers + numbers * 18 // 32


# ---- what is refused ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kv", "has_flash", "message"),
    [
        ({"is_mla": True}, ("q8_0", "f16"), yes, r"one row for keys and values .* give --kv-type q8_0 without --kv-type-v"),
        ({"key_lengths": (80,)}, ("q8_0", "f16"), yes, "keys of qwen3moe have heads of 80, which blocks of 32 do not divide: give --kv-type f16"),
        ({"value_lengths": (80,)}, ("f16", "q4_0"), yes, r"values of qwen3moe have heads of 80, .* give --kv-type-v f16, not q4_0"),
        ({}, ("q8_0", "q8_0", "off"), yes, "q8_0 values need flash attention: drop --flash-attn off"),
        (
            {},
            ("q5_1", "q5_1"),
            no,
            r"GPU has no kernel .* q5_1 keys of 128 and q5_1 values of 128, .* the CPU \(q5_1 values\): give --kv-type f16",
        ),
        ({}, ("q8_0", "q4_0"), no, r"on the CPU \(q4_0 values\): give keys and values the same type"),
        ({}, ("f16", "f16", "on"), no, r"on the CPU \(--flash-attn on\)"),
        ({"architecture": "grok"}, ("q8_0", "q8_0"), yes, "no flash attention for grok: q8_0 values cannot be"),
        ({"architecture": "grok"}, ("f16", "f16", "on"), yes, "no flash attention for grok: --flash-attn on cannot be"),
        ({"is_cached": False}, ("q8_0", "q8_0"), yes, "no KV cache: drop --kv-type"),
    ],
)
def test_refused(changes: dict[str, object], kv: tuple[str, ...], has_flash: Callable[..., bool], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_kv(replace(PLAIN, **changes), KvOptions(*kv), "GPU", has_flash)  # type: ignore[arg-type]


def test_only_a_missing_kernel_turns_flash_attention_off() -> None:
    """What needs none still runs: f16, and quantised keys with plain values."""
    for kv in (KvOptions(), KvOptions("q8_0", "f16"), KvOptions("bf16", "bf16")):
        assert check_kv(PLAIN, kv, "GPU", yes)
        assert not check_kv(PLAIN, kv, "GPU", no)
    assert KvOptions("q8_0", "f16").line(False) == "q8_0 keys, f16 values; flash attention off: no kernel for these types and head sizes"
    swa = replace(PLAIN, key_lengths=(256, 512), value_lengths=(256, 512), rope_lengths=(256, 512))
    assert not check_kv(swa, KvOptions(), "GPU", lambda k, *_: k != 512)  # one kind of block without a kernel is enough


def test_unknown_types() -> None:
    for options, message in ((("q6_k",), "--kv-type is one of f16, bf16"), (("f16", "x"), "--kv-type-v"), (("f16", "f16", "yes"), "--flash-attn")):
        with pytest.raises(OptionError, match=message):
            KvOptions(*options)


def test_a_refusal_comes_before_the_load(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("tinyserve_gguf.model.NativeModel", loaded)
    monkeypatch.setattr(_ops, "has_flash_attention", lambda *_, **__: False)
    with pytest.raises(OptionError, match="CPU has no kernel for flash attention"):
        load(model_file("qwen3moe"), device="CPU", kv_type="q8_0")
    with pytest.raises(OptionError, match="more than the 2048 positions"):
        load(model_file("qwen3moe"), device="CPU", window=4096)


def test_heads_that_blocks_do_not_divide(model_file: ModelFile) -> None:
    """llama.cpp would abort the process without flash attention."""
    with pytest.raises(OptionError, match="heads of 48, which blocks of 32 do not divide"):
        load(model_file("qwen3moe", head_dim=48), device="CPU", kv_type="q8_0")


# ---- windows --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "keys", "reason"),
    [
        ({}, "f16", ""),
        ({}, "q4_0", ""),
        ({}, "bf16", "cannot rotate bf16 keys"),
        ({"is_mrope": True}, "f16", "M-RoPE"),
        ({"architecture": "cohere2moe"}, "f16", "not known to rotate the keys of cohere2moe"),
        ({"rope_keeps_length": False}, "f16", "scales keys"),
        ({"rope_lengths": (64,)}, "f16", ""),
        ({"rope_lengths": (64,)}, "q8_0", "a part of q8_0 keys"),
    ],
)
def test_why_positions_stay(changes: dict[str, object], keys: str, reason: str) -> None:
    found = why_no_shift(replace(PLAIN, **changes), keys, yes)  # type: ignore[arg-type]
    assert reason in found if reason else found == ""


def test_device_without_a_kernel_to_rotate_with() -> None:
    assert why_no_shift(PLAIN, "iq4_nl", no) == "the device has no kernel to rotate iq4_nl keys"
    assert why_no_shift(PLAIN, "f16", no) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_cached": False}, "no KV cache"),
        ({"is_absolute": True}, "positions are learned"),
        ({"architecture": "deepseek4"}, "nothing out of the middle"),
    ],
)
def test_no_window(changes: dict[str, object], reason: str) -> None:
    attention = replace(PLAIN, **changes)  # type: ignore[arg-type]
    assert reason in why_no_window(attention)
    with pytest.raises(OptionError, match=f"--window is impossible with .*{reason}.*; drop it"):
        keep_window(attention, Window(), "")


def attention(architecture: str = "qwen3moe", tensors: tuple[str, ...] = ("blk.0.attn_k.weight",), **metadata: object) -> Attention:
    given = {"attention.head_count": 8, "embedding_length": 1024, "context_length": 8192, **metadata}
    return read_attention(architecture, {f"{architecture}.{key}": value for key, value in given.items()}, set(tensors))


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}


@pytest.mark.parametrize(
    ("architecture", "metadata", "keeps"),
    [
        ("qwen3moe", {}, True),
        ("qwen3moe", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, True),
        ("qwen3moe", {"rope.scaling.type": "yarn", "rope.scaling.factor": 1.0}, True),
        ("gpt-oss", YARN, False),
        ("qwen3moe", YARN, False),
        ("deepseek2", YARN, False),
        ("deepseek2", {**YARN, "rope.scaling.yarn_log_multiplier": 0.0707}, True),
        ("deepseek32", {**YARN, "rope.scaling.yarn_log_multiplier": 0.1}, True),
        ("mistral3", {**YARN, "rope.scaling.yarn_log_multiplier": 1.0}, True),
        ("mistral3", {**YARN, "rope.scaling.yarn_log_multiplier": 0.5}, False),
        ("phimoe", {"rope.scaling.attn_factor": 1.19}, False),
        ("grok", {"rope.scaling.yarn_ext_factor": 1.0}, False),
    ],
)
def test_what_rotating_does_to_the_length_of_a_key(architecture: str, metadata: dict[str, object], keeps: bool) -> None:
    assert attention(architecture, **metadata).rope_keeps_length == keeps


def test_attention_of_a_header() -> None:
    plain = attention()
    assert (plain.key_lengths, plain.value_lengths, plain.rope_lengths, plain.n_head_kv, plain.n_positions) == ((128,), (128,), (128,), 8, 8192)
    assert not plain.is_partly_rotated
    many = attention(**{"attention.head_count_kv": (0, 2, 0), "rope.dimension_count": 64, "attention.key_length_swa": 64})
    assert (many.n_head_kv, many.key_lengths, many.rope_lengths, many.is_partly_rotated) == (2, (128, 64), (64, 64), True)
    long = attention(tensors=("blk.0.attn_qkv.weight", "blk.0.rope_factors_long.weight"), **{"rope.scaling.original_context_length": 4096})
    assert (long.n_positions, long.is_cached) == (4096, True)
    assert attention(tensors=("blk.0.ssm_in.weight",)).is_recurrent
    assert not attention(tensors=("blk.0.ssm_in.weight",)).is_cached


# ---- info -----------------------------------------------------------------------------------------------------------------------------------


def test_info_says_which_applies(model_file: ModelFile, tmp_path: Path) -> None:
    every = ", ".join(KV_TYPES)
    assert context_lines(read_facts(model_file("qwen3moe"))) == [
        f"--window, {every.replace('bf16, ', '')}: tokens leave and positions move down",
        "--window, bf16: tokens leave and positions stay: llama.cpp cannot rotate bf16 keys",
    ]
    assert context_lines(read_facts(model_file("qwen35moe"))) == [
        "--window, every type: tokens leave and positions stay: M-RoPE positions cannot move",
        "recurrent state in some blocks; it also remembers what left a window",
    ]
    assert "--window, f16, f32: tokens leave and positions move down" in context_lines(read_facts(model_file("deepseek2")))
    assert "sliding window of 32 in some blocks; their cache is kept as long as the others" in context_lines(read_facts(model_file("gpt-oss")))
    plain = write_gguf(tmp_path / "m.gguf", "deepseek4", keys(1), rest(1) + experts(0))
    assert context_lines(read_facts(plain))[0].startswith("--window: impossible, ")
