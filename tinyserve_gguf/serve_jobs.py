"""What runs in the thread of a context: all choices of one request, in OpenAI's form, in parts or at once."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tinyserve_gguf import _llama
from tinyserve_gguf.serve_llama import Cost, Run, ServedLlama
from tinyserve_gguf.serve_prepare import Prepared
from tinyserve_gguf.serve_reply import Json
from tinyserve_gguf.serve_request import MAX_SEED, CompletionRequest

Emit = Callable[[Json], None]


class Reply:
    """The answer to one request. `emit` hears every part of a streamed one; `run` returns the whole of another."""

    def __init__(self, prepared: Prepared, model: str, emit: Emit) -> None:
        self._prepared = prepared
        self._emit = emit
        self._chat = prepared.handler is not None
        self._stream = bool(prepared.request.stream)
        kind = ("chat.completion.chunk" if self._stream else "chat.completion") if self._chat else "text_completion"
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        self.cost = Cost()
        self.cancelled = threading.Event()

    def run(self, llama: ServedLlama) -> Json | None:
        """None if it was streamed. Raises GivenUpError soon after `cancelled` is set."""
        prepared = self._prepared
        choices: list[Json] = []
        costs: list[Cost] = []
        seed = prepared.seed if prepared.seed >= 0 else secrets.randbelow(MAX_SEED + 1)
        for which, prompt in enumerate(prepared.prompts):
            of_prompt = Cost()
            for number in range(prepared.n_choices):
                run = Run(
                    seed=(seed + number) % (MAX_SEED + 1),
                    limit=prepared.limit,
                    logit_bias=prepared.logit_bias,
                    n_logprobs=prepared.n_logprobs,
                    message_stops=None if prepared.streams else prepared.request.stops,
                    cancelled=self.cancelled,
                )
                index = which * prepared.n_choices + number
                try:
                    with llama.serving(run, afresh=prepared.seed >= 0):
                        made = self._chat_parts(llama, run) if self._chat else self._text_parts(llama, run, which, prompt)
                        choices += list(self._numbered(made, index))
                finally:
                    of_prompt = of_prompt.plus(run.cost)
                    self.cost = Cost.total([*costs, of_prompt])
            costs.append(of_prompt)
        if not self._stream:
            return {**self._head, "choices": choices, "usage": self.cost.usage()}
        if prepared.request.wants_usage:
            self._emit({**self._head, "choices": [], "usage": self.cost.usage()})
        return None

    def _numbered(self, choices: Iterator[Json], index: int) -> Iterator[Json]:
        """Choices of a whole reply; parts of a streamed one are sent."""
        for choice in choices:
            choice = {**choice, "index": index}
            if self._stream:
                self._emit({**self._head, "choices": [choice]} | ({"usage": None} if self._prepared.request.wants_usage else {}))
            else:
                yield choice

    def _grammar(self) -> Any:
        text = self._prepared.grammar
        return None if text is None else _llama.stock_grammars.LlamaGrammar.from_string(text)

    # ---- completions ----

    def _text_parts(self, llama: ServedLlama, run: Run, which: int, prompt: list[int]) -> Iterator[Json]:
        request, text = self._prepared.request, self._prepared.texts[which]
        assert isinstance(request, CompletionRequest)
        run.offset = 0 if request.echo and self._stream else len(text)
        if request.echo and self._stream:
            yield {"text": text, "logprobs": None, "finish_reason": None}
        made = llama.create_completion(prompt, stream=self._stream, stop=request.stops, grammar=self._grammar(), **self._prepared.sampling)
        for part in made if self._stream else [made]:
            choice = part["choices"][0]
            yield choice | {"text": text + choice["text"]} if request.echo and not self._stream else choice

    # ---- chat ----

    def _chat_parts(self, llama: ServedLlama, run: Run) -> Iterator[Json]:
        prepared = self._prepared
        assert prepared.handler
        made = prepared.handler(llama=llama, grammar=self._grammar(), **prepared.arguments)
        if not prepared.arguments["stream"]:
            choice = made["choices"][0]
            message = {name: value for name, value in choice["message"].items() if name != "function_call"}
            whole = {"message": message, "logprobs": _logprobs(choice, run), "finish_reason": _finish(choice, run)}
            yield from _in_parts(whole) if self._stream else [whole]
            return
        for part in made:
            choice = part["choices"][0]
            delta = {name: value for name, value in choice["delta"].items() if value is not None and name != "function_call"}
            yield {"delta": delta, "logprobs": _logprobs(choice, run), "finish_reason": _finish(choice, run)}


def _finish(choice: Json, run: Run) -> str | None:
    """Handlers say "tool_calls" also of a call that was cut off."""
    reason: str | None = choice["finish_reason"]
    return "length" if reason == "tool_calls" and run.finish == "length" else reason


def _logprobs(choice: Json, run: Run) -> Json | None:
    """With the bytes of tokens, which the handlers leave out."""
    given = choice["logprobs"]
    if given is None:
        return None
    return {"content": [run.shown.popleft().for_chat() for _ in given["content"]], "refusal": None}


def _in_parts(choice: Json) -> Iterator[Json]:
    """A whole message as a stream, for a handler that cannot hand out parts."""
    message = choice["message"]
    delta: Json = {"role": "assistant"}
    if message.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(message["tool_calls"])]
    else:
        delta["content"] = message["content"]
    yield {"delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    yield {"delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
