"""Options of the server and of requests that go beyond OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sheepop.checkpoint import LoadedModel
from sheepop.core.errors import TokenizerError
from sheepop.model import ModelConfig, build_model
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel
from sheepop.tokenizer import ByteLevelBPE, CharTokenizer
from sheepop.tokenizer.ready_templates import READY

from ..command_line import in_process
from .conftest import Live, model_of, tiny

KEY = {"Authorization": "Bearer a-long-random-word"}
SAID = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    template = tmp_path_factory.mktemp("template") / "own.jinja"
    template.write_text("{% for m in messages %}({{ m.content }}){% endfor %}{{ mood }}")
    server = Live(
        ServerConfig(
            api_key="a-long-random-word",
            protect_metrics=True,
            cors_origins=("https://example.org",),
            max_model_len=100,
            chat_template=str(template),
            embedding_pooling="last",
        )
    )
    yield server
    server.close()


@pytest.fixture(scope="module")
def client(guarded: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, headers=KEY, timeout=60) as found:
        yield found


def test_a_key_is_needed_where_it_is_asked_for(guarded: Live, client: httpx.Client) -> None:
    for path in ("/v1/models", "/metrics", "/openapi.json", "/api/tags"):
        assert httpx.get(f"{guarded.url}{path}").status_code == 401
        assert client.get(path).status_code == 200
    assert httpx.get(f"{guarded.url}/version").json().keys() == {"version"}
    body = {"model": "chat", "messages": SAID, "max_tokens": 3}
    refused = httpx.post(f"{guarded.url}/v1/messages", json=body, headers={"x-api-key": "wrong"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    given = {"x-api-key": "a-long-random-word"}
    assert httpx.post(f"{guarded.url}/v1/messages", json=body, headers=given).status_code == 200


def test_pages_of_the_named_origins_may_use_the_server(client: httpx.Client) -> None:
    for origin, allowed in (("https://example.org", "https://example.org"), ("https://other.org", None)):
        answer = client.get("/v1/models", headers={"Origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_the_context_is_as_long_as_it_was_set(client: httpx.Client) -> None:
    assert client.get("/v1/models/plain").json()["max_model_len"] == 100
    asked = {"model": "plain", "prompt": "x" * 60, "max_tokens": 90}
    choice = client.post("/v1/completions", json=asked).json()
    assert choice["usage"]["completion_tokens"] <= 40
    error = client.post("/v1/completions", json={**asked, "prompt": "x" * 100}).json()["error"]
    assert "max_seq_len = 100" in error["message"]


def test_the_chat_template_of_a_file_is_used(client: httpx.Client) -> None:
    asked = {"model": "chat", "messages": SAID, "max_tokens": 3, "chat_template_kwargs": {"mood": "!"}}
    assert client.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"] == len("(Hi)!")


def test_special_tokens_are_text_unless_they_are_asked_for(client: httpx.Client) -> None:
    for name, asked, path in (
        ("chat", {"messages": [{"role": "user", "content": "a<eos>b"}]}, "/v1/chat/completions"),
        ("plain", {"prompt": "(a<eos>b)"}, "/v1/completions"),
    ):
        for special, count in ((False, 9), (True, 5)):
            body = {"model": name, "max_tokens": 2, "parse_special": special, **asked}
            assert client.post(path, json=body).json()["usage"]["prompt_tokens"] == count
    body = {"model": "plain", "prompt": "a<eos>b", "parse_special": True, "add_special_tokens": False}
    assert client.post("/tokenize", json=body).json()["tokens"] == [ord("a"), 3, ord("b")]


def test_scores_and_ranks_are_those_of_the_vectors(guarded: Live, client: httpx.Client) -> None:
    model = model_of(guarded.registry, "plain")
    texts = ["Once", "upon a time", "x"]
    states = []
    for text in texts:
        with torch.no_grad():
            last = model.generator.model.hidden_states(torch.tensor([model.tokenizer.encode(text)]))[0, -1].double()
        states.append(last / last.norm())
    cosines = [float(states[0] @ other) for other in states[1:]]
    asked = {"model": "plain", "text_1": "Once", "text_2": texts[1:]}
    found = client.post("/v1/score", json=asked).json()["data"]
    assert [each["score"] for each in found] == pytest.approx(cosines, abs=1e-5)
    ranked = client.post("/v1/rerank", json={"model": "plain", "query": "Once", "documents": texts[1:]}).json()
    order = sorted(range(2), key=lambda number: -cosines[number])
    assert [each["index"] for each in ranked["results"]] == order
    assert ranked["results"][0]["relevance_score"] == pytest.approx(max(cosines), abs=1e-5)
    wrong = client.post("/v1/score", json={**asked, "text_1": ["a"] * 3}).json()["error"]
    assert wrong["param"] == "text_1"


@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ({"guided_choice": ["Bern", "Oslo"]}, {"Bern", "Oslo"}),
        ({"structured_outputs": {"choice": ["Bern"]}}, {"Bern"}),
        ({"guided_regex": "a{3}b?"}, {"aaa", "aaab"}),
        ({"structured_outputs": {"regex": "a{3}"}}, {"aaa"}),
        ({"guided_grammar": 'start: "x" "y"'}, {"xy"}),
        ({"guided_json": json.dumps({"const": 17})}, {"17"}),
        ({"guided_json": {"const": 17}}, {"17"}),
        ({"structured_outputs": {"json": {"enum": [True]}}}, {"true"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 3}}}}, {"3"}),
    ],
)
def test_a_text_follows_a_grammar_under_every_name(
    client: httpx.Client, asked: dict[str, Any], texts: set[str]
) -> None:
    chat = client.post("/v1/chat/completions", json={"model": "chat", "messages": SAID, "max_tokens": 20, **asked})
    assert chat.json()["choices"][0]["message"]["content"] in texts
    text = client.post("/v1/completions", json={"model": "plain", "prompt": "Hi", "max_tokens": 20, **asked})
    assert text.json()["choices"][0]["text"] in texts


def test_one_text_follows_one_grammar(client: httpx.Client) -> None:
    body = {"model": "chat", "messages": SAID}
    two = {"guided_regex": "a", "structured_outputs": {"choice": ["b"]}}
    error = client.post("/v1/chat/completions", json={**body, **two}).json()["error"]
    assert "cannot be combined" in error["message"]
    error = client.post("/v1/chat/completions", json={**body, "guided_json": "no JSON"}).json()["error"]
    assert error["param"] == "guided_json"


def test_tokens_from_the_cache_are_counted(client: httpx.Client) -> None:
    asked = {"model": "plain", "prompt": "All of this is read only once. " * 2, "max_tokens": 2}
    counts = [
        client.post("/v1/completions", json=asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert counts == [0, 48]  # whole blocks of 16 tokens
    metrics = client.get("/metrics").text
    assert 'sheepop_cached_tokens_total{model="plain"} 48.0' in metrics
    assert 'sheepop_preemptions_total{model="plain"} 0.0' in metrics
    assert 'sheepop_queue_seconds_count{model="plain"}' in metrics


def test_a_template_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    from sheepop.core.errors import TokenizerError
    from sheepop.tokenizer import CharTokenizer

    from .conftest import tiny

    with pytest.raises(TokenizerError, match=r"none\.jinja"):
        tiny("plain", CharTokenizer(), ServerConfig(chat_template=str(tmp_path / "none.jinja")))


def test_the_key_of_the_environment_is_that_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("sheepop.cli.serve.start", lambda models, options, *_, **__: given.append(options["server"]))
    monkeypatch.setenv("SHEEPOP_API_KEY", "key of the environment")
    assert in_process("serve", "runs/mine").code == 0
    assert in_process("serve", "runs/mine", "--api-key", "key of the option").code == 0
    assert [server["api_key"] for server in given] == ["key of the environment", "key of the option"]


def test_the_turns_of_a_ready_template_end_answers(tmp_path: Path) -> None:
    (tmp_path / "chatml.jinja").write_text(READY["chatml"].template())
    tokenizer = ByteLevelBPE.train(["user assistant\n"] * 9, 272, ["<|im_start|>", "<|im_end|>"])
    end = tokenizer.special_tokens["<|im_end|>"]
    network = build_model(ModelConfig(vocab_size=272, d_model=16, num_layers=1, num_heads=2, max_seq_len=64), 1).eval()
    loaded = LoadedModel(network, tokenizer, network.config, {}, Path(), ())
    # The same template from a file says nothing of the token's meaning.
    for template, reason in (("chatml", "stop"), (str(tmp_path / "chatml.jinja"), "length")):
        config = ServerConfig(chat_template=template)
        live = Live(config, models=("chat",), load=lambda name, config=config: ServedModel(name, loaded, config))
        try:
            body = {"model": "chat", "messages": SAID, "max_tokens": 3, "logit_bias": {str(end): 100}}
            (choice,) = httpx.post(f"{live.url}/v1/chat/completions", json=body).json()["choices"]
        finally:
            live.close()
        assert (choice["finish_reason"], choice["message"]["content"]) == (reason, "")


def test_a_ready_template_needs_the_tokens_of_the_model() -> None:
    with pytest.raises(TokenizerError, match=r"The chat template llama3 needs the special token <\|begin_of_text\|>"):
        tiny("plain", CharTokenizer(), ServerConfig(chat_template="llama3"))
