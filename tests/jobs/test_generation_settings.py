"""A model's generation_config.json travels with it: no way of writing a model loses the tokens that end its texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import GenerationConfig

import sheepop
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.scalar_head import VALUE_HEAD, add_scalar_head
from sheepop.checkpoint import load_model, save_model
from sheepop.checkpoint.generation_settings import read_generation
from sheepop.checkpoint.model_form import AdaptedModel, WholeModel, WithValues
from sheepop.jobs.chat import ModelSpeaker
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.exchange import export_model, import_model
from sheepop.jobs.generate import load_generator
from sheepop.jobs.quantize import quantize_model
from sheepop.jobs.task.fork import Fork
from sheepop.tokenizer import CharTokenizer

from ..command_line import in_process
from ..running import train

ENDS = [3, 106]  # the first is the tokenizer's own
GENERATION = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "eos_token_id": ENDS}
LLAMA = (
    "tokenizer.algorithm=char", "model.d_model=16", "model.num_layers=1", "model.num_heads=2", "model.max_seq_len=32",
    "model.position_encoding=rope", "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false",
    "model.dropout=0", "model.tie_weights=false",
)  # fmt: skip
STEP = (
    "device=cpu", "training.max_steps=1", "training.sample_tokens=4", "training.precision=fp32",
    "training.global_batch_size=2", "training.micro_batch_size=2", "training.warmup_steps=0", "training.sinks=[]",
    "data.validation_fraction=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends its texts with two tokens, as a chat model does."""
    place = tmp_path_factory.mktemp("model")
    run = train(load_config(overrides=(*LLAMA, *STEP, f"data.paths={text_folder}", f"output_dir={place / 'run'}"))).run
    loaded = load_model(run)
    assert loaded.generation == {}
    save_model(place / "model", loaded.model, CharTokenizer(), loaded.provenance, generation=GENERATION)
    return place / "model"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text(f"{json.dumps(row)}\n" * 4)
    return path


def settings(output: Path, data: Path, *more: str) -> SheepOpConfig:
    return load_config(overrides=(*STEP, f"data.paths={data}", f"output_dir={output}", *more))


