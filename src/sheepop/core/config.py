"""The configuration tree: frozen and typed; it refuses unknown keys, and errors name the path of the key.

Each folder declares its own subtree as a subclass of `Config`; this module reads files, applies ``key=value`` overrides
and turns validation failures into one readable paragraph.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import ErrorDetails

from sheepop.core.errors import ConfigError
from sheepop.core.keys import nearest_key

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name

C = TypeVar("C", bound="Config")


def _possible(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path cannot contain a NUL character")
    return path


PathText = Annotated[str, AfterValidator(_possible), WithJsonSchema({"type": "string", "format": "path"})]
"""The path of a file or folder."""

_MOST_VALUES = 100_000
_SHOWN_CHARACTERS = 100


class _Refusing(ModelMetaclass):
    """The metaclass of `Config`: a wrong value in a constructor call raises `ConfigError`, like one in a file."""

    def __call__(self, *arguments: Any, **values: Any) -> Any:
        try:
            return super().__call__(*arguments, **values)
        except ValidationError as error:
            raise _refusal(cast(type[Config], self), error) from None


class Config(BaseModel, metaclass=_Refusing):
    """An immutable subtree of the configuration that refuses unknown keys, NaN, and true or false for a number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses true and false for a number, which Python takes for 1 and 0; accepts one text for a list of texts."""
        refuses_truth_values, is_list_of_texts = _demands(cls, info.field_name or "")
        if refuses_truth_values and _holds_truth_value(value):
            raise ValueError("must be a number, not true or false")
        return (value,) if is_list_of_texts and isinstance(value, str) else value

    def replace(self: C, **changes: Any) -> C:
        """Returns a validated copy with these fields changed."""
        return validate(type(self), {**self.model_dump(), **changes})


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Reads a YAML or JSON mapping; raises `ConfigError` with the line if it cannot be parsed."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"Config file {path} does not exist. Give the path of a YAML or JSON file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config file {path} cannot be read: {error}.") from None
    return parse_config(text, where=str(path), is_json=path.suffix.lower() == ".json")


def parse_config(text: str, *, where: str, is_json: bool = False) -> dict[str, Any]:
    """Parses YAML or JSON text into a mapping; refuses duplicate keys."""
    try:
        loaded = json.loads(text, object_pairs_hook=_unique_keys) if is_json else yaml.load(text, _UniqueKeyLoader)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}, line {error.lineno}: not valid JSON ({error.msg}).") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where}{line}: not valid YAML ({problem}).") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply for a config.") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where} must be a mapping of keys to values, not {type(loaded).__name__}.")
    _refuse_expanding(loaded, where)
    return loaded


def apply_overrides(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Returns a copy of `tree` with ``section.key=value`` strings applied in order; values are parsed as YAML."""
    result = merge({}, tree)
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key or any(not part for part in key.split(".")):
            if os.path.exists(override):  # noqa: PTH110 - Path.exists raises an error for long names
                raise ConfigError(f"{override!r} is a file or folder, not a setting. Did you mean --data {override}?")
            raise ConfigError(
                f"{_shown(override)} is not a setting of the form key=value, such as training.learning_rate=0.001."
            )
        try:
            value = yaml.load(text, _UniqueKeyLoader) if text.strip() else ""
        except yaml.constructor.ConstructorError as error:
            raise ConfigError(f"Override {override!r}: {error.problem}.") from None
        except yaml.YAMLError:
            value = text  # *.pyc, for example, is not valid YAML; the value is then the text that the user typed
        except (ValueError, RecursionError):
            raise ConfigError(f"Override {_shown(override)}: the value cannot be read.") from None
        _refuse_expanding(value, f"Override {key}")
        *parents, leaf = key.split(".")
        node = result
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}  # a null section counts as absent
            child = node[parent]
            if not isinstance(child, dict):
                raise ConfigError(f"Override {override!r}: {parent} is a value, not a section with keys.")
            node = child
        node[leaf] = value
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `base` with the leaves of `over` in place of its own, section by section."""
    result = {key: merge({}, value) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in over.items():
        under = result.get(key)
        result[key] = merge(under if isinstance(under, dict) else {}, value) if isinstance(value, Mapping) else value
    return result


def leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) for each value of `tree` that is not a section; a path looks like ``training.seed``."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{path}", leaf) for path, leaf in leaves(value))
        else:
            yield key, value


def validate(config_class: type[C], tree: Mapping[str, Any]) -> C:
    """Builds `config_class` from plain data; raises `ConfigError` that names every wrong key."""
    try:
        return config_class.model_validate(dict(tree))
    except ValidationError as error:
        raise _refusal(config_class, error) from None


def _refusal(config_class: type[Config], error: ValidationError) -> ConfigError:
    lines = [_explain(config_class, detail) for detail in error.errors(include_url=False)]
    return ConfigError("\n".join(dict.fromkeys(lines)))


def value_text(value: Any) -> str:
    """Returns plain data as one line of YAML, which reads back to an equal value."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def refuse_unknown_keys(config_class: type[Config], tree: Mapping[str, Any]) -> None:
    """Raises `ConfigError` that names all keys of `tree` that `config_class` lacks; does not check the values."""
    try:
        config_class.model_validate(dict(tree))
    except ValidationError as error:
        unknown = [detail for detail in error.errors(include_url=False) if detail["type"] == "extra_forbidden"]
        if unknown:
            raise ConfigError("\n".join(_explain(config_class, detail) for detail in unknown)) from None


