"""`bench MODEL`: a table of speeds, hit rates and bounds, and llama.cpp's own speeds beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from tinyserve_gguf.choices import MISSES, POLICIES, WARM_STARTS
from tinyserve_gguf.cli.interrupt import Interrupt
from tinyserve_gguf.cli.lines import decoded
from tinyserve_gguf.cli.model_argument import model_argument
from tinyserve_gguf.cli.options import (
    INT32_MAX,
    ExpertCache,
    FiniteRange,
    device_option,
    engine_option,
    miss_threads_option,
    tensor_split_option,
    threads_option,
    ubatch_option,
)
from tinyserve_gguf.cli.output import is_quiet
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.outfile import OutputFile

EPILOG = """\b
Examples:
  bench model.gguf --expert-cache all,50%,25% --baseline       the cache against llama.cpp itself
  bench model.gguf -p 2048 -n 64 --depth 0,4096                tests as llama-bench has them
  bench model.gguf -p 0 --policy lfru,lru --prompt-file a.txt  decode alone, on real text
  bench model.gguf -p 0 --miss fetch,cpu --miss-admit 4,16     misses computed by the CPU instead
  bench model.gguf --link-gbps 13.8 --csv --output slow.csv    what a slower link would do
  bench model.gguf -p 0 --expert-cache 25% --profile           where the time of a token goes
  bench model.gguf -p 0 -n 0 --warm both                       the first tokens of a session, cold and warm
  bench model.gguf -p 0 -n 0 --needle 30000                    does it find a number in a long prompt?
  bench model.gguf -p 0 -d 0,8192 --window 0,2048 --plot a.png decode over depth, with a window and without
