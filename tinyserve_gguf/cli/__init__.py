"""The command line: the group of commands, and the one place where errors become a line and an exit code.

A command's module is imported when the command is called, and llama.cpp when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from tinyserve_gguf.cli.output import Tail, log, logging_to
from tinyserve_gguf.cli.settings import META, Settings, config_path, options_of, read_settings
from tinyserve_gguf.errors import EXIT_BAD_INPUT, EngineError, OptionError, TinyserveError

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count

EPILOG = """\b
Examples:
  tinyserve-gguf chat "$(tinyserve-gguf demo)"             make a small MoE model and talk to it
  tinyserve-gguf chat model.gguf --expert-cache 25%        a quarter of the experts on the device
  tinyserve-gguf chat model.gguf -p "Name a river."        one answer, on stdout
  tinyserve-gguf chat gpt-oss-20b                          a known model, from a cache or the hub
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


def _models() -> click.Command:
    from tinyserve_gguf.cli.models import models

    return models


def _config() -> click.Command:
    from tinyserve_gguf.cli.config import config

    return config


def _completion() -> click.Command:
    from tinyserve_gguf.cli.completion import completion

    return completion


COMMANDS: dict[str, tuple[Callable[[], click.Command], str]] = {
    "chat": (_chat, "Chat with a model, answer one prompt, or a script of turns."),
    "serve": (_serve, "Serve a model over HTTP, as OpenAI's API has it, with a page at /."),
    "info": (_info, "What a model file holds, and what would be placed where."),
    "bench": (_bench, "Measure speed, hit rates and bounds, and llama.cpp beside them."),
    "verify": (_verify, "Prove that paging changes nothing: logits, kernels, bytes."),
    "models": (_models, "Models that are known by name, and whether they fit here."),
    "doctor": (_doctor, "What of this machine works, how fast it is, and how to mend the rest."),
    "demo": (_demo, "Build a small demo model and print its path."),
    "config": (_config, "What the config file sets."),
    "completion": (_completion, "Completion for bash, zsh or fish."),
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

    def invoke(self, ctx: click.Context) -> Any:
        """The command. Where llama.cpp fails, its last lines say more than one line can."""
        try:
            return super().invoke(ctx)
        except TinyserveError as error:
            log.error("%s", error)
            if isinstance(error, EngineError) and isinstance(ctx.obj, Tail) and not ctx.params["verbose"]:
                ctx.obj.show()
            raise

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        extra["standalone_mode"] = False  # click shows nothing itself then
        try:
            status = super().main(*args, **extra)
        except click.ClickException as error:
            self._fail(error.format_message() + _hint(error))
        except TinyserveError as error:
            self._fail(str(error))
        except click.Abort:  # click's form of KeyboardInterrupt
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(status if isinstance(status, int) else 0)

    def _fail(self, message: str) -> NoReturn:
        click.echo("error: " + " ".join(message.split()), err=True)
        sys.exit(EXIT_BAD_INPUT)


def _hint(error: click.ClickException) -> str:
    """Where a wrong value was set, or where to read more."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return ""
    parameter = error.param if isinstance(error, click.BadParameter) else None
    if parameter and parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.DEFAULT_MAP:
        settings = context.meta.get(META)
        if isinstance(settings, Settings):
            return f" (set in {settings.path})"
    return f" (see {context.command_path} --help)"


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    from tinyserve_gguf.cli.versions import print_versions

    print_versions(context, parameter, wanted)


def _read_config(context: click.Context, _parameter: click.Parameter, given: Path | None) -> Path | None:
    """Runs before the other options are read. A broken file stops every command but `--version` and `--help`."""
    try:
        path = given or config_path()
    except OptionError:  # no home, so there is no such file
        return None
    if context.resilient_parsing or (given is None and not path.exists()):
        return None
    commands = {name: make() for name, (make, _) in COMMANDS.items()}
    settings = read_settings(path, must_exist=given is not None, main=context.command, commands=commands)
    context.meta[META] = settings
    context.default_map = settings.defaults("", options_of(context.command)) | {
        name: settings.defaults(name, options_of(command)) for name, command in commands.items()
    }
    return given


@click.group(
    cls=Boundary, epilog=EPILOG, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the versions and leave.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="Instead of ~/.config/tinyserve-gguf/config.toml.",
)
@click.option("-v", "--verbose", is_flag=True, help="llama.cpp's log on stderr.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but warnings and errors.")
@click.option(
    "--log-file", type=click.Path(path_type=Path), metavar="FILE", help="Write all that is logged to FILE: llama.cpp's lines, status lines, errors."
)
@click.pass_context
def main(context: click.Context, verbose: bool, quiet: bool, log_file: Path | None) -> None:
    """Run mixture-of-experts GGUF models whose experts do not fit on the device.

    The experts stay in host memory; the device holds a cache of the ones in use. llama.cpp computes.
    """
    if verbose and quiet:
        raise OptionError("--verbose and --quiet ask for opposite things: give one of them")
    context.obj = context.with_resource(logging_to(verbose, log_file))
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
