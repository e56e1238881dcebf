"""The requests of OpenAI's API, checked field by field, and the shape of its errors.

An unsupported field is refused by name and never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

from sheepop.tokenizer.messages import check_content, message_text

# The paths of requests to a model: these need a key, count towards its limits, and have metrics per path.
MODEL_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
_MOST_TEXTS = 128
_MOST_STOPS = 4
_MOST_BIASES = 16384
_LONGEST_STOP = 1000
_LONGEST_NAME = 256
_LONGEST_MESSAGE = 2000  # messages can quote what a client sent


class ApiError(HTTPException):
    """An error in the shape of OpenAI's API."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, retry_after: int | None = None,
    ) -> None:  # fmt: skip
        message = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
        super().__init__(status, message, None if retry_after is None else {"Retry-After": str(retry_after)})
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class RequestModel(BaseModel):
    """A body of a request, or a part of one; null is the same as no value, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        found = {}
        for name, value in given.items():
            if value is None and not (name in fields and fields[name].is_required()):
                continue
            if name not in fields:  # only the first: a body may have many
                raise PydanticCustomError("unsupported", "{name}", {"name": name})
            found[name] = value
        return found


ModelName = Annotated[str, Field(max_length=_LONGEST_NAME)]


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool = False


Ids = Annotated[list[int], Field(fail_fast=True)]


def _as_prompts(given: Any, _: Any) -> Any:
    """Checks prompts one by one, without an attempt at each type of the union."""
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(given, str) or given == []:
        return given
    if isinstance(first, str) and all(isinstance(value, str) for value in given):
        return given
    if type(first) is int and _are_ids(given):
        return given
    if isinstance(first, list) and all(isinstance(value, list) and _are_ids(value) for value in given):
        return given
    raise PydanticCustomError("prompts", "is not a text, a list of texts, token ids, or a list of token ids")


def _are_ids(given: list[Any]) -> bool:
    return all(type(value) is int for value in given)


Prompts = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_as_prompts)]


_Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]


def _none_yet(given: list[Any]) -> list[Any]:
    if given:
        raise PydanticCustomError("unsupported", "{name}", {"name": ""})
    return given


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _MOST_BIASES:
        raise PydanticCustomError("too_many", f"has more than {_MOST_BIASES:,} entries")
    return given


class SamplingRequest(RequestModel):
    """The fields that chat and text completions share."""

    model: ModelName
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=_MOST_TEXTS)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MOST_STOPS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: str | None = None
    # These change no answer: nothing is stored, there is one tier, and prefixes are found by their tokens.
    store: bool = False
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # Not in OpenAI's API; the names are those of other servers.
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    typical_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop_token_ids: Annotated[list[int], Field(max_length=_MOST_TEXTS)] = Field(default_factory=list)
    # The default is the most urgent: a client can lower its priority, but not overtake others.
    priority: Annotated[int, Field(ge=0, le=100)] = 0

    @model_validator(mode="after")
    def _check_sampling(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream = true")
        return self


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: Prompts
    best_of: Annotated[int, Field(ge=1, le=_MOST_TEXTS)] | None = None
    echo: bool = False
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: Input should be greater than or equal to 1, or 0 with echo = true")
        return self


class TextPart(RequestModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(RequestModel):
    """A function that the model called."""

    name: str
    arguments: str


class ToolCall(RequestModel):
    """A call of a tool in an earlier message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # Templates read either; `annotations` come back from a client as it got them.
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        check_content(self.model_dump())
        return self

    def to_template(self) -> dict[str, Any]:
        """Converts the message for chat templates: joins its parts, and parses the arguments of tool calls."""
        found = self.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
        if isinstance(self.content, list):
            found["content"] = message_text(found)
        for call in found.get("tool_calls", ()):
            try:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"].strip() or "{}")
            except (ValueError, RecursionError):
                continue  # the template gets the unparsed text
        return found


class Function(RequestModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class Tool(RequestModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class NamedFunction(RequestModel):
    """A function, by name."""

    name: str


class ToolChoice(RequestModel):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(RequestModel):
    """A schema that the answer must fit."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: needed for type json_schema, and only there")
        return self


class ChatRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: Annotated[list[Any], AfterValidator(_none_yet)] | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    # For the chat template; not in OpenAI's API, and named as by other servers.
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs = true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_completion_tokens: cannot be combined with max_tokens")
        names = {tool.function.name for tool in self.tools or ()}
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice: only with tools")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: there is no tool {self.tool_choice.function.name!r}")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: cannot be combined with add_generation_prompt")
        return self

    def variables(self) -> dict[str, Any]:
        """Returns the variables of the request for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def for_template(self) -> dict[str, Any]:
        """Returns what the chat template gets besides the messages."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or () if self.tool_choice != "none"]
        prompted = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "tools": tools or None,
            "documents": self.documents,
            "add_generation_prompt": prompted,
            "continue_final_message": self.continue_final_message,
        }


class EmbeddingRequest(RequestModel):
    """``POST /v1/embeddings``."""

    model: ModelName
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class TokenizeRequest(RequestModel):
    """``POST /tokenize``."""

    model: ModelName
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(RequestModel):
    """``POST /detokenize``."""

    model: ModelName
    tokens: Ids


def refusal_of(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Converts pydantic's errors about a request to one `ApiError`, about the first invalid field."""
    # If a field fits none of several types, an error other than a wrong type is the most helpful.
    field = errors[0]["loc"][:2]
    reasons = [error for error in errors if error["loc"][:2] == field]
    first = next((error for error in reasons if not error["type"].endswith("_type")), errors[0])
    kind, message = first["type"], str(first["msg"])
    if kind == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    source, *parts = first["loc"]
    path = ".".join(str(part) for part in parts if isinstance(part, int) or source != "body" or part in _FIELDS)
    if kind == "value_error":  # a check of several fields together
        name, _, message = message.removeprefix("Value error, ").partition(": ")
        path = ".".join(filter(None, (path, name)))
        return ApiError(400, f"{path}: {message}", param=path, code="invalid_value")
    if kind == "unsupported":
        path = ".".join(filter(None, (path, first["ctx"]["name"])))
        return ApiError(400, f"{path} is not supported.", param=path, code="unsupported_parameter")
    if not path:
        message = "The body must be a JSON object, with Content-Type: application/json."
        return ApiError(400, message, code="invalid_json")
    if kind == "missing":
        return ApiError(400, f"{path} is missing.", param=path, code="missing_required_parameter")
    return ApiError(400, f"{path}: {message}", param=path, code="invalid_value")


def _fields(model: type[BaseModel]) -> set[str]:
    """The names of all fields of requests; pydantic's locations also contain names of types."""
    own = {field.alias or name for name, field in model.model_fields.items()}
    return own.union(*map(_fields, model.__subclasses__()))


_FIELDS = _fields(RequestModel)
