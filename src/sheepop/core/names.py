"""Allowed names for a setting, which a plugin can extend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from sheepop.core.errors import ConfigError


class Names:
    """An annotation with the allowed values of a setting: ``Annotated[str, Names("a", "b")]``."""

    def __init__(self, *names: str) -> None:
        self._names = list(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def add(self, name: str) -> None:
        """Allows another name; raises `ConfigError` if it is taken or not an identifier."""
        if name in self._names:
            raise ConfigError(f"The name {name!r} is taken already. Choose another one.")
        if not name.isidentifier():
            raise ConfigError(f"{name!r} is not a name: use letters, digits and underscores.")
        self._names.append(name)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, core_schema.any_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self._names), "type": "string"}

    def _checked(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self._names:
            *others, last = map(repr, self._names)
            expected = f"{', '.join(others)} or {last}" if others else last
            raise PydanticKnownError("literal_error", {"expected": expected})
        return value
