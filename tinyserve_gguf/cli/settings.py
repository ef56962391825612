"""The config file: options that hold where the command line says nothing.

    expert-cache = "50%"            # every command that has --expert-cache
    [chat]
    temp = 0.7                      # chat alone
    [model."gpt-oss-20b"]           # that model: a name of the catalogue, a repository, or a file name; * and ? stand for any
    ctx-size = 16384
    [model."gpt-oss-20b".bench]
    n-gen = [64, 256]               # a list, for options that take A,B,C

What is more special wins: a model over a command over the top, the command line over all. A name that no option has is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.toml_files import read_toml
from tinyserve_gguf.user_files import config_dir

META = "tinyserve_gguf.settings"  # where a click context keeps them
MODEL = "model"  # the table of per-model sections
NEVER = {"help", "version", "config", "hf-repo"}  # options that have no place in the file
Commands = Mapping[str, click.Command]


def config_path() -> Path:
    """The file that is read by default. OptionError without a home."""
    return config_dir() / "config.toml"


def key_of(parameter: click.Parameter) -> str | None:
    """What the file calls an option: its long name without dashes. None for arguments and for what has no place there."""
    if not isinstance(parameter, click.Option):
        return None
    name = max((name for name in parameter.opts if name.startswith("--")), key=len, default="").lstrip("-")
    return name if name and name not in NEVER else None


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Of a command, by key."""
    return {key: option for option in command.params if isinstance(option, click.Option) and (key := key_of(option))}


@dataclass(frozen=True, slots=True)
class Value:
    """What holds for one option of one command."""

    given: Any  # as in the file
    section: str  # "" = the top

    def converted(self, option: click.Option, place: str) -> Any:
        """As a default for click: text that the option parses, or a flag. OptionError, naming the place, for a kind of value that it cannot be."""
        if isinstance(self.given, list) and not any(isinstance(item, list | dict) for item in self.given):
            items = [str(item) for item in self.given]
            return items if option.multiple else ",".join(items)
        if isinstance(self.given, bool):
            if option.is_flag and option.is_bool_flag:
                return self.given
            if self.given and (
                option.is_flag or option._flag_needs_value
            ):  # one of several, such as --json and --csv; or a value that may be left out
                return option.flag_value
        elif isinstance(self.given, str | int | float) and not option.is_flag:
            return [str(self.given)] if option.multiple else str(self.given)
        kind = "true or false" if option.is_flag else "text, a number or a list"
        raise OptionError(f"{place}: {key_of(option)} is {kind}, not {self.given!r}")


@dataclass(frozen=True, slots=True)
class Section:
    """One level of the file: values, and tables of commands with values."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    commands: dict[str, dict[str, Any]] = field(default_factory=dict)

    def of(self, command: str) -> Iterator[tuple[str, Value]]:
        """Key and value, the more special ones last."""
        yield from ((key, Value(given, self.name)) for key, given in self.values.items())
        inner = f"{self.name}.{command}" if self.name else command
        yield from ((key, Value(given, inner)) for key, given in self.commands.get(command, {}).items())

    def all(self) -> Iterator[tuple[str, Value]]:
        """Everything in it, in the order of the file."""
        yield from ((key, Value(given, self.name)) for key, given in self.values.items())
        for command, values in self.commands.items():
            inner = f"{self.name}.{command}" if self.name else command
            yield from ((key, Value(given, inner)) for key, given in values.items())


@dataclass(frozen=True, slots=True)
class Settings:
    """What a config file holds, checked against the options that exist."""

    path: Path | None  # None: there is none
    top: Section = Section("")
    models: dict[str, Section] = field(default_factory=dict)

    def values(self, command: str, options: Mapping[str, click.Option], models: Iterable[str] = ()) -> dict[str, Value]:
        """By key, for one command; for a model too, if what it is called is given."""
        names = [name.lower() for name in models]
        sections = [self.top, *(section for pattern, section in self.models.items() if any(fnmatchcase(name, pattern.lower()) for name in names))]
        return {key: value for section in sections for key, value in section.of(command) if key in options}

    def defaults(self, command: str, options: Mapping[str, click.Option], models: Iterable[str] = ()) -> dict[str, Any]:
        """The same for click's default_map, by parameter name."""
        found = self.values(command, options, models).items()
        return {options[key].name or key: value.converted(options[key], self.place(value)) for key, value in found}

    def place(self, value: Value) -> str:
        return f"{self.path}" + (f" [{value.section}]" if value.section else "")


def read_settings(path: Path, *, must_exist: bool, main: click.Command, commands: Commands) -> Settings:
    """The file; no settings if there is none and none is needed. OptionError if it cannot be read or names what does not exist."""
    try:
        content = read_toml(path)
    except FileNotFoundError:
        if must_exist:
            raise OptionError(f"--config {path}: there is no such file") from None
        return Settings(None)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{path} is no TOML: {error}") from None
    models = content.pop(MODEL, {})
    if not isinstance(models, dict) or not all(isinstance(section, dict) for section in models.values()):
        raise OptionError(f'{path}: sections of models are written [{MODEL}."NAME"]')
    known = {name: options_of(command) for name, command in commands.items()}
    return Settings(
        path,
        _section(path, "", content, known, options_of(main)),
        {name: _section(path, f'{MODEL}."{name}"', section, known, {}) for name, section in models.items()},
    )


def _section(path: Path, name: str, content: dict[str, Any], known: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any]) -> Section:
    values = {key: given for key, given in content.items() if not isinstance(given, dict)}
    tables = {key: given for key, given in content.items() if isinstance(given, dict)}
    everywhere = {key for options in known.values() for key in options} | set(own)
    _check(path, name, values, everywhere, "no option of any command")
    _check(path, name, tables, set(known) | ({MODEL} if not name else set()), "no command")
    for command, inner in tables.items():
        _check(path, f"{name}.{command}" if name else command, inner, set(known[command]), f"no option of {command}")
    return Section(name, values, tables)


def _check(path: Path, section: str, given: Iterable[str], known: set[str], what: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            place = f"{path} [{section}]" if section else f"{path}"
            raise OptionError(f"{place}: {key} is {what}" + (f"; did you mean {near[0]}?" if near else "; write long names without dashes in front"))
