"""What a model is made of, from its GGUF header alone: blocks, experts, top-k, types, bytes.

Expert weights are those that llama.cpp multiplies through MUL_MAT_ID, `blk.N.ffn_(gate|up|down|gate_up)_(ch)?exps.weight`, with their per-expert
biases and scales. Whatever would make llama.cpp abort the process while it reads these hyperparameters is refused here.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tinyserve_gguf.attention import Attention, read_attention
from tinyserve_gguf.errors import ModelFileError

if TYPE_CHECKING:
    from tinyserve_gguf._ggufio import Header

MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
ROLES = ("gate", "up", "gate_up", "down")

_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_((?:ch)?exps)\.(weight|bias|scale)")
_ONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)\.\d+\.weight")  # Mixtral files from before April 2024
_SHARED = re.compile(r"blk\.\d+\.ffn_\w+_shexp\.\w+")
_BLOCK = re.compile(r"blk\.(\d+)\.")

# Looked up row by row; llama.cpp keeps them in host memory whatever the device (LLM_TENSOR_LAYER_INPUT)
INPUTS = frozenset(f"{name}.weight" for name in ("token_embd", "position_embd", "token_types", "per_layer_token_embd"))
# The only graphs that read expert_used_count per block; every other one takes the number of block 0 for all
_PER_BLOCK_TOP_K = frozenset({"nemotron_h", "nemotron_h_moe"})
# llama.cpp takes expert_count <= 1 for dense here
_DENSE_WITH_ONE_EXPERT = frozenset({"hunyuan_vl", "hunyuan-dense"})


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of the model."""

    name: str
    type_id: int  # enum ggml_type
    type: str  # "Q4_K"
    shape: tuple[int, ...]  # ggml order, ne0 first, without trailing ones
    n_bytes: int
    offset: int  # bytes from the start of its shard file
    shard: int  # index in ModelFacts.shards

    def ne(self, i: int) -> int:
        """Size of dimension `i`; 1 beyond the stored ones."""
        return self.shape[i] if i < len(self.shape) else 1


@dataclass(frozen=True, slots=True)
class PartFacts:
    """One weight of an expert layer, for all its experts."""

    role: str  # one of ROLES
    weight: TensorFacts  # [ne0, ne1, n_expert]
    bias: TensorFacts | None  # [ne1, n_expert] F32
    scale: TensorFacts | None  # [n_expert] F32

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in (self.weight, self.bias, self.scale) if tensor)

    @property
    def bytes_per_expert(self) -> int:
        """Its slice of the weight, its bias row and its scale value."""
        return self.n_bytes // self.weight.ne(2)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The routed experts of one block. A GroveMoE block has two: "exps", and "chexps" with fewer experts and their own ids."""

    block: int
    family: str  # "exps" or "chexps"
    n_expert: int
    n_used: int  # top-k: experts that one token uses
    parts: tuple[PartFacts, ...]  # in the order of ROLES

    @property
    def bytes_per_expert(self) -> int:
        return sum(part.bytes_per_expert for part in self.parts)

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)

    @property
    def layout(self) -> Hashable:
        """Equal for layers whose experts fit into the same slots."""
        return tuple(
            (part.role, part.weight.type_id, part.weight.ne(0), part.weight.ne(1), part.bias is not None, part.scale is not None)
            for part in self.parts
        )