@pytest.fixture(scope="module")
def adapter(model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained an adapter of the model."""
    output = tmp_path_factory.mktemp("adapter") / "run"
    return train(settings(output, chats, "tuning.method=sft", "tuning.lora.rank=2"), fork=model).run


def quantized(model: Path, output: Path, chats: Path) -> Path:
    quantize_model(model, output, to="int8", text="some text")
    return output


def tuned_and_resumed(model: Path, output: Path, chats: Path) -> Path:
    run = train(settings(output, chats, "tuning.method=sft"), fork=model).run
    assert load_model(run).generation == GENERATION
    return train(settings(output, chats, "tuning.method=sft", "training.max_steps=2"), resume=True).run


def merged(adapter: Path, output: Path, chats: Path) -> Path:
    """The base of a second adapter: the model with the first one merged."""
    Fork(adapter).write_base(output)
    return output


def continued(model: Path, output: Path, chats: Path) -> Path:
    return train(settings(output, chats, "data.documents=line"), fork=model).run


def through_hugging_face(model: Path, output: Path, chats: Path) -> Path:
    exported = output.with_name("hf")
    export_model(model, exported)
    theirs = GenerationConfig.from_pretrained(exported)
    assert sorted(theirs.eos_token_id) == ENDS and theirs.temperature == 0.6  # type: ignore[union-attr]
    import_model(exported, output)
    return output


@pytest.mark.parametrize(
    ("source", "write"),
    [
        ("model", quantized),
        ("model", tuned_and_resumed),
        ("model", continued),
        ("model", through_hugging_face),
        ("adapter", merged),
        ("adapter", through_hugging_face),
    ],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_every_way_of_writing_a_model_keeps_its_settings(
    source: str,
    write: Callable[[Path, Path, Path], Path],
    chats: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
):
    loaded = load_model(write(request.getfixturevalue(source), tmp_path / "output", chats))
    found = {key: loaded.generation.get(key) for key in GENERATION}
    assert {**found, "eos_token_id": sorted(found["eos_token_id"])} == GENERATION
    assert sorted(loaded.end_ids) == ENDS


def test_every_form_of_a_checkpoint_keeps_them(model: Path, tmp_path: Path):
    """The forms of PPO with a value head, of an adapter, and of a run of several processes."""
    loaded = load_model(model)
    add_scalar_head(loaded.model, VALUE_HEAD)
    whole, adapter = WholeModel(loaded.model, GENERATION), AdaptedModel(model, loaded.model, LoraConfig())
    for form in (whole, WithValues(whole), adapter):
        place = tmp_path / type(form).__name__
        place.mkdir()
        form.write(place, form.weights(loaded.model), loaded.tokenizer, {})
        assert read_generation(place) == GENERATION
    (tmp_path / "described").mkdir()
    whole.describe(tmp_path / "described", loaded.tokenizer, {})
    assert read_generation(tmp_path / "described") == GENERATION


def test_a_gguf_file_keeps_the_ends(model: Path, tmp_path: Path):
    export_model(model, tmp_path / "model.gguf", format="gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    stored = {fields[name].contents() for name in fields if name in _END_KEYS}
    assert stored == set(ENDS)
    assert sorted(load_model(tmp_path / "model.gguf").end_ids) == ENDS


_END_KEYS = {f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")}


# The settings of sampling


def test_every_way_of_generating_uses_the_settings(model: Path, monkeypatch: pytest.MonkeyPatch):
    lm, generator = sheepop.load(model, "cpu"), load_generator(model, device="cpu")
    want = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert lm.defaults == generator.defaults == want
    same = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    plain = sheepop.LanguageModel(lm.model, lm.tokenizer, lm.config, lm.end_ids)
    text = plain.generate("The sheep", seed=3, max_new_tokens=20, **same).text
    assert lm.generate("The sheep", seed=3, max_new_tokens=20).text == text
    assert "".join(lm.stream("The sheep", seed=3, max_new_tokens=20)) == text
    assert lm.generate_batch(["The sheep"], seed=3, max_new_tokens=20)[0].text == text
    likeliest = plain.generate("The sheep", greedy=True, max_new_tokens=20).text
    assert lm.generate("The sheep", seed=3, max_new_tokens=20, top_k=1).text == likeliest != text
    command = ("generate", model, "The sheep", "--seed", "3", "--max-new-tokens", "20", "--device", "cpu")
    done = in_process(*command)
    assert done.out == f"The sheep{text}\n"
    assert "The model's own settings: temperature 0.6, top_k 20, top_p 0.9." in done.err
    speaker = ModelSpeaker(model, device="cpu")
    assert speaker.defaults == want


def test_a_chat_shows_and_uses_the_settings(model: Path, tmp_path: Path):
    greedy = tmp_path / "greedy"
    loaded = load_model(model)
    stated = {"do_sample": False, "eos_token_id": ENDS}
    save_model(greedy, loaded.model, loaded.tokenizer, loaded.provenance, generation=stated)
    said = [in_process("chat", greedy, "--seed", seed, "--max-new-tokens", "8", stdin="Hello\n") for seed in (1, 2)]
    assert said[0].out == said[1].out and "The model's own settings: temperature 0.0." in said[0].err
    warm = in_process("chat", greedy, "--seed", 1, "--max-new-tokens", "8", "--temperature", "1.5", stdin="Hello\n")
    assert warm.out != said[0].out


def test_a_damaged_setting_is_named(model: Path, tmp_path: Path):
    loaded: Any = load_model(model)
    save_model(tmp_path / "bad", loaded.model, loaded.tokenizer, {}, generation={"do_sample": True, "top_p": 7})
    done = in_process("generate", tmp_path / "bad", "one")
    assert done.code == 3 and "generation_config.json: top_p" in done.err
    assert read_generation(tmp_path / "bad")["top_p"] == 7
