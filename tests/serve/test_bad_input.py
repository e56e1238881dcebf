"""Hostile input of every kind against one live server: it is refused in OpenAI's shape and affects nobody else."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from .conftest import Live

MESSAGES = [{"role": "user", "content": "Hello"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "plain", "prompt": "Once", "max_tokens": 1},
    "/v1/chat/completions": {"model": "chat", "messages": MESSAGES, "max_tokens": 1},
    "/v1/embeddings": {"model": "plain", "input": "Once"},
    "/tokenize": {"model": "plain", "prompt": "Once"},
    "/detokenize": {"model": "plain", "tokens": [5]},
}


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as found:
        yield found


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer; checks its status and OpenAI's shape."""
    assert answer.status_code == status, (answer.request.content[-200:], answer.text)
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


def assert_serves(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"model": "plain", "prompt": "Once", "max_tokens": 4, "seed": 1})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


def metric(client: httpx.Client, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def await_idle(client: httpx.Client) -> None:
    """Waits until only its own request is open; the test's time limit ends it."""
    while metric(client, "sheepop_running_requests") or metric(client, "sheepop_open_connections") > 1:
        time.sleep(0.01)


# The values that each field accepts, by OpenAI's reference or this server's documentation.


def number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def integer(low: float, high: float) -> Callable[[Any], bool]:
    # A float without a fraction is an integer in JSON.
    return lambda value: type(value) is int and low <= value <= high


def one_of(*known: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) in (str, bool) and value in known


def text(value: Any) -> bool:
    return type(value) is str


SAMPLING = {
    "model": one_of("plain", "chat"),
    "temperature": number(0, 2),
    "top_p": number(1e-300, 1),
    "n": integer(1, 4),  # as many as are written at a time
    "stream": one_of(False, True),
    "stream_options": lambda value: value is None,
    "stop": lambda value: value in (None, []) or (text(value) and 0 < len(value) <= 1000),
    "max_tokens": lambda value: value is None or integer(1, float("inf"))(value),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": lambda value: value is None or value == {},
    "seed": lambda value: value is None or integer(-(2**63), 2**63 - 1)(value),
    "user": lambda value: value is None or text(value),
    "store": one_of(False, True),
    "metadata": lambda value: value == {},
    "service_tier": text,
    "prompt_cache_key": text,
    "safety_identifier": text,
    "top_k": lambda value: value is None or integer(1, float("inf"))(value),
    "min_p": number(0, 1),
    "typical_p": number(1e-300, 1),
    "repetition_penalty": number(0.01, 100),
    "min_tokens": integer(0, 1),  # no more than max_tokens
    "priority": integer(0, 100),
}
FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "/v1/completions": {
        **SAMPLING,
        "prompt": lambda value: (text(value) and 0 < len(value) < 256) or value == [1],
        "best_of": lambda value: value is None or integer(1, 4)(value),
        "echo": lambda value: type(value) is bool,
        "logprobs": lambda value: value is None or integer(0, 20)(value),
    },
    "/v1/chat/completions": {
        **SAMPLING,
        "messages": lambda value: False,
        "max_completion_tokens": lambda value: value is None,  # beside max_tokens
        "logprobs": lambda value: type(value) is bool,
        "top_logprobs": lambda value: value is None,  # only with logprobs
        "response_format": lambda value: value is None,
        "tools": lambda value: value is None or value == [],
        "tool_choice": lambda value: value is None or value == "none",
        "parallel_tool_calls": one_of(False, True),
        "functions": lambda value: value == [],
        "reasoning_effort": text,
        "modalities": lambda value: value == [],
    },
    "/v1/embeddings": {
        "model": SAMPLING["model"],
        "input": lambda value: (text(value) and 0 < len(value) < 256) or value == [1],
        "encoding_format": one_of("float", "base64"),
        "user": lambda value: value is None or text(value),
    },
    "/tokenize": {"model": SAMPLING["model"], "prompt": text, "add_special_tokens": lambda v: type(v) is bool},
    "/detokenize": {"model": SAMPLING["model"], "tokens": lambda value: value in ([], [1])},
}
REQUIRED = {"model", "prompt", "messages", "input", "tokens"}
VALUES: list[Any] = [
    None, True, 0, 1, -1, 1.5, 1e-300, 1e300, 2**63, -(2**63) - 1, 10**30, 1_000_000, "", "x", "none", "1", "\x00",
    "x" * 20_000, [], [1], [-1], [10**30], [[]], [[[1]]], ["a", 1], [{}], {}, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_every_field_refuses_what_it_does_not_accept(client: httpx.Client, path: str) -> None:
    assert client.post(path, json=ENDPOINTS[path]).status_code == 200
    for field, accepts in FIELDS[path].items():
        for value in VALUES:
            answer = client.post(path, json={**ENDPOINTS[path], field: value})
            case = f"{field} = {json.dumps(value)[:60]}: {answer.text[:300]}"
            if accepts(value) or (value is None and field not in REQUIRED):
                assert answer.status_code == 200, case
                continue
            unknown_model = field == "model" and text(value) and len(value) <= 256
            error = refusal(answer, 404 if unknown_model else 400)
            assert error["type"] == "invalid_request_error", case
            assert (error["param"] or "").partition(".")[0] == field, case
            assert len(error["message"]) < 2100
    assert_serves(client)


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_what_is_not_a_json_object_is_refused(client: httpx.Client, path: str) -> None:
    whole = json.dumps(ENDPOINTS[path]).encode()
    number = b'{"model": "plain", "prompt": "x", "temperature": %s}'
    bodies = [
        b"", b"{", b"[]", b"null", b"7", b'"text"', whole[:-1], whole + b"}", b"\xff\xfe" + whole, b"\x80" * 40,
        whole.replace(b"model", b"mod\xc3el"), b'{"model": "\\ud800"}', b"[" * 50_000, b'{"a":' * 20_000,
        b'{"model": "\xed\xa0\x80"}', b"1" * 5000,
        *(number % value for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"0x10", b"01", b"1_0")),
    ]  # fmt: skip
    for body in bodies:
        error = refusal(client.post(path, content=body, headers={"content-type": "application/json"}))
        assert error["type"] == "invalid_request_error"
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""):
        assert (
            "application/json" in refusal(client.post(path, content=whole, headers={"content-type": kind}))["message"]
        )
    assert_serves(client)


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_unknown_fields_are_refused_by_name(client: httpx.Client, path: str) -> None:
    names = ["chat_template", "suffixes", "audio", "use_beam_search", "ä", "__class__", "x" * 5000, "model ", "a.b"]
    for name in names:
        error = refusal(client.post(path, json={**ENDPOINTS[path], name: "{{ 1 }}"}))
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert refusal(client.post(path, json={}))["code"] == "missing_required_parameter"


