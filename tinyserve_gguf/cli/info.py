"""`info MODEL`: what a GGUF's header says, what would be placed where, and how fast it would be, here or on another machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.table import Table

from tinyserve_gguf.choices import KV_TYPES
from tinyserve_gguf.cli.model_argument import model_argument
from tinyserve_gguf.cli.options import (
    FiniteRange,
    ctx_size_option,
    expert_cache_option,
    kv_type_option,
    kv_type_v_option,
    ubatch_option,
    vram_reserve_option,
)
from tinyserve_gguf.errors import OptionError, TinyserveError
from tinyserve_gguf.facts import ExpertLayer, LayoutGroup, ModelFacts, PartFacts, read_facts
from tinyserve_gguf.plan import size

if TYPE_CHECKING:
    from tinyserve_gguf.check import Broken
    from tinyserve_gguf.cli.outlook import Asked, Outlook

F = TypeVar("F", bound=Callable[..., Any])

EXIT_BROKEN = 1
PLAIN_WIDTH = 160  # columns, where the output is no terminal


def _rate_option(name: str, what: str) -> Callable[[F], F]:
    return click.option(name, type=FiniteRange(min=0, min_open=True), metavar="X", help=f"{what}, GB/s.  [default: as doctor measured, or assumed]")


@click.command()
@model_argument()
@click.option("--vram", type=FiniteRange(min=0), metavar="GiB", help="Free GPU memory of the machine; 0 = no GPU.  [default: this machine's]")
@vram_reserve_option
@click.option("--ram", type=FiniteRange(min=0, min_open=True), metavar="GiB", help="Host memory of the machine.  [default: this machine's]")
@_rate_option("--link-gbps", "Its link from host to GPU")
@_rate_option("--mem-gbps", "Its host memory")
@_rate_option("--gpu-gbps", "Its GPU memory")
@ctx_size_option
@kv_type_option
@kv_type_v_option
@ubatch_option
@expert_cache_option
@click.option("--check", is_flag=True, help="Also read every weight and name those that hold NaN: exit code 1 if there are any.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(model: str, check: bool, as_json: bool, **options: Any) -> None:
    """Say what MODEL, a GGUF file, is made of, and whether and how fast it would run. Of a split model, any shard will do.

    Reads the header only, so it is quick however large the file is, and plans for the device that `chat` would take, or for a machine that --vram,
    --ram and rates describe. With --check it reads the whole file, for blocks with a scale that is no number, as quantising with a broken imatrix
    leaves them.

    \b
    Examples:
      tinyserve-gguf info qwen3-30b-a3b-q4_k_m.gguf
      tinyserve-gguf info --json gpt-oss-120b-00001-of-00003.gguf
      tinyserve-gguf info qwen3-30b-a3b-q4_k_m.gguf --vram 8 --ram 32 -c 16384 --link-gbps 12
    """
    from tinyserve_gguf.cli.outlook import Asked, outlook

    facts, asked = read_facts(model), Asked(**options)
    if asked.vram == 0 and (asked.link_gbps or asked.gpu_gbps or asked.vram_reserve):
        raise OptionError("--vram 0 is a machine without a GPU: drop --link-gbps, --gpu-gbps and --vram-reserve")
    found = outlook(facts, asked)
    broken = _broken(facts) if check else None
    if as_json:
        more = {} if broken is None else {"broken": [asdict(one) for one in broken]}
        click.echo(json.dumps(facts_dict(facts, asked) | {"estimate": found.as_dict()} | more, indent=2))
    else:
        _print_all(facts, asked, found, broken)
    if broken:
        click.get_current_context().exit(EXIT_BROKEN)


def _broken(facts: ModelFacts) -> list[Broken]:
    from tinyserve_gguf.check import find_broken  # loads llama.cpp
    from tinyserve_gguf.cli.bench import progress_bar

    with progress_bar() as show:
        return find_broken(facts, show)


def _print_all(facts: ModelFacts, asked: Asked, found: Outlook, broken: list[Broken] | None) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, highlight=False, width=PLAIN_WIDTH)
    _print_report(console, facts, asked, found)
    if broken is not None:
        console.print("\ncheck", style="bold")
        for line in [one.line() for one in broken] or ["every weight is a finite number"]:
            console.print(f"  {line}")


def placement_lines(facts: ModelFacts) -> list[str]:
    """Which bytes go to the host pool, to the device, and stay in the file; what holds on every device."""
    shared = f", of which {size(facts.shared_expert_bytes)} shared experts" if facts.shared_expert_bytes else ""
    lines = [f"device: {size(facts.device_bytes)}{shared}; and the KV cache and compute buffers"]
    if facts.is_moe:
        n_experts = sum(group.n_experts for group in facts.groups)
        each = ", ".join(sorted({size(group.bytes_per_expert) for group in facts.groups}))
        lines.insert(0, f"host pool: {size(facts.expert_bytes)} in {n_experts:,} experts of {each}; the device caches them in slots")
    else:
        lines.insert(0, "host pool: nothing; a dense model has no experts to page")
    lines.append(f"host memory: {size(facts.input_bytes)} embedding tables, which llama.cpp reads row by row on the CPU")
    if facts.idle_bytes:
        lines.append(f"not loaded: {size(facts.idle_bytes)} in blocks for multi-token prediction")
    return lines


def plan_lines(facts: ModelFacts, asked: Asked) -> list[str]:
    """What `chat` would decide on this machine with these options, or why it would refuse."""
    from tinyserve_gguf.context import ContextSpec
    from tinyserve_gguf.placement import plan_for  # loads the native library
    from tinyserve_gguf.plan import Budget

    try:
        context = ContextSpec.of(asked.n_ctx, None, None, asked.kv_type, asked.kv_type_v, "auto")
        budget = Budget.of(reserve=asked.vram_reserve)
        plan, _ = plan_for(facts, expert_cache=asked.expert_cache, context=context, n_ubatch=asked.n_ubatch, budget=budget)
    except TinyserveError as error:
        return [f"chat would refuse: {error}"]
    return [*plan.lines(), plan.host_line()] if facts.is_moe else plan.lines()


def context_lines(facts: ModelFacts) -> list[str]:
    """What the KV cache of the model takes, and how a window is kept with keys of each type."""
    from tinyserve_gguf.kv import why_no_shift, why_no_window

    if problem := why_no_window(facts.attention):
        return [f"--window: impossible, {problem}"]
    reasons: dict[str, list[str]] = {}
    for name in KV_TYPES:
        reasons.setdefault(why_no_shift(facts.attention, name, lambda _kind, _length: True), []).append(name)
    lines = []
    for reason, names in reasons.items():
        types = "every type" if len(names) == len(KV_TYPES) else ", ".join(names)
        how = f"tokens leave and positions stay: {reason}" if reason else "tokens leave and positions move down"
        lines.append(f"--window, {types}: {how}")
    if facts.attention.sliding_window:
        lines.append(f"sliding window of {facts.attention.sliding_window} in some blocks; their cache is kept as long as the others")
    if facts.attention.is_recurrent:
        lines.append("recurrent state in some blocks; it also remembers what left a window")
    return lines


def facts_dict(facts: ModelFacts, asked: Asked) -> dict[str, object]:
    """The facts as JSON holds them. Sizes in bytes."""
    return {
        "path": str(facts.path),
        "shards": [str(path) for path in facts.shards],
        "architecture": facts.architecture,
        "name": facts.name,
        "n_blocks": facts.n_blocks,
        "n_idle_blocks": facts.n_idle_blocks,
        "n_expert": facts.n_expert,
        "n_used": facts.n_used,
        "context_length": facts.context_length,
        "embedding_length": facts.embedding_length,
        "is_moe": facts.is_moe,
        "file_bytes": facts.file_bytes,
        "expert_bytes": facts.expert_bytes,
        "resident_bytes": facts.resident_bytes,
        "device_bytes": facts.device_bytes,
        "input_bytes": facts.input_bytes,
        "shared_expert_bytes": facts.shared_expert_bytes,
        "idle_bytes": facts.idle_bytes,
        "types": facts.types,
        "groups": [
            {
                "bytes_per_expert": group.bytes_per_expert,
                "n_experts": group.n_experts,
                "parts": [_part_dict(part) for part in group.layers[0].parts],
                "layers": [_layer_dict(layer) for layer in group.layers],
            }
            for group in facts.groups
        ],
        "idle_layers": [_layer_dict(layer) for layer in facts.idle_layers],
        "placement": placement_lines(facts),
        "context": context_lines(facts),
        "plan": plan_lines(facts, asked),
    }


def _layer_dict(layer: ExpertLayer) -> dict[str, object]:
    return {
        "block": layer.block,
        "family": layer.family,
        "n_expert": layer.n_expert,
        "n_used": layer.n_used,
        "bytes_per_expert": layer.bytes_per_expert,
        "bytes": layer.n_bytes,
    }


def _part_dict(part: PartFacts) -> dict[str, object]:
    return {
        "role": part.role,
        "type": part.weight.type,
        "ne0": part.weight.ne(0),
        "ne1": part.weight.ne(1),
        "bias": part.bias is not None,
        "scale": part.scale is not None,
        "bytes_per_expert": part.bytes_per_expert,
    }


# ---- report ---------------------------------------------------------------------------------------------------------------------------------


def _print_report(console: Console, facts: ModelFacts, asked: Asked, found: Outlook) -> None:
    summary = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    summary.add_column()
    summary.add_column(overflow="fold")  # a long path is shown whole
    for key, value in _summary(facts):
        summary.add_row(key, value)
    console.print(summary)
    if facts.is_moe:
        console.print(_group_table(console, facts.groups))
    console.print(_type_table(console, facts))
    console.print("\nplacement", style="bold")
    for line in placement_lines(facts):
        console.print(f"  {line}")
    console.print("\ncontext", style="bold")
    for line in context_lines(facts):
        console.print(f"  {line}")
    if not asked.is_elsewhere:
        console.print("\nchat on this machine", style="bold")
        for line in plan_lines(facts, asked):
            console.print(f"  {line}")
    console.print(f"\n{found.title}", style="bold")
    for line in found.lines(with_plan=asked.is_elsewhere):
        console.print(f"  {line}")


def _summary(facts: ModelFacts) -> list[tuple[str, str]]:
    first, *others = facts.shards
    rows = [
        ("model", f"{facts.name} ({facts.architecture})"),
        (
            "file",
            click.format_filename(first)
            + (f" and {len(others)} more shard{'s' * (len(others) > 1)}" if others else "")
            + f", {size(facts.file_bytes)}",
        ),
        ("context", f"{facts.context_length:,} tokens trained, embedding {facts.embedding_length:,}"),
    ]
    idle = f", the last {facts.n_idle_blocks} for multi-token prediction (not loaded)" if facts.n_idle_blocks else ""
    rows.append(("blocks", f"{facts.n_blocks}{idle}"))
    if facts.is_moe:
        rows.append(("MoE blocks", ranges({layer.block for layer in facts.expert_layers})))
        rows.append(("experts", _experts(facts)))
        parts = [part for layer in facts.expert_layers for part in layer.parts]
        extra = [name for name, there in (("biases", any(p.bias for p in parts)), ("scales", any(p.scale for p in parts))) if there]
        rows.append(("per expert", " and ".join(["weights", *extra])))
        rows.append(("shared experts", size(facts.shared_expert_bytes) if facts.shared_expert_bytes else "none"))
    else:
        rows.append(("experts", "none: a dense model, there is nothing to page"))
    return rows


def _experts(facts: ModelFacts) -> str:
    """ "128 per block, top-8", for every combination that occurs."""
    kinds = {(layer.family, layer.n_expert, layer.n_used): None for layer in facts.expert_layers}
    return "; ".join(f"{n} per block, top-{k}{'' if family == 'exps' else f' ({family})'}" for family, n, k in kinds)


def _group_table(console: Console, groups: Iterable[LayoutGroup]) -> Table:
    table = _table(console, "layout groups (layers that can share a pool)")
    table.add_column("blocks")
    table.add_column("parts of one expert")
    for title in ("experts", "each", "together"):
        table.add_column(title, justify="right")
    for group in groups:
        parts = ", ".join(_part_text(part) for part in group.layers[0].parts)
        total = sum(layer.n_bytes for layer in group.layers)
        table.add_row(ranges({layer.block for layer in group.layers}), parts, f"{group.n_experts:,}", size(group.bytes_per_expert), size(total))
    return table


def _part_text(part: PartFacts) -> str:
    extra = ("+bias" if part.bias else "") + ("+scale" if part.scale else "")
    return f"{part.role} {part.weight.type} {part.weight.ne(0)}x{part.weight.ne(1)}{extra}"


def _type_table(console: Console, facts: ModelFacts) -> Table:
    expert_types = {part.weight.type for layer in facts.expert_layers for part in layer.parts}
    table = _table(console, "tensor types")
    table.add_column("type")
    table.add_column("bytes", justify="right")
    table.add_column("of the file", justify="right")
    table.add_column("used by experts")
    total = sum(facts.types.values())
    for name, n_bytes in facts.types.items():
        table.add_row(name, size(n_bytes), f"{100 * n_bytes / total:.1f} %", "yes" if name in expert_types else "")
    return table


def _table(console: Console, title: str) -> Table:
    """Ruled on a terminal, columns alone elsewhere."""
    return Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD if console.is_terminal else None, padding=(0, 2, 0, 0)
    )


def ranges(numbers: Iterable[int]) -> str:
    """ "0-2, 5" for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
