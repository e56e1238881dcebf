"""The configuration tree: frozen, typed, unknown keys refused, errors that name the path of the key.

Each folder declares its own subtree as a subclass of `Config`; this module reads files, applies
``key=value`` overrides and turns validation failures into one readable paragraph.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from sheepop.core.errors import ConfigError

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """A subtree of the configuration: immutable, with unknown keys and NaN refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    def replace(self: C, **changes: Any) -> C:
        """A validated copy in which the given fields differ."""
        return validate(type(self), {**self.model_dump(), **changes})


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Reads a YAML or JSON mapping; raises `ConfigError` with the line when it cannot be parsed."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"Config file {path} does not exist. Give the path of a YAML or JSON file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config file {path} cannot be read: {error}.") from None
    return parse_config(text, where=str(path), is_json=path.suffix == ".json")


def parse_config(text: str, *, where: str, is_json: bool = False) -> dict[str, Any]:
    """Parses YAML or JSON text into a mapping, refusing keys that stand twice."""
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
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where} holds a {type(loaded).__name__}; a config is a mapping of keys to values.")
    return loaded


def apply_overrides(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `tree` with ``section.key=value`` strings applied in order; values are read as YAML."""
    result = _copy_tree(tree)
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key or any(not part for part in key.split(".")):
            raise ConfigError(
                f"Override {override!r} is not of the form key=value. Example: training.learning_rate=0.001"
            )
        try:
            value = yaml.load(text, _UniqueKeyLoader) if text.strip() else ""
        except yaml.YAMLError:
            value = text
        *parents, leaf = key.split(".")
        node = result
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"Override {override!r}: {parent} is a value, not a section with keys.")
            node = child
        node[leaf] = value
    return result


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` in which the leaves of `over` win, section by section."""
    result = _copy_tree(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), dict):
            result[key] = merge(result[key], value)
        else:
            result[key] = _copy_tree(value) if isinstance(value, Mapping) else value
    return result


def validate(config_class: type[C], tree: Mapping[str, Any]) -> C:
    """Builds `config_class` from plain data; raises `ConfigError` naming every offending key."""
    try:
        return config_class.model_validate(dict(tree))
    except ValidationError as error:
        details = error.errors(include_url=False)
        lines = [_explain(config_class, detail) for detail in details]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def dump_config(config: Config) -> str:
    """The config as YAML text that `validate` reads back to an equal tree."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _explain(config_class: type[Config], detail: ErrorDetails) -> str:
    location = [str(part) for part in detail["loc"]]
    path = ".".join(location)
    if detail["type"] == "extra_forbidden":
        return f"{path}: unknown key.{_nearest(config_class, location)}"
    message = detail["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if detail["type"] == "missing":
        return f"{path}: this key is required."
    if not location or isinstance(detail["input"], dict | BaseModel):
        return f"{path}: {message}" if path else message
    return f"{path} = {detail['input']!r}: {message}"


def _nearest(config_class: type[Config], location: list[str]) -> str:
    known = _known_keys(config_class)
    path = ".".join(location)
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in known}
    section = ".".join(location[:-1])
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    match = difflib.get_close_matches(path, siblings, n=1, cutoff=0.6)
    if not match:
        leaves = difflib.get_close_matches(location[-1], by_leaf, n=1, cutoff=0.75)
        match = [by_leaf[leaf] for leaf in leaves]
    if match:
        return f" Did you mean {match[0]}?"
    return f" Known keys here: {', '.join(key.rsplit('.', 1)[-1] for key in siblings)}."


def _known_keys(config_class: type[Config], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in config_class.model_fields.items():
        keys.append(prefix + name)
        for candidate in (field.annotation, *get_args(field.annotation)):
            if isinstance(candidate, type) and issubclass(candidate, Config):
                keys += _known_keys(candidate, f"{prefix}{name}.")
    return keys


def _copy_tree(value: Any) -> Any:
    return {key: _copy_tree(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return result


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys and reads ``1e-3`` as a number, as JSON does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _construct_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(node.value))


_UniqueKeyLoader.yaml_implicit_resolvers = {
    key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_UniqueKeyLoader.add_implicit_resolver(
    "!exponent", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_UniqueKeyLoader.add_constructor("!exponent", _construct_number)
