"""The official client, with strict validation of every answer, against a live server process."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator

import pytest

from sheepop.checkpoint import save_model
from sheepop.tokenizer import CharTokenizer

from ..command_line import Launcher
from .conftest import ServerProcess, WithTemplate, tiny_network

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def url(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a separate process that serves two models."""
    place = tmp_path_factory.mktemp("served")
    for name, tokenizer in (("chat", WithTemplate()), ("plain", CharTokenizer())):
        save_model(place / name, tiny_network(), tokenizer, {})
    server = ServerProcess(launcher, [place / "chat", place / "plain"], place / "log")
    yield server.url
    assert server.close() == 128 + signal.SIGTERM
    assert "Traceback" not in (place / "log").read_text()


def connected(url: str, *, strict: bool) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="nobody", max_retries=0, _strict_response_validation=strict)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with connected(url, strict=True) as found:
        yield found


@pytest.fixture(scope="module")
def lenient(url: str) -> Iterator[openai.OpenAI]:
    """For two answers of OpenAI's own servers that the client's strict types refuse: chunks of a text completion, whose
    reason to finish is null until the last, and vectors in base64."""
    with connected(url, strict=False) as found:
        yield found


MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["chat", "plain"]
    assert client.models.retrieve("plain").id == "plain"
    with pytest.raises(openai.NotFoundError, match="There is no model 'other'; there is chat, plain"):
        client.models.retrieve("other")


def test_a_text_is_continued_and_its_stream_has_the_same_text(client: openai.OpenAI, lenient: openai.OpenAI) -> None:
    asked = {"model": "plain", "prompt": "Once", "max_tokens": 24, "seed": 3, "temperature": 0.9}
    whole = client.completions.create(**asked)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (4, 24, 28)
    assert whole.choices[0].finish_reason == "length"
    chunks = list(lenient.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"


def test_several_prompts_and_texts_are_numbered_as_they_are_asked_for(
    client: openai.OpenAI, lenient: openai.OpenAI
) -> None:
    asked = {"model": "plain", "prompt": ["Once", "Twice"], "n": 2, "max_tokens": 8, "seed": 1, "echo": True}
    whole = client.completions.create(**asked)
    texts = [choice.text for choice in whole.choices]
    assert [text[:4] for text in texts] == ["Once", "Once", "Twic", "Twic"]
    assert len(set(texts)) == 4
    streamed = [""] * 4
    for chunk in lenient.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_token_ids_are_prompts_too(client: openai.OpenAI) -> None:
    asked = {"model": "plain", "max_tokens": 8, "seed": 1}
    ids = [ord(letter) for letter in "Once"]
    tokens = json.loads(
        client.post("/../tokenize", body={"model": "plain", "prompt": "Once"}, cast_to=openai.BaseModel).to_json()
    )["tokens"]
    assert len(tokens) == len(ids)
    assert (
        client.completions.create(prompt=tokens, **asked).choices[0].text
        == client.completions.create(prompt="Once", **asked).choices[0].text
    )


def test_log_probabilities_of_a_text(client: openai.OpenAI) -> None:
    done = client.completions.create(model="plain", prompt="Once", max_tokens=5, temperature=0, logprobs=3)
    found = done.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert "".join(found.tokens) == done.choices[0].text
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())


def test_a_conversation_is_answered_and_streamed(client: openai.OpenAI) -> None:
    asked = {"model": "chat", "messages": MESSAGES, "max_completion_tokens": 20, "seed": 5}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("[system] Be kind.\n[user] Hello\n[assistant] ")
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    again = client.chat.completions.create(**{**asked, "messages": [MESSAGES[0], {"role": "user", "content": parts}]})
    assert again.choices[0].message.content == whole.choices[0].message.content


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    asked = {"model": "chat", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    done = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    assert done.logprobs is not None
    assert done.logprobs.content is not None
    assert bytes(b for entry in done.logprobs.content for b in entry.bytes or ()).decode() == done.message.content
    for entry in done.logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert math.exp(entry.top_logprobs[0].logprob) <= 1
    streamed = [
        entry.logprob
        for chunk in client.chat.completions.create(**asked, logprobs=True, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == pytest.approx([entry.logprob for entry in done.logprobs.content], abs=1e-4)


def test_stop_strings_end_a_text_and_are_not_in_it(client: openai.OpenAI) -> None:
    asked = {"model": "plain", "prompt": "Once", "max_tokens": 60, "seed": 2}
    text = client.completions.create(**asked).choices[0].text
    stop = text[20:22]
    done = client.completions.create(**asked, stop=[stop]).choices[0]
    assert done.text == text[: text.index(stop)]
    assert done.finish_reason == "stop"


def test_answers_fit_their_schema_and_tools_are_called(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["s", "m"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "shirt", "schema": schema}}
    asked = {"model": "chat", "messages": MESSAGES, "max_completion_tokens": 150, "seed": 3}
    found = json.loads(client.chat.completions.create(**asked, response_format=form).choices[0].message.content or "")
    assert found["size"] in ("s", "m")
    tool = {"type": "function", "function": {"name": "order", "description": "Orders.", "parameters": schema}}
    for choice in ("required", {"type": "function", "function": {"name": "order"}}):
        done = client.chat.completions.create(**asked, tools=[tool], tool_choice=choice).choices[0]
        assert done.finish_reason == "tool_calls"
        # A model with random weights may call any number of tools.
        assert done.message.tool_calls
        for call in done.message.tool_calls:
            assert call.function.name == "order"
            assert json.loads(call.function.arguments)["size"] in ("s", "m")
    chunks = list(client.chat.completions.create(**asked, tools=[tool], tool_choice="required", stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {call.function.name for call in calls if call.function} == {"order"}


def test_texts_become_vectors(client: openai.OpenAI, lenient: openai.OpenAI) -> None:
    one = client.embeddings.create(model="plain", input="Once", encoding_format="float").data[0].embedding
    two = lenient.embeddings.create(model="plain", input=["Twice", "Once"]).data[1].embedding
    assert len(one) == 32
    assert sum(value * value for value in one) == pytest.approx(1, abs=1e-5)
    assert two == pytest.approx(one, abs=1e-6)


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"n": 1_000_000}, "n", "less than or equal to 128"),
        ({"top_p": "much"}, "top_p", "valid number"),
        ({"prompt": []}, "prompt", "must not be an empty list"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": "x" * 300}, "prompt", "has 300 tokens"),
        ({"prompt": [5, 999]}, "prompt", "token id 999"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"suffix": "end"}, "suffix", "is not supported"),
        ({"stream": True, "best_of": 3}, "best_of", "cannot be streamed"),
        ({"model": "other"}, "model", "There is no model"),
    ],
)
def test_what_is_wrong_is_said_with_its_field(client: openai.OpenAI, wrong, param: str, message: str) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as refusal:
        client.completions.create(**{"model": "plain", "prompt": "Once", "max_tokens": 3, **wrong})
    assert refusal.value.status_code == (404 if param == "model" else 400)
    assert refusal.value.body["param"].split(".")[0] == param
    assert refusal.value.type == "invalid_request_error"
