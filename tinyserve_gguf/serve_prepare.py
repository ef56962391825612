"""From a request to what a context will be asked: chat handler, grammar, prompt. All that can be wrong with a request is found here, before it
waits for a context."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from tinyserve_gguf import _llama
from tinyserve_gguf.sampling import Sampling
from tinyserve_gguf.serve_llama import ServedLlama
from tinyserve_gguf.serve_request import ChatRequest, CompletionRequest, Generating, Json, Message, RequestError

TEMPLATE = "chat_template.default"  # llama-cpp-python's name for the template in the file
WITH_TOOLS = "chatml-function-calling"  # its handler that lets a model choose functions, under a grammar
MAX_GRAMMAR = 1 << 18  # characters. ggml's parser recurses: unlimited, a grammar could overflow the stack
MAX_NESTING = 100
MAX_RULES = 5000
# of JSON schema, what llama-cpp-python's conversion to a grammar passes over
UNSUPPORTED = {
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "uniqueItems", "contains", "minContains", "maxContains"),
    *("minProperties", "maxProperties", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "not", "if", "then", "else"),
    *("unevaluatedProperties", "unevaluatedItems"),
}
# arguments of chat handlers and names of templates that a request cannot set by the way
RESERVED = {
    *("llama", "messages", "functions", "function_call", "tools", "tool_choice", "stream", "stop", "seed", "response_format", "max_tokens", "model"),
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repeat_penalty", "tfs_z", "mirostat_mode"),
    *("mirostat_tau", "mirostat_eta", "logits_processor", "grammar", "logit_bias", "logprobs", "top_logprobs", "eos_token", "bos_token"),
    *("raise_exception", "add_generation_prompt", "strftime_now"),
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be computed. `prompts` are tokens; a chat has one."""

    request: Generating
    prompts: list[list[int]]
    sampling: Json
    seed: int  # -1: any
    limit: int | None
    n_logprobs: int | None
    logit_bias: dict[int, float] | None
    grammar: str | None
    # of a chat
    handler: Callable[..., Any] | None = None
    arguments: Json = field(default_factory=dict)  # of the handler
    streams: bool = True  # whether the handler can hand out parts
    # of a completion
    texts: list[str] = field(default_factory=list)  # the prompts

    @property
    def n_choices(self) -> int:
        """For each prompt."""
        return self.request.n or 1


class _CapturedError(Exception):
    def __init__(self, prompt: str | list[int]) -> None:
        super().__init__()
        self.prompt = prompt


class _Probe:
    """Stands in for the context when a chat handler is called only to learn its prompt. Uses nothing of the context but its vocabulary."""

    verbose = False

    def __init__(self, llama: ServedLlama) -> None:
        self.tokenize = llama.tokenize

    def create_completion(self, prompt: str | list[int], **_: Any) -> None:
        raise _CapturedError(prompt)


