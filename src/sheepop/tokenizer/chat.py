"""Renders conversations with a model's chat template, a program that runs in Jinja's sandbox in a bounded process."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from sheepop.core.bounded import BoundedProcess, BoundedProcessError, HandlerError, MemoryLimitError, TimeLimitError
from sheepop.core.errors import TokenizerError, UsageError
from sheepop.tokenizer.chat_forms import REASONING, as_template_reads, forms_of, with_parts, without_null
from sheepop.tokenizer.interface import CHAT_TEMPLATE, SETTINGS_FILE, Tokenizer
from sheepop.tokenizer.messages import Message
from sheepop.tokenizer.settings import LARGEST_TEMPLATE
from sheepop.tokenizer.spelled import SpelledTokens

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
# What a conversation gives to a template itself.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}

# A template that reads contents as lists of parts asks for their types or texts.
_READS_PARTS = re.compile(r"\b(?:type|text)\b")
_ASKING = frozenset({"user", "system", "developer", "tool"})
_ROLES_WITH_PARTS = (frozenset[str](), _ASKING | {"assistant"}, _ASKING, frozenset({"assistant"}))

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
    """Renders conversations with a template that also sees `variables`, such as ``bos_token``.

    `template` is one, or several by name, of which `name` chooses one. Without it, a conversation with tools is
    rendered with the template ``tool_use``, if there is one, and any other with ``default``.

    Rendering fails if it takes more than `seconds` or `memory_bytes`, or writes more than `largest_output` characters.
    The process starts with the first conversation and ends with `close`. Safe to share between threads, which then
    wait for each other.
    """

    def __init__(
        self,
        template: str | Mapping[str, str],
        variables: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        seconds: float = 10.0,
        memory_bytes: int = 2**29,
        largest_output: int = 2**24,
    ) -> None:
        self._templates = {_DEFAULT: template} if isinstance(template, str) else dict(template)
        for text in self._templates.values():
            if len(text) > LARGEST_TEMPLATE:
                raise TokenizerError(
                    f"The chat template has {len(text):,} characters, but it may have at most {LARGEST_TEMPLATE:,}."
                )
        self._name, self._variables = name, free_variables(variables or {})
        # For the record of a measurement.
        self.settings: dict[str, Any] = {}
        self._chosen(with_tools=True)
        self._limits = (seconds, memory_bytes, largest_output)
        self._process = BoundedProcess("sheepop.tokenizer.chat_child", memory_bytes=memory_bytes, seconds=seconds)
        self._parted: dict[str, frozenset[str]] = {}
        # Linux ends the process with the thread that started it, so this object uses a thread of its own for it.
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
        source: str | None = None,
    ) -> ChatTemplate:
        """The chat templates in the settings of a model's tokenizer, or the one with the text `source`.

        `name` chooses one, and `variables` are for the template to read, such as ``enable_thinking``. Raises
        `TokenizerError` if there is no template, or none of that name.
        """
        templates = chat_templates(tokenizer) if source is None else {_DEFAULT: source}
        if not templates:
            raise TokenizerError(
                f"This model has no chat template: neither {SETTINGS_FILE} nor a chat_template.jinja has one. Use a "
                "model that was trained on conversations, or write the prompt yourself."
            )
        template = cls(templates, {**_special_texts(tokenizer.settings()), **(variables or {})}, name=name)
        template.settings = {"chat_template_kwargs": dict(variables)} if variables else {}
        return template

    def _chosen(self, *, with_tools: bool) -> str:
        """The template for a conversation with or without tools; raises `TokenizerError` if there is none."""
        name = self._name
        if name is None:
            name = _WITH_TOOLS if with_tools and _WITH_TOOLS in self._templates else _DEFAULT
        if name not in self._templates:
            known = ", ".join(sorted(self._templates))
            raise TokenizerError(f"This model has no chat template {name!r}; it has {known}. Choose one by its name.")
        return self._templates[name]

    @property
    def source(self) -> str:
        """The text of all templates, for those who look for what it writes."""
        return "\n".join(self._templates.values())

    def marks_answers(self, *, with_tools: bool = False) -> bool:
        """Whether the template has ``{% generation %}`` blocks around the parts that the model writes."""
        return re.search(r"\{%[-+]?\s*generation\b", self._chosen(with_tools=with_tools)) is not None

    def render(
        self,
        /,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation; it contains special tokens, so use `Tokenizer.encode` with `allow_special`.

        `messages` are objects as in JSON with at least a role; None counts as absent. `tools` are descriptions of
        functions, as JSON schema, `documents` objects, usually with a title and a text. With `add_generation_prompt`,
        the text ends where the model's answer begins; with `continue_final_message`, where the content of the last
        message ends, or the field that it names, such as ``reasoning_content``, so that the model continues that. The
        text of messages is not escaped: special tokens in it are encoded as such.

        Raises `UsageError` if `messages` is not a conversation, and `TokenizerError` if the template is damaged,
        refuses the conversation, or exceeds a limit.
        """
        given = {"add_generation_prompt": add_generation_prompt, **free_variables(variables)}
        if not continue_final_message:
            return self._render(messages, False, tools, documents, given).text
        if add_generation_prompt:
            raise UsageError("continue_final_message and add_generation_prompt exclude each other.")
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        mark = secrets.token_hex(16)
        marked, final = _marked_end(_checked(messages), field, f"{mark} ")
        if not any(name in self._chosen(with_tools=tools is not None) for name in _same_fields(field)):
            raise UsageError(f"The chat template does not read {field!r}, so that cannot be continued.")
        text = self._render(marked, False, tools, documents, given).text
        before, found, after = text.rpartition(mark)
        if not found or final.strip() not in text:
            raise TokenizerError(
                "The chat template changes the end of the last message, so it cannot be continued. Leave out "
                "continue_final_message."
            )
        # A template that strips the content has removed the space after the mark too.
        return before if after.startswith(" ") else before.rstrip()

    def encode(
        self, tokenizer: Tokenizer, /, messages: Sequence[Message], *, parse_special: bool = False, **options: Any
    ) -> list[int]:
        """The tokens of a conversation; `options` are those of `render`, which this raises as.

        The special tokens of the template are tokens. One that the text of a message, a tool or a document spells is
        text, unless `parse_special`, so that nobody can end a message inside it.
        """
        given = {name: options.pop(name, None) for name in ("tools", "documents")}
        spelled = SpelledTokens(tokenizer, () if parse_special else [messages, *given.values()])
        seen, tools, documents = spelled.hidden([messages, *given.values()])
        return spelled.encode(self.render(seen, tools=tools, documents=documents, **options))

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
        for name, entries in (("tools", tools), ("documents", documents)):
            if isinstance(entries, str | Mapping) or not all(isinstance(entry, Mapping) for entry in entries or ()):
                raise UsageError(f"{name} must be a list of objects as in JSON.")
        functions = None if tools is None else [without_null(tool) for tool in tools]
        template = self._chosen(with_tools=tools is not None)
        given = {"tools": functions, "documents": documents, **self._variables, **variables}
        try:
            forms = forms_of(_checked(messages), template)
            if parted := self._roles_with_parts(template):
                forms = [[with_parts(each) if each["role"] in parted else each for each in form] for form in forms]
            for number, form in enumerate(forms, 1):
                try:
                    return self._form(template, form, given, marked)
                except HandlerError as error:
                    if error.kind != "TypeError" or number == len(forms):
                        raise
            raise AssertionError("there is a form")
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

    def _roles_with_parts(self, template: str) -> frozenset[str]:
        """The roles whose messages a template reads only as lists of parts, each with a type and a text."""
        if template not in self._parted:
            said = [{"role": role, "content": secrets.token_hex(8)} for role in ("user", "assistant")]
            self._parted[template] = frozenset()
            for roles in _ROLES_WITH_PARTS if _READS_PARTS.search(template) else ():
                messages = [with_parts(each) if each["role"] in roles else each for each in said]
                with suppress(HandlerError):
                    text = self._form(template, messages, self._variables).text
                    if all(each["content"] in text for each in said):
                        self._parted[template] = roles
                        break
        return self._parted[template]

    def _form(
        self, template: str, messages: list[dict[str, Any]], variables: Mapping[str, Any], marked: bool = False
    ) -> Rendered:
        """The text that the process renders; raises what `BoundedProcess.request` raises."""
        request = {
            "template": template,
            "variables": {**variables, "messages": messages},
            "now": datetime.now().isoformat(),  # the process has another time zone
            "largest_output": self._limits[2],
            "marked": marked,
        }
        return self._thread.submit(self._ask, request).result()

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


