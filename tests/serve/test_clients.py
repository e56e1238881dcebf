"""Programs that speak to the server in their own words: each client's own library against a live server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from sheepop.serve.config import ServerConfig

from .conftest import Live

pytestmark = pytest.mark.filterwarnings("ignore")  # of the clients

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
SAID = [{"role": "user", "content": "Hi"}]


class Place(BaseModel):
    """A place."""

    flag: bool


@pytest.fixture(scope="module")
def served() -> Iterator[Live]:
    server = Live(ServerConfig(max_running=4, max_waiting=8))
    yield server
    server.close()


def expected(served: Live, **asked: Any) -> dict[str, Any]:
    """The message of the same chat in OpenAI's API, read without any library."""
    body = {"model": "chat", "messages": SAID, "temperature": 0, "max_tokens": 9, **asked}
    choice: dict[str, Any] = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    return choice["message"]


def test_anthropic(served: Live) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "chat", "max_tokens": 9, "messages": SAID, "extra_body": {"temperature": 0}}
    text = expected(served)["content"]
    message = client.messages.create(**asked)
    assert (message.content[0].text, message.stop_reason, message.usage.output_tokens) == (text, "max_tokens", 9)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len("[user] Hi\n[assistant] ")
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage == message.usage
    stopped = client.messages.create(**{**asked, "stop_sequences": [text[4]]})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[4])
    tools = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
    forced = {**asked, "max_tokens": 90, "tools": tools, "tool_choice": {"type": "tool", "name": "weather"}}
    called = client.messages.create(**forced)
    (use,) = called.content
    assert (use.type, use.name, called.stop_reason) == ("tool_use", "weather", "tool_use") and use.input["city"]
    with client.messages.stream(**forced) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (use.name, use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "warm"}]}
    conversation = [*SAID, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**asked, "system": "Be kind.", "tools": tools, "messages": conversation})
    call = {"id": use.id, "function": {"name": "weather", "arguments": json.dumps(use.input)}}
    same = [
        {"role": "system", "content": "Be kind."}, *SAID, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "warm", "tool_call_id": use.id},
    ]  # fmt: skip
    assert after.usage.output_tokens == 9 and len(same) == 4
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**{**asked, "model": "nobody"})
    assert refused.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="image"):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        client.messages.create(**{**asked, "messages": [{"role": "user", "content": [image]}]})


def test_openai_responses(served: Live) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "chat", "input": "Hi", "temperature": 0, "max_output_tokens": 9}
    text = expected(served)["content"]
    found = client.responses.create(**asked)
    assert (found.output_text, found.status, found.usage.output_tokens) == (text, "incomplete", 9)
    assert found.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert (events[-1].type, events[-1].response.output_text) == ("response.incomplete", text)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    followed = client.responses.create(**{**asked, "input": "Go on", "previous_response_id": found.id})
    messages = [*SAID, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on"}]
    assert followed.output_text == expected(served, messages=messages)["content"]
    tool = {"type": "function", **FUNCTION}
    forced = {**asked, "max_output_tokens": 90, "tools": [tool], "tool_choice": "required"}
    (call,) = client.responses.create(**forced).output
    assert (call.type, call.name) == ("function_call", "weather") and json.loads(call.arguments)["city"]
    with client.responses.stream(**forced) as stream:
        (streamed,) = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    again = client.responses.create(**{**asked, "input": [*SAID, call.model_dump(), output]})
    assert again.usage.output_tokens == 9
    parsed = client.responses.parse(**{**asked, "max_output_tokens": 60, "text_format": Place})
    assert isinstance(parsed.output_parsed, Place)
    with pytest.raises(openai.NotFoundError, match="no response 'resp_other'"):
        client.responses.create(**{**asked, "previous_response_id": "resp_other"})


def test_ollama(served: Live) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=served.url)
    options = {"temperature": 0, "num_predict": 9}
    text = expected(served)["content"]
    answer = client.chat(model="chat", messages=SAID, options=options)
    assert (answer.message.content, answer.done_reason, answer.eval_count) == (text, "length", 9)
    pieces = list(client.chat(model="chat:latest", messages=SAID, options=options, stream=True))
    assert "".join(piece.message.content for piece in pieces) == text and pieces[-1].done
    assert client.generate(model="chat", prompt="Hi", options=options).response == text
    raw = client.generate(model="plain", prompt="Hi", raw=True, options=options, stream=True)
    body = {"model": "plain", "prompt": "Hi", "max_tokens": 9, "temperature": 0}
    choice = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert "".join(piece.response for piece in raw) == choice["text"]
    made = client.chat(model="chat", messages=SAID, format=SCHEMA, options={"temperature": 0})
    assert json.loads(made.message.content)["city"]
    assert [model.model for model in client.list().models] == ["chat", "plain"]
    assert "completion" in client.show("chat").capabilities
    vectors = client.embed(model="plain", input=["Once", "upon"]).embeddings
    data = httpx.post(f"{served.url}/v1/embeddings", json={"model": "plain", "input": ["Once", "upon"]}).json()["data"]
    for vector, other in zip(vectors, data, strict=True):
        assert list(vector) == pytest.approx(other["embedding"], abs=1e-6)
    with pytest.raises(ollama.ResponseError, match="no model 'nobody'"):
        client.chat(model="nobody", messages=SAID)
    with pytest.raises(ollama.ResponseError, match=r"options.mirostat is not supported"):
        client.chat(model="chat", messages=SAID, options={"mirostat": 1})


