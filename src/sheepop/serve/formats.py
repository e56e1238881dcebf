"""The formats in which models write reasoning and tool calls: tables of markers, and what stands between them.

The markers are those of the models' published chat templates. A format is told from the template, or named.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Call(NamedTuple):
    """The name of a function, its arguments as an object or as JSON text, and the id that the model gives the call."""

    name: str
    arguments: Any
    id: str = ""


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


def _listed_calls(text: str, parameters: Parameters) -> list[Call]:
    """Objects with a name and arguments: one, a list, or several between semicolons; or calls as in Python."""
    found, decoder, place = list[Any](), json.JSONDecoder(), 0
    text = text.strip()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            if place:
                raise
            return _python_calls(text)
        found += value if isinstance(value, list) else [value]
        rest = re.compile(r"\s*;?\s*").match(text, place)
        place = rest.end() if rest else place
    return [_json_call(value) for value in found]


def _json_call(value: Any) -> Call:
    name = (
        next((value[key] for key in ("name", "tool_name") if key in value), None) if isinstance(value, dict) else None
    )
    if not isinstance(name, str):
        raise ValueError("a call is an object with a name")
    return Call(name, next((value[key] for key in ("arguments", "parameters") if key in value), {}))


def _python_calls(text: str) -> list[Call]:
    """``NAME(KEY=VALUE)`` with literal values, alone, on lines, or in a list."""
    found = []
    try:
        for line in ast.parse(text).body:
            value = line.value if isinstance(line, ast.Expr) else None
            for call in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
                if not isinstance(call, ast.Call) or call.args:
                    raise ValueError("a call has a name and named arguments")
                arguments = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
                found.append(Call(ast.unparse(call.func), json.loads(json.dumps(arguments, allow_nan=False))))
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(str(error)) from None
    return found


def _named_calls(separator: str, begin: str = "", *, has_id: bool = False) -> Callable[[str, Parameters], list[Call]]:
    """Reads calls that each are a name, `separator` and an object, with `begin` between them; JSON as well.

    What follows a name, such as an id, is no part of it, and neither is ``functions.`` before it. With `has_id`, all
    of that is the id. DeepSeek V3 has the word ``function`` first, then the name, and the object in a block of code.
    """

    def read(text: str, parameters: Parameters) -> list[Call]:
        found = list[Call]()
        for part in text.split(begin) if begin else [text]:
            if part.lstrip()[:1] in ("[", "{"):
                found += _listed_calls(part, parameters)
                continue
            name, found_separator, arguments = part.partition(separator)
            if "```json" in arguments.partition("{")[0]:
                name, _, arguments = arguments.partition("```json")
                arguments = arguments.strip().removesuffix("```")
            elif not found_separator and "{" in name:  # NAME{...}
                name, arguments = name[: name.index("{")], name[name.index("{") :]
            plain = re.match(r"\s*(?:functions\.)?([^\s<:\[]*)", name)
            found.append(Call(plain[1] if plain else "", arguments.strip(), name.strip() if has_id else ""))
        return found

    return read


def _tagged_calls(function: str, argument: str) -> Callable[[str, Parameters], list[Call]]:
    """Reads what the patterns match: `function` a ``name`` and ``body``, and `argument` in it a ``key`` and ``value``.

    A value is a text if the pattern finds ``text`` as true, or else the schema says so; any other one is JSON.
    """
    functions, arguments = re.compile(function, re.DOTALL), re.compile(argument, re.DOTALL)

    def read(text: str, parameters: Parameters) -> list[Call]:
        found = []
        for call in functions.finditer(text):
            name = call["name"].strip()
            properties, given = parameters.get(name, {}).get("properties", {}), {}
            for each in arguments.finditer(call["body"]):
                key, is_text = each["key"].strip(), each.groupdict().get("text")
                schema = properties.get(key) if isinstance(properties, dict) else None
                given[key] = _typed(
                    each["value"], schema if is_text is None else {"type": is_text == "true" and "string"}
                )
            found.append(Call(name, given))
        return found or _listed_calls(text, parameters)

    return read


def _tags(function: str, argument: str, mark: str = "") -> Callable[[str, Parameters], list[Call]]:
    """Reads calls in tags like those of XML, whose names begin with `mark`; `function` and `argument` open them."""
    end, value_end = (f"</{mark}{name.partition(' ')[0].removesuffix('=')}>" for name in (function, argument))
    function, argument, name = f"<{mark}{function}", f"<{mark}{argument}", r'"?(?P<{}>[^">]{{0,256}})"?'.format
    value = rf"\n?(?P<value>.*?)\n?(?:{value_end}|(?={argument})|\Z)"
    return _tagged_calls(
        rf"{function}{name('name')}>(?P<body>.*?)(?:{end}|(?={function})|\Z)",
        rf'{argument}{name("key")}(?: string="(?P<text>\w+)")?>{value}',
    )


_key_calls = _tagged_calls(
    r"\A\s*(?P<name>[^\s<{\[]+)\s*(?P<body>(?:<arg_key>.*)?)\Z",
    r"<arg_key>(?P<key>.{0,256}?)</arg_key>\s*<arg_value>(?P<value>.*?)(?:</arg_value>|(?=<arg_key>)|\Z)",
)
_qwen_calls = _tags("function=", "parameter=")


def _tool_calls(text: str, parameters: Parameters) -> list[Call]:
    """What models write in ``<tool_call>``: JSON, Qwen3-Coder's tags, or a name with GLM's keys and values."""
    return (_qwen_calls if "<function=" in text else _key_calls)(text, parameters)


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
        return [Call(name.strip(), "".join(parts))]

    return read


_HERMES = Section("calls", "<tool_call>", ("</tool_call>",), _tool_calls)
_WHOLE = tuple(Section("calls", begin, (), _listed_calls, is_whole=True) for begin in ("{", "["))
_HARMONY = _named_calls("<|message|>")


def _listed(begin: str, *ends: str) -> tuple[Section, ...]:
    return (Section("calls", begin, ends, _listed_calls),)


def _around(begin: str, end: str) -> tuple[Section, ...]:
    """Marks around all calls, which are left out."""
    return Section("said", begin, ("",)), Section("said", end, ("",))


FORMATS: dict[str, tuple[Section, ...]] = {
    "harmony": (
        Section("reasoning", "<|channel|>analysis<|message|>", ("<|end|>",)),
        Section("calls", "<|channel|>commentary to=", ("<|call|>", "<|end|>"), _HARMONY),
        Section("calls", "<|channel|>analysis to=", ("<|call|>", "<|end|>"), _HARMONY),
        Section("calls", " to=", ("<|call|>", "<|end|>"), _HARMONY),
        Section("said", "<|channel|>commentary<|message|>", ("<|end|>",)),
        Section("said", "<|channel|>final<|message|>", ("<|end|>", "<|return|>")),
        Section("said", "<|channel|>final <|constrain|>json<|message|>", ("<|end|>", "<|return|>")),
        Section("said", "<|start|>assistant", ("",)),
    ),
    "deepseek": (
        Section("calls", "<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), _named_calls("<｜tool▁sep｜>")),
        *_around("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "dsml": tuple(
        Section(
            "calls", f"<｜DSML｜{name}>", (f"</｜DSML｜{name}>",), _tags("invoke name=", "parameter name=", "｜DSML｜")
        )
        for name in ("function_calls", "tool_calls")
    ),
    "kimi": (
        Section(
            "calls",
            "<|tool_call_begin|>",
            ("<|tool_call_end|>",),
            _named_calls("<|tool_call_argument_begin|>", has_id=True),
        ),
        *_around("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "minimax": (
        Section("calls", "<minimax:tool_call>", ("</minimax:tool_call>",), _tags("invoke name=", "parameter name=")),
    ),
    "cohere": (
        *_listed("<|START_ACTION|>", "<|END_ACTION|>"),
        Section("said", "<|START_RESPONSE|>", ("<|END_RESPONSE|>",)),
        Section("said", "<|START_TEXT|>", ("<|END_TEXT|>",)),
    ),
    "command_r": _listed("Action: ```json", "```"),
    "lfm2": _listed("<|tool_call_start|>", "<|tool_call_end|>"),
    "granite": _listed("<|tool_call|>", "<|/tool_call|>"),
    "nemotron": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": _listed("<tool_calls>", "</tool_calls>"),
    "olmo": _listed("<function_calls>", "</function_calls>"),
    "internlm": _listed("<|action_start|><|plugin|>", "<|action_end|>"),
    "seed": (Section("calls", "<seed:tool_call>", ("</seed:tool_call>",), _qwen_calls),),
    "mistral": (Section("calls", "[TOOL_CALLS]", (), _named_calls("[ARGS]", "[TOOL_CALLS]")),),
    "gemma": (Section("calls", "<|tool_call>", ("<tool_call|>",), _gemma_calls('<|"|>')),),
    "function_gemma": (Section("calls", "<start_function_call>", ("<end_function_call>",), _gemma_calls("<escape>")),),
    "llama3": (Section("calls", "<|python_tag|>", (), _listed_calls), *_WHOLE),
    "hermes": (_HERMES,),
    "json": (_HERMES, *_WHOLE),
}
"""The sections of each format by its name; a template that writes the first marker of calls has that format."""

_MARKS = {"harmony": "<|channel|>", "dsml": "｜DSML｜"}  # other than the first one of calls
_REASONING = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"), ("<|START_THINKING|>", "<|END_THINKING|>"), ("◁think▷", "◁/think▷"),
)  # fmt: skip
REQUIRED = _WHOLE


def format_of(template: str, name: str = "auto") -> tuple[Section, ...]:
    """The sections of the answers of a model with this chat template; the format of calls may be named."""
    if name == "auto":
        marks = {each: next(part for part in parts if part.kind == "calls").begin for each, parts in FORMATS.items()}
        marks |= _MARKS
        name = next((each for each, mark in marks.items() if mark in template), "json")
    reasoning = [Section("reasoning", begin, (end,)) for begin, end in _REASONING if end in template]
    return (*reasoning, *FORMATS[name])


def markers(sections: Sequence[Section]) -> Iterator[str]:
    """All markers of the sections."""
    for section in sections:
        yield from (section.begin, *section.ends)
