"""What a GGUF header says of attention: head sizes, rotary embedding, sliding window, recurrent state. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

_KEYS = ("attn_k.weight", "attn_qkv.weight", "attn_kv_a_mqa.weight", "attn_kv.weight")  # a block with one of these has a KV cache
_STATES = (".ssm_", ".shortconv.", ".time_mix_")


@dataclass(frozen=True, slots=True)
class Attention:
    """Lengths in numbers, positions in tokens."""

    architecture: str
    n_head: int  # of queries, the most of any block
    n_head_kv: int
    key_lengths: tuple[int, ...]  # head sizes that occur: one, or that of full and of sliding-window blocks
    value_lengths: tuple[int, ...]
    rope_lengths: tuple[int, ...]  # how much of each of key_lengths is rotated
    sliding_window: int  # 0 = none
    is_cached: bool  # some block keeps keys and values
    is_recurrent: bool  # some block keeps a state instead
    is_mla: bool  # one compressed row a token, of which keys and values are views
    is_mrope: bool  # several positions a token
    is_absolute: bool  # learned position embeddings, which become part of every key
    rope_keeps_length: bool  # False: rotating a key also scales it (YaRN, LongRoPE)
    n_positions: int  # positions that the model knows with the rotary factors of a short context; 0 = not said

    @property
    def is_partly_rotated(self) -> bool:
        return any(rope < key for rope, key in zip(self.rope_lengths, self.key_lengths, strict=True))


def read_attention(architecture: str, metadata: Mapping[str, object], tensors: Collection[str]) -> Attention:
    """From the metadata and tensor names of the whole model."""

    def number(key: str, default: float = 0) -> float:
        """A number; the highest, where the file has one per block."""
        value = metadata.get(f"{architecture}.{key}", default)
        values = [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, int | float) and not isinstance(item, bool)]
        return max(values, default=default)

    n_head = int(number("attention.head_count"))
    equal = int(number("embedding_length")) // n_head if n_head else 0
    lengths: dict[str, tuple[int, ...]] = {}
    for name, key, default in (
        ("key", "attention.key_length", equal),
        ("value", "attention.value_length", equal),
        ("rope", "rope.dimension_count", int(number("attention.key_length", equal))),
    ):
        full = int(number(key, default))
        lengths[name] = (full, int(number(f"{key}_swa", full)))
    both = list(dict.fromkeys(zip(lengths["key"], lengths["value"], lengths["rope"], strict=True)))
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "linear")
    original, trained = int(number("rope.scaling.original_context_length")), int(number("context_length"))
    has_long_factors = any(name.endswith("rope_factors_long.weight") for name in tensors)
    return Attention(
        architecture=architecture,
        n_head=n_head,
        n_head_kv=int(number("attention.head_count_kv", n_head)),
        key_lengths=tuple(key for key, _, _ in both),
        value_lengths=tuple(value for _, value, _ in both),
        rope_lengths=tuple(rope for _, _, rope in both),
        sliding_window=int(number("attention.sliding_window")),
        is_cached=any(name.endswith(_KEYS) for name in tensors),
        is_recurrent=any(part in name for name in tensors for part in _STATES),
        is_mla=number("attention.key_length_mla") > 0,
        is_mrope=number("rope.dimension_sections") > 0,
        is_absolute="position_embd.weight" in tensors,
        rope_keeps_length=_keeps_length(architecture, scaling, number),
        n_positions=min(original, trained) if has_long_factors and original and trained else trained,
    )


def _keeps_length(architecture: str, scaling: object, number: Callable[..., float]) -> bool:
    """Whether the factors by which llama_context's constructor and ggml scale a rotated vector cancel out."""
    if number("rope.scaling.attn_factor", 1.0) != 1:
        return False
    if architecture == "grok" and (number("rope.scaling.yarn_ext_factor") > 0 or number("rope.scaling.yarn_attn_factor", 1.0) not in (-1, 1)):
        return False
    if scaling != "yarn" or number("rope.scaling.factor", 1.0) <= 1:
        return True
    log_multiplier = number("rope.scaling.yarn_log_multiplier")
    if architecture == "deepseek2" and log_multiplier:
        return True
    return math.isclose(log_multiplier, 0.1 if architecture == "deepseek32" else 1.0)
