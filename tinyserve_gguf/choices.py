"""What users choose from by name, and defaults that help texts show. Loads nothing: `--help` stays fast."""

from __future__ import annotations

from dataclasses import dataclass

# In the order of their enums in `shim/tsg.h`.
POLICIES = ("lfru", "lru", "slru", "lfu", "fifo")  # enum tsg_policy
ENGINES = ("auto", "host", "device")  # enum tsg_engine_kind
MISS_MODES = ("fetch", "cpu", "split", "layers")  # enum tsg_miss_mode

MISSES = (*MISS_MODES, "auto")
WARM_STARTS = ("off", "on", "both")  # of bench
FLASH_ATTENTION = ("auto", "on", "off")
DEFAULT_WINDOW = 2048  # tokens
DEFAULT_SINKS = 4


@dataclass(frozen=True, slots=True)
class KvType:
    """One of ggml's types: blocks of `block` numbers in `n_bytes` bytes."""

    type_id: int  # enum ggml_type
    block: int
    n_bytes: int

    @property
    def is_quantised(self) -> bool:
        return self.block > 1


KV_TYPES = {
    "f16": KvType(1, 1, 2),
    "bf16": KvType(30, 1, 2),
    "q8_0": KvType(8, 32, 34),
    "q5_1": KvType(7, 32, 24),
    "q5_0": KvType(6, 32, 22),
    "q4_1": KvType(3, 32, 20),
    "q4_0": KvType(2, 32, 18),
    "iq4_nl": KvType(20, 32, 18),
    "f32": KvType(0, 1, 4),
}
