"""What a reply is made of while its tokens come: whole characters, the end at a stop string, log probabilities in step with the text. Pure."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """One token with what the model, before any sampler, gave it. Logarithms are natural."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()  # the likeliest tokens, best first

    def for_chat(self) -> Json:
        """As /v1/chat/completions has it. `bytes` tells tokens apart that are only a part of a character."""
        return {**_token(self.piece, self.logprob), "top_logprobs": [_token(piece, logprob) for piece, logprob in self.top]}


def _token(piece: bytes, logprob: float) -> Json:
    return {"token": text_of(piece), "logprob": logprob, "bytes": list(piece)}


def text_of(piece: bytes) -> str:
    """A token as text; what is no whole character is shown as U+FFFD."""
    return piece.decode("utf-8", "replace")


@dataclass(slots=True)
class Piece:
    """Text that can be sent, and the tokens that it came from."""

    text: str
    choices: list[Choice] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of the choices, in characters of the reply

    def logprobs(self, start: int) -> Json:
        """As /v1/completions has it. `start`: characters before the reply, which offsets count too."""
        return {
            "tokens": [text_of(choice.piece) for choice in self.choices],
            "token_logprobs": [choice.logprob for choice in self.choices],
            "top_logprobs": [
                {**{text_of(piece): logprob for piece, logprob in reversed(choice.top)}, text_of(choice.piece): choice.logprob}
                for choice in self.choices
            ],
            "text_offset": [start + offset for offset in self.offsets],
        }


class ReplyText:
    """Turns the bytes of tokens into text that can be sent.

    A character that is split over tokens comes when it is whole, and one that never becomes whole is left out, as llama-cpp-python does. What may
    be the beginning of a stop string is held back. So the parts of a streamed reply are together exactly the reply that is given at once.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""  # decoded and not sent
        self._n_sent = 0  # characters
        self._waiting: deque[tuple[int, Choice]] = deque()  # tokens with no text sent yet, and where they begin
        self.stopped = False  # at a stop string: whatever comes is no part of the reply

    def add(self, piece: bytes, choice: Choice | None = None) -> Piece:
        """Take the next token; what can be sent now, perhaps nothing."""
        if self.stopped:
            return Piece("")
        if choice is not None:
            self._waiting.append((self._n_sent + len(self._held), choice))
        self._held += self._decoder.decode(piece)
        cut = min((at for at in map(self._held.find, self._stops) if at >= 0), default=-1)
        if cut >= 0:
            self._held, self.stopped = self._held[:cut], True
            return self._send(len(self._held))
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        return self._send(len(self._held) - keep)

    def finish(self) -> Piece:
        """What was held back, when nothing follows any more."""
        rest = self._send(len(self._held))
        if not self.stopped:  # tokens without text, such as half a character at the end
            rest.choices += [choice for _, choice in self._waiting]
            rest.offsets += [start for start, _ in self._waiting]
        self._waiting.clear()
        return rest

    def _send(self, n: int) -> Piece:
        sent = Piece(self._held[:n])
        self._held = self._held[n:]
        self._n_sent += n
        while self._waiting and self._waiting[0][0] < self._n_sent:
            start, choice = self._waiting.popleft()
            sent.choices.append(choice)
            sent.offsets.append(start)
        return sent
