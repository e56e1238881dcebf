"""The program of the child process that renders chat templates."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from sheepop.core.bounded_child import Alive, serve


class OutputError(Exception):
    """A template wrote more than the limit."""


class _Generation(Extension):
    """The tag ``{% generation %}`` around a part that a model writes, marked with `generation_mark` if there is one."""

    tags = {"generation"}  # noqa: RUF012 - declared so in jinja2

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.extend(generation_mark="", num_generations=0)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses a block, which has its own scope of variables."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        environment: Any = self.environment
        mark = environment.generation_mark
        environment.num_generations += 1
        return f"{mark}<{caller()}{mark}>" if mark else caller()


class _Dict:
    """``dict`` without the attributes of a class."""

    def __call__(self, *arguments: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*arguments, **entries)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """``dict.fromkeys``."""
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """``namespace`` without names that begin with an underscore, which Python uses internally."""

    # No named parameters, because `self` may be one of the attributes.
    def __init__(*arguments: Any, **attributes: Any) -> None:
        self, *others = arguments
        given = dict(*others, **attributes)
        for name in given:
            _refuse_underscore(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def render(request: dict[str, Any], alive: Alive) -> Iterator[str]:
    """Yields the rendered text and, if requested, ``begin end`` in characters of each part that a model writes."""
    template = _compiled(request["template"])
    # A random mark, which no template can write itself.
    mark = f"\0{secrets.token_hex(16)}" if request.get("marked") else ""
    environment: Any = template.environment
    environment.generation_mark, environment.num_generations = mark, 0
    now = datetime.fromisoformat(request["now"])
    pieces, size = [], 0
    for piece in template.generate({"strftime_now": now.strftime, **request["variables"]}):
        pieces.append(piece)
        size += len(piece)
        if size > request["largest_output"]:
            raise OutputError(f"more than {request['largest_output']:,} characters")
    text = "".join(pieces)
    if not mark:
        yield text
        return
    text, parts = _without_marks(text, mark)
    if len(parts) != environment.num_generations:
        raise TemplateError("its generation blocks lie in one another, or are changed after they were written")
    yield text
    yield from (f"{begin} {end}" for begin, end in parts)


def _without_marks(text: str, mark: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the spans of the marked parts, up to the first incomplete one."""
    first, *rest = text.split(f"{mark}<")
    clean, parts, size = [first], [], len(first)
    for part in rest:
        written, end, after = part.partition(f"{mark}>")
        if not end:
            break
        clean += [written, after]
        parts.append((size, size + len(written)))
        size += len(written) + len(after)
    return "".join(clean), parts


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "dict": _Dict(), "namespace": _Namespace}
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise TemplateError(str(message))


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"{name!r} begins with an underscore")


if __name__ == "__main__":
    serve(render)
