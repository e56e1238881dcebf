"""A judge behind an address: a server on loopback that answers as a chat model of OpenAI's API does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


def prefers_the_first(question: str) -> str:
    """Says that the answer shown first is better."""
    return "The first one says more.\n[[A]]"


@contextmanager
def judge_server(opinion: Callable[[str], str] = prefers_the_first) -> Iterator[tuple[str, list[str], list[str]]]:
    """A server with an opinion; what it was asked, and replies to give before that."""
    asked: list[str] = []
    first: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body["messages"][0]["content"])
            said = first.pop(0) if first else opinion(asked[-1])
            status = {"refuse": 400, "denied": 401, "busy": 503}.get(said, 200)
            self.reply(status, {"choices": [{"message": {"content": said}}]})

        def do_GET(self) -> None:
            self.reply(200, {"object": "list", "data": [{"id": "judge", "object": "model"}]})

        def reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked, first
    server.shutdown()
    server.server_close()
    thread.join()