def free_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a user gives to a template; raises `UsageError` for one that a conversation sets."""
    if taken := variables.keys() & _GIVEN:
        raise UsageError(
            f"chat_template_kwargs: {', '.join(sorted(taken))}: a conversation gives the chat template this itself."
        )
    return dict(variables)


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates read them; raises `UsageError` if they are not a conversation."""
    if not messages or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    ):
        raise UsageError(
            "A conversation must be a list of at least one message, each an object with content and a role, "
            "which is a text such as user."
        )
    return [as_template_reads(message) for message in messages]


def _same_fields(field: str) -> tuple[str, ...]:
    return REASONING if field in REASONING else (field,)


def _marked_end(messages: list[dict[str, Any]], field: str, mark: str) -> tuple[list[dict[str, Any]], str]:
    """The messages with `mark` at the end of the last one's `field`, and the text before it.

    In a list of parts, the last part with a text is marked; reasoning is marked under every name that it has. Raises
    `UsageError` if there is no such text.
    """
    last = messages[-1]
    value = last.get(field)
    parts = list(value) if isinstance(value, list) else []
    place = next((n for n in reversed(range(len(parts))) if _has_text(parts[n])), None)
    if place is not None:
        text = parts[place]["text"]
        parts[place] = {**parts[place], "text": text + mark}
        return [*messages[:-1], {**last, field: parts}], text
    if not isinstance(value, str):
        raise UsageError(f"continue_final_message: the last message has no text in {field!r} to continue.")
    marked = {name: value + mark for name in _same_fields(field) if last.get(name) == value}
    return [*messages[:-1], {**last, **marked}], value


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)
