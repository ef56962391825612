"""`config show`: what holds for the options of a command, and where it comes from."""

from __future__ import annotations

import json
from typing import Any

import click

from tinyserve_gguf.cli.model_argument import ModelName, called
from tinyserve_gguf.cli.settings import META, Settings, config_path, options_of
from tinyserve_gguf.errors import OptionError


@click.command()
@click.argument("action", metavar="show", type=click.Choice(("show",)))
@click.argument("command_name", metavar="[COMMAND]", required=False)
@click.argument("model", metavar="[MODEL]", type=ModelName(), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def config(context: click.Context, action: str, command_name: str | None, model: str | None, as_json: bool) -> None:  # noqa: ARG001 (show is all)
    """Show what the config file sets, or what holds for COMMAND (with MODEL, a file or a name) and where that comes from.

    The file is ~/.config/tinyserve-gguf/config.toml, or under XDG_CONFIG_HOME. Names are those of the long options; what stands at the top holds for
    every command that has the option, a table [chat] for that command, a table [model."NAME"] for that model. The command line wins over all.

    \b
    Example:
      expert-cache = "50%"
      [model."gpt-oss-20b"]
      ctx-size = 16384
    """
    settings = context.meta.get(META)
    settings = settings if isinstance(settings, Settings) else Settings(None)
    rows = _of_command(context, settings, command_name, model) if command_name else _of_file(settings)
    where = str(settings.path or f"{config_path()} (there is no such file)")
    if as_json:
        click.echo(json.dumps({"file": str(settings.path) if settings.path else None, "values": rows}, indent=2, ensure_ascii=False))
        return
    click.echo(where)
    cells = [(row["option"], "" if row["value"] is None else str(row["value"]), row["from"]) for row in rows]
    widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(2)]
    for option, value, place in cells:
        click.echo(f"{option:{widths[0]}}  {value:{widths[1]}}  {place}")


def _of_file(settings: Settings) -> list[dict[str, Any]]:
    sections = [settings.top, *settings.models.values()]
    return [{"option": key, "value": value.given, "from": settings.place(value)} for section in sections for key, value in section.all()]


def _of_command(context: click.Context, settings: Settings, name: str, model: str | None) -> list[dict[str, Any]]:
    group = context.find_root().command
    command = group.get_command(context, name) if isinstance(group, click.Group) else None
    if command is None:
        raise OptionError(f"there is no command {name!r}")
    options = options_of(command)
    values = settings.values(name, options, called(model, is_repository=False) if model else ())
    settings.defaults(name, options)  # refuses what no option takes
    return [
        {"option": key, "value": values[key].given, "from": settings.place(values[key])}
        if key in values
        else {"option": key, "value": option.to_info_dict()["default"], "from": "default"}
        for key, option in options.items()
    ]
