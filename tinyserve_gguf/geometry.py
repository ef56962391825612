"""The facts of a model from a few numbers of its geometry, where there is no file: a catalogue entry, or a test. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tinyserve_gguf.attention import Attention
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.facts import ExpertLayer, LayoutGroup, ModelFacts, PartFacts, TensorFacts


@dataclass(frozen=True, slots=True)
class Geometry:
    """What memory and speed depend on. Weights in numbers, not bytes; types in bits per weight, as quantisations have them on average."""

    name: str
    architecture: str
    n_blocks: int  # that are computed
    n_expert: int  # routed ones of a block
    n_used: int  # top-k
    embedding_length: int
    expert_ff: int  # hidden units of a routed expert
    vocabulary: int
    other_weights: int  # of all blocks together: attention, norms, routers, shared experts, dense blocks; without embedding table and output matrix
    kv_numbers: int  # keys and values of one token in all blocks: 2 * KV heads * head size * blocks; MLA: (rank + rope) * blocks
    context_length: int  # tokens, as trained
    expert_bits: float  # per weight
    other_bits: float  # per weight, of everything else
    n_dense: int = 0  # leading blocks without routed experts
    n_parts: int = 3  # matrices of an expert: gate, up, down; 2 without a gate
    tied: bool = False  # the output matrix is the embedding table
    state_bytes: int = 0  # recurrent states of one sequence
    sliding_window: int = 0  # tokens; 0 = none

    def __post_init__(self) -> None:
        if not (0 <= self.n_dense < self.n_blocks and 0 < self.n_used <= self.n_expert and self.expert_bits > 0 and self.other_bits > 0):
            raise OptionError(f"{self.name}: this is the geometry of no mixture of experts")

    def facts(self) -> ModelFacts:
        """As `read_facts` would give them, with what is no expert in few large tensors. The path is empty."""
        layers = tuple(self._layer(block) for block in range(self.n_dense, self.n_blocks))
        table = _tensor("token_embd.weight", (self.embedding_length, self.vocabulary), self.other_bits)
        rest = [_tensor("blk.0.attn_output.weight", (self.other_weights,), self.other_bits), table]
        rest += [] if self.tied else [_tensor("output.weight", (self.embedding_length, self.vocabulary), self.other_bits)]
        # no bytes of their own: what matters is how many rows they have
        rest += [_tensor(f"blk.0.attn_{name}.weight", (0, rows), 0) for name, rows in (("k", -(-self.kv_numbers // 2)), ("v", self.kv_numbers // 2))]
        rest += [_tensor("blk.0.ssm_conv1d.weight", (2, self.state_bytes // 4 // 129), 0)] if self.state_bytes else []
        tensors = (*rest, *(part.weight for layer in layers for part in layer.parts))
        return ModelFacts(
            path=Path(),
            shards=(),
            architecture=self.architecture,
            name=self.name,
            n_blocks=self.n_blocks,
            n_idle_blocks=0,
            n_expert=self.n_expert,
            n_used=self.n_used,
            context_length=self.context_length,
            embedding_length=self.embedding_length,
            file_bytes=sum(tensor.n_bytes for tensor in tensors),
            tensors=tensors,
            expert_layers=layers,
            idle_layers=(),
            groups=(LayoutGroup(layers[0].layout, layers),),
            attention=_attention(self),
        )

    def _layer(self, block: int) -> ExpertLayer:
        shape = {
            "gate": (self.embedding_length, self.expert_ff),
            "up": (self.embedding_length, self.expert_ff),
            "down": (self.expert_ff, self.embedding_length),
        }
        roles = ("gate", "up", "down")[3 - self.n_parts :]
        parts = [_tensor(f"blk.{block}.ffn_{role}_exps.weight", (*shape[role], self.n_expert), self.expert_bits) for role in roles]
        return ExpertLayer(
            block, "exps", self.n_expert, self.n_used, tuple(PartFacts(role, part, None, None) for role, part in zip(roles, parts, strict=True))
        )


def _tensor(name: str, shape: tuple[int, ...], bits: float) -> TensorFacts:
    numbers = 1
    for n in shape:
        numbers *= n
    experts = shape[2] if len(shape) > 2 else 1
    return TensorFacts(name, 0, f"{bits:g} bits", shape, int(numbers // experts * bits / 8) * experts, 0, 0)


def _attention(geometry: Geometry) -> Attention:
    """Nothing of it is known but what the cache takes; head sizes are those that every KV type divides."""
    return Attention(
        architecture=geometry.architecture,
        n_head=1,
        n_head_kv=1,
        key_lengths=(64,),
        value_lengths=(64,),
        rope_lengths=(64,),
        sliding_window=geometry.sliding_window,
        is_cached=geometry.kv_numbers > 0,
        is_recurrent=geometry.state_bytes > 0,
        is_mla=False,
        is_mrope=False,
        is_absolute=False,
        rope_keeps_length=True,
        n_positions=geometry.context_length,
    )
