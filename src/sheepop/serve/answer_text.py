"""The text of an answer, split while it grows into what is said, reasoning, and tool calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from sheepop.serve.formats import REQUIRED, Parameters, Section, format_of, markers
from sheepop.tokenizer import ChatTemplate, StreamDecoder, Tokenizer
from sheepop.tokenizer.chat_forms import as_template_reads
from sheepop.tokenizer.messages import Message

_TAIL = 16  # tokens of a prompt that may begin a section of the answer


@dataclass
class Part:
    """What a piece of an answer makes certain: text to say, reasoning, and complete calls as in OpenAI's API."""

    said: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class Offer(Protocol):
    """The tools that an answer may call, such as those of a `ChatRequest`."""

    @property
    def parameters(self) -> Parameters:
        """The parameters of every tool by its name."""

    @property
    def may_call(self) -> bool:
        """Whether the answer may have calls."""

    @property
    def must_call(self) -> bool:
        """Whether the whole answer must be a call."""

    @property
    def one_call(self) -> bool:
        """Whether calls after the first stay text."""


@dataclass(frozen=True)
class Offered:
    """Tools that an answer may call, or not."""

    parameters: Parameters
    must_call: bool = False
    one_call: bool = False

    @property
    def may_call(self) -> bool:
        """Whether there are any."""
        return bool(self.parameters)


def active_sections(requested: Offer, sections: Sequence[Section]) -> tuple[Section, ...]:
    """The `sections` of a model's format that the answer to a request can have; a required call is JSON."""
    if requested.must_call:
        return REQUIRED
    return tuple(section for section in sections if requested.may_call or section.kind != "calls")


def shown_ids(tokenizer: Tokenizer, sections: Sequence[Section]) -> frozenset[int]:
    """The special tokens that the text of an answer must have, so that its `sections` can be told."""
    marks = set(markers(sections))
    special = tokenizer.special_tokens
    return frozenset(token_id for text, token_id in special.items() if any(text in mark for mark in marks))


def begun_section(tokenizer: Tokenizer, sections: Sequence[Section], prompt: Sequence[int]) -> Section | None:
    """The section of reasoning that a prompt of these tokens has begun, if it has."""
    tail = tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
    return next((each for each in sections if each.kind == "reasoning" and tail.endswith(each.begin)), None)


def answer_reader(
    tokenizer: Tokenizer, template: ChatTemplate
) -> Callable[[Sequence[int], Sequence[int], Sequence[Mapping[str, Any]], int], Message]:
    """A function from a prompt, its answer, the tools and the number of earlier calls to the message of the answer.

    It reads tokens as the server does, but counts calls for their ids, which the server draws.
    """
    sections = format_of(template.source)

    def read(prompt: Sequence[int], answer: Sequence[int], tools: Sequence[Mapping[str, Any]], calls: int) -> Message:
        functions = [tool.get("function", tool) for tool in tools]
        offered = Offered({str(each.get("name")): each.get("parameters") or {} for each in functions})
        shown, numbers = shown_ids(tokenizer, active_sections(offered, sections)), count(calls)
        decoder = StreamDecoder(tokenizer, shown_ids=shown, continues=True)
        text = "".join(map(decoder.push, answer)) + decoder.finish()
        begun = begun_section(tokenizer, sections, prompt)
        splitter = AnswerText(offered, sections, begun, lambda: f"call{next(numbers):05d}")
        part = splitter.push(text, is_last=True)
        more = {"reasoning_content": part.reasoning or None, "tool_calls": part.calls or None}
        return as_template_reads({"role": "assistant", "content": part.said, **more})

    return read


def _random_id() -> str:
    # Mistral's templates accept only nine letters and digits.
    return secrets.token_hex(5)[:9]


