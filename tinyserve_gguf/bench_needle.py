"""The needle test: a number hidden in a long prompt, and whether the model finds it again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.model import Model
from tinyserve_gguf.sampling import Sampling
from tinyserve_gguf.stats import ReplyStats

REPLY_TOKENS = 256  # room for a model that thinks first
LEAST_FILLER = 16  # tokens

_WHO = ("The baker", "A tall sailor", "My neighbour", "The old teacher", "A young painter", "The gardener", "Our doctor", "The night porter")
_DID = ("carried", "repaired", "forgot", "described", "sold", "painted", "borrowed", "hid", "measured", "cleaned")
_WHAT = ("a wooden chair", "the copper kettle", "an empty letter", "two green bottles", "the broken clock", "a heavy book", "the garden gate")
_WHERE = ("behind the station", "near the river", "before the storm", "on the market square", "after the concert", "in the small harbour")


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt with a number in it."""

    number: str
    at: float  # where it is, 0..1 of the filler
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    found: bool
    reply: str
    stats: ReplyStats


def filler(n_tokens: int, seed: int) -> str:
    """Sentences without a digit, of `n_tokens` or more: each is at least 6 tokens."""
    rng = random.Random(seed)
    return " ".join(" ".join(map(rng.choice, (_WHO, _DID, _WHAT, _WHERE))) + "." for _ in range(n_tokens // 6 + 1))


def hide(model: Model, n_tokens: int, text: str | None, seed: int) -> Needle:
    """A chat prompt of at most `n_tokens` tokens, and nearly so many. `text` is the filler, generated if None.

    ModelFileError if the model has no chat template, OptionError if `n_tokens` is too few.
    """
    rng = random.Random(seed)
    number = str(rng.randrange(10_000, 100_000))
    while text and number in text:
        number = str(rng.randrange(10_000, 100_000))
    at = rng.random()
    overhead = len(_prompt(model, "", number))
    room = n_tokens - overhead
    if room < LEAST_FILLER:
        raise OptionError(f"--needle {n_tokens} is too short: the question alone takes {overhead} tokens, give {overhead + LEAST_FILLER} or more")
    words = model.tokenize(text or filler(room, seed), add_bos=False)
    words *= -(-room // len(words))
    while True:  # tokens of the whole are not exactly those of its parts
        haystack, cut = _insert(model.detokenize(words[:room]), at, number)
        tokens = _prompt(model, haystack, number)
        if len(tokens) <= n_tokens:
            return Needle(number, cut, tokens)
        room -= len(tokens) - n_tokens


def look(model: Model, needle: Needle, tick: Callable[[], None]) -> Answer:
    """Ask for the number, greedily."""
    session = model.session()
    reply = ""
    try:
        for piece in model.text(session.generate(needle.tokens, REPLY_TOKENS, Sampling(temp=0))):
            tick()
            reply += piece
    finally:
        session.close()
    assert session.last is not None
    return Answer(needle.number in reply, reply, session.last)


def _sentence(number: str) -> str:
    return f"The secret number is {number}."


def _insert(text: str, at: float, number: str) -> tuple[str, float]:
    """`text` with the needle at the end of the sentence (or else of the word) at `at`, and where that is. Not every script has spaces."""
    start = int(at * len(text))
    ends = [found + 1 for end in (". ", ".\n", "\n", " ") if (found := text.find(end, start, start + 200)) >= 0]
    cut = ends[0] if ends else start
    return f"{text[:cut].rstrip()} {_sentence(number)} {text[cut:].lstrip()}".strip(), cut / len(text)


def _prompt(model: Model, haystack: str, number: str) -> list[int]:
    text = haystack or _sentence(number)
    question = f"Read this text.\n\n{text}\n\nWhich secret number does the text mention? Reply with the number alone."
    return model.prompt_tokens(model.render([{"role": "user", "content": question}]))