def test_fields_within_messages_are_checked_too(client: httpx.Client) -> None:
    def asked(**changes: Any) -> dict[str, Any]:
        return refusal(client.post("/v1/chat/completions", json={**ENDPOINTS["/v1/chat/completions"], **changes}))

    image = {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}
    assert asked(messages=[{"role": "king", "content": "x"}])["param"] == "messages.0.role"
    assert asked(messages=[{"role": "user", "content": [image]}])["param"].startswith("messages.0.content")
    assert asked(messages=[*MESSAGES, {"role": "user", "content": "x"}, {}])["param"] == "messages.2.role"
    assert asked(messages=[*MESSAGES, {"role": "user"}])["param"] == "messages.1.content"
    assert asked(messages=[{"role": "user", "content": "x" * 300}])["code"] == "context_length_exceeded"
    function = {"name": "no name", "parameters": {}}
    assert asked(tools=[{"type": "function", "function": function}])["param"] == "tools.0.function.name"
    assert asked(tool_choice={"type": "function", "function": {"name": "f"}})["param"] == "tool_choice"
    assert asked(response_format={"type": "json_schema"})["param"] == "response_format.json_schema"
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nosuch"}}}
    assert "Invalid type: nosuch" in asked(response_format=form)["message"]
    for arguments in ("[" * 30_000, "no json", ""):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": "x", "tool_calls": [call]}
        answer = client.post("/v1/chat/completions", json={"model": "chat", "messages": [message], "max_tokens": 1})
        assert answer.status_code == 200
    assert "no chat template" in asked(model="plain")["message"]