class AnswerText:
    """Splits the pieces of an answer by its `sections`, of which it `begins` in one, if the prompt has begun that.

    Whatever the pieces are, the results add up to those for the whole answer. Text that is no call of a tool of the
    request stays text. Whitespace around sections is said only between other text. A call to which the model gives no
    id gets a `new_id`.
    """

    def __init__(
        self,
        requested: Offer,
        sections: Sequence[Section],
        begins: Section | None = None,
        new_id: Callable[[], str] = _random_id,
    ) -> None:
        self._new_id = new_id
        self._parameters = requested.parameters
        self._sections = active_sections(requested, sections)
        self._one_call = requested.one_call
        self._section, self._held = begins, ""
        self._said, self._thought = _Spaced(), _Spaced()
        self._thought.after_section, self._said.after_section = True, begins is not None
        self._has_begun, self._num_calls = begins is not None, 0

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._section is not None and self._section.kind == "reasoning"

    def push(self, text: str, *, is_last: bool = False) -> Part:
        """Returns what the next piece makes certain."""
        part = Part()
        self._held += text
        while self._advance(part, is_last=is_last):
            pass
        if is_last:
            part.said += self._said.end()
        return part

    def _advance(self, part: Part, *, is_last: bool) -> bool:
        """Reads up to the next marker; returns whether there was one."""
        section = self._section
        possible = self._possible() if section is None else section.ends
        place, marker = min(
            ((self._held.find(each), each) for each in possible if each in self._held), default=(-1, "")
        )
        if section is not None and section.kind == "calls":
            if place < 0 and not is_last:
                return False
            end = len(self._held) if place < 0 else place
            body, self._held = self._held[:end], self._held[end + len(marker) :]
            self._call(part, section, body, marker)
            self._section = None
            return bool(self._held)
        found = place >= 0
        certain = place if found else len(self._held) if is_last else self._num_certain(possible)
        self._emit(part, self._held[:certain])
        self._held = self._held[certain + len(marker) :]
        if found:
            self._section = next(each for each in self._sections if each.begin == marker) if section is None else None
            if self._section is not None and self._section.kind != "calls":
                self._said.after_section = True
            if self._section is not None and self._section.is_whole:
                self._held = marker + self._held
        return found

    def _possible(self) -> list[str]:
        """The markers that can begin a section now."""
        return [
            section.begin
            for section in self._sections
            if not (section.kind == "calls" and self._one_call and self._num_calls)
            and not (section.is_whole and (self._has_begun or self._held.lstrip()[:1] != section.begin))
        ]

    def _num_certain(self, markers: Sequence[str]) -> int:
        """The number of held characters that are no beginning of a marker, whatever follows."""
        if not self._held.strip() and not self._has_begun and any(section.is_whole for section in self._sections):
            return 0
        sizes = range(min(len(self._held), max(map(len, markers), default=1) - 1), 0, -1)
        ends = tuple(markers)
        return len(self._held) - next(
            (size for size in sizes if any(end.startswith(self._held[-size:]) for end in ends)), 0
        )

    def _emit(self, part: Part, text: str) -> None:
        self._has_begun = self._has_begun or bool(text.strip())
        if self.reasons:
            part.reasoning += self._thought.push(text)
        else:
            part.said += self._said.push(text)

    def _call(self, part: Part, section: Section, body: str, end: str) -> None:
        self._has_begun = True
        try:
            found = [self._checked(*call) for call in section.read(body, self._parameters)]
            if not found:
                raise ValueError("there is no call")
        except (ValueError, RecursionError):
            part.said += self._said.push(f"{'' if section.is_whole else section.begin}{body}{end}")
            return
        found = found[:1] if self._one_call else found
        self._num_calls += len(found)
        self._said.after_section = True
        part.calls += found

    def _checked(self, name: str, arguments: Any, own_id: str) -> dict[str, Any]:
        """The tool call object of OpenAI's API; raises `ValueError` if it calls no tool of the request."""
        if name not in self._parameters:
            raise ValueError("a call names a tool of the request")
        function = {"name": name, "arguments": _arguments(arguments)}
        # Kimi's templates write the id that the model wrote.
        return {"id": own_id or self._new_id(), "type": "function", "function": function}


class _Spaced:
    """Text whose last whitespace waits for more; after a section, the first is left out, and so is the last."""

    def __init__(self) -> None:
        self.after_section, self._has_said, self._spaces = False, False, ""

    def push(self, text: str) -> str:
        text = self._spaces + text
        said = text.rstrip()
        self._spaces = text[len(said) :]
        if said and not self._has_said and self.after_section:
            said = said.lstrip()
        self._has_said = self._has_said or bool(said)
        return said

    def end(self) -> str:
        """The whitespace at the end of a text without sections."""
        return "" if self.after_section else self._spaces


def _arguments(found: Any) -> str:
    """Arguments as JSON text; an object that the model wrote as text is not encoded again, and empty text is `{}`."""
    if isinstance(found, str):
        try:
            if not found.strip() or isinstance(json.loads(found), dict):
                return found.strip() or "{}"
        except ValueError:
            pass
    return json.dumps(found, ensure_ascii=False)
