"""Bodies of requests and answers as JSON: strict, bounded, and beside the event loop if they are large.

The library's parser and writer hold the interpreter until they are done, so that a large body would stop every other
thread; one of many values is read and written by Python, which takes turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NoReturn, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from sheepop.serve.protocol import ApiError, fitted
from sheepop.serve.worker import SideWork

CLIENT_LEFT = 499  # appears only in the log, since the client is gone
_SMALL = 2**16  # bytes that are read at once
_MOST_VALUES = 20_000  # in a body for the library's parser
_MOST_PARTS, _DEEPEST = 25_000, 201  # as deep as the library reads


def checked(body: bytes, model: type[BaseModel]) -> BaseModel:
    """Reads a body; raises `ApiError` if it is no standard JSON, is too deep, or does not fit `model`."""
    try:
        value = parsed(body)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    return fitted(model, value)


def parsed(body: bytes) -> Any:
    """Parses JSON without NaN and lone surrogates, of at most 201 levels and 25,000 lists and objects.

    Raises `ValueError` for anything else.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) <= _MOST_VALUES:
        return from_json(body, allow_inf_nan=False)
    return _Decoder().decode(body.decode("utf-8"))


def written(value: Any) -> bytes:
    """Writes JSON; other threads run meanwhile."""
    return "".join(json.JSONEncoder(allow_nan=False).iterencode(value)).encode()


class _Decoder(json.JSONDecoder):
    """The decoder of the standard library in Python alone, with limits."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse, object_pairs_hook=_object)
        self._depth = self._count = 0
        read_string = self.parse_string  # type: ignore[has-type]
        self.parse_string = lambda *given: _text(read_string(*given))
        self.parse_array = self._counted(self.parse_array)  # type: ignore[has-type]
        self.parse_object = self._counted(self.parse_object)  # type: ignore[has-type]
        self.scan_once = py_make_scanner(self)

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self._depth, self._count = self._depth + 1, self._count + 1
            if self._depth > _DEEPEST:
                raise ValueError(f"it has more than {_DEEPEST} levels")
            if self._count > _MOST_PARTS:
                raise ValueError(f"it has more than {_MOST_PARTS:,} lists and objects")
            found = parse(*given)
            self._depth -= 1
            return found

        return counted


def _text(found: tuple[str, int]) -> tuple[str, int]:
    found[0].encode()  # refuses a lone surrogate
    return found


def _object(found: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found) > _MOST_PARTS:
        raise ValueError(f"it has an object of more than {_MOST_PARTS:,} members")
    for key, _ in found:
        key.encode()
    return dict(found)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


class _CheckedRequest(Request):
    """Reads a body as standard JSON that fits `model`, a large one beside the event loop."""

    def __init__(self, request: Request, model: type[BaseModel], bodies: SideWork) -> None:
        super().__init__(request.scope, request.receive)
        self._model, self._bodies = model, bodies

    async def body(self) -> bytes:
        try:
            return await super().body()
        except ClientDisconnect:
            raise left() from None

    async def json(self) -> BaseModel:
        body = await self.body()
        if len(body) <= _SMALL:
            return checked(body, self._model)
        return await self._bodies.do(checked, body, self._model)


def route_class(bodies: SideWork) -> type[APIRoute]:
    """The class of routes whose bodies are read by `_CheckedRequest`; FastAPI takes an instance of a model as it is."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            answer = super().get_route_handler()
            model = get_type_hints(self.endpoint).get("requested")
            if model is None:
                return answer

            async def answer_checked(request: Request) -> Any:
                return await answer(_CheckedRequest(request, model, bodies))

            return answer_checked

    return Route


def left() -> ApiError:
    """The error that ends a request whose client is gone."""
    return ApiError(CLIENT_LEFT, "The client has closed the connection.", kind="client_error")
