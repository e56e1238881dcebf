"""The request of a chat: its messages, tools, and what the chat template gets of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from sheepop.serve.formats import Parameters
from sheepop.serve.protocol import RequestModel, SamplingRequest
from sheepop.tokenizer.chat_forms import as_template_reads
from sheepop.tokenizer.messages import check_content, message_text, with_tool_calls


def _none_yet(given: list[Any]) -> list[Any]:
    if given:
        raise PydanticCustomError("unsupported", "{name}", {"name": ""})
    return given


NoneYet = Annotated[list[Any], AfterValidator(_none_yet)] | None
"""A field that is not supported, which clients send empty."""


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

    @model_validator(mode="before")
    @classmethod
    def _take_former_calls(cls, given: Any) -> Any:
        return with_tool_calls(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        check_content(self.model_dump())
        return self

    def to_template(self) -> dict[str, Any]:
        """Converts the message for chat templates: joins its parts, and parses the arguments of tool calls."""
        found = self.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
        if isinstance(self.content, list):
            found["content"] = message_text(found)
        return as_template_reads(found)


class Function(RequestModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class Tool(RequestModel):
    """A tool; only functions are supported. `given` is it as the client sent it, for chat templates."""

    type: Literal["function"]
    function: Function
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """The tool with the keys in the client's order."""
        return self._given

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, given: Any, check: Callable[[Any], Tool]) -> Tool:
        tool = check(given)
        tool._given = given
        return tool


class NamedFunction(RequestModel):
    """A function, by name."""

    name: str


class ToolChoice(RequestModel):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: NoneYet = None
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

    @property
    def parameters(self) -> Parameters:
        """The parameters of every tool by its name."""
        return {tool.function.name: tool.function.parameters for tool in self.tools or ()}

    @property
    def may_call(self) -> bool:
        """Whether the answer may have tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def one_call(self) -> bool:
        """Whether the answer may have only one."""
        return not self.parallel_tool_calls

    @property
    def must_call(self) -> bool:
        """Whether the whole answer must be a tool call."""
        return isinstance(self.tool_choice, ToolChoice) or self.tool_choice == "required"

    def variables(self) -> dict[str, Any]:
        """Returns the variables of the request for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    def for_template(self) -> dict[str, Any]:
        """Returns what the chat template gets besides the messages."""
        tools = [tool.given for tool in self.tools or () if self.tool_choice != "none"]
        prompted = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "tools": tools or None,
            "documents": self.documents,
            "add_generation_prompt": prompted,
            "continue_final_message": self.continue_final_message,
        }


class Part(RequestModel):
    """A text part of a message in the APIs of others; what clients send with it changes nothing."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    citations: None = None
    cache_control: dict[str, Any] | None = None


Content = str | Annotated[list[Part], Field(fail_fast=True)]


def text_of(content: Content | None) -> str:
    """The text of all parts."""
    return content or "" if content is None or isinstance(content, str) else "".join(part.text for part in content)


def added(message: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """What a message of an answer, or a piece of it, has: kind (reasoning, text, call), the text, and the call."""
    for field, kind in (("reasoning_content", "reasoning"), ("content", "text")):
        if message.get(field):
            yield kind, message[field], None
    for call in message.get("tool_calls", ()):
        yield "call", call["function"]["arguments"], {key: value for key, value in call.items() if key != "index"}