@dataclass(frozen=True, slots=True)
class LayoutGroup:
    """Layers of one layout: they can share a pool."""

    layout: Hashable
    layers: tuple[ExpertLayer, ...]  # never empty

    @property
    def bytes_per_expert(self) -> int:
        return self.layers[0].bytes_per_expert

    @property
    def n_experts(self) -> int:
        """Experts of all its layers together."""
        return sum(layer.n_expert for layer in self.layers)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """All that a plan needs to know of a model."""

    path: Path  # what llama.cpp must be given: the file, or its first shard
    shards: tuple[Path, ...]
    architecture: str
    name: str  # general.name, or the name of the file
    n_blocks: int
    n_idle_blocks: int  # the last of them, for multi-token prediction: llama.cpp neither loads nor computes these
    n_expert: int  # 0 for a dense model
    n_used: int  # top-k, the highest of any block
    context_length: int  # tokens, as trained
    embedding_length: int
    file_bytes: int  # all shards
    tensors: tuple[TensorFacts, ...] = field(repr=False)
    expert_layers: tuple[ExpertLayer, ...] = field(repr=False)  # computed ones, by block
    idle_layers: tuple[ExpertLayer, ...] = field(repr=False)  # experts of idle blocks
    groups: tuple[LayoutGroup, ...] = field(repr=False)  # of expert_layers, in order of their first block
    attention: Attention

    @property
    def is_moe(self) -> bool:
        """There are experts to page."""
        return bool(self.expert_layers)

    @property
    def expert_bytes(self) -> int:
        """Weights, biases and scales of the computed experts."""
        return sum(layer.n_bytes for layer in self.expert_layers)

    @property
    def idle_bytes(self) -> int:
        """Everything in idle blocks: in the file, never loaded."""
        return sum(tensor.n_bytes for tensor in self.tensors if self.is_idle(tensor))

    @property
    def resident_bytes(self) -> int:
        """All that gets loaded and is no expert."""
        return sum(tensor.n_bytes for tensor in self.tensors) - self.expert_bytes - self.idle_bytes

    @property
    def input_bytes(self) -> int:
        """The part of resident_bytes that llama.cpp keeps in host memory: embedding tables."""
        return sum(tensor.n_bytes for tensor in self.tensors if tensor.name in INPUTS)

    @property
    def device_bytes(self) -> int:
        """What lies on the device beside the pools: resident_bytes without the embedding tables, but with a copy of the token embedding where it
        is the output matrix too."""
        sizes = {tensor.name: tensor.n_bytes for tensor in self.tensors}
        tied = 0 if "output.weight" in sizes else sizes.get("token_embd.weight", 0)
        return self.resident_bytes - self.input_bytes + tied

    @property
    def shared_expert_bytes(self) -> int:
        """Shared experts, which every token uses: part of resident_bytes."""
        return sum(tensor.n_bytes for tensor in self.tensors if _SHARED.fullmatch(tensor.name) and not self.is_idle(tensor))

    @property
    def types(self) -> dict[str, int]:
        """Bytes of the whole file per tensor type, most first."""
        total: Counter[str] = Counter()
        for tensor in self.tensors:
            total[tensor.type] += tensor.n_bytes
        return dict(total.most_common())

    def is_idle(self, tensor: TensorFacts) -> bool:
        """It belongs to a block for multi-token prediction."""
        match = _BLOCK.match(tensor.name)
        return match is not None and int(match[1]) >= self.n_blocks - self.n_idle_blocks


def read_facts(path: str | os.PathLike[str]) -> ModelFacts:
    """Facts of a GGUF model; any shard of a split one may be given. Reads headers only.

    Raises ModelFileError, one line that names the file, when it is missing, damaged, or of a kind that cannot be paged.
    """
    from tinyserve_gguf._ggufio import read_shards  # loads llama.cpp

    headers = read_shards(Path(path))
    keys = _Keys(headers[0])
    tensors = tuple(
        TensorFacts(tensor.name, tensor.type_id, tensor.type, tensor.shape, tensor.n_bytes, tensor.offset, shard)
        for shard, header in enumerate(headers)
        for tensor in header.tensors
    )
    if not tensors:
        raise keys.error("holds no tensors, only a vocabulary; give a file with weights")
    n_blocks = keys.count("block_count")
    if not 0 < n_blocks <= MAX_BLOCKS:
        raise keys.error(f"{keys.arch}.block_count is {n_blocks}, and llama.cpp takes 1 to {MAX_BLOCKS}")
    n_idle = _idle_blocks(keys, n_blocks, {tensor.name for tensor in tensors})
    n_expert, n_used = _routing(keys, n_blocks)
    layers = _expert_layers(keys, tensors, n_blocks, n_expert, n_used)
    computed = tuple(layer for layer in layers if layer.block < n_blocks - n_idle)
    for layer in computed:
        _check_top_k(keys, layer, n_used)
    by_layout: dict[Hashable, list[ExpertLayer]] = defaultdict(list)
    for layer in computed:
        by_layout[layer.layout].append(layer)
    return ModelFacts(
        path=headers[0].path,
        shards=tuple(header.path for header in headers),
        architecture=keys.arch,
        name=keys.name,
        n_blocks=n_blocks,
        n_idle_blocks=n_idle,
        n_expert=n_expert,
        n_used=max(n_used),
        context_length=keys.count("context_length"),
        embedding_length=keys.count("embedding_length"),
        file_bytes=sum(header.file_bytes for header in headers),
        tensors=tensors,
        expert_layers=computed,
        idle_layers=tuple(layer for layer in layers if layer.block >= n_blocks - n_idle),
        groups=tuple(LayoutGroup(layout, tuple(members)) for layout, members in by_layout.items()),
        attention=read_attention(keys.arch, headers[0].metadata, {tensor.name for tensor in tensors}),
    )