"""


def list_of(convert: Callable[[Any, click.Parameter | None, click.Context | None], Any]) -> Callable[[click.Context, click.Parameter, str], Any]:
    """A click callback: values with commas between them, each converted, as a tuple."""

    def split(context: click.Context, parameter: click.Parameter, value: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in value.split(",")]
        if not all(parts):
            raise click.BadParameter(f"{value!r} is not a list like A,B,C", context, parameter)
        return tuple(convert(part, parameter, context) for part in parts)

    return split


counts = list_of(click.IntRange(0, INT32_MAX).convert)


@click.command(epilog=EPILOG)
@model_argument()
@click.option(
    "-p", "--n-prompt", "prompts", callback=counts, default="512", show_default=True, metavar="LIST", help="Tokens of the prompts; 0 = none."
)
@click.option("-n", "--n-gen", "replies", callback=counts, default="128", show_default=True, metavar="LIST", help="Tokens of the replies; 0 = none.")
@click.option(
    "-d",
    "--depth",
    "depths",
    callback=counts,
    default="0",
    show_default=True,
    metavar="LIST",
    help="Tokens that are in the context before each test.",
)
@click.option(
    "--expert-cache",
    "expert_caches",
    callback=list_of(ExpertCache().convert),
    default="auto",
    show_default=True,
    metavar="LIST",
    help="Experts kept on the device: all, a count N, a share 25%, a size 6GiB, or auto.",
)
@click.option(
    "--policy",
    "policies",
    callback=list_of(click.Choice(POLICIES).convert),
    default="lfru",
    show_default=True,
    metavar="LIST",
    help="Eviction policies.",
)
@click.option(
    "--window",
    "windows",
    callback=counts,
    default="0",
    show_default=True,
    metavar="LIST",
    help="Go on without end in a context of W tokens: the oldest leave; 0 = keep all.",
)
@click.option(
    "--miss",
    "misses",
    callback=list_of(click.Choice(MISSES).convert),
    default="fetch",
    show_default=True,
    metavar="LIST",
    help="Experts that decode misses: fetch them, let the cpu compute them, split them between both, keep whole layers on either side, or auto.",
)
@click.option(
    "--miss-admit",
    "miss_admits",
    callback=lambda context, parameter, value: counts(context, parameter, value) if value else (),
    metavar="LIST",
    help="Of the misses that the CPU computes at most one in N enters the cache; 0 = none.  [default: 4]",
)
@miss_threads_option
@device_option
@tensor_split_option
@engine_option
@ubatch_option
@threads_option
@click.option("-r", "--repeat", type=click.IntRange(1, 1000), default=3, show_default=True, metavar="N", help="Times each test is measured.")
@click.option(
    "--warmup", type=click.IntRange(0, INT32_MAX), default=200, show_default=True, metavar="N", help="Tokens decoded before decoding is timed."
)
@click.option("--baseline", is_flag=True, help="Also llama.cpp itself: everything on the device, all experts on the CPU, the best --n-cpu-moe.")
@click.option("--prompt-file", type=click.Path(path_type=Path), metavar="FILE", help="Read this text instead of random tokens.")
@click.option("--link-gbps", type=FiniteRange(min=0, min_open=True), metavar="X", help="Throttle the link to X GB/s.")
@click.option(
    "--warm",
    type=click.Choice(WARM_STARTS),
    default="off",
    show_default=True,
    help="Also time the first 64 tokens behind a load: from a cache that a hot list filled (on), or from that and from an empty one (both).",
)
@click.option("--needle", type=click.IntRange(0, INT32_MAX), default=0, metavar="N", help="Hide a number in a prompt of N tokens and ask for it.")
@click.option("--profile", is_flag=True, help="Also where the time goes: attention, lookup, copy and experts of every layer.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, metavar="N", help="Seed of random tokens and of the needle.")
@click.option("--json", "style", flag_value="json", help="One JSON object.")
@click.option("--csv", "style", flag_value="csv", help="One line a test, with a header.")
@click.option("--markdown", "style", flag_value="markdown", default=True, help="A table.  [default]")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Also draw decode speed over depth; needs the extra plot.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write to FILE instead of stdout.")
def bench(model: str, style: str, output: Path | None, plot: Path | None, prompt_file: Path | None, **options: Any) -> None:
    """Measure the GGUF file MODEL: a line per expert cache, policy, test and depth.

    The tests are llama-bench's: pp reads a prompt at once, tg decodes token by token. Bounds are what the link and the compute time of this very run
    allow, with copies and compute in turn (serial) and at the same time (overlapped).
    """
    from tinyserve_gguf import bench_table
    from tinyserve_gguf.bench import Bench
    from tinyserve_gguf.bench_options import BenchOptions
    from tinyserve_gguf.bench_plot import as_png, check_plot

    if options["profile"] and style == "csv":
        raise OptionError("--profile has no place in --csv, which has one line a test: leave one of them out")
    as_text = {"json": bench_table.as_json, "csv": bench_table.as_csv, "markdown": bench_table.as_markdown}[style]
    file = OutputFile(output, "--output") if output else None
    picture = OutputFile(plot, "--plot") if plot else None
    for name in ("prompts", "replies"):
        options[name] = tuple(n for n in options[name] if n)
    if plot:
        check_plot(options["depths"], options["replies"])
    if prompt_file:
        options |= {"text": read_text(prompt_file), "text_name": prompt_file.name}
    with Interrupt("ask") as interrupt, progress_bar() as show:
        found = Bench(BenchOptions(path=model, **options), ProgressWatch(show, interrupt))
        try:
            found.run()
        finally:
            if any(row.error is None for row in found.rows):
                report = found.report()
                text = as_text(report)
                if file:
                    file.write_text(text + "\n")
                else:
                    click.echo(text)
                if picture:  # last: what goes wrong there must not cost the figures
                    picture.write_bytes(as_png(report.rows, f"{report.model['name']} on {report.setup['device_description']}"))


def read_text(path: Path) -> str:
    """The text of --prompt-file. OptionError if there is none."""
    try:
        text = decoded(path.read_bytes(), f"--prompt-file {path}")
    except OSError as error:
        raise OptionError(f"--prompt-file {path}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise OptionError(f"--prompt-file {path}: there is no text in it")
    return text


class ProgressWatch:
    """The `Watch` of a terminal."""

    def __init__(self, show: Callable[[str, float], None], interrupt: Interrupt) -> None:
        self.show = show
        self._interrupt = interrupt

    def stopped(self) -> bool:
        return self._interrupt.requested


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A function that shows what happens on stderr, if that is a terminal. It draws when called and at no other time: a thread that redraws would
    take time from what is measured."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal or is_quiet()) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda text, done: progress.update(task, description=text, completed=done, refresh=True)