def dump_config(config: Config) -> str:
    """Returns the config as YAML text that `validate` reads back to an equal tree."""
    return dump_tree(config.model_dump(mode="json"))


def dump_tree(tree: Mapping[str, Any]) -> str:
    """Returns plain data as YAML text, in its own order."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _explain(config_class: type[Config], detail: ErrorDetails) -> str:
    location = [str(part) for part in detail["loc"]]
    path = ".".join(location)
    if detail["type"] == "extra_forbidden":
        return f"{path}: unknown key.{nearest_key(config_class, location)}"
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if detail["type"] == "missing":
        return f"{path}: this key is required."
    if not location or isinstance(detail["input"], dict | BaseModel):
        return f"{path}: {message}" if path else message
    if detail["type"] == "tuple_type":
        message = "must be a list, in brackets"
    if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
        message += "; to give it as text, put it in quotes"
    return f"{path} = {_shown(detail['input'])}: {message}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


@cache
def _demands(config_class: type[Config], field: str) -> tuple[bool, bool]:
    """Returns whether a field takes numbers but not true and false, and whether it is a list of texts."""
    annotation = config_class.model_fields[field].annotation
    types = _types_within(annotation)
    return bool(types & {int, float} and not types & {bool, Any}), _is_list_of_texts(annotation)


def _types_within(annotation: Any) -> set[Any]:
    """Returns the plain types in an annotation; a literal counts as the type of its values."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        arguments = arguments[:1]  # the others are constraints
    if not arguments:
        return {annotation}
    return set().union(*(_types_within(argument) for argument in arguments))


def _is_list_of_texts(annotation: Any) -> bool:
    """Returns whether an annotation is a list of any length of texts, or of literals that are texts."""
    arguments = get_args(annotation)
    return get_origin(annotation) is tuple and arguments[1:] == (Ellipsis,) and _types_within(arguments[0]) == {str}


def _holds_truth_value(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_truth_value(item) for item in value)
    return isinstance(value, bool)


def _refuse_expanding(tree: Any, where: str) -> None:
    """Refuses a tree that contains itself, or that a few YAML aliases expand to millions of values."""
    pending, count = [tree], 0
    while pending:
        node = pending.pop()
        children = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
        count += len(children)
        if count > _MOST_VALUES:
            raise ConfigError(f"{where}: more than {_MOST_VALUES:,} values, including those that aliases repeat.")
        pending.extend(children)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return result


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe YAML loader that refuses duplicate keys and reads numbers as in YAML 1.2: ``1e-3``, but not ``1:30``."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            name = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else id(key_node)
            if name in seen:
                problem = f"the key {key_node.value!r} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """Reads decimal, 0x and 0o numbers; a leading zero does not mean octal."""
        digits = str(node.value)
        return int(digits, 0 if re.match("[-+]?0[xo]", digits) else 10)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes text which this module, or a YAML 1.1 reader, would read as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Writes text with Unicode line breaks in double quotes; otherwise YAML folds them into spaces."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _UNICODE_BREAKS & set(text) else None)


_UNICODE_BREAKS = frozenset("\x85\u2028\u2029")
_Dumper.add_representer(str, _Dumper.represent_text)


_INTEGER, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_INTEGERS = re.compile(r"[-+]?[0-9][0-9_]*$|0x[0-9a-fA-F]+$|0o[0-7]+$")
_FLOATS = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INTEGER, _FLOAT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_UniqueKeyLoader, _Dumper):
    _class.add_implicit_resolver(_INTEGER, _INTEGERS, list("-+0123456789"))
    _class.add_implicit_resolver(_FLOAT, _FLOATS, list("-+.0123456789"))
_UniqueKeyLoader.add_constructor(_INTEGER, _UniqueKeyLoader.construct_integer)
