"""A client of servers: one on loopback that misbehaves in every way, one answer after another."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sheepop.core.errors import DataError, UsageError
from sheepop.core.http_client import RefusedError
from sheepop.evaluate.endpoint import Endpoint, Piece

from ..command_line import free_port

Behaviour = Callable[[BaseHTTPRequestHandler], None]
HELLO = [{"role": "user", "content": "Hello"}]


class Server(ThreadingHTTPServer):
    """Behaves as it is told, the last way again and again, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviours: list[Behaviour] = []
        self.asked: list[tuple[str, str | None, Any]] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def does(self, *behaviours: Behaviour) -> None:
        self.behaviours, self.asked = list(behaviours), []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.path, self.headers["Authorization"], json.loads(body) if body else None))
        number = min(len(self.server.asked), len(self.server.behaviours)) - 1
        self.close_connection = True
        self.server.behaviours[number](self)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.released.clear()
    yield running
    running.released.set()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which take no time here."""
    found: list[float] = []
    monkeypatch.setattr("sheepop.core.http_client.sleep", found.append)
    return found


def answers(data: bytes, status: int = 200, *, length: int | None = None, after: str | None = None) -> Behaviour:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Location", "/elsewhere")
        if after is not None:
            handler.send_header("Retry-After", after)
        handler.send_header("Content-Length", str(len(data) if length is None else length))
        handler.end_headers()
        handler.wfile.write(data)

    return behave


def says(text: Any) -> Behaviour:
    return answers(json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode())


def refuses(status: int, message: str, after: str | None = None) -> Behaviour:
    return answers(json.dumps({"error": {"message": message}}).encode(), status, after=after)


def streams(*events: Any, end: bytes = b"data: [DONE]\n\n") -> Behaviour:
    return answers(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + end)


def piece(text: str | None, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {} if text is None else {"content": text}, "finish_reason": reason}]}


def hangs(handler: BaseHTTPRequestHandler) -> None:
    handler.server.released.wait(20)  # type: ignore[attr-defined]


def drips(handler: BaseHTTPRequestHandler) -> None:
    """A byte now and then, each in time."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(1000):
        try:
            handler.wfile.write(b" ")
        except OSError:
            return
        if handler.server.released.wait(0.02):  # type: ignore[attr-defined]
            return


def closes(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def endpoint(server: Server, attempts: int = 3, timeout: float = 20.0, **more: Any) -> Endpoint:
    return Endpoint(server.url, model="judge", attempts=attempts, timeout=timeout, **more)


def test_it_asks_as_the_protocol_says(server: Server) -> None:
    server.does(says("Hi \N{SHEEP}"))
    asker = Endpoint(f"{server.url}/v1/", model="m", api_key="secret", settings={"temperature": 0, "seed": 1})
    assert asker.ask(HELLO, seed=2) == "Hi \N{SHEEP}"
    asked = {"model": "m", "messages": HELLO, "temperature": 0, "seed": 2}
    assert server.asked == [("/v1/chat/completions", "Bearer secret", asked)]


def test_the_first_model_is_taken_where_none_is_named(server: Server) -> None:
    server.does(answers(b'{"data": [{"id": "one"}, {"id": "two"}]}'))
    assert Endpoint(server.url).model == "one"
    assert server.asked == [("/v1/models", None, None)]
    server.does(answers(b'{"data": []}'))
    with pytest.raises(DataError, match="serves no model"):
        Endpoint(server.url)


@pytest.mark.parametrize(
    "trouble",
    [
        refuses(500, "out of memory"),
        refuses(429, "too many requests"),
        answers(b"<html>Bad gateway</html>", 502),
        answers(b'{"choices": [{"mess'),
        answers(b"[]"),
        answers(b'{"choices": []}'),
        answers(b'{"choices": [{"message": {"content": 7}}]}'),
        answers(b'{"choices": [{"message": {"content": "\\ud800"}}]}'),
        answers(b"[" * 100_000),
        answers(b'{"error": {"message": "the model upstream is gone"}}'),
        answers(b'{"choices": [{"message": {"content": "cut', length=1000),
        closes,
    ],
)  # fmt: skip
def test_after_trouble_it_asks_again(server: Server, waits: list[float], trouble: Behaviour) -> None:
    server.does(trouble, trouble, says("at last"))
    assert endpoint(server).ask(HELLO) == "at last"
    assert waits == [1.0, 2.0]


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (refuses(500, "out of memory"), "answered 500: out of memory (5 attempts). Try again later"),
        (answers(b"nonsense"), "did not answer with a JSON object (5 attempts). Give the address of a server that"),
        (answers(b'{"choices": 3}'), "answers in another format than OpenAI's protocol has (5 attempts). Give"),
        (answers(b'{"a', length=9), "broke off its answer (5 attempts). Try again"),
        (closes, "broke off its answer: Remote end closed connection without response (5 attempts). Try"),
    ],
)
def test_it_gives_up_with_words(server: Server, waits: list[float], trouble: Behaviour, words: str) -> None:
    server.does(trouble)
    with pytest.raises(DataError) as caught:
        endpoint(server, attempts=5).ask(HELLO)
    assert str(caught.value).startswith(f"{server.url}/v1 {words}")
    assert (len(server.asked), waits) == (5, [1.0, 2.0, 4.0, 8.0])


