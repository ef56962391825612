"""From what the user calls a model to its file: a path, a name of the catalogue, or a repository on the hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from tinyserve_gguf.catalog import KnownModel, catalogue, check_geometry, close_to, find
from tinyserve_gguf.errors import ModelFileError
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.hub import Hub, Wanted


@dataclass(frozen=True, slots=True)
class Reference:
    """What a name stands for: a file that is named itself, or one that the hub has."""

    name: str  # as the user wrote it
    wanted: Wanted | None = None  # None: `name` is a path
    model: KnownModel | None = None

    @classmethod
    def parse(cls, name: str, *, is_repository: bool = False) -> Reference:
        """`name` is OWNER/NAME[:QUANT] if it is a repository. Otherwise a file that exists comes before a name of the catalogue, and what is neither
        is left to whoever opens it, unless it looks like a slip. OptionError for a quant that the catalogue does not have."""
        if is_repository:
            wanted = Wanted.parse(name)
            return cls(name, wanted, next((model for model in catalogue().values() if model.repository == wanted.repository), None))
        alias, _, quant = name.partition(":")
        if os.path.exists(name):  # noqa: PTH110 (Path.exists raises for a name that is too long)
            return cls(name)
        if model := find(alias):
            known = model.quant(quant or None)
            return cls(name, Wanted(model.repository, known, model.quants[known]), model)
        if not any(mark in name for mark in ("/", "\\", ".gguf")) and (near := close_to(alias)):
            raise ModelFileError(
                f"there is no file {name!r} and no known model of that name: did you mean {' or '.join(near)}? (see the command models)"
            )
        return cls(name)


def resolve(reference: Reference, hub: Hub, say: Callable[[str], None]) -> str:
    """The path of the file, which is downloaded if no cache has it. A file that stands for a known model is checked against its geometry:
    ModelFileError if it is another one."""
    if reference.wanted is None:
        return reference.name
    path = hub.cached(reference.wanted) or hub.download(reference.wanted, say)
    if reference.model:
        check_geometry(read_facts(path), reference.model)
    return str(path)
