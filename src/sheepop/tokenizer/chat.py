"""Renders conversations with a model's chat template, a program that runs in Jinja's sandbox in a bounded process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, NamedTuple

from sheepop.core.bounded import BoundedProcess, BoundedProcessError, HandlerError, MemoryLimitError, TimeLimitError
from sheepop.core.errors import TokenizerError, UsageError
from sheepop.tokenizer.interface import CHAT_TEMPLATE, SETTINGS_FILE, Tokenizer
from sheepop.tokenizer.messages import Message
from sheepop.tokenizer.settings import LARGEST_TEMPLATE

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
# The keys under which a message may have its reasoning. Templates read the first, those of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")

# The explanation of a template's errors, by the name of their type.
_REASONS = {
    "TemplateSyntaxError": "is not a valid Jinja template",
    "TemplateError": "does not accept this conversation",
    "SecurityError": "does something that the sandbox forbids",
    "UndefinedError": "uses a value that the conversation does not have",
    "OutputError": "writes too much",
    "RecursionError": "calls itself too deeply",
}


class Rendered(NamedTuple):
    """A conversation as text, and the spans of the parts that a model writes, in characters."""

    text: str
    written: tuple[tuple[int, int], ...] = ()


class ChatTemplate:
    """Renders conversations with `template`, which also sees `variables`, such as ``bos_token``.

    Rendering fails if it takes more than `seconds` or `memory_bytes`, or writes more than `largest_output` characters.
    The process starts with the first conversation and ends with `close`. Safe to share between threads, which then
    wait for each other.
    """

    def __init__(
        self,
        template: str,
        variables: Mapping[str, Any] | None = None,
        *,
        seconds: float = 10.0,
        memory_bytes: int = 2**29,
        largest_output: int = 2**24,
    ) -> None:
        if len(template) > LARGEST_TEMPLATE:
            raise TokenizerError(
                f"The chat template has {len(template):,} characters, but it may have at most {LARGEST_TEMPLATE:,}."
            )
        self._template = template
        self._variables = dict(variables or {})
        self._limits = (seconds, memory_bytes, largest_output)
        self._process = BoundedProcess("sheepop.tokenizer.chat_child", memory_bytes=memory_bytes, seconds=seconds)
        # Linux ends the process with the thread that started it, so this object uses a thread of its own for it.
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str | None = None, *, with_tools: bool = False) -> ChatTemplate:
        """The chat template in the settings of a model's tokenizer.

        `name` chooses one of several; the default is ``tool_use``, if it exists and `with_tools` is set, else
        ``default``. Raises `TokenizerError` if there is no template, or none of that name.
        """
        templates = chat_templates(tokenizer)
        if not templates:
            raise TokenizerError(
                f"This model has no chat template: neither {SETTINGS_FILE} nor a chat_template.jinja has one. Use a "
                "model that was trained on conversations, or write the prompt yourself."
            )
        if name is None:
            name = _WITH_TOOLS if with_tools and _WITH_TOOLS in templates else _DEFAULT
        if name not in templates:
            raise TokenizerError(f"This model has no chat template {name!r}; it has {', '.join(sorted(templates))}.")
        return cls(templates[name], _special_texts(tokenizer.settings()))

    @property
    def marks_answers(self) -> bool:
        """Whether the template has ``{% generation %}`` blocks around the parts that the model writes."""
        return re.search(r"\{%[-+]?\s*generation\b", self._template) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation; it contains special tokens, so use `Tokenizer.encode` with `allow_special`.

        `messages` are objects as in JSON with at least a role; None counts as absent. `tools` are descriptions of
        functions, as JSON schema. With `add_generation_prompt`, the text ends where the model's answer begins. The
        text of messages is not escaped: special tokens in it are encoded as such.

        Raises `UsageError` if `messages` is not a conversation, and `TokenizerError` if the template is damaged,
        refuses the conversation, or exceeds a limit.
        """
        return self._render(
            messages, False, tools, documents, {"add_generation_prompt": add_generation_prompt, **variables}
        ).text

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> Rendered:
        """Like `render`, with the spans of ``{% generation %}`` blocks; raises `TokenizerError` if they nest."""
        return self._render(messages, True, tools, None, {"add_generation_prompt": False, **variables})

    def _render(
        self,
        messages: Sequence[Message],
        marked: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> Rendered:
        if not messages or not all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
        ):
            raise UsageError(
                "A conversation must be a list of at least one message, each an object with content and a role, "
                "which is a text such as user."
            )
        seen = {"messages": [_message(message) for message in messages], "tools": tools, "documents": documents}
        request = {
            "template": self._template,
            "variables": {**seen, **self._variables, **variables},
            "now": datetime.now().isoformat(),  # the process has another time zone
            "largest_output": self._limits[2],
            "marked": marked,
        }
        try:
            return self._thread.submit(self._ask, request).result()
        except BoundedProcessError as error:
            raise self._error(error) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"The conversation contains a value that JSON cannot express: {error}.") from None

    def close(self) -> None:
        """Ends the process; nothing can be rendered afterwards."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._process.close)
            self._thread.shutdown()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> Rendered:
        text, *parts = self._process.request(request)
        begin_and_end = (str(part).split() for part in parts)
        return Rendered(str(text), tuple((int(begin), int(end)) for begin, end in begin_and_end))

    def _error(self, error: BoundedProcessError) -> TokenizerError:
        seconds, memory_bytes, _ = self._limits
        if isinstance(error, TimeLimitError):
            reason = f"did not finish within {seconds:g} s, so it was stopped; it may loop forever"
        elif isinstance(error, MemoryLimitError):
            reason = f"needed more than {memory_bytes:,} bytes of memory, so it was stopped"
        elif isinstance(error, HandlerError):
            reason = f"{_REASONS.get(error.kind, 'failed')} ({error.detail or error.kind})"
        else:
            reason = f"could not be rendered: {error}"
        return TokenizerError(f"The chat template of the model {reason}.")


def chat_templates(tokenizer: Tokenizer) -> dict[str, str]:
    """The chat templates in a tokenizer's settings by name; one without a name is ``default``."""
    found = tokenizer.settings().get(CHAT_TEMPLATE)
    if found is None:
        return {}
    if isinstance(found, str):
        return {_DEFAULT: found}
    named = {}
    for entry in found if isinstance(found, list) else [None]:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerError(
                f"{SETTINGS_FILE}: {CHAT_TEMPLATE} must be a template, or a list of objects with name and template."
            )
        named[name] = template
    return named


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens by the names that templates use, such as ``bos_token``."""
    found = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _message(message: Message) -> dict[str, Any]:
    """A message without None values, with its reasoning under every key that templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}
