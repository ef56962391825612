"""The catalogue of known models, `models.toml`: names, where their files are, and what their headers must say."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tinyserve_gguf.errors import ModelFileError, OptionError
from tinyserve_gguf.facts import ModelFacts
from tinyserve_gguf.geometry import Geometry
from tinyserve_gguf.toml_files import read_toml

PACKAGE = Path(__file__).parent
PLACES = (PACKAGE / "models.toml", PACKAGE.parent / "models.toml")  # installed, or in a source tree
WINDOWS = {"shift": "tokens leave, positions move down", "stay": "tokens leave, positions stay"}
VERIFIED = {"geometry": "in this geometry, random weights", "architecture": "small models of the architecture"}


@dataclass(frozen=True, slots=True)
class KnownGeometry:
    """What decides shapes. Blocks for multi-token prediction do not count."""

    architecture: str
    blocks: int
    moe_blocks: int  # of these, with routed experts
    experts: int  # of each
    used: int  # top-k
    embedding: int
    expert_ff: int  # rows of one expert's gate
    weights: int  # numbers of the whole model; this and what follows is for estimates alone
    vocabulary: int
    kv: int  # numbers that the KV cache keeps of a token
    state: int = 0  # bytes of recurrent blocks
    sliding_window: int = 0  # tokens; 0 = none
    tied: bool = False  # the output matrix is the embedding table

    @property
    def expert_weights(self) -> int:
        """Numbers in all routed experts: gate, up and down."""
        return self.moe_blocks * self.experts * 3 * self.embedding * self.expert_ff

    @property
    def other_weights(self) -> int:
        """Neither in experts nor in the embedding table and the output matrix."""
        return self.weights - self.expert_weights - (1 if self.tied else 2) * self.embedding * self.vocabulary


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One entry."""

    alias: str
    title: str
    repository: str  # "owner/name" on the hub
    quants: dict[str, str]  # quant -> pattern of its files, the default first
    bytes: dict[str, int]  # quant -> size of its files, where known
    trained: int  # tokens
    context: int | None  # recommended, where it is less than that
    window: str | None  # one of WINDOWS, None = not known
    verified: str  # one of VERIFIED
    geometry: KnownGeometry

    @property
    def default_quant(self) -> str:
        return next(iter(self.quants))

    def quant(self, name: str | None) -> str:
        """The quant as the catalogue writes it. OptionError for one that it does not have."""
        if name is None:
            return self.default_quant
        for known in self.quants:
            if known.lower() == name.lower():
                return known
        raise OptionError(
            f"{self.alias} is known as {', '.join(self.quants)}, not as {name}; -hf {self.repository}:{name} takes any quant of the repository"
        )

    def facts(self, quant: str) -> ModelFacts | None:
        """As far as they are known without the file, for estimates: every weight with the bits that weights have on average. None if the size of
        the quant is not known."""
        if quant not in self.bytes:
            return None
        known, bits = self.geometry, 8 * self.bytes[quant] / self.geometry.weights
        return Geometry(
            name=self.title,
            architecture=known.architecture,
            n_blocks=known.blocks,
            n_expert=known.experts,
            n_used=known.used,
            embedding_length=known.embedding,
            expert_ff=known.expert_ff,
            vocabulary=known.vocabulary,
            other_weights=known.other_weights,
            kv_numbers=known.kv,
            context_length=self.trained,
            expert_bits=bits,
            other_bits=bits,
            n_dense=known.blocks - known.moe_blocks,
            tied=known.tied,
            state_bytes=known.state,
            sliding_window=known.sliding_window,
        ).facts()


@cache
def catalogue() -> dict[str, KnownModel]:
    """All entries by alias. ModelFileError if the file is missing or damaged: then the installation is."""
    path = next((place for place in PLACES if place.is_file()), PLACES[0])
    try:
        return {alias: _model(alias, entry) for alias, entry in read_toml(path).items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelFileError(f"{path}, which lists the known models, cannot be used: {error!r}; install the package again") from None


def _model(alias: str, entry: dict[str, Any]) -> KnownModel:
    """TypeError for a field too many or too few."""
    optional: dict[str, Any] = {"bytes": {}, "context": None, "window": None}
    made = KnownModel(alias=alias, **(optional | entry | {"geometry": KnownGeometry(**entry["geometry"])}))
    if made.verified not in VERIFIED or (made.window and made.window not in WINDOWS) or not made.quants or set(made.bytes) - set(made.quants):
        raise ValueError(f"[{alias}] holds a value that is not in the list at the top of the file")
    return made


def find(name: str) -> KnownModel | None:
    """The model of this alias; capitals do not matter."""
    return catalogue().get(name.lower())


def close_to(name: str) -> list[str]:
    """Aliases that `name` may have been meant for, the closest first."""
    return difflib.get_close_matches(name.lower(), catalogue(), n=3, cutoff=0.7)


def check_geometry(facts: ModelFacts, model: KnownModel) -> None:
    """ModelFileError if the file is not the model that the catalogue knows by that name."""
    wanted = model.geometry
    first = facts.expert_layers[0] if facts.expert_layers else None
    rows = {part.weight.ne(1) // (2 if part.role == "gate_up" else 1) for part in first.parts if part.role != "down"} if first else set()
    found = {
        "architecture": facts.architecture,
        "blocks": facts.n_blocks - facts.n_idle_blocks,
        "moe_blocks": len({layer.block for layer in facts.expert_layers}),
        "experts": facts.n_expert,
        "used": facts.n_used,
        "embedding": facts.embedding_length,
        "expert_ff": rows.pop() if len(rows) == 1 else 0,
    }
    wrong = [f"{name.replace('_', ' ')} {value}, not {getattr(wanted, name)}" for name, value in found.items() if value != getattr(wanted, name)]
    if wrong:
        raise ModelFileError(
            f"{facts.path} is not {model.title}: {'; '.join(wrong)}; give the file itself instead of {model.alias} if that is the one you want"
        )
