"""A model and a conversation without llama.cpp, for the tests of the command line and of the chat loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tinyserve_gguf.errors import ContextFullError, OptionError


@dataclass(frozen=True)
class FakeReplyStats:
    prompt_tokens: int = 5
    reused_tokens: int = 3
    reply_tokens: int = 2
    prefill_seconds: float = 0.5
    decode_seconds: float = 0.25
    prefill_rate: float = 10.0
    decode_rate: float = 8.0
    hit_rate: float | None = None
    mb_per_token: float = 1.5
    finish: str = "stop"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        return f"[status {self.finish}]"


class FakeConversation:
    """Replies with "you said TEXT" in pieces. `during`, if set, is called between the pieces; the text "FULL" finds the context full."""

    def __init__(
        self, _model: object = None, system: str | None = None, *, keep_system: bool = False, during: Callable[[], None] | None = None
    ) -> None:
        self.keep_system = keep_system
        self.n_sinks = 12
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.last: Any = None
        self.asked: list[tuple[str, int, Any]] = []
        self.resets = 0
        self.during = during

    def reply(self, text: str, max_tokens: int, sampling: Any) -> Generator[str, None, None]:
        self.asked.append((text, max_tokens, sampling))
        if text == "FULL":
            raise ContextFullError("the prompt does not fit: use a larger -c")
        said, finish = "", "interrupted"
        try:
            for piece in ("you ", "said ", text):
                yield piece
                said += piece
                if self.during:
                    self.during()
            finish = "context" if text == "LONG" else "stop"
        finally:
            self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
            self.last = FakeReplyStats(finish=finish)

    def reset(self) -> None:
        self.resets += 1
        self.messages = []

    def set_system(self, text: str | None) -> None:
        self.messages = [{"role": "system", "content": text or ""}, *(m for m in self.messages if m["role"] != "system")]

    def save(self, path: str | os.PathLike[str]) -> None:
        if not Path(path).parent.is_dir():
            raise OptionError(f"cannot write {path}")
        Path(path).write_text("saved")


class FakeStats:
    def lines(self) -> list[str]:
        return ["hits 7 of 9"]

    def as_dict(self) -> dict[str, Any]:
        return {"hits": 7}


@dataclass
class FakeModel:
    """Also records what `load` was called with."""

    path: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    closed: bool = False

    @property
    def plan(self) -> FakeModel:
        return self

    def lines(self) -> list[str]:
        return ["plan: all experts resident"]

    def stats(self) -> FakeStats:
        return FakeStats()

    def take_notes(self) -> list[str]:
        return []

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


def fake_modules(conversation: type[FakeConversation] = FakeConversation) -> tuple[dict[str, ModuleType], list[FakeModel]]:
    """Stand-ins for `tinyserve_gguf.model` and `tinyserve_gguf.chat`, to be put into sys.modules, and the list of models they load."""
    loaded: list[FakeModel] = []

    def load(path: str, *, progress: Callable[[float], bool] | None = None, **options: Any) -> FakeModel:
        if progress:
            assert progress(0.5) is True
        loaded.append(FakeModel(path, options))
        return loaded[-1]

    model, chat = ModuleType("tinyserve_gguf.model"), ModuleType("tinyserve_gguf.chat")
    vars(model)["load"] = load
    vars(chat)["Conversation"] = conversation
    return {model.__name__: model, chat.__name__: chat}, loaded


if __name__ == "__main__":  # the program of the terminal test
    import time

    from tinyserve_gguf.cli import main

    class Slow(FakeConversation):
        """Also takes a minute for the text "wait", a piece each 50 ms."""

        def reply(self, text: str, max_tokens: int, sampling: Any) -> Generator[str, None, None]:
            yield from super().reply(text, max_tokens, sampling)
            try:
                for _ in range(1200 if text == "wait" else 0):
                    yield "tick "
                    time.sleep(0.05)
            finally:
                if text == "wait":
                    self.last = FakeReplyStats(finish="interrupted")

    sys.modules.update(fake_modules(Slow)[0])
    main(["chat", "model.gguf", *sys.argv[1:]])