def test_what_the_chat_template_gets_is_checked(client: httpx.Client) -> None:
    def asked(**changes: Any) -> dict[str, Any]:
        return refusal(client.post("/v1/chat/completions", json={**ENDPOINTS["/v1/chat/completions"], **changes}))

    for name in ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"):
        error = asked(chat_template_kwargs={name: "{{ 1 }}"})
        assert error["param"] == "chat_template_kwargs"
        assert f"{name}: a conversation gives the chat template this itself" in error["message"]
    assert asked(chat_template_kwargs="{}")["param"] == "chat_template_kwargs"
    assert asked(documents=["a text"])["param"] == "documents.0"
    assert asked(add_generation_prompt=True, continue_final_message=True)["param"] == "continue_final_message"
    nothing = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}]
    error = asked(messages=[*MESSAGES, *nothing], continue_final_message=True)
    assert error["param"] == "continue_final_message"
    assert "the last message has no text" in error["message"]
    # A name that Python's functions use is a variable like any other.
    body = {**ENDPOINTS["/v1/chat/completions"], "chat_template_kwargs": {"self": 1, "template": "x", "options": []}}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_settings_that_leave_nothing_to_choose_harm_only_who_asks(client: httpx.Client) -> None:
    """Each of these arrives while another text is generated, and is answered or refused."""
    everyone = {str(token_id): -100 for token_id in range(128)}
    odd: list[dict[str, Any]] = [
        {"temperature": 1e-300},
        {"temperature": 1e-40, "top_p": 1e-300, "typical_p": 1e-300, "top_k": 1},
        {"logit_bias": {"128": 5}},
        {"logit_bias": {"-1": 5}},
        {"logit_bias": {"99999999999999999999999": 5}},
        {"logit_bias": everyone},
        {"logit_bias": everyone, "temperature": 1e-30, "repetition_penalty": 100},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 0.01},
        {"min_tokens": 10**18, "max_tokens": 10**18},
    ]
    with client.stream(
        "POST",
        "/v1/completions",
        json={"model": "plain", "prompt": "Once", "max_tokens": 200, "min_tokens": 200, "seed": 7, "stream": True},
    ) as stream:
        for settings in odd:
            answer = client.post("/v1/completions", json={**ENDPOINTS["/v1/completions"], "max_tokens": 9, **settings})
            assert answer.status_code in (200, 400), (settings, answer.text)
            if answer.status_code == 400:
                assert refusal(answer)["param"] is not None, settings
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert not any("error" in json.loads(line[6:]) for line in lines[:-1])
    empty = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}
    base = {"model": "chat", "messages": MESSAGES, "max_tokens": 40}
    answer = client.post("/v1/chat/completions", json={**base, "response_format": empty, "min_tokens": 20})
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == 1
    assert_serves(client)


