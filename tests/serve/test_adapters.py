"""Adapters that are served with their base: on its engine and over its weights, loaded and dropped under load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sheepop.adapt.lora import adapted_layers, add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.checkpoint import load_model, save_model, with_adapters
from sheepop.checkpoint.changes import changes_of
from sheepop.checkpoint.model_form import AdaptedModel
from sheepop.core.errors import CheckpointError, ConfigError, UsageError
from sheepop.core.files import atomic_directory
from sheepop.generate import GenerationConfig, Generator
from sheepop.jobs.exchange import export_model
from sheepop.jobs.quantize import quantize_model
from sheepop.serve.config import ServerConfig
from sheepop.serve.stock import Stock
from sheepop.tokenizer import CharTokenizer

from .conftest import Live, model_of, tiny_network

openai = pytest.importorskip("openai")
PROMPT = "Once upon a time there was a sheep"
GREEDY = GenerationConfig(max_new_tokens=16, temperature=0.0)
NAMES = ("tuned", "one", "two")


def write(base: Path, place: Path, seed: int, **sizes: Any) -> Path:
    """Writes an adapter whose weights matter, of a network of this size."""
    model = tiny_network(**sizes)
    add_lora(model, LoraConfig())
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            for weight in layer.changes.parameters():
                weight += 0.3 * torch.randn(weight.shape, generator=draws)
    with atomic_directory(place) as directory:
        AdaptedModel(base, model, LoraConfig()).write(directory, changes_of(model), CharTokenizer(), {})
    return place


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and a directory of adapters: some for it, one for another base, and ways out of the directory."""
    place = tmp_path_factory.mktemp("adapted")
    save_model(place / "base", tiny_network(), CharTokenizer(), {})
    save_model(place / "wide", tiny_network(d_ff=64), CharTokenizer(), {})
    (place / "adapters").mkdir()
    for seed, name in enumerate((*NAMES, "outside"), start=1):
        write(place / "base", place / "adapters" / name, seed)
    (place / "adapters" / "outside").rename(place / "outside")
    (place / "adapters" / "link").symlink_to(place / "outside")
    write(place / "wide", place / "adapters" / "wide", 5, d_ff=64)
    return place


@pytest.fixture(scope="module")
def texts(places: Path) -> dict[str, str]:
    """What the base and each adapter, merged into it, writes alone."""
    plain = load_model(places / "base")
    loaded = {"base": plain, **{name: with_adapters(plain, [places / "adapters" / name]) for name in NAMES}}
    found = {
        name: Generator(each.model, each.tokenizer).generate([PROMPT], GREEDY)[0].text for name, each in loaded.items()
    }
    assert len(set(found.values())) == len(found)
    return found


@pytest.fixture(scope="module")
def server(places: Path) -> Iterator[Live]:
    config = ServerConfig(
        max_running=8, max_waiting=64, adapter_directory=str(places / "adapters"), aliases={"polite": "tuned"}
    )
    stock = Stock(
        {"base": places / "base", "wide": places / "wide"}, {"tuned": places / "adapters/tuned"}, config, "cpu"
    )
    running = Live(config, stock=stock)
    yield running
    running.close()


def change(server: Live, verb: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=body, timeout=60)


def asked(name: str, prompt: str = PROMPT) -> dict[str, Any]:
    return {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0}


def test_base_and_adapter_answer_each_as_itself_over_the_same_weights(server: Live, texts: dict[str, str]) -> None:
    registry = server.registry
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="nobody", max_retries=0) as client:
        for _ in range(2):
            assert [found.id for found in client.models.list()] == ["base", "wide", "tuned", "polite"]
            assert client.models.retrieve("polite").parent == "base"
            one, other = (model_of(registry, name) for name in ("base", "tuned"))
            assert one.worker is other.worker
            theirs = {name: weight.data_ptr() for name, weight in other.generator.model.named_parameters()}
            own = one.generator.model.named_parameters()
            assert all(theirs[name] == weight.data_ptr() for name, weight in own)
            for name, expected in (("base", "base"), ("tuned", "tuned"), ("polite", "tuned")):
                assert client.completions.create(**asked(name)).choices[0].text == texts[expected]
            registry.reload()
        # Embeddings and log-probabilities of prompts are those of the adapter, too.
        vectors = [client.embeddings.create(model=name, input=PROMPT).data[0].embedding for name in ("base", "tuned")]
        assert vectors[0] != vectors[1]


