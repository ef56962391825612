"""`completion SHELL`: what makes a shell complete commands, options, names of models and files."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
PROGRAM = "tinyserve-gguf"


@click.command()
@click.argument("shell", type=click.Choice(tuple(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script for SHELL that completes commands, options, names of models and files.

    \b
      bash: echo 'eval "$(tinyserve-gguf completion bash)"' >> ~/.bashrc
      zsh:  echo 'eval "$(tinyserve-gguf completion zsh)"' >> ~/.zshrc
      fish: tinyserve-gguf completion fish > ~/.config/fish/completions/tinyserve-gguf.fish
    """
    variable = f"_{PROGRAM.replace('-', '_').upper()}_COMPLETE"  # what click looks for when the program is called as PROGRAM
    script = SHELLS[shell](context.find_root().command, {}, PROGRAM, variable)
    click.echo(script.source_template % script.source_vars())
