"""The formats in which models write reasoning and tool calls: tables of markers, and what stands between them.

The markers are those of the models' published chat templates. A format is told from the template, or named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Call = tuple[str, Any]
"""The name of a function, and its arguments as an object or as JSON text."""
Parameters = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each function."""


@dataclass(frozen=True)
class Section:
    """A part of an answer from `begin` to the first of `ends`, or to the end of the answer.

    The text between is said, reasoning, or read as calls by `read`, which raises `ValueError` for anything else. With
    `is_whole`, `begin` is part of the text and must stand at the beginning of the answer.
    """

    kind: Literal["said", "reasoning", "calls"]
    begin: str
    ends: tuple[str, ...] = ()
    read: Callable[[str, Parameters], list[Call]] = lambda text, parameters: []
    is_whole: bool = False


def _json_calls(text: str, parameters: Parameters) -> list[Call]:
    """Objects with a name and arguments or parameters: one, a list, or several between semicolons."""
    found, decoder, place = list[Any](), json.JSONDecoder(), 0
    text = text.strip()
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        found += value if isinstance(value, list) else [value]
        rest = re.compile(r"\s*;?\s*").match(text, place)
        place = rest.end() if rest else place
    return [_json_call(value) for value in found]


def _json_call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call is an object with a name")
    return value["name"], next((value[key] for key in ("arguments", "parameters") if key in value), {})


def _named_calls(separator: str, begin: str = "") -> Callable[[str, Parameters], list[Call]]:
    """Reads calls that each are a name, `separator` and an object, with `begin` between them; JSON as well."""

    def read(text: str, parameters: Parameters) -> list[Call]:
        found = list[Call]()
        for part in text.split(begin) if begin else [text]:
            name, found_separator, arguments = part.partition(separator)
            if part.lstrip()[:1] in ("[", "{"):
                found += _json_calls(part, parameters)
            elif found_separator or "{" not in name:
                found.append((name.partition("[CALL_ID]")[0].strip(), arguments.strip()))
            else:  # no separator at all: NAME{...}
                found.append((name[: name.index("{")].strip(), name[name.index("{") :].strip()))
        return found

    return read


def _deepseek_call(text: str, parameters: Parameters) -> list[Call]:
    """``NAME<sep>{...}``, or as first published ``function<sep>NAME`` and the object in a code block."""
    name, _, arguments = text.partition("<｜tool▁sep｜>")
    if "```" in arguments:
        name, _, arguments = arguments.partition("```json")
    return [(name.strip(), arguments.strip().removesuffix("```").strip())]


def _harmony_call(text: str, parameters: Parameters) -> list[Call]:
    """``functions.NAME <|constrain|>json<|message|>{...}``, possibly with a channel after the name."""
    head, _, arguments = text.partition("<|message|>")
    return [(re.split(r"[\s<]", head.strip(), maxsplit=1)[0].removeprefix("functions."), arguments.strip())]


def _xml_calls(text: str, parameters: Parameters) -> list[Call]:
    """``<function=NAME>`` with a ``<parameter=KEY>`` for each argument; what the schema says is no text is JSON."""
    found = list[Call]()
    for part in text.split("<function=")[1:]:
        name, _, body = part.partition(">")
        properties = parameters.get(name, {}).get("properties", {})
        arguments = {}
        for given in body.partition("</function>")[0].split("<parameter=")[1:]:
            key, _, value = given.partition(">")
            value = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, properties.get(key) if isinstance(properties, dict) else None)
        found.append((name, arguments))
    return found or _json_calls(text, parameters)


def _typed(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _gemma_calls(quote: str) -> Callable[[str, Parameters], list[Call]]:
    """Reads ``call:NAME{key:value}``, where keys are bare and texts stand between two `quote`."""

    def read(text: str, _: Parameters) -> list[Call]:
        name, brace, rest = text.strip().removeprefix("call:").partition("{")
        parts = (brace + rest).split(quote)
        parts[::2] = [re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
        parts[1::2] = map(json.dumps, parts[1::2])
        return [(name.strip(), "".join(parts))]

    return read


_HERMES = Section("calls", "<tool_call>", ("</tool_call>",), _xml_calls)
_WHOLE = tuple(Section("calls", begin, (), _json_calls, is_whole=True) for begin in ("{", "["))

FORMATS: dict[str, tuple[Section, ...]] = {
    "harmony": (
        Section("reasoning", "<|channel|>analysis<|message|>", ("<|end|>",)),
        Section("calls", "<|channel|>commentary to=", ("<|call|>", "<|end|>"), _harmony_call),
        Section("calls", "<|channel|>analysis to=", ("<|call|>", "<|end|>"), _harmony_call),
        Section("calls", " to=", ("<|call|>", "<|end|>"), _harmony_call),
        Section("said", "<|channel|>commentary<|message|>", ("<|end|>",)),
        Section("said", "<|channel|>final<|message|>", ("<|end|>", "<|return|>")),
        Section("said", "<|channel|>final <|constrain|>json<|message|>", ("<|end|>", "<|return|>")),
        Section("said", "<|start|>assistant", ("",)),
    ),
    "deepseek": (
        Section("calls", "<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), _deepseek_call),
        Section("said", "<｜tool▁calls▁begin｜>", ("",)),
        Section("said", "<｜tool▁calls▁end｜>", ("",)),
    ),
    "mistral": (Section("calls", "[TOOL_CALLS]", (), _named_calls("[ARGS]", "[TOOL_CALLS]")),),
    "gemma": (Section("calls", "<|tool_call>", ("<tool_call|>",), _gemma_calls('<|"|>')),),
    "function_gemma": (Section("calls", "<start_function_call>", ("<end_function_call>",), _gemma_calls("<escape>")),),
    "llama3": (Section("calls", "<|python_tag|>", (), _json_calls), *_WHOLE),
    "hermes": (_HERMES,),
    "json": (_HERMES, *_WHOLE),
}
"""The sections of each format by its name; a template that writes the first marker of calls has that format."""

_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
REQUIRED = _WHOLE


def format_of(template: str, name: str = "auto") -> tuple[Section, ...]:
    """The sections of the answers of a model with this chat template; the format of calls may be named."""
    if name == "auto":
        marks = {each: next(part for part in parts if part.kind == "calls").begin for each, parts in FORMATS.items()}
        marks["harmony"] = "<|channel|>"
        name = next((each for each, mark in marks.items() if mark in template), "json")
    reasoning = [Section("reasoning", begin, (end,)) for begin, end in _REASONING if end in template]
    return (*reasoning, *FORMATS[name])


def markers(sections: Sequence[Section]) -> Iterator[str]:
    """All markers of the sections."""
    for section in sections:
        yield from (section.begin, *section.ends)
