"""A client of servers that speak OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sheepop.core.errors import UsageError
from sheepop.core.http_client import LATER, Failure, HttpClient

_EXPECTED = "Give the address of a server that speaks OpenAI's protocol."
_WRONG_FORMAT = "answers in another format than OpenAI's protocol has"
_REMEDIES = {
    401: "Give a key with --api-key, or in OPENAI_API_KEY.",
    403: "Give a key that may use this model, with --api-key or in OPENAI_API_KEY.",
    404: "Check the address, and the model's name.",
}


class Piece(NamedTuple):
    """A piece of a streamed answer; the last one has a finish reason such as ``stop`` or ``length``."""

    text: str
    finish_reason: str | None
    reasoning: str = ""


class Endpoint:
    """A model behind ``/v1/chat/completions`` below `url`; the server's first model if `model` is None.

    `settings` are sent with every request, for example ``temperature``. Retries and errors are those of `HttpClient`;
    raises `UsageError` too for an invalid key. Safe to share between threads.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        attempts: int = 5,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("The API key contains a line break or a non-ASCII character. Copy it again.")
        if "?" in url:
            raise UsageError(f"{url!r} is no address of a server. Leave out what begins with a question mark.")
        base = url.rstrip("/")
        self._client = HttpClient(
            base if base.endswith("/v1") else f"{base}/v1",
            expected=_EXPECTED,
            remedies=_REMEDIES,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=timeout,
            attempts=attempts,
        )
        self._settings = dict(settings or {})
        self.model = model or self._client.request("/models", None, _first_model)

    def ask(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """The whole answer to a conversation; `settings` are further fields of the request."""
        return self._client.request("/chat/completions", self._body(messages, settings), _content)

    def stream(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> Iterator[Piece]:
        """The answer piece by piece; once it has begun, there is no other attempt."""
        body = self._body(messages, {**settings, "stream": True})
        return self._client.stream("/chat/completions", body, self._pieces)

    def _body(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "messages": list(messages), **self._settings, **settings}

    def _pieces(self, lines: Iterator[bytes]) -> Iterator[Piece]:
        """The pieces in the server-sent events of a reply."""
        is_finished = False
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            try:
                for choice in self._client.decoded(data).get("choices") or ():
                    reason = choice.get("finish_reason")
                    is_finished = is_finished or reason is not None
                    delta = choice.get("delta") or {}
                    yield Piece(_text(delta.get("content")), reason, _text(delta.get("reasoning_content")))
            except (AttributeError, TypeError):
                raise Failure(_WRONG_FORMAT, _EXPECTED) from None
        if not is_finished:
            raise Failure("broke off its answer", LATER)


def _first_model(reply: dict[str, Any]) -> str:
    try:
        return str(reply["data"][0]["id"])
    except IndexError:
        raise Failure("serves no model", "Start it with one.", passes=False) from None
    except (KeyError, TypeError):
        raise Failure("does not list its models", _EXPECTED) from None


def _content(reply: dict[str, Any]) -> str:
    try:
        return _text(reply["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError):
        raise Failure(_WRONG_FORMAT, _EXPECTED) from None


def _text(content: Any) -> str:
    """The text of a message; empty if the model was cut off before its first word."""
    if content is None:
        return ""
    if not isinstance(content, str) or any("\ud800" <= letter <= "\udfff" for letter in content):
        raise Failure(_WRONG_FORMAT, _EXPECTED)
    return content
