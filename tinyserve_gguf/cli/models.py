"""`models`: the models that are known by name, where they are, and whether they would run here."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tinyserve_gguf.catalog import KnownModel
    from tinyserve_gguf.estimate import Estimate
    from tinyserve_gguf.machine import Machine

PLAIN_WIDTH = 200  # columns, where the output is no terminal


@click.command()
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models(name: str | None, as_json: bool) -> None:
    """List the models that are known by name, or those whose name holds NAME: what they are, whether they are on this machine, whether they would run
    here and about how fast.

    The numbers are those of the file where a cache has it, else of the catalogue. MODEL of the other commands may be such a name; NAME:QUANT takes
    another quant than the first.

    \b
    Examples:
      tinyserve-gguf models
      tinyserve-gguf models qwen --json
      tinyserve-gguf chat qwen3-30b-a3b:UD-Q4_K_XL
    """
    from tinyserve_gguf.catalog import catalogue
    from tinyserve_gguf.cli.outlook import Asked, machine_of
    from tinyserve_gguf.errors import OptionError

    chosen = [model for model in catalogue().values() if name is None or name.lower() in model.alias]
    if not chosen:
        raise OptionError(f"no known model has {name!r} in its name; models lists all of them")
    machine, notes = machine_of(Asked())
    rows = [describe(model, machine) for model in chosen]
    if as_json:
        click.echo(json.dumps({"machine": asdict(machine), "models": rows}, indent=2))
    else:
        _print(rows, machine, notes)


def describe(model: KnownModel, machine: Machine) -> dict[str, Any]:
    """Plain values, for JSON. `bytes`, `window` and the estimate are None where nothing is known."""
    from tinyserve_gguf.hub import Hub, Wanted

    quant, path = model.default_quant, None
    for known in model.quants:
        if path := Hub().cached(Wanted(model.repository, known, model.quants[known])):
            quant = known
            break
    if not path and quant not in model.bytes:
        quant = next(iter(model.bytes), quant)  # then that of which a size is known
    found = _estimate(model, quant, path, machine)
    return {
        "name": model.alias,
        "title": model.title,
        "repository": model.repository,
        "quant": quant,
        "quants": list(model.quants),
        "bytes": model.bytes.get(quant),
        "file": str(path) if path else None,
        "geometry": asdict(model.geometry),
        "trained": model.trained,
        "context": model.context or model.trained,
        "window": model.window,
        "verified": model.verified,
        "fits": found.fits if found else None,
        "estimate": found.line() if found else None,
        "decode_tok_s": found.decode if found and found.fits else None,
    }


def _estimate(model: KnownModel, quant: str, path: Path | None, machine: Machine) -> Estimate | None:
    """At the context that the catalogue recommends."""
    from tinyserve_gguf.errors import ModelFileError
    from tinyserve_gguf.estimate import Estimate, estimate
    from tinyserve_gguf.facts import read_facts

    try:
        facts = read_facts(path) if path else model.facts(quant)
    except ModelFileError as error:
        return Estimate(False, str(error))
    return estimate(facts, machine, n_ctx=model.context or model.trained) if facts else None


def _short(estimate: str | None) -> str:
    """A refusal without its sum, which --json has."""
    if estimate is None:
        return "the size of its files is not known"
    total = re.match(r"no: .* = ([\d.]+ \w+, and .*)", estimate)
    return f"no: needs {total[1]}" if total else estimate


def _print(rows: list[dict[str, Any]], machine: Machine, notes: list[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tinyserve_gguf.plan import size

    console = Console(markup=False, emoji=False, highlight=False)
    plain = not console.is_terminal
    console = Console(markup=False, emoji=False, highlight=False, width=PLAIN_WIDTH) if plain else console
    table = Table(box=None if plain else box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for title in ("name", "experts", "quant", "size", "context", "window", "here"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("size", "context") else "left")
    table.add_column("fits here")
    for row in rows:
        shape = row["geometry"]
        table.add_row(
            row["name"],
            f"{shape['moe_blocks']} x {shape['experts']}, top-{shape['used']}",
            row["quant"],
            size(row["bytes"]) if row["bytes"] else "?",
            f"{row['context']:,}",
            row["window"] or "?",
            "yes" if row["file"] else "",
            _short(row["estimate"]),
        )
    console.print(table)
    console.print()
    memory = f"{size(machine.vram)} of free GPU memory, " if machine.has_gpu else "no GPU, "
    lines = [f"estimates for {machine.name}: {memory}{size(machine.ram)} of free host memory; context: the recommended one, -c sets it", *notes]
    for line in [*lines, "no entry was run with the published weights: verify MODEL --quick proves a file on this machine"]:
        console.print(line)
