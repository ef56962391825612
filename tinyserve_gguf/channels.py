"""What a reasoning model says to itself, told from what it says to the reader.

gpt-oss writes channels, `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; Qwen, DeepSeek and others write
`<think>...</think>` before the answer. Both are told by their marker tokens, never by text that merely looks like them. The thoughts belong neither
to the reply nor into the messages that the chat template gets on the next turn.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

from tinyserve_gguf._llama import NativeModel

MARKERS = ("<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
ANSWER = "final"  # the channel of gpt-oss that the reader sees


class Channels:
    """Sorts the tokens of a model's replies. Cheap to keep, one for each model."""

    def __init__(self, native: NativeModel) -> None:
        self._native = native
        self._marker: dict[int, str] = {}  # token -> marker, of those that are one token in this vocabulary
        for marker in MARKERS:
            tokens = native.tokenize(marker, add_special=False, parse_special=True)
            if len(tokens) == 1:
                self._marker[tokens[0]] = marker

    def split(self, tokens: Iterable[int], prompt: str = "") -> Iterator[tuple[bool, str]]:
        """(is it for the reader, text) in pieces as they come; a character that is split over tokens comes when it is whole. `prompt` is what the
        reply answers: some templates end with an open `<think>`."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        place = "thought" if prompt.rstrip().endswith("<think>") else "answer"  # or "header": between the markers of gpt-oss
        channel: str | None = None  # its name, as far as it was read; None: no channel was opened
        fresh = False  # the answer has begun after thoughts: blank lines before it are no part of it
        for token in tokens:
            marker = self._marker.get(token)
            text = decoder.decode(b"" if marker else self._native.piece(token), final=marker is not None)
            if place == "header":
                channel = None if channel is None else channel + text
            elif place == "thought" and text:
                yield False, text
            elif text := text.lstrip() if fresh else text:
                fresh = False
                yield True, text
            match marker:
                case "<think>":
                    place = "thought"
                case "</think>":
                    place, fresh = "answer", True
                case "<|start|>" | "<|end|>":
                    place, channel = "header", None
                case "<|channel|>":
                    place, channel = "header", ""
                case "<|message|>":
                    place = "answer" if channel is None or channel.strip().startswith(ANSWER) else "thought"
        if rest := decoder.decode(b"", final=True):
            yield place == "answer", rest