class Preparer:
    """For one model. `chat_format`: a handler of llama-cpp-python instead of the file's template. Its methods may run in several threads."""

    def __init__(self, llama: ServedLlama, defaults: Sampling, chat_format: str | None) -> None:
        self._llama = llama
        self._defaults = defaults
        self._format = chat_format
        self._template = str(llama.metadata.get("tokenizer.chat_template", ""))

    def chat(self, request: ChatRequest) -> Prepared:
        name, handler = self._handler(request)
        arguments, streams = self._arguments(request, name), not (name == WITH_TOOLS and request.uses_tools and not request.forced_tool)
        grammar = self._grammar(request)
        try:
            handler(llama=_Probe(self._llama), **arguments)
        except _CapturedError as captured:
            prompt = self._llama.prompt_tokens(captured.prompt)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(f"the chat template refuses these messages: {one_line(error)}", param="messages") from error
        else:
            raise RequestError("this chat format asks the model for nothing")
        return self._prepared(
            request, [prompt], grammar=grammar, handler=handler, arguments=arguments | {"stream": bool(request.stream) and streams}, streams=streams
        )

    def completion(self, request: CompletionRequest) -> Prepared:
        texts, prompts = [], []
        for prompt in request.prompts:
            tokens = self._llama.prompt_tokens(prompt)
            if any(token >= self._llama.n_vocab() for token in tokens):
                raise RequestError(f"a token is outside the vocabulary of {self._llama.n_vocab()}", param="prompt")
            prompts.append(tokens)
            texts.append(prompt if isinstance(prompt, str) else b"".join(map(self._llama.piece, tokens)).decode("utf-8", "ignore"))
        return self._prepared(request, prompts, grammar=self._grammar(request), texts=texts)

    def _prepared(self, request: ChatRequest | CompletionRequest, prompts: list[list[int]], **rest: Any) -> Prepared:
        for tokens in prompts:
            if not tokens:
                raise RequestError("the prompt is empty: give at least one token", param="prompt")
            if not self._llama.goes_on and len(tokens) >= self._llama.n_ctx():
                raise RequestError(self._llama.too_long(len(tokens)), code="context_length_exceeded", param="messages")
        return Prepared(
            request=request,
            prompts=prompts,
            sampling=request.sampling(self._defaults),
            seed=self._defaults.seed if request.seed is None else request.seed,
            limit=request.limit,
            n_logprobs=request.n_logprobs,
            logit_bias=self._bias(request),
            **rest,
        )

    # ---- chat formats ----

    def _handler(self, request: ChatRequest) -> tuple[str, Callable[..., Any]]:
        """Who turns messages into a prompt, and what the model writes into a message."""
        name = self._format or TEMPLATE
        if request.uses_tools and not request.forced_tool and self._format is None:
            if "<|im_start|>" not in self._template:
                raise RequestError(
                    "the chat template of this model gives no way to choose among tools: name one in tool_choice, or start the server with "
                    f"--chat-format {WITH_TOOLS}",
                    param="tools",
                )
            name = WITH_TOOLS
        if name == TEMPLATE and not self._template:
            raise RequestError("this model has no chat template: use /v1/completions, or start the server with --chat-format", param="messages")
        return name, self._llama.chat_handler_named(name)

    def _arguments(self, request: ChatRequest, name: str) -> Json:
        """Of the chat handler. What it would not look at is refused."""
        messages = [message.plain() for message in request.messages]
        if name == WITH_TOOLS:
            messages = _for_chatml(request.messages, messages, with_tools=request.uses_tools)
        arguments: Json = {"messages": messages, "stop": request.stops, **request.sampling(self._defaults)}
        if request.uses_tools:
            arguments |= self._tools(request)
        if request.logprobs:
            if "tools" in arguments:
                raise RequestError("logprobs with tools is not supported", param="logprobs")
            arguments |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
        extra = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            extra["reasoning_effort"] = request.reasoning_effort
        for key in extra:
            if name != TEMPLATE or key in RESERVED or not re.search(rf"\b{re.escape(key)}\b", self._template):
                raise RequestError(f"the chat template of this model has no {key!r}", param=key)
        return arguments | extra

    def _tools(self, request: ChatRequest) -> Json:
        assert request.tools
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        for tool in tools:
            _schema_grammar(tool["function"]["parameters"], strict=bool(tool["function"].pop("strict", False)), param="tools")
        forced = request.forced_tool
        if request.tool_choice == "required" and forced is None:
            raise RequestError("tool_choice required is supported with one tool: name one of them in tool_choice", param="tool_choice")
        if forced is not None and forced not in [tool["function"]["name"] for tool in tools]:
            raise RequestError(f"tool_choice names {forced!r}, which is not among the tools", param="tool_choice")
        if request.parallel_tool_calls is False and forced is None:
            raise RequestError("parallel_tool_calls false is not supported, unless tool_choice names the tool", param="parallel_tool_calls")
        return {"tools": tools, "tool_choice": "auto" if forced is None else {"type": "function", "function": {"name": forced}}}

    # ---- what is sampled ----

    def _grammar(self, request: ChatRequest | CompletionRequest) -> str | None:
        text, param = request.grammar, "grammar"
        wanted = request.response_format if isinstance(request, ChatRequest) else None
        if wanted is not None and wanted.type != "text":
            text, param = _schema_grammar(wanted.schema_asked, strict=True, param="response_format"), "response_format"
        if text is None:
            return None
        nesting = deepest = 0
        for character in text if param == "grammar" else "":
            nesting += (character == "(") - (character == ")")
            deepest = max(deepest, nesting)
        if len(text) > MAX_GRAMMAR or deepest > MAX_NESTING or text.count("::=") > MAX_RULES:
            raise RequestError(
                f"the grammar is too large: at most {MAX_GRAMMAR} characters, {MAX_RULES} rules and {MAX_NESTING} parentheses inside each other",
                param=param,
            )
        if reason := self._llama.grammar_error(text):
            raise RequestError(f"llama.cpp does not take the grammar: {reason}", param=param)
        return text

    def _bias(self, request: Generating) -> dict[int, float] | None:
        if not request.logit_bias:
            return None
        for key in request.logit_bias:
            if not key.isdecimal() or int(key) >= self._llama.n_vocab():
                raise RequestError(f"logit_bias has tokens of this model as keys, 0 to {self._llama.n_vocab() - 1}, not {key!r}", param="logit_bias")
        return {int(key): value for key, value in request.logit_bias.items()}


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _for_chatml(given: list[Message], messages: list[Json], *, with_tools: bool) -> list[Json]:
    """That handler writes its list of functions into the system message, and knows no tool messages: then there is one, and results are said by the
    user."""
    names = {call.id: call.function.name for message in given for call in message.tool_calls or ()}
    said = [
        {"role": "user", "content": f"functions.{names.get(message['tool_call_id'], 'tool')} returned: {message['content']}"}
        if message["role"] == "tool"
        else message
        for message in messages
    ]
    if with_tools and not any(message["role"] == "system" for message in said):
        said.insert(0, {"role": "system", "content": "You are a helpful assistant."})
    return said


def _schema_grammar(schema: Json | None, *, strict: bool, param: str) -> str:
    """A grammar for JSON, of this schema if there is one. `strict`: keywords that would be passed over are errors."""
    if schema is None:
        return str(_llama.stock_grammars.JSON_GBNF)
    try:
        if strict and (unknown := sorted(_keywords(schema) & UNSUPPORTED)):
            raise RequestError(f"the JSON schema uses {', '.join(unknown)}, which a reply cannot be held to here: leave that out", param=param)
        return str(_llama.stock_grammars.json_schema_to_gbnf(json.dumps(schema)))
    except (ValueError, AssertionError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise RequestError(f"the JSON schema cannot be turned into a grammar: {one_line(error)}", param=param) from error


def _keywords(schema: Any) -> set[str]:
    """Keywords in a schema and in those inside it; names of properties are none."""
    if isinstance(schema, list):
        return set[str]().union(*map(_keywords, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, dict):
            found |= _keywords(list(value.values()))
        elif key not in ("const", "enum", "default", "examples", "required"):
            found |= _keywords(value)
    return found
