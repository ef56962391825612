"""A conversation: messages, the model's chat template, and a KV cache that is never read twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator

from tinyserve_gguf.channels import Channels
from tinyserve_gguf.errors import OptionError
from tinyserve_gguf.model import Model
from tinyserve_gguf.outfile import OutputFile
from tinyserve_gguf.sampling import Sampling
from tinyserve_gguf.stats import ReplyStats

Message = dict[str, str]


class Conversation:
    """Turns with one model. After an interrupted reply the conversation goes on from what was said.

    `on_thought` is called with what a reasoning model says to itself before it answers, and with a line break where that ends; replies and messages
    hold the answers only.

    On a model with a window the conversation goes on without end, and the oldest turns are forgotten. `keep_system`: the system prompt is not, its
    tokens count as sinks. OptionError without a window, or if the system prompt takes more than half of it.
    """

    def __init__(self, model: Model, system: str | None = None, *, keep_system: bool = False) -> None:
        self._model = model
        self._session = model.session()
        self._channels = Channels(model.native)
        self._system = system
        self._keep_system = keep_system
        if keep_system:
            self._keep(system)
        self.on_thought: Callable[[str], None] | None = None
        self.messages: list[Message] = []
        self.last: ReplyStats | None = None
        self.reset()

    @property
    def n_sinks(self) -> int:
        """Tokens at the beginning that never leave the window; 0 without one."""
        return self._session.n_sinks

    def reset(self) -> None:
        """Forget every turn; the system prompt stays."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self._said, self._tokens = "", list[int]()

    def set_system(self, text: str | None) -> None:
        """Change the system prompt. The turns stay, and are read anew with it. OptionError, changing nothing, if it shall be kept and is too long."""
        if self._keep_system:
            self._keep(text)
        self._system = text
        turns = [message for message in self.messages if message["role"] != "system"]
        self.reset()
        self.messages += turns

    def _keep(self, system: str | None) -> None:
        """Let the tokens of a system prompt be sinks: those at the beginning of every prompt with it, whatever is said then."""
        window = self._session.window
        if window is None:
            raise OptionError("--keep-system needs --window: without one nothing leaves the context")
        start = [{"role": "system", "content": system}] if system else []
        first, second = (self._model.prompt_tokens(self._model.render([*start, {"role": "user", "content": word}])) for word in ("a", "0"))
        n_system = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0) if system else 0
        if n_system > window.size // 2:
            raise OptionError(
                f"the system prompt takes {n_system} tokens, more than half of the window of {window.size}: give a larger --window, "
                "or drop --keep-system"
            )
        self._session.set_sinks(max(n_system, window.sinks))

    def reply(self, text: str, max_tokens: int = -1, sampling: Sampling = Sampling()) -> Generator[str, None, None]:
        """Say `text` and stream the answer. If the iterator is closed early, what was said so far stays in the conversation; if the prompt fails
        (context full), nothing does."""
        self.messages.append({"role": "user", "content": text})
        said, thinking = "", False
        try:
            prompt, tokens = self._prompt()
            made: list[int] = []

            def keep(source: Iterator[int]) -> Iterator[int]:
                for token in source:
                    made.append(token)
                    yield token

            for is_answer, piece in self._channels.split(keep(self._session.generate(tokens, max_tokens, sampling)), prompt):
                if self.on_thought and (thinking or not is_answer):
                    self.on_thought("\n" if is_answer else piece)
                thinking = not is_answer
                if is_answer:
                    said += piece
                    yield piece
        except BaseException:
            if not said:
                self.messages.pop()
                raise
            self._finish(said, prompt, tokens, made)
            raise
        self._finish(said, prompt, tokens, made)

    def _finish(self, said: str, prompt: str, tokens: list[int], made: list[int]) -> None:
        self.messages.append({"role": "assistant", "content": said})
        # or it was interrupted within a character, which the next turn shall not begin with, or has thoughts, which templates leave out of it
        whole = self._model.detokenize(made) == said
        self._said, self._tokens = (prompt + said, tokens + made) if whole else ("", [])
        self.last = self._session.last

    def _prompt(self) -> tuple[str, list[int]]:
        """Text and tokens of the whole conversation. Where the text only grew, the tokens of before are kept as the model wrote them and only the
        rest is tokenized: its own reply, tokenized anew, may split otherwise and would be read again."""
        text = self._model.render(self.messages)
        if self._said and text.startswith(self._said):
            rest = self._model.tokenize(text[len(self._said) :], add_bos=False, special=True)
            return text, self._tokens + rest
        return text, self._model.prompt_tokens(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the messages as JSON, in place of a file of that name at once. OptionError if it cannot be written."""
        OutputFile(path).write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._session.close()
