"""The requests of OpenAI's API, checked field by field, and the shape of its errors.

An unsupported field is refused by name and never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)  # fmt: skip
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException

# The paths of requests to a model: these need a key, count towards its limits, and have metrics per path.
MODEL_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/messages",
    "/v1/responses",
    "/v1/votes",
    "/v1/score",
    "/v1/rerank",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/embed",
)
# The names of errors in Anthropic's API that differ.
_KINDS = {404: "not_found_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "api_error"}
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


def draining() -> ApiError:
    """The error for new requests while the server finishes the open ones."""
    return ApiError(503, "The server is shutting down.", kind="server_error", code="draining", retry_after=1)


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The body of an error in the shape of the API that has `path`: Anthropic's, Ollama's, or OpenAI's."""
    about = error.body["error"]
    if path.startswith("/v1/messages"):
        kind = _KINDS.get(error.status_code, about["type"])
        return {"type": "error", "error": {"type": kind, "message": about["message"]}}
    return {"error": about["message"]} if path.startswith("/api/") else error.body


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


def _few(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > _MOST_BIASES:
        raise PydanticCustomError("too_many", f"has more than {_MOST_BIASES:,} entries")
    return given


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


class StructuredOutputs(RequestModel):
    """What the text must follow, in the words of vLLM: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(alias="json", default=None)
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


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
    # The log of a server records no answer whose client sends false.
    store: bool = False
    # These change no answer: there is one tier, and prefixes are found by their tokens.
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    parse_special: bool = False
    # The default is the most urgent: a client can lower its priority, but not overtake others.
    priority: Annotated[int, Field(ge=0, le=100)] = 0

    def grammar(self) -> dict[str, Any]:
        """What the text must follow, as a setting of `GenerationConfig`; empty for free text.

        Raises `ApiError` for more than one grammar, or a schema that is no JSON.
        """
        outputs, answer = self.structured_outputs or StructuredOutputs(), self.response_format
        found: list[tuple[str, str, Any]] = []
        if answer is not None and answer.type != "text":
            schema = {"type": "object"} if answer.json_schema is None else answer.json_schema.schema_
            found.append(("response_format", "json_schema", schema))
        if outputs.json_object:
            found.append(("structured_outputs", "json_schema", {"type": "object"}))
        for name, setting, values in (
            ("json", "json_schema", (outputs.json_, self.guided_json)),
            ("regex", "regex", (outputs.regex, self.guided_regex)),
            ("choice", "choice", (outputs.choice, self.guided_choice)),
            ("grammar", "grammar", (outputs.grammar, self.guided_grammar)),
        ):
            for field, value in zip((f"structured_outputs.{name}", f"guided_{name}"), values, strict=True):
                if value is not None:
                    found.append((field, setting, value))
        if len(found) > 1:
            raise ApiError(400, f"{found[1][0]}: cannot be combined with {found[0][0]}.", param=found[1][0])
        return {
            setting: _schema(field, value) if setting == "json_schema" else value for field, setting, value in found
        }

    @model_validator(mode="after")
    def _check_sampling(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream = true")
        return self


def _schema(field: str, value: Any) -> dict[str, Any]:
    """A JSON schema, which clients may send as text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(400, f"{field}: is no JSON schema.", param=field)
    return found


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: Prompts
    best_of: Annotated[int, Field(ge=1, le=_MOST_TEXTS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: Input should be greater than or equal to 1, or 0 with echo = true")
        return self


class TokenizeRequest(RequestModel):
    """``POST /tokenize``."""

    model: ModelName
    prompt: str
    add_special_tokens: bool = True
    parse_special: bool = False


class DetokenizeRequest(RequestModel):
    """``POST /detokenize``."""

    model: ModelName
    tokens: Ids


M = TypeVar("M", bound=BaseModel)


def fitted(model: type[M], value: Any) -> M:
    """The request that a value of JSON is; raises `ApiError` if it does not fit `model`."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise refusal_of([{**each, "loc": ("body", *each["loc"])} for each in found]) from None


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
    known = _fields(RequestModel)
    path = ".".join(str(part) for part in parts if isinstance(part, int) or source != "body" or part in known)
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


@cache
def _fields(model: type[BaseModel]) -> set[str]:
    """The names of all fields of requests; pydantic's locations also contain names of types."""
    own = {field.alias or name for name, field in model.model_fields.items()}
    return own.union(*map(_fields, model.__subclasses__()))