def test_adapters_come_and_go_under_load_and_texts_are_those_of_each_alone(server: Live, texts: dict[str, str]) -> None:
    async def load() -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        over = asyncio.Event()
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def stream(name: str) -> None:
                while not over.is_set():
                    answer = await client.post("/v1/completions", json=asked(name))
                    if answer.status_code == 200:
                        found.append((name, answer.json()["choices"][0]["text"]))
                    else:
                        assert (name in ("one", "two"), answer.status_code) == (True, 404), answer.text

            running = [asyncio.ensure_future(stream(name)) for name in ("base", "tuned", "one", "two", "one", "base")]
            for _ in range(3):
                for name in ("one", "two"):
                    body = {"lora_name": name, "lora_path": name}
                    answer = await client.post("/v1/load_lora_adapter", json=body)
                    assert answer.text == f"Success: LoRA adapter '{name}' added successfully.", answer.text
                    seen = len(found)
                    while not any(other == name for other, _ in found[seen:]):
                        await asyncio.sleep(0.01)
                for name in ("one", "two"):
                    answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
                    assert answer.text == f"Success: LoRA adapter '{name}' removed successfully."
            over.set()
            await asyncio.gather(*running)
        return found

    found = asyncio.run(load())
    assert {name for name, _ in found} == {"base", *NAMES}
    assert [pair for pair in found if texts[pair[0]] != pair[1]] == []
    assert len(server.registry.models()) == 2  # nothing stays of those that were dropped
    manager = model_of(server.registry, "base").worker.scheduler.manager
    assert manager.num_free == manager.num_blocks


def test_a_name_that_comes_back_finds_no_prefix_of_its_former_adapter(server: Live, texts: dict[str, str]) -> None:
    cached = []
    prompt = "Twice " + PROMPT  # no other test has it
    for path in ("one", "two"):
        assert change(server, "load", lora_name="same", lora_path=path).status_code == 200
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/completions", json=asked("same", prompt), timeout=60).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert change(server, "unload", lora_name="same").status_code == 200
    assert cached == [0, 32, 0, 32]


def test_what_is_no_adapter_of_the_server_is_refused(server: Live, places: Path) -> None:
    for path in (
        "../outside",
        str(places / "outside"),
        "link",
        "missing",
        "a\0b",
        "x" * 4000,
        "one/adapter.safetensors",
    ):
        refused = change(server, "load", lora_name="other", lora_path=path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "lora_path"), path
    for taken in ("base", "tuned", "polite"):
        refused = change(server, "load", lora_name=taken, lora_path="one")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
        assert "has already been loaded" in refused.text
    refused = change(server, "load", lora_name="other", lora_path="wide")
    assert refused.status_code == 400 and "does not fit its model" in refused.text
    refused = change(server, "load", lora_name="other", lora_path="one", base_model_name="nobody")
    assert refused.status_code == 404
    fitting = change(server, "load", lora_name="other", lora_path="wide", base_model_name="wide")
    assert fitting.status_code == 200, fitting.text
    assert httpx.get(f"{server.url}/v1/models/other").json()["parent"] == "wide"
    assert change(server, "unload", lora_name="other").status_code == 200
    for name in ("other", "base", "wide", "polite"):
        refused = change(server, "unload", lora_name=name)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "lora_name")
        assert f"The lora adapter '{name}' cannot be found." in refused.text
    for body in ({"lora_name": "x"}, {"lora_name": "", "lora_path": "one"}, {"lora_path": "one"}):
        assert change(server, "load", **body).status_code == 400


def test_without_a_directory_adapters_stay_as_they_are(live: Live) -> None:
    for refused in (change(live, "load", lora_name="x", lora_path="x"), change(live, "unload", lora_name="x")):
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")


def test_settings_that_allow_no_adapters_say_so(places: Path) -> None:
    with pytest.raises(ConfigError, match="adapter_directory needs models that run in this process"):
        ServerConfig(adapter_directory="x", engine="ray")
    with pytest.raises(UsageError, match="there is no directory"):
        Stock({}, {}, ServerConfig(adapter_directory=str(places / "none")))
    config = ServerConfig(batch_invariant=True)
    with pytest.raises(UsageError, match="batch_invariant"):
        Live(config, stock=Stock({"base": places / "base"}, {"tuned": places / "adapters/tuned"}, config, "cpu"))


def test_an_adapter_of_another_base_with_the_same_shapes_is_refused(places: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "other", tiny_network(seed=9), CharTokenizer(), {})
    loaded = load_model(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"trained on other weights than those in .*other, although their shapes"):
        with_adapters(loaded, [places / "adapters" / "one"])
    export_model(places / "adapters" / "one", tmp_path / "peft", format="peft")
    with pytest.raises(CheckpointError, match=r"trained on other weights than those in .*other"):
        with_adapters(loaded, [tmp_path / "peft"])
    with_adapters(load_model(places / "base"), [tmp_path / "peft"])
    quantize_model(places / "base", tmp_path / "int8", to="int8")
    with_adapters(load_model(tmp_path / "int8"), [places / "adapters" / "one"])  # rounded from the right weights
