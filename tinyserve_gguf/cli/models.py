"""`models`: the catalogue of known models."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def models(as_json: bool) -> None:
    """List the models that are known by name."""
    click.echo(as_json)
