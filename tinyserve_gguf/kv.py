"""Types of the KV cache, and what a model's attention and a device allow. Pure.

Combinations that llama.cpp would refuse, compute on the CPU or abort on are refused here, with the reason; a window is kept in a way that is sound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinyserve_gguf.attention import Attention
from tinyserve_gguf.choices import FLASH_ATTENTION, KV_TYPES, KvType
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.window import Rolling, Window

# Architectures whose keys, once moved by llama.cpp, were found equal to those computed at the new positions. With others it rotates keys of layers
# that have no rotary embedding, or keys that are normalised after it, or aborts the process because no layer is left to rotate.
_SHIFTS = frozenset(
    "arctic bailingmoe bailingmoe2 dbrx deepseek deepseek2 dots1 ernie4_5 ernie4_5-moe gemma4 glm4moe gpt-oss "  # noqa: SIM905
    "grok grovemoe hy_v3 kimi-k3 kimi-linear lfm2moe llama mimo2 minicpm minimax-01 minimax-m2 "
    "minimax-m3 mistral3 mistral4 nemotron_h_moe olmoe phimoe qwen2moe qwen3moe qwen3next refact".split()
)
_NO_MIDDLE = frozenset({"deepseek4"})  # llama_kv_cache_dsv4 removes tokens at the end only
_NO_FLASH = frozenset({"grok"})  # llama_init_from_model turns it off

# (key length, value length, type of keys, type of values) -> whether the device has a kernel for flash attention over such heads
HasFlash = Callable[[int, int, KvType, KvType], bool]


@dataclass(frozen=True, slots=True)
class KvOptions:
    """What the user asked for. OptionError if there is no such type."""

    k: str = "f16"
    v: str = "f16"
    flash: str = "auto"

    def __post_init__(self) -> None:
        for option, value in (("--kv-type", self.k), ("--kv-type-v", self.v)):
            if value not in KV_TYPES:
                raise OptionError(f"{option} is one of {', '.join(KV_TYPES)}, not {value!r}")
        if self.flash not in FLASH_ATTENTION:
            raise OptionError(f"--flash-attn is one of {', '.join(FLASH_ATTENTION)}, not {self.flash!r}")

    @property
    def keys(self) -> KvType:
        return KV_TYPES[self.k]

    @property
    def values(self) -> KvType:
        return KV_TYPES[self.v]

    def line(self, flash: bool) -> str:
        """For people: what is used, and why flash attention is or is not."""
        types = f"{self.k} keys and values" if self.k == self.v else f"{self.k} keys, {self.v} values"
        if self.flash != "auto":
            why = "as asked"
        elif flash:
            why = f"{self.v} values need it" if self.values.is_quantised else "there is a kernel"
        else:
            why = "no kernel for these types and head sizes"
        return f"{types}; flash attention {'on' if flash else 'off'}: {why}"


def check_kv(attention: Attention, kv: KvOptions, device: str, has_flash: HasFlash) -> bool:
    """Whether flash attention will be used. OptionError, with the reason and a way out, if these types do not go with the model or the device."""
    arch = attention.architecture
    if not attention.is_cached:
        if kv != KvOptions():
            raise OptionError(f"{arch} keeps a recurrent state and no KV cache: drop --kv-type and --flash-attn")
        return False
    if kv.k != kv.v and (attention.is_mla or arch in _NO_MIDDLE):
        raise OptionError(f"{arch} keeps one row for keys and values (MLA), so both have one type: give --kv-type {kv.k} without --kv-type-v")
    for what, option, name, lengths in (
        ("keys", "--kv-type", kv.k, attention.key_lengths),
        ("values", "--kv-type-v", kv.v, attention.value_lengths),
    ):
        block = KV_TYPES[name].block
        if odd := [n for n in lengths if n % block]:
            raise OptionError(f"the {what} of {arch} have heads of {odd[0]}, which blocks of {block} do not divide: give {option} f16, not {name}")
    need = f"{kv.v} values" if kv.values.is_quantised else "--flash-attn on" if kv.flash == "on" else ""
    if kv.values.is_quantised and kv.flash == "off":
        raise OptionError(f"{kv.v} values need flash attention: drop --flash-attn off, or give --kv-type-v f16")
    if arch in _NO_FLASH:
        if need:
            raise OptionError(f"llama.cpp has no flash attention for {arch}: {need} cannot be; give --kv-type-v f16 and drop --flash-attn")
        return False
    if kv.flash == "off":
        return False
    pairs = zip(attention.key_lengths, attention.value_lengths, strict=True)
    missing = next(((k, v) for k, v in pairs if not has_flash(k, v, kv.keys, kv.values)), None)
    if missing and need:
        k, v = missing
        raise OptionError(
            f"{device} has no kernel for flash attention over {kv.k} keys of {k} and {kv.v} values of {v}, and llama.cpp would compute it on the CPU "
            f"({need}): " + ("give keys and values the same type" if kv.k != kv.v else "give --kv-type f16 or q8_0, or leave --flash-attn to auto")
        )
    return missing is None


# ---- windows --------------------------------------------------------------------------------------------------------------------------------


def why_no_window(attention: Attention) -> str:
    """Why a window is impossible on this model; empty if it is not."""
    if not attention.is_cached:
        return "it keeps a recurrent state and no KV cache, so there is nothing that fills up"
    if attention.is_absolute:
        return "its positions are learned and part of every key, so what stays cannot be used at other positions"
    if attention.architecture in _NO_MIDDLE:
        return "llama.cpp takes nothing out of the middle of its compressed cache"
    return ""


def why_no_shift(attention: Attention, keys: str, has_cast: Callable[[KvType, int], bool]) -> str:
    """Why positions cannot move down on this model with keys of this type, though tokens can leave; empty if they can. `has_cast`: whether the device
    turns keys of a type and length into F32."""
    if attention.is_mrope:
        return "M-RoPE positions cannot move"
    if attention.architecture not in _SHIFTS:
        return f"llama.cpp is not known to rotate the keys of {attention.architecture} rightly"
    if not attention.rope_keeps_length:
        return "this model scales keys when it rotates them, and llama.cpp would scale them again at every move"
    if keys == "bf16":
        return "llama.cpp cannot rotate bf16 keys"
    if KV_TYPES[keys].is_quantised and attention.is_partly_rotated:
        return f"llama.cpp cannot rotate a part of {keys} keys"
    if KV_TYPES[keys].is_quantised and not all(has_cast(KV_TYPES[keys], length) for length in attention.key_lengths):
        return f"the device has no kernel to rotate {keys} keys"
    return ""


def keep_window(attention: Attention, window: Window, why_not: str) -> tuple[Rolling, str]:
    """How a window is kept on a model, and why so, for people. `why_not`: why positions cannot move down, empty if they can. OptionError if a window
    is impossible."""
    if problem := why_no_window(attention):
        raise OptionError(f"--window is impossible with {attention.architecture}: {problem}; drop it")
    n_positions = attention.n_positions or 2**31 - 1
    if window.size > n_positions:
        raise OptionError(f"--window {window.size} is more than the {n_positions} positions that the model knows: give less")
    sinks = f"{window.sinks} sink{'s' * (window.sinks != 1)}"
    moves = "positions of the rest move down" if not why_not else f"positions of the rest stay, and start again after {n_positions}: {why_not}"
    state = "; its recurrent state also remembers what left" if attention.is_recurrent else ""
    text = f"{window.size} tokens, {sinks}; the oldest {window.block} after them leave at once, {moves}{state}"
    return Rolling(window, shifts=not why_not, n_positions=n_positions), text
