"""The keys of a configuration tree, as declared by the fields of its classes.

Documentation, ``sheepop config`` and the checks of a resumed run use `keys`. The meaning of a field is the text below
it in its class.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, TypeGuard, TypeVar, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sheepop.core.errors import ConfigError

T = TypeVar("T")
_MAY_CHANGE = object()
MayChange = Annotated[T, _MAY_CHANGE]
"""Marks a field that may change when a run is resumed, because it affects no number of the steps already taken.

On a section it applies to all keys of the section.
"""


@dataclass(frozen=True)
class Key:
    """A key of a configuration tree: its path, its field, and whether it may change when a run is resumed.

    `owner` is the class that has the field. `section` is the class of the keys below it, if it is a section or a list
    of sections, else None.
    """

    path: str
    field: FieldInfo
    owner: type[BaseModel]
    section: type[BaseModel] | None
    may_change: bool

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def meaning(self) -> str:
        """The text below the field in its class, on one line, or an empty string."""
        declaring = [kind for kind in self.owner.__mro__ if self.name in vars(kind).get("__annotations__", {})]
        return _meanings(declaring[0]).get(self.name, "")


def keys(config_class: type[BaseModel], prefix: str = "", may_change: bool = False) -> Iterator[Key]:
    """Yields every key of the tree of `config_class`, a section before the keys in it."""
    for name, field in config_class.model_fields.items():
        inside = [kind for kind in (field.annotation, *get_args(field.annotation)) if _is_section(kind)]
        section = inside[0] if inside else None
        key = Key(prefix + name, field, config_class, section, may_change or _MAY_CHANGE in field.metadata)
        yield key
        if section is not None:
            yield from keys(section, f"{key.path}.", key.may_change)


def may_change(config_class: type[BaseModel]) -> frozenset[str]:
    """Returns the paths of the keys that may change when a run is resumed."""
    return frozenset(key.path for key in keys(config_class) if key.may_change)


def find_key(config_class: type[BaseModel], path: str) -> Key:
    """Returns the key at `path`; if there is none, raises `ConfigError` that names the nearest one."""
    known = {key.path: key for key in keys(config_class)}
    if path in known:
        return known[path]
    location = path.split(".")
    while len(location) > 1 and ".".join(location[:-1]) not in known:
        location.pop()
    raise ConfigError(f"{path}: unknown key.{nearest_key(config_class, location)}")


def nearest_key(config_class: type[BaseModel], location: list[str]) -> str:
    """Returns a hint for an unknown key: a similar name in its section or elsewhere, or all keys of the section."""
    known = [key.path for key in keys(config_class)]
    by_name = {key.rpartition(".")[2]: key for key in known}
    section, name = ".".join(part for part in location[:-1] if not part.isdigit()), location[-1]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    for candidates, cutoff in ((siblings, 0.6), (by_name, 0.75)):
        if match := difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff):
            return f" Did you mean {candidates[match[0]]}?"
    return f" Known keys here: {', '.join(siblings)}." if siblings else f" {section} has no keys."


def _is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@cache
def _meanings(config_class: type[BaseModel]) -> dict[str, str]:
    """Returns the texts below the fields of a class from its source, because Python does not keep them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found
