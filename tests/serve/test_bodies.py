"""Large bodies: read as the small ones are, but beside the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from sheepop.serve import answering, bodies, served_model
from sheepop.serve.bodies import parsed, written
from sheepop.serve.config import ServerConfig

from .conftest import Live, model_of

MANY = [1, -2.5e3, True, None, "\u00e9\n🐑", {"a": [], "": {}}] * 4000


@pytest.fixture(scope="module")
def roomy() -> Iterator[Live]:
    server = Live(ServerConfig(max_running=4, max_waiting=8))
    yield server
    server.close()


def test_a_body_of_many_values_is_read_as_the_library_reads_it() -> None:
    for ascii_only in (True, False):
        assert parsed(json.dumps(MANY, ensure_ascii=ascii_only).encode()) == MANY
    assert json.loads(written({"a": MANY})) == {"a": MANY}


@pytest.mark.parametrize(
    "wrong",
    [
        b"NaN",
        b"-Infinity",
        b'"\\ud800"',
        b'{"\\ud800": 1}',
        b"[" * 300 + b"]" * 300,
        b"[" * 100_000,
        b"01",
        b"\xff",
        b"1,",
    ],
)
def test_a_body_of_many_values_is_as_strict(wrong: bytes) -> None:
    for body in (wrong, b"[" + b"1," * 30_000 + wrong + b"]"):
        with pytest.raises(ValueError, match=r"."):
            parsed(body)


def test_a_body_has_a_bounded_number_of_parts() -> None:
    with pytest.raises(ValueError, match="more than 25,000 lists"):
        parsed(b"[" + b"[]," * 25_001 + b"1]")
    with pytest.raises(ValueError, match="more than 25,000 members"):
        parsed(b"{" + b",".join(b'"%d":0' % number for number in range(25_001)) + b"}")


def test_reading_and_writing_is_done_beside_the_event_loop(roomy: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing, checking, templates, encoding and writing of large bodies run in other threads than the server's."""
    threads: dict[str, set[str]] = {}

    def watch(place: Any, name: str) -> None:
        work = getattr(place, name)

        def watched(*given: Any, **more: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return work(*given, **more)

        monkeypatch.setattr(place, name, watched)

    watch(bodies, "checked")
    watch(answering, "written")
    watch(served_model, "read_prompt")
    watch(served_model.ServedModel, "read_chat")
    watch(model_of(roomy.registry, "plain").tokenizer, "encode")
    text = "a" * 100_000
    messages = [{"role": "user", "content": text}]
    with httpx.Client(base_url=roomy.url, timeout=60) as client:
        sent = {
            "/tokenize": {"model": "plain", "prompt": text},
            "/v1/completions": {"model": "plain", "prompt": [1] * 100_000},
            "/v1/embeddings": {"model": "plain", "input": [text]},
            "/v1/chat/completions": {"model": "chat", "messages": messages},
        }
        statuses = {path: client.post(path, json=body).status_code for path, body in sent.items()}
    assert statuses == {**dict.fromkeys(sent, 400), "/tokenize": 200}
    assert threads.keys() == {"checked", "written", "read_prompt", "read_chat", "encode"}
    loop = roomy._thread.name
    assert all(loop not in names for names in threads.values())


def test_embeddings_of_a_batch_are_those_of_each_text(roomy: Live) -> None:
    texts = ["Once", "upon a time", "x", "there was a longer text than all the others, and it was long"]
    with httpx.Client(base_url=roomy.url, timeout=60) as client:
        answer = client.post("/v1/embeddings", json={"model": "plain", "input": texts}).json()
    model = model_of(roomy.registry, "plain")
    for text, found in zip(texts, answer["data"], strict=True):
        with torch.no_grad():
            states = model.generator.model.hidden_states(torch.tensor([model.tokenizer.encode(text)]))[0]
        expected = states.double().mean(0) / states.double().mean(0).norm()
        assert found["embedding"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_log_probabilities_of_a_prompt_are_those_of_the_network(roomy: Live) -> None:
    asked = {"model": "plain", "prompt": "Once upon", "echo": True, "logprobs": 3, "max_tokens": 0}
    with httpx.Client(base_url=roomy.url, timeout=60) as client:
        answer = client.post("/v1/completions", json=asked).json()
        longer = client.post("/v1/completions", json={**asked, "max_tokens": 1, "temperature": 0}).json()
    choice, found = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == ("Once upon", "length")
    cached = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9, **cached}
    model = model_of(roomy.registry, "plain")
    ids = torch.tensor([model.tokenizer.encode("Once upon")])
    with torch.no_grad():
        logprobs = model.generator.model(ids)[0].double().log_softmax(-1)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for position in range(1, ids.shape[1]):
        token = found["tokens"][position]
        assert token == "Once upon"[position]
        expected = float(logprobs[position - 1, ids[0, position]])
        assert found["token_logprobs"][position] == pytest.approx(expected, abs=1e-4)
        top = found["top_logprobs"][position]
        assert top[token] == found["token_logprobs"][position]
        assert sorted(top.values())[-3:] == pytest.approx(
            logprobs[position - 1].topk(3).values.tolist()[::-1], abs=1e-4
        )
    assert found["text_offset"] == list(range(9))
    assert longer["choices"][0]["logprobs"]["token_logprobs"][:9] == found["token_logprobs"]
    assert len(longer["choices"][0]["logprobs"]["tokens"]) == 10


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema


CHAT: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": nested(95)}}
CALL = {
    "id": "1",
    "function": {"name": "f", "arguments": json.dumps({str(number): [number] for number in range(50_000)})},
}
CALLED = {"role": "assistant", "content": "x", "tool_calls": [CALL]}
PARTS = [{"type": "text", "text": "x"}] * 9_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": nested(80)}}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"model": "plain", "prompt": [1] * 2_000_000, "max_tokens": 1}, 400),
        ("/v1/completions", {"model": "plain", "prompt": [[1]] * 400_000, "max_tokens": 1}, 400),
        ("/v1/completions", {"model": "plain", "prompt": [[[1]]] * 9_000, "max_tokens": 1}, 400),
        ("/v1/completions", {"model": "plain", "prompt": ["x"] * 200_000, "max_tokens": 1}, 400),
        ("/v1/embeddings", {"model": "plain", "input": [*["x"] * 200_000, 1]}, 400),
        ("/v1/chat/completions", {**CHAT, "response_format": FORM}, 400),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL] * 20}, 200),
        ("/v1/chat/completions", {**CHAT, "messages": [CALLED]}, 200),
        ("/v1/chat/completions", {**CHAT, "messages": CHAT["messages"] * 24_000}, 400),
        ("/v1/chat/completions", {**CHAT, "metadata": {str(number): "x" for number in range(20_000)}}, 400),
        ("/v1/messages", {**CHAT, "messages": [{"role": "user", "content": PARTS}]}, 400),
        ("/v1/responses", {"model": "chat", "input": [{"role": "user", "content": "x"}] * 9_000}, 400),
    ],
)  # fmt: skip
def test_large_bodies_of_every_kind_are_answered_or_refused(
    roomy: Live, path: str, body: dict[str, Any], status: int
) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    assert len(data) < 4 * 2**20
    with httpx.Client(base_url=roomy.url, timeout=60, headers={"content-type": "application/json"}) as client:
        answer = client.post(path, content=data)
        assert answer.status_code == status, answer.text[:500]
        assert client.get("/health").status_code == 200
    if status == 400:
        assert 0 < len(answer.json()["error"]["message"]) < 2100
