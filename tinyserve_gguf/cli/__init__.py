"""The command line: the group of commands, and the one place where errors become a line and an exit code.

A command's module is imported when the command is called, and llama.cpp when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import click

from tinyserve_gguf.errors import EXIT_BAD_INPUT, TinyserveError

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count

EPILOG = """\b
Examples:
  tinyserve-gguf chat "$(tinyserve-gguf demo)"             make a small MoE model and talk to it
  tinyserve-gguf chat model.gguf --expert-cache 25%        a quarter of the experts on the device
  tinyserve-gguf chat model.gguf -p "Name a river."        one answer, on stdout
  tinyserve-gguf serve model.gguf --parallel 2             OpenAI's API on http://127.0.0.1:8080
  tinyserve-gguf info model.gguf --json                    what the file holds and what would go where
  tinyserve-gguf bench model.gguf --baseline               how fast, and llama.cpp beside it
  tinyserve-gguf verify model.gguf --quick                 are the logits really the same?
"""


def _chat() -> click.Command:
    from tinyserve_gguf.cli.chat import chat

    return chat


def _info() -> click.Command:
    from tinyserve_gguf.cli.info import info

    return info


def _demo() -> click.Command:
    from tinyserve_gguf.cli.demo import demo

    return demo


def _doctor() -> click.Command:
    from tinyserve_gguf.cli.doctor import doctor

    return doctor


def _bench() -> click.Command:
    from tinyserve_gguf.cli.bench import bench

    return bench


def _serve() -> click.Command:
    from tinyserve_gguf.cli.serve import serve

    return serve


def _verify() -> click.Command:
    from tinyserve_gguf.cli.verify import verify

    return verify


COMMANDS: dict[str, tuple[Callable[[], click.Command], str]] = {
    "chat": (_chat, "Chat with a model, answer one prompt, or a script of turns."),
    "serve": (_serve, "Serve a model over HTTP, as OpenAI's API has it, with a page at /."),
    "info": (_info, "What a model file holds, and what would be placed where."),
    "bench": (_bench, "Measure speed, hit rates and bounds, and llama.cpp beside them."),
    "verify": (_verify, "Prove that paging changes nothing: logits, kernels, bytes."),
    "doctor": (_doctor, "What of this machine works, how fast it is, and how to mend the rest."),
    "demo": (_demo, "Build a small demo model and print its path."),
}


class Boundary(click.Group):
    """The commands above. `main` ends the process: every foreseen error is one `error: ...` line on stderr and exit code 2, Ctrl-C is 130."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature, here and below)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        return COMMANDS[cmd_name][0]() if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        extra["standalone_mode"] = False  # click shows nothing itself then
        try:
            status = super().main(*args, **extra)
        except click.ClickException as error:
            context = error.ctx if isinstance(error, click.UsageError) else None
            self._fail(error.format_message() + (f" (see {context.command_path} --help)" if context else ""))
        except TinyserveError as error:
            self._fail(str(error))
        except click.Abort:  # click's form of KeyboardInterrupt
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(status if isinstance(status, int) else 0)

    def _fail(self, message: str) -> NoReturn:
        click.echo("error: " + " ".join(message.split()), err=True)
        sys.exit(EXIT_BAD_INPUT)


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    try:
        ours = version("tinyserve-gguf")
    except PackageNotFoundError:
        ours = "(not installed: run from a source tree)"
    click.echo(f"tinyserve-gguf {ours}, llama-cpp-python {version('llama-cpp-python')}")
    context.exit()


@click.group(
    cls=Boundary, epilog=EPILOG, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the versions and leave.")
@click.option("-v", "--verbose", is_flag=True, help="llama.cpp's log on stderr.")
@click.pass_context
def main(context: click.Context, verbose: bool) -> None:
    """Run mixture-of-experts GGUF models whose experts do not fit on the device.

    The experts stay in host memory; the device holds a cache of the ones in use. llama.cpp computes.
    """
    logger = logging.getLogger("tinyserve_gguf")
    logger.addHandler(logging.StreamHandler() if verbose else logging.NullHandler())  # without any, logging prints warnings by itself
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
