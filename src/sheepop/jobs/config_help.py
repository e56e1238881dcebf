"""The text of ``sheepop config``: every key of the configuration, described from the fields."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from sheepop.core.config import value_text
from sheepop.core.keys import Key, find_key, keys
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.recipe import chosen_keys

_WIDTH = 110
_MOST_WRITTEN_OUT = 10**12


@dataclass(frozen=True)
class Setting:
    """A key of the configuration, described for a reader.

    `type` is its type in words, `schema` the same as JSON Schema. `is_section` is true if the keys below it always
    exist; `entries` is true if there may be none, or a list of them.
    """

    key: str
    type: str
    required: bool
    default: Any
    meaning: str
    may_change_on_resume: bool
    is_section: bool
    entries: bool
    schema: dict[str, Any]

    @classmethod
    def of(cls, key: Key) -> Setting:
        """Describes `key` from its field."""
        required, is_section = key.field.is_required(), key.field.annotation is key.section
        schema = _properties(key.owner)[key.name]
        return cls(
            key=key.path,
            type="section" if is_section else in_words(schema),
            required=required,
            default=None if required else to_jsonable_python(key.field.get_default(call_default_factory=True)),
            meaning=key.meaning,
            may_change_on_resume=key.may_change,
            is_section=is_section,
            entries=key.section is not None and not is_section,
            schema={} if key.section else {name: schema[name] for name in schema.keys() - {"title", "default"}},
        )

    @property
    def section(self) -> str:
        """The key of its section; empty at the top level."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a section has no default of its own."""
        given = asdict(self)
        del given["entries"]
        texts = {"type": _plain(self.type), "meaning": _plain(self.meaning)}
        return {**given, **texts, "default": None if self.is_section else self.default}


def all_settings(path: str | None = None) -> list[Setting]:
    """The settings at and below the key `path`, or all of them, in the order of the configuration.

    Raises `ConfigError`, which suggests the nearest key, for an unknown one.
    """
    if path is not None:
        find_key(SheepOpConfig, path)
    found = map(Setting.of, keys(SheepOpConfig))
    return [setting for setting in found if path is None or f"{setting.key}.".startswith(f"{path}.")]


def default_of(path: str) -> str:
    """The default of the key `path`, as a config file writes it."""
    return value_text(Setting.of(find_key(SheepOpConfig, path)).default)


def render(settings: list[Setting]) -> str:
    """The settings as text: all facts about a single value, a section as a config file."""
    return _render_value(settings[0]) if len(settings) == 1 else _render_tree(settings)


def _render_value(setting: Setting) -> str:
    resume = "may change" if setting.may_change_on_resume else "cannot change"
    facts = {
        "type": _plain(setting.type),
        "default": "none, it is required" if setting.required else value_text(setting.default),
        "meaning": _plain(setting.meaning),
        "on resume": resume,
    }
    if setting.key in chosen_keys():
        facts["if not set"] = "train and quickstart choose it for the text, the machine and the budget"
    lines = [setting.key]
    for name, text in facts.items():
        indent = " " * 13
        lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<11}", subsequent_indent=indent) or [f"  {name}"]
    return "\n".join(lines)


def _render_tree(settings: list[Setting]) -> str:
    """A config file with the defaults of the settings, each below a comment with its meaning.

    The keys below one that may be null or a list are commented out.
    """
    first = settings[0].key.split(".")[:-1]
    head = [f"{'  ' * depth}{name}:" for depth, name in enumerate(first)]
    return "\n".join([*head, *_yaml(settings, len(first))])


def _yaml(settings: list[Setting], depth: int) -> Iterator[str]:
    indent = "  " * depth
    pending = list(settings)
    while pending:
        setting = pending.pop(0)
        inside = [other for other in pending if other.key.startswith(f"{setting.key}.")]
        pending = pending[len(inside) :]
        comment = f"{indent}# "
        yield from textwrap.wrap(_plain(setting.meaning), _WIDTH, initial_indent=comment, subsequent_indent=comment)
        value = "" if setting.required or setting.is_section else f" {value_text(setting.default)}"
        yield f"{indent}{setting.name}:{value}" + ("" if setting.is_section else f"  # {_facts(setting)}")
        below = _yaml(inside, depth + 1)
        yield from (f"{indent}# {line.removeprefix(indent)}" for line in below) if setting.entries else below


def _facts(setting: Setting) -> str:
    facts = (
        _plain(setting.type),
        "required" if setting.required else "",
        "may change on resume" if setting.may_change_on_resume else "",
    )
    return "; ".join(filter(None, facts))


def in_words(schema: dict[str, Any], plural: str = "") -> str:
    """The type in a JSON Schema in words: ``whole number from 1, or null``; `plural` is ``s`` for the plural."""
    if "anyOf" in schema:
        return ", or ".join(in_words(choice, plural) for choice in schema["anyOf"])
    if "enum" in schema:
        return ("any of " if plural else "one of ") + ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    match schema.get("type"):
        case "null" | "boolean" as kind:
            return {"null": "`null`", "boolean": "`true` or `false`"}[kind]
        case "string":
            return ("path" if schema.get("format") == "path" else "text") + plural
        case "integer" | "number" as kind:
            return ("whole number" if kind == "integer" else "number") + plural + _bounds(schema)
        case "array" if "prefixItems" in schema:
            return f"pair{plural} of {' and '.join(map(in_words, schema['prefixItems']))}"
        case "array":
            return f"list{plural} of {in_words(schema['items'], 's')}"
        case "object" if "properties" not in schema:
            return f"mapping{plural}"
    return f"section{plural}"


def _bounds(schema: dict[str, Any]) -> str:
    to, below = ("to", "to below") if "minimum" in schema else ("up to", "below")
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": to, "exclusiveMaximum": below}
    return "".join(f" {word} {_number(schema[name])}" for name, word in words.items() if name in schema)


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) and abs(bound) < _MOST_WRITTEN_OUT else f"{bound:g}"


@cache
def _properties(owner: type[BaseModel]) -> dict[str, Any]:
    properties: dict[str, Any] = owner.model_json_schema()["properties"]
    return properties


def _plain(text: str) -> str:
    """The text without backticks, which only the documentation renders."""
    return text.replace("`", "")
