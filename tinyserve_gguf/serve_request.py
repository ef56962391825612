"""What the server understands: bodies of requests, checked. What it does not support is an error that names it, never ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tinyserve_gguf.sampling import Sampling

Json = dict[str, Any]
MAX_CHOICES = 128  # of one request: prompts times n
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_SEED = 2**32 - 2  # the next one means "draw a seed" in llama.cpp


class RequestError(Exception):
    """A request that is refused, in the form that OpenAI's clients know. `code` and `param` are theirs too."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param

    @property
    def body(self) -> Json:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Strict(BaseModel):
    """No unknown fields, no strings for numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(Strict):
    """A whole body."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, values: Any) -> Any:
        """JSON can spell halves of characters, which no tokenizer takes."""
        try:
            json.dumps(values if isinstance(values, dict) else None, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a string holds half a character: an unpaired surrogate") from None
        return values


class StreamOptions(Strict):
    include_usage: bool | None = None


Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Generating(Body):
    """What both kinds of completion take. `user` says who asks, which changes no reply."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None
    # llama.cpp's own
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    mirostat_mode: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    mirostat_eta: Annotated[float, Field(gt=0, le=1)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _together(self) -> Generating:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options needs stream")
        if self.mirostat_mode in (None, 0) and (self.mirostat_tau is not None or self.mirostat_eta is not None):
            raise ValueError("mirostat_tau and mirostat_eta need mirostat_mode 1 or 2")
        if not all(self.stops) or len(self.stops) > MAX_STOPS:
            raise ValueError(f"stop takes up to {MAX_STOPS} strings, none of them empty")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """A last chunk with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, defaults: Sampling) -> Json:
        """Arguments of llama_cpp.Llama for the sampler; what the request leaves out is as the server was started."""
        asked = {
            "temperature": (self.temperature, defaults.temp),
            "top_p": (self.top_p, defaults.top_p),
            "top_k": (self.top_k, defaults.top_k),
            "min_p": (self.min_p, defaults.min_p),
            "typical_p": (self.typical_p, 1.0),
            "repeat_penalty": (self.repeat_penalty, defaults.repeat_penalty),
            "presence_penalty": (self.presence_penalty, 0.0),
            "frequency_penalty": (self.frequency_penalty, 0.0),
            "mirostat_mode": (self.mirostat_mode, 0),
            "mirostat_tau": (self.mirostat_tau, 5.0),
            "mirostat_eta": (self.mirostat_eta, 0.1),
        }
        return {name: default if value is None else value for name, (value, default) in asked.items()}


# ---- chat -----------------------------------------------------------------------------------------------------------------------------------


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str  # JSON


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Strict):
    """One message. Content in parts is joined; "developer" is OpenAI's newer name for "system"."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # some templates show a model its own thoughts
    refusal: None = None  # clients send back what they were given

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant message has tool_calls")
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a {self.role} message needs content")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to tool messages, and each of them needs it")
        return self

    def plain(self) -> Json:
        """For a chat template: without what is not there, except the content, which templates ask for."""
        values = self.model_dump(exclude_none=True, exclude={"content"})
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        return values | {"role": "system" if self.role == "developer" else self.role, "content": content}


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Json = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Strict):
    name: str
    description: str | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Json | None = Field(default=None, alias="schema")  # llama.cpp's way, with json_object

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format json_schema needs the field json_schema, and only it has one")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("a bare schema goes with response_format json_object")
        return self

    @property
    def schema_asked(self) -> Json | None:
        return self.json_schema.schema_ if self.json_schema else self.schema_


class ChatRequest(Generating):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None  # as vLLM and llama.cpp have it

    @model_validator(mode="after")
    def _chat_together(self) -> ChatRequest:
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise ValueError("max_tokens is the older name of max_completion_tokens: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if not self.tools and (self.tool_choice not in (None, "none") or self.parallel_tool_calls is not None):
            raise ValueError("tool_choice and parallel_tool_calls need tools")
        wants_format = self.response_format is not None and self.response_format.type != "text"
        if wants_format and self.grammar is not None:
            raise ValueError("give a grammar or a response_format, not both")
        if self.uses_tools and (wants_format or self.grammar is not None):
            raise ValueError("tools write their own JSON: they do not go with a grammar or a response_format, unless tool_choice is none")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of a reply."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forced_tool(self) -> str | None:
        """The function that must be called, if it is known which. "required" with one tool is a choice without a choice."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        if self.tool_choice == "required" and self.tools and len(self.tools) == 1:
            return self.tools[0].function.name
        return None


# ---- text and embeddings --------------------------------------------------------------------------------------------------------------------

Tokens = list[Annotated[int, Field(ge=0)]]


class CompletionRequest(Generating):
    prompt: str | list[str] | Tokens | list[Tokens]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _text_together(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is not supported: every reply that is computed is returned, as n says")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: the prompt has none")
        if not 1 <= len(self.prompts) * (self.n or 1) <= MAX_CHOICES:
            raise ValueError(f"a request has 1 to {MAX_CHOICES} choices: prompts times n")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class EmbeddingRequest(Body):
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None

    @property
    def inputs(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class CacheRequest(Body):
    expert_cache: Annotated[str, BeforeValidator(lambda given: str(given) if type(given) is int else given)]  # 48 as well as "48"
