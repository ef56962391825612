"""MODEL and -hf, which all commands that take a model share: a file, a known name, or a repository of the hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from tinyserve_gguf.cli.output import is_quiet, say
from tinyserve_gguf.cli.settings import META, Settings, options_of
from tinyserve_gguf.errors import OptionError

HF_HELP = "Instead of MODEL: from the Hugging Face hub, or from the caches of llama.cpp and huggingface_hub if it is there."


class ModelName(click.types.StringParamType):
    """A path or a name. What it stands for is found out when the command runs."""

    name = "model"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002 (click's signature)
        """Names that the catalogue has, and files."""
        from tinyserve_gguf.catalog import catalogue

        names = [CompletionItem(model.alias, help=model.title) for model in catalogue().values() if model.alias.startswith(incomplete.lower())]
        return [*names, CompletionItem(incomplete, type="file")]


def model_argument(*, required: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds MODEL and -hf to a command, which gets `model`: the path of a file that was found or downloaded, as text; None if it is not required and
    not given. Before that the config file's sections of this model have become defaults of the other options."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*arguments: Any, model: str | None, hf_repo: str | None, **options: Any) -> Any:
            if model and hf_repo:
                raise OptionError(f"MODEL {model} and -hf {hf_repo} are two models: give one of them")
            if not model and not hf_repo and required:
                names = "a GGUF file, a name that `tinyserve-gguf models` lists, or -hf OWNER/NAME:QUANT"
                raise click.UsageError(f"there is no MODEL: give {names}", click.get_current_context())
            return command(*arguments, model=find_model(model, hf_repo), **options)

        run = click.option(
            "-hf", "--hf-repo", "hf_repo", metavar="OWNER/NAME[:QUANT]", is_eager=True, expose_value=True, callback=_use_sections, help=HF_HELP
        )(run)
        metavar = "MODEL" if required else "[MODEL]"
        return click.argument("model", metavar=metavar, type=ModelName(), required=False, is_eager=True, callback=_use_sections)(run)

    return decorate


def find_model(model: str | None, hf_repo: str | None) -> str | None:
    """The path of what one of both names."""
    if not model and not hf_repo:
        return None
    from tinyserve_gguf.hub import Hub
    from tinyserve_gguf.resolve import Reference, resolve

    reference = Reference.parse(hf_repo or model or "", is_repository=bool(hf_repo))
    path = resolve(reference, Hub(progress=not is_quiet()), say)
    if reference.wanted:
        say(f"model: {path}")
    return path


def _use_sections(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Runs before the other options are read."""
    settings = context.meta.get(META)
    if value and not context.resilient_parsing and isinstance(settings, Settings) and settings.models:
        found = settings.defaults(context.info_name or "", options_of(context.command), called(value, is_repository=parameter.name == "hf_repo"))
        context.default_map = {**(context.default_map or {}), **found}
    return value


def called(value: str, *, is_repository: bool) -> list[str]:
    """The names by which a section may mean this model: as it was written, without a quant, the name of the file, the name in the catalogue."""
    from tinyserve_gguf.resolve import Reference

    reference = Reference.parse(value, is_repository=is_repository)
    names = [value, value.partition(":")[0]]
    names += [reference.model.alias] if reference.model else []
    names += [Path(value).name] if reference.wanted is None else []
    return list(dict.fromkeys(names))