def test_a_tool_that_is_not_called_to_the_end_is_no_call(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    asked = {"model": "chat", "messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 5}
    choice = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    events = client.post("/v1/chat/completions", json={**asked, "stream": True}).text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert json.loads(events[-3][6:])["choices"][0]["finish_reason"] == "length"


def test_a_grammar_that_explodes_is_refused_while_others_are_answered(client: httpx.Client, live: Live) -> None:
    pieces = [{"type": "string", "pattern": f"(.*a.{{{size}}}|(x+x+)+y){{1,900}}$"} for size in range(300, 340)]
    bombs: list[Any] = [
        {"allOf": [{"type": "string", "pattern": f"a.{{{size}}}b"} for size in range(20, 50)]},
        {"anyOf": [{"type": "object", "properties": {str(n): piece for n, piece in enumerate(pieces)}}] * 20},
        {"type": "array", "minItems": 10**9, "items": {"type": "string"}},
        {"type": "string", "pattern": "(a{1,5000}){1,5000}(b{1,5000}){1,5000}"},
        {"$ref": "#"},
        {"type": "string", "minLength": 10**12},
    ]
    answers: list[httpx.Response] = []

    def ask(schema: Any) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        body = {"model": "chat", "messages": MESSAGES, "max_tokens": 3, "response_format": form}
        answers.append(httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60))

    asking = [threading.Thread(target=ask, args=(schema,)) for schema in bombs]
    for thread in asking:
        thread.start()
    between = 0
    while any(thread.is_alive() for thread in asking):
        assert_serves(client)
        between += 1
    assert between > 0
    assert len(answers) == len(bombs)
    for answer in answers:
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            refusal(answer)
    assert sum(answer.status_code == 400 for answer in answers) >= 3  # by size, time or memory, as the machine has it
    deep = '{"not":' * 10_000 + "{}" + "}" * 10_000
    body = f'{{"model": "chat", "messages": [], "response_format": {deep}}}'
    error = refusal(client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"}))
    assert "recursion" in error["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_a_hundred_megabytes_is_refused_and_not_held(client: httpx.Client, live: Live, chunked: bool) -> None:
    piece, sent = b"x" * 2**20, 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += len(piece)
            yield piece

    headers = {"content-type": "application/json", **({} if chunked else {"content-length": str(100 * len(piece))})}
    before = resident()
    with httpx.Client(timeout=60) as own:
        error = refusal(own.post(f"{live.url}/v1/completions", content=pieces(), headers=headers), 413)
    assert error["code"] == "request_too_large"
    assert resident() - before < 50 * 2**20
    assert_serves(client)


def resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def connected(live: Live) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=60)
    found.settimeout(60)
    return found


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(65536):
            data += more
    return data


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("first", "drop"),
    [
        (HEAD, b"X-A: b\r\n"),
        (HEAD + b"Content-Length: 90000\r\n\r\n{", b" "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
)
def test_who_sends_slowly_is_cut_off(client: httpx.Client, live: Live, first: bytes, drop: bytes) -> None:
    connections = [connected(live) for _ in range(20)]
    for connection in connections:
        connection.sendall(first)
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(0.05):
            for connection in connections:
                with suppress(OSError):
                    connection.sendall(drop)

    thread = threading.Thread(target=dribble)
    thread.start()
    assert_serves(client)
    for connection in connections:
        data = b""
        while more := connection.recv(65536):
            data += more
            if b"request_timeout" in data:
                break
        assert data.startswith(b"HTTP/1.1 408 ")
        assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    over.set()
    thread.join()
    for connection in connections:
        connection.close()
    await_idle(client)
    assert_serves(client)


def test_who_reads_a_byte_at_a_time_is_cut_off(client: httpx.Client, live: Live) -> None:
    asked = {"model": "plain", "prompt": ["x" * 250] * 12, "n": 4, "echo": True, "logprobs": 20, "max_tokens": 0}
    body = json.dumps(asked).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect((host, int(port)))
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with suppress(ConnectionResetError):
            while connection.recv(1):
                assert_serves(client)
                if metric(client, "sheepop_open_connections") == 1:
                    break
    await_idle(client)


@pytest.mark.parametrize(
    "name", ["..", "../chat", "../../etc/passwd", "chat/..", "/etc/passwd", "chat\x00", "file:///chat"]
)
def test_a_name_of_a_model_is_no_path(client: httpx.Client, name: str) -> None:
    others: dict[str, dict[str, Any]] = {
        "/v1/score": {"text_1": "a", "text_2": "b"}, "/v1/rerank": {"query": "a", "documents": ["b"]},
    }  # fmt: skip
    for path, body in {**ENDPOINTS, **others}.items():
        error = refusal(client.post(path, json={**body, "model": name}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    said = {"model": name, "max_tokens": 1, "messages": MESSAGES}
    assert client.post("/v1/messages", json=said).json()["error"]["type"] == "not_found_error"
    assert client.post("/v1/responses", json={"model": name, "input": "Hi"}).status_code == 404
    for path, body in {
        "chat": {"messages": MESSAGES},
        "generate": {"prompt": "x"},
        "show": {},
        "embed": {"input": "x"},
    }.items():
        answer = client.post(f"/api/{path}", json={"model": name, **body})
        assert answer.status_code == 404 and "There is no model" in answer.json()["error"], path


def test_a_connection_that_says_nothing_is_closed(live: Live) -> None:
    with connected(live) as connection:
        assert connection.recv(100) == b""


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /health HTTP/99\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: nosuch\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        HEAD + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(client: httpx.Client, live: Live, said: bytes) -> None:
    with connected(live) as connection:
        with suppress(OSError):
            connection.sendall(said)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    if len(said) < 100_000:  # else the connection may be reset before the answer is read
        assert head.split()[1] in (b"400", b"501")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert_serves(client)


def test_paths_and_methods_that_are_not_there(client: httpx.Client) -> None:
    assert refusal(client.get("/nothing"), 404)["code"] == "not_found"
    assert refusal(client.get("/v1/models/" + "y" * 3000), 404)["code"] == "model_not_found"
    assert refusal(client.get("/v1/models/%ff%00"), 404)["code"] == "model_not_found"
    answer = client.request("DELETE", "/v1/completions")
    refusal(answer, 405)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [True, False])
def test_the_work_of_clients_that_vanish_is_cancelled(client: httpx.Client, live: Live, stream: bool) -> None:
    await_idle(client)
    before = metric(client, "sheepop_completion_tokens_total")
    asked = {"model": "plain", "prompt": "Once", "max_tokens": 240, "min_tokens": 240, "n": 4, "stream": stream}
    body = json.dumps(asked).encode()
    for _ in range(5):
        with connected(live) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while metric(client, "sheepop_running_requests") == 0:
                time.sleep(0.001)
        await_idle(client)
    assert metric(client, "sheepop_completion_tokens_total") - before < 5 * 4 * 240
    assert metric(client, "sheepop_cache_use") == 0
    assert live.registry.num_open == 0
    assert_serves(client)


def test_ten_times_more_than_fit_are_answered_or_refused(client: httpx.Client, live: Live) -> None:
    answers: list[httpx.Response] = []

    def ask(seed: int) -> None:
        body = {**ENDPOINTS["/v1/completions"], "max_tokens": 30, "min_tokens": 30, "seed": seed}
        answers.append(crowd.post("/v1/completions", json=body))

    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=live.url, timeout=60, limits=limits) as crowd:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(120)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 120
    done = [answer for answer in answers if answer.status_code == 200]
    assert len(done) >= 12
    assert all(answer.json()["usage"]["completion_tokens"] == 30 for answer in done)
    for answer in answers:
        if answer.status_code != 200:
            assert refusal(answer, 503)["code"] == "overloaded"
            assert 1 <= int(answer.headers["retry-after"]) <= 10
    assert_serves(client)
    await_idle(client)