def test_langchain(served: Live) -> None:
    langchain = pytest.importorskip("langchain_openai")
    about = {"base_url": f"{served.url}/v1", "api_key": "none", "model": "chat", "temperature": 0, "max_retries": 0}
    model = langchain.ChatOpenAI(**about, max_tokens=9)
    text = expected(served)["content"]
    assert model.invoke("Hi").content == text
    assert "".join(chunk.content for chunk in model.stream("Hi")) == text
    longer = langchain.ChatOpenAI(**about, max_tokens=60)
    for method in ("function_calling", "json_schema"):
        assert isinstance(longer.with_structured_output(Place, method=method).invoke("Hi"), Place)
    vectors = langchain.OpenAIEmbeddings(
        base_url=f"{served.url}/v1", api_key="none", model="plain", check_embedding_ctx_length=False
    ).embed_documents(["Once"])
    assert len(vectors[0]) == 32


def test_litellm(served: Live) -> None:
    litellm = pytest.importorskip("litellm")
    about: dict[str, Any] = {"api_key": "none", "temperature": 0, "max_tokens": 9, "messages": SAID}
    text = expected(served)["content"]
    for name, base in (("openai/chat", f"{served.url}/v1"), ("ollama_chat/chat", served.url)):
        assert litellm.completion(model=name, api_base=base, **about).choices[0].message.content == text
    message = {"role": "user", "content": "x" * 300}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model="openai/chat", api_base=f"{served.url}/v1", **{**about, "messages": [message]})


def test_instructor(served: Live) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    plain = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(
            model="chat", messages=SAID, response_model=Place, max_tokens=90, temperature=0, max_retries=0
        )
        assert isinstance(found, Place)


def test_pydantic_ai(served: Live) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    settings: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
    model = OpenAIChatModel("chat", provider=provider)
    for output in (Place, NativeOutput(Place, template=False)):
        agent = Agent(model, output_type=output, model_settings=settings)
        assert isinstance(agent.run_sync("Hi").output, Place)


def test_openai_agents(served: Live) -> None:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(max_tokens=9, temperature=0)

    async def ask(kind: Any) -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            agent = agents.Agent(name="one", model=kind(model="chat", openai_client=client), model_settings=settings)
            answer: str = (await agents.Runner.run(agent, "Hi")).final_output
            return answer

    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        assert asyncio.run(ask(kind)) == expected(served)["content"]


def test_llm(served: Live, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llm")
    from llm.default_plugins.openai_models import Chat

    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    model = Chat("chat", model_name="chat", api_base=f"{served.url}/v1")
    response = model.prompt("Hi", key="none", stream=True, max_tokens=9, temperature=0)
    assert response.text() == expected(served)["content"]
