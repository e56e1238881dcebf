"""``sheepop models``, and the commands that take the name of a published model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sheepop.tokenizer import CharTokenizer

from ..hub_server import LoopbackHub, client, hub
from .conftest import Run

__all__ = ["client", "hub"]

NAME = "org/toy"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    place = tmp_path_factory.mktemp("toy")
    LlamaForCausalLM(LlamaConfig(vocab_size=130, max_position_embeddings=64, **sizes)).save_pretrained(place)
    CharTokenizer().save(place)
    return {file.name: file.read_bytes() for file in place.iterdir()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the commands of this module share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def place(hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path):
    hub.repository(NAME, files)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHEEPOP_MODELS", str(cache))
    (tmp_path / "text.txt").write_text("Some text to read, long enough for a few windows of tokens. " * 3)
    row = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 8)


STEP = (
    "training.max_steps=1",
    "training.sample_tokens=4",
    "training.global_batch_size=2",
    "training.precision=fp32",
    "data.validation_fraction=0",
)


@pytest.mark.parametrize(
    "command",
    [
        ("generate", NAME, "one", "--max-new-tokens", "2"),
        ("generate", NAME, "one", "--max-new-tokens", "2", "--guesses", "2", "--draft-model", f"hf:{NAME}"),
        ("score", NAME, "text.txt"),
        ("tokenizer", "encode", NAME, "one"),
        ("tokenizer", "show", NAME),
        ("trace", NAME, "one", "--compare", NAME),
        ("eval", "perplexity", NAME, "--data", "text.txt", "--no-compressors"),
        ("export", NAME, "--output", "exported"),
        ("quantize", NAME, "--to", "int8", "--output", "smaller", "--text", "text.txt"),
        ("tune", "sft", NAME, "--data", "chats.jsonl", "--output", "tuned", *STEP),
    ],
    ids=lambda command: f"{command[0]}-{command[1]}",
)
def test_a_command_takes_a_name(run: Run, command: tuple[str, ...]):
    done = run(*command)
    assert done.code == 0, done.err


def test_a_chat_takes_a_name(run: Run):
    done = run("chat", NAME, "--max-new-tokens", "2", stdin="Hello\n")
    assert done.code == 0, done.err
    assert "Chatting with toy." in done.err


def test_quiet_prints_nothing_about_the_fetching(run: Run, hub: LoopbackHub, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SHEEPOP_MODELS", str(tmp_path / "other"))
    assert run("generate", NAME, "one", "--quiet", "--greedy", "--max-new-tokens", "1").err == ""
    assert hub.total_sent > 0


def test_models_are_pulled_listed_and_removed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHEEPOP_MODELS", str(tmp_path / "other"))
    pulled = json.loads(run("models", "pull", NAME, "--json").out)
    assert json.loads(run("models", "--json").out) == [pulled]
    assert set(pulled) == {"name", "revision", "finished", "bytes", "stored", "last_used", "path"}
    assert pulled["stored"] == ["float32"]
    listed = run("models").out
    assert f"{NAME} at {pulled['revision'][:12]}: " in listed and " MB in float32, used " in listed
    assert pulled["path"] in listed and "1 model, " in listed
    asked = run("models", "rm", NAME)
    assert asked.code == 2 and "--yes" in asked.err
    assert run("models", "rm", "org/none", "--yes").code == 2
    assert "Removed 1 model" in run("models", "rm", NAME, "--yes").out
    assert json.loads(run("models", "--json").out) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("models", "pull", "nothing"), "is not the name of a published model"),
        (("models", "--json", "pull", NAME), "--json belongs after"),
        (("generate", "org/none", "one"), "There is no model org/none"),
        (("tokenizer", "encode", "org/none", "one"), "There is no model org/none"),
    ],
)
def test_a_mistake_is_explained(run: Run, arguments: tuple[str, ...], words: str):
    done = run(*arguments)
    assert done.code in (2, 3) and words in done.err