def test_waits_do_not_grow_for_ever(server: Server, waits: list[float]) -> None:
    server.does(refuses(503, "starting"))
    with pytest.raises(DataError, match="503: starting"):
        endpoint(server, attempts=9).ask(HELLO)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_it_waits_as_long_as_it_is_asked_to_but_not_for_hours(server: Server, waits: list[float]) -> None:
    server.does(refuses(429, "slowly", "17"), refuses(429, "slowly", "soon"), says("now"))
    assert endpoint(server).ask(HELLO) == "now"
    assert waits == [17.0, 2.0]
    server.does(refuses(429, "no credit", "7200"))
    with pytest.raises(DataError, match=r"429: no credit\. It asks for 7,200 s\."):
        endpoint(server).ask(HELLO)
    assert (len(server.asked), waits) == (1, [17.0, 2.0])


@pytest.mark.parametrize(
    ("status", "kind", "remedy"),
    [
        (401, DataError, "Give a key"),
        (403, DataError, "Give a key that may"),
        (404, DataError, "the model's name"),
        (400, RefusedError, "a shorter one may work"),
        (302, DataError, "the address is right"),
    ],
)
def test_what_no_attempt_can_mend_is_not_tried_again(
    server: Server, waits: list[float], status: int, kind: type[DataError], remedy: str
) -> None:
    server.does(refuses(status, "no"))
    with pytest.raises(DataError, match=rf"127\.0\.0\.1:\d+/v1 answered {status}: no\. .*{remedy}") as caught:
        endpoint(server, api_key="secret").ask(HELLO)
    assert type(caught.value) is kind
    assert "secret" not in str(caught.value)
    assert (len(server.asked), waits) == (1, [])


def test_a_server_that_hangs_is_left(server: Server, waits: list[float]) -> None:
    server.does(hangs, says("awake"))
    assert endpoint(server, timeout=1.0).ask(HELLO) == "awake"
    server.does(hangs)
    with pytest.raises(DataError, match=r"does not answer in time \(2 attempts\)\. Give it more time"):
        endpoint(server, attempts=2, timeout=0.1).ask(HELLO)


def test_a_server_that_drips_is_left_too(server: Server, waits: list[float]) -> None:
    server.does(drips)
    with pytest.raises(DataError, match=r"did not finish its answer within 1 s"):
        endpoint(server, attempts=1, timeout=1.0).ask(HELLO)


def test_an_answer_that_is_too_large_is_not_read_to_its_end(server: Server, waits: list[float]) -> None:
    def flood(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(4096):  # 256 MiB
            try:
                handler.wfile.write(b" " * 2**16)
            except OSError:
                return

    server.does(flood)
    for call in (endpoint(server).ask, lambda messages: list(endpoint(server).stream(messages))):
        with pytest.raises(DataError, match="more than 16 MiB"):
            call(HELLO)
    assert (len(server.asked), waits) == (2, [])


def test_a_server_that_is_not_there(waits: list[float]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(DataError, match=rf"{url}/v1 cannot be reached: Connection refused \(3 attempts\)\. Check that"):
        Endpoint(url, model="m", attempts=3).ask(HELLO)
    assert waits == [1.0, 2.0]


@pytest.mark.parametrize(
    "url", ["localhost:8000", "file:///etc/passwd", "http://", "http://a b", "http://a:x", "http://u:p@a", "http://["]
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is no address of a server"):
        Endpoint(url, model="m")


def test_a_key_with_a_line_break_is_refused() -> None:
    with pytest.raises(UsageError, match="API key") as caught:
        Endpoint("http://localhost", model="m", api_key="secret\n")
    assert "secret" not in str(caught.value)


def test_an_answer_that_was_cut_off_before_its_first_word_is_empty(server: Server) -> None:
    server.does(says(None))
    assert endpoint(server).ask(HELLO) == ""


def test_a_stream_comes_piece_by_piece(server: Server, waits: list[float]) -> None:
    usage = {"choices": [], "usage": {"total_tokens": 3}}
    server.does(refuses(503, "wait"), streams(piece("Hel"), piece("lo"), piece(None, "length"), usage))
    found = list(endpoint(server).stream(HELLO, max_completion_tokens=2))
    assert found == [Piece("Hel", None), Piece("lo", None), Piece("", "length")]
    assert server.asked[1][2] == {"model": "judge", "messages": HELLO, "max_completion_tokens": 2, "stream": True}
    assert waits == [1.0]


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (streams(piece("Hel"), end=b""), "broke off its answer"),
        (streams(piece("Hel"), {"error": {"message": "out of memory"}}), "answered with an error: out of memory"),
        (streams(piece("Hel"), {"choices": [7]}), "another format"),
        (streams(piece("Hel"), end=b"data: {no json\n\n"), "JSON"),
    ],
)
def test_a_stream_that_ends_badly_is_no_answer(
    server: Server, waits: list[float], behaviour: Behaviour, words: str
) -> None:
    server.does(behaviour)
    stream = endpoint(server).stream(HELLO)
    assert next(stream).text == "Hel"
    with pytest.raises(DataError, match=words):
        list(stream)
    assert (len(server.asked), waits) == (1, [])
