"""`verify MODEL`: proves that paging changes nothing on this machine."""

from __future__ import annotations

from typing import Any

import click

from tinyserve_gguf.choices import MISS_MODES, POLICIES
from tinyserve_gguf.cli.bench import list_of, progress_bar
from tinyserve_gguf.cli.chat import abort_shown
from tinyserve_gguf.cli.model_argument import model_argument
from tinyserve_gguf.cli.options import device_option, tensor_split_option, threads_option
from tinyserve_gguf.errors import OptionError

EXIT_DIFFERENT = 1

EPILOG = """\b
Examples:
  verify model.gguf                                      every check, at four sizes of the expert cache
  verify model.gguf --quick                              a sample of them, in under a minute
  verify model.gguf --expert-cache 10% --policy lru,lfu  what you run
  verify --types all                                     every quant type, on micro models
"""


class VerifiedCache(click.types.StringParamType):
    """A size of the expert cache, or the smallest one."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from tinyserve_gguf.verify import check_cache

        try:
            return check_cache(str(value))
        except OptionError as error:
            self.fail(f"{error}; or minimum", param, ctx)


@click.command(epilog=EPILOG)
@model_argument(required=False)
@click.option("--types", metavar="LIST", help="Instead of MODEL: micro models of these types, such as Q4_K,MXFP4, or of all that ggml knows.")
@click.option(
    "--expert-cache",
    "caches",
    callback=lambda context, parameter, value: list_of(VerifiedCache().convert)(context, parameter, value) if value is not None else (),
    metavar="LIST",
    help="Sizes to run with, as in chat, and minimum: what one token needs.  [default: minimum,25%,50%,all; quick: minimum,50%]",
)
@click.option(
    "--policy",
    "policies",
    callback=lambda context, parameter, value: list_of(click.Choice(POLICIES).convert)(context, parameter, value) if value is not None else (),
    metavar="LIST",
    help="Eviction policies to run with.  [default: lfru,lru; quick: lfru]",
)
@click.option(
    "--miss",
    type=click.Choice(MISS_MODES),
    default="fetch",
    show_default=True,
    help="Experts that decode misses, as in chat. On a GPU the CPU's share rounds otherwise, and near logits count as right.",
)
@device_option
@tensor_split_option
@threads_option
@click.option("--quick", is_flag=True, help="Fewer sizes, short prompts, one tensor of each type and shape.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(model: str | None, types: str | None, as_json: bool, **options: Any) -> None:
    """Prove that paging changes nothing on this machine.

    Runs llama.cpp alone and with paged experts over the same tokens and compares every bit of the logits; compares every slot in use with the
    file; and compares the device's expert matmuls with the same in float64. Exit code 0 if all of it holds, 1 if something differs.
    """
    from tinyserve_gguf import verify_report
    from tinyserve_gguf.verify import VerifyOptions
    from tinyserve_gguf.verify import verify as run

    if (model is None) == (types is None):
        raise OptionError("give a MODEL, or --types all for micro models of every type" + (", not both" if model else ""))
    console = verify_report.make_console()
    checks = VerifyOptions(path=model or "", **options)
    if types is not None:
        from tinyserve_gguf.placement import pick_device
        from tinyserve_gguf.verify_types import chosen_types, verify_types

        names, device = chosen_types(types), pick_device(checks.device).name
        if "," in device or checks.tensor_split:
            raise OptionError("--types checks the kernels of one device: give one --device, and no --tensor-split")
        with progress_bar() as show:
            rows = verify_types(names, checks, show)
        holds, content = all(row.holds for row in rows), verify_report.types_dict(rows, device)
        parts = verify_report.type_tables(rows, device, console)
    else:
        assert model
        with progress_bar() as show, abort_shown(model):
            report = run(checks, show)
        holds, content = report.holds, verify_report.report_dict(report)
        parts = verify_report.report_tables(report, console)
    if as_json:
        click.echo(verify_report.as_json(content))
    else:
        for part in parts:
            console.print(part)
    if not holds:
        click.get_current_context().exit(EXIT_DIFFERENT)
