"""From a plan to a pager: pools, layers and the small tables of the file, ready for llama.cpp's loader."""

from __future__ import annotations

from tinyserve_gguf._shim import Device, Pager, Part
from tinyserve_gguf.dryrun import EXPERT_PATTERN as EXPERT_PATTERN
from tinyserve_gguf.facts import ExpertLayer, ModelFacts, PartFacts, TensorFacts
from tinyserve_gguf.plan import Plan

Layers = dict[tuple[int, str], tuple[int, ExpertLayer]]  # (block, family) -> (index in the pager, facts)


def open_pager(plan: Plan, device: Device, policy: str, engine: str, cpu_threads: int | None, *, beside: Pager | None = None) -> tuple[Pager, Layers]:
    """A pager with its slots allocated, and its layers. `cpu_threads`: for misses that the CPU computes, None if it never does. `beside`: the first
    pager of the same model, which has another device. CapacityError if the slots do not fit."""
    layers: Layers = {}
    pager = Pager(device, policy, engine)
    try:
        if beside:
            pager.join(beside)
        for shard in plan.facts.shards:
            pager.add_file(shard)
        for pool in plan.pools:
            index = pager.add_pool(pool.n_slots, pool.n_stages)
            for layer in pool.group.layers:
                parts = [_part(plan.facts, part) for part in layer.parts]
                layers[layer.block, layer.family] = pager.add_layer(index, layer.n_expert, layer.n_used, parts), layer
        if cpu_threads:
            pager.use_cpu(cpu_threads)
        pager.commit(plan.host.limit)
    except BaseException:
        pager.close()
        raise
    return pager, layers


def _part(facts: ModelFacts, part: PartFacts) -> Part:
    w = part.weight
    return Part(
        weight=w.name,
        type_id=w.type_id,
        shard=w.shard,
        offset=w.offset,
        ne0=w.ne(0),
        ne1=w.ne(1),
        bias=part.bias.name if part.bias else None,
        bias_data=_table(facts, part.bias),
        scale=part.scale.name if part.scale else None,
        scale_data=_table(facts, part.scale),
    )


def _table(facts: ModelFacts, tensor: TensorFacts | None) -> bytes | None:
    """A small F32 table of the file: per-expert biases or scales."""
    if tensor is None:
        return None
    with facts.shards[tensor.shard].open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.n_bytes)