class _Keys:
    """Metadata of one model, by key without the architecture's prefix."""

    def __init__(self, header: Header) -> None:
        self._header = header
        arch, name = header.metadata.get("general.architecture"), header.metadata.get("general.name")
        if not isinstance(arch, str) or not arch:
            raise self.error("names no general.architecture, so it is no model; give the file that holds the language model")
        if header.metadata.get("general.type") == "adapter":
            raise self.error("is an adapter and no model: give it to --lora, and the file of its model as MODEL")
        self.arch = arch
        self.name = name if isinstance(name, str) and name else header.path.stem

    def error(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._header.path}: {problem}")

    def count(self, key: str, default: int | None = None) -> int:
        """A number that must be there, unless there is a default."""
        full = f"{self.arch}.{key}"
        if full not in self._header.kinds:
            if default is None:
                raise self.error(f"has no {full}, so it is no complete model (an adapter, a projector or a vocabulary?); give the file that holds it")
            return default
        value = self._header.metadata.get(full)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"{full} must be one whole number of 0 or more, and it is {_shown(value)}; convert the model again")
        return value

    def counts(self, key: str, n: int) -> list[int]:
        """One number per block; in the file either a list or one number for all. 0 if it is missing."""
        full = f"{self.arch}.{key}"
        value = self._header.metadata.get(full)
        if not isinstance(value, tuple):
            return [self.count(key, 0)] * n
        numbers = [item for item in value if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
        if len(value) != n or len(numbers) != n:
            raise self.error(f"{full} must list {n} whole numbers, one per block, and it is {_shown(value)}; convert the model again")
        return numbers


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"a list of {len(value)} values"
    return "a list" if value is None else repr(value)  # long lists and lists of strings are not read


def _idle_blocks(keys: _Keys, n_blocks: int, names: set[str]) -> int:
    """How many blocks at the end are for multi-token prediction (MTP, nextn), which llama.cpp skips unless asked for a draft."""
    n_idle = keys.count("nextn_predict_layers", 0)
    if n_idle > n_blocks:
        raise keys.error(f"{keys.arch}.nextn_predict_layers is {n_idle}, more than the {n_blocks} blocks; convert the model again")
    if keys.arch == "deepseek4" and f"blk.{n_blocks - n_idle}.nextn.eh_proj.weight" not in names:
        return 0  # llama_model_deepseek4::load_arch_hparams then counts every block as an ordinary one
    return n_idle


def _routing(keys: _Keys, n_blocks: int) -> tuple[int, list[int]]:
    """(experts, top-k of each block), after the checks that llama_model_base::load_hparams makes with GGML_ASSERT."""
    n_expert, n_used = keys.count("expert_count", 0), keys.counts("expert_used_count", n_blocks)
    if keys.arch in _DENSE_WITH_ONE_EXPERT and n_expert <= 1:
        n_expert, n_used = 0, [0] * n_blocks
    groups, groups_used = keys.count("expert_group_count", 0), keys.count("expert_group_used_count", 0)
    most, arch = max(n_used), keys.arch
    if n_expert > MAX_EXPERTS:
        raise keys.error(f"{arch}.expert_count is {n_expert}, and llama.cpp takes {MAX_EXPERTS} at most")
    if most > n_expert:
        raise keys.error(f"{arch}.expert_used_count is {most}, more than its {n_expert} experts; convert the model again")
    if n_expert and not most:
        raise keys.error(f"{arch}.expert_used_count is 0 or missing, with {n_expert} experts; convert the model again")
    if groups and groups >= n_expert:
        raise keys.error(f"{arch}.expert_group_count is {groups}, not less than its {n_expert} experts; convert the model again")
    if groups > 1 and (n_expert % groups or not 0 < groups_used < groups):
        raise keys.error(
            f"{arch} routes {n_expert} experts in {groups} groups of which {groups_used} are used, which is impossible; convert the model again"
        )
    return n_expert, n_used


def _expert_layers(keys: _Keys, tensors: tuple[TensorFacts, ...], n_blocks: int, n_expert: int, n_used: list[int]) -> list[ExpertLayer]:
    """Every expert layer in the file, by block."""
    found: dict[tuple[int, str], dict[str, dict[str, TensorFacts]]] = defaultdict(lambda: defaultdict(dict))
    for tensor in tensors:
        if _ONE_EXPERT.fullmatch(tensor.name):
            raise keys.error(
                f"has one tensor per expert ({tensor.name}), the old Mixtral layout; convert the original model with a current llama.cpp"
            )
        if match := _EXPERT.fullmatch(tensor.name):
            block, role, family, kind = int(match[1]), match[2], match[3], match[4]
            if block >= n_blocks:
                raise keys.error(f"has {tensor.name}, but {keys.arch}.block_count is {n_blocks}; convert the model again")
            found[block, family][role][kind] = tensor
    layers = []
    for (block, family), roles in sorted(found.items(), key=lambda item: (item[0][0], item[0][1] != "exps")):
        parts = tuple(_part(keys, role, roles[role]) for role in ROLES if role in roles)
        _check_parts(keys, block, family, parts)
        n = parts[0].weight.ne(2)
        expected = n_expert if family == "exps" else n_expert // max(1, keys.count("experts_per_group", 0))
        if n != expected:
            raise keys.error(f"block {block} has {n} experts in {parts[0].weight.name}, and {keys.arch}.expert_count asks for {expected}")
        top_k = n_used[block if keys.arch in _PER_BLOCK_TOP_K else 0]
        layers.append(ExpertLayer(block, family, n, top_k if family == "exps" else min(top_k, n), parts))
    return layers


def _part(keys: _Keys, role: str, tensors: dict[str, TensorFacts]) -> PartFacts:
    weight, bias, scale = (tensors.get(kind) for kind in ("weight", "bias", "scale"))
    if weight is None:
        name = next(iter(tensors.values())).name
        raise keys.error(f"has {name} without the weight it belongs to; convert the model again")
    if len(weight.shape) > 3 or 0 in weight.shape:
        raise keys.error(f"{weight.name} has the shape {_by(weight.shape)}, which holds no experts; convert the model again")
    for tensor, shape in ((bias, (weight.ne(1), weight.ne(2))), (scale, (weight.ne(2),))):
        if tensor and (tensor.type != "F32" or [tensor.ne(i) for i in range(4)] != [*shape, 1, 1, 1][:4]):
            raise keys.error(f"{tensor.name} must be F32 {_by(shape)} and is {tensor.type} {_by(tensor.shape)}; convert the model again")
    return PartFacts(role, weight, bias, scale)


def _check_parts(keys: _Keys, block: int, family: str, parts: tuple[PartFacts, ...]) -> None:
    """The parts make up whole experts: all of the same number, with a way up and a way down."""
    roles = {part.role for part in parts}
    first = parts[0].weight
    for part in parts:
        if part.weight.ne(2) != first.ne(2):
            raise keys.error(f"{first.name} holds {first.ne(2)} experts but {part.weight.name} holds {part.weight.ne(2)}; convert the model again")
    if "down" not in roles or not roles & {"up", "gate_up"}:
        missing = "ffn_down" if "down" not in roles else "ffn_up"
        raise keys.error(f"block {block} has expert weights but no {missing}_{family}.weight; convert the model again")
    if "gate_up" in roles and roles & {"gate", "up"}:
        raise keys.error(f"block {block} has a fused ffn_gate_up_{family} beside a separate gate or up; convert the model again")


def _check_top_k(keys: _Keys, layer: ExpertLayer, n_used: list[int]) -> None:
    """llama.cpp would divide by zero, or add up experts it never computed."""
    listed, arch = n_used[layer.block], keys.arch
    if not listed:
        raise keys.error(f"{arch}.expert_used_count is 0 for block {layer.block}, which has experts; convert the model again")
    if listed != n_used[0] and arch not in _PER_BLOCK_TOP_K:
        raise keys.error(
            f"{arch}.expert_used_count is {listed} for block {layer.block} and {n_used[0]} for block 0, "
            f"and llama.cpp takes one number for all blocks of {arch}; convert the model again"
        )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
