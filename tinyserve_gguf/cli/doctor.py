"""`doctor [MODEL]`: what of this machine works, and how to mend the rest."""

from __future__ import annotations

import json
from datetime import date

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinyserve_gguf.cli.model_argument import model_argument

EXIT_BROKEN = 1
COLOURS = {"ok": "green", "warning": "yellow", "broken": "red"}
PLAIN_WIDTH = 160  # columns, where the output is no terminal

EPILOG = """\b
Examples:
  doctor                what of this machine works
  doctor model.gguf     and how fast its file is read
  doctor --json         for programs
"""


@click.command(epilog=EPILOG)
@model_argument(required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(model: str | None, as_json: bool) -> None:
    """Say what of this machine works, what is slow, what is broken and how to mend it. With MODEL also how fast its file is read.

    Takes some seconds, as it measures: the link, memory, expert matmuls. `info` uses what it found. Exit code 1 if something is broken.
    """
    from tinyserve_gguf.doctor import examine
    from tinyserve_gguf.machine import MEMORY, Measured, remember

    errors = Console(stderr=True)
    with errors.status("looking") as status:
        report = examine(model, lambda what: status.update(f"looking at: {what}"))
    note = remember(Measured(report.device, date.today().isoformat(), report.rates)) if report.rates else None
    if as_json:
        click.echo(json.dumps(report.as_dict() | {"remembered": None if note or not report.rates else str(MEMORY)}, indent=2))
    else:
        console = Console(markup=False, emoji=False, highlight=False)
        if not console.is_terminal:
            console = Console(markup=False, emoji=False, highlight=False, width=PLAIN_WIDTH)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for _ in range(3):
            table.add_column(overflow="fold")
        for finding in report.findings:
            table.add_row(Text(finding.status, COLOURS[finding.status]), finding.name, finding.text)
            if finding.fix:
                table.add_row("", "", f"mend it: {finding.fix}")
        console.print(table)
        console.print(f"\n{report.works}")
        if report.rates and not note:
            console.print(f"measured rates are kept in {MEMORY}; info uses them")
    if note:
        click.echo(note, err=True)
    if report.is_broken:
        click.get_current_context().exit(EXIT_BROKEN)
