"""Models of other programs that are opened where they lie: which files are written, and what notices a change."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from sheepop.checkpoint import load_model, resolve_model_directory
from sheepop.checkpoint.gguf.writer import write_gguf
from sheepop.checkpoint.identity import identities, require_base
from sheepop.checkpoint.linked_weights import LINK
from sheepop.checkpoint.model_cache import cached_models
from sheepop.checkpoint.model_directory import open_model, unique_weights
from sheepop.checkpoint.model_form import copy_base
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError
from sheepop.jobs.exchange import import_model
from sheepop.jobs.models import list_models
from sheepop.tokenizer import CharTokenizer

if TYPE_CHECKING:
    from tests.hub_server import LoopbackHub

IDS = torch.tensor([[5, 17, 100, 41, 8]])
SIZES = {"vocab_size": 133, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHEEPOP_MODELS", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """GPT-2 of transformers, whose matrices are stored transposed, three of them in one tensor."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**SIZES)).save_pretrained(tmp_path / "gpt2")
    CharTokenizer().save(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def weight_files(place: Path) -> list[str]:
    return [path.name for path in place.rglob("*") if path.suffix in (".safetensors", ".gguf")]


def test_a_directory_computes_what_its_import_computes_and_nothing_of_its_weights_is_written(gpt2: Path, cache: Path):
    opened = load_model(gpt2).model(IDS)
    import_model(gpt2, "imported")
    assert torch.equal(opened, load_model("imported").model(IDS))
    assert weight_files(cache) == []
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) < 40_000


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q4_k_m", "f32"])
def test_a_gguf_file_computes_what_its_import_computes(gpt2: Path, cache: Path, kind: str):
    model = open_model(gpt2)
    write_gguf(Path("toy.gguf"), model.config, model.tensors, model.tokenizer, dtype=kind, name="toy")
    import_model("toy.gguf", "imported")
    opened, imported = load_model("toy.gguf"), load_model("imported")
    assert torch.equal(opened.model(IDS), imported.model(IDS))
    assert [type(each) for each in opened.model.parameters()] == [type(each) for each in imported.model.parameters()]
    assert weight_files(cache) == []


def test_training_in_place_leaves_the_file_as_it_is(gpt2: Path):
    before = (gpt2 / "model.safetensors").read_bytes()
    with torch.no_grad():
        for parameter in load_model(gpt2).model.parameters():
            parameter.zero_()
    assert (gpt2 / "model.safetensors").read_bytes() == before


def test_another_file_is_noticed(gpt2: Path):
    made = resolve_model_directory(gpt2, Console.silent())
    first = identities(made)
    file = gpt2 / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.wte.weight"] = torch.zeros_like(tensors["transformer.wte.weight"])
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{file} was changed since the model was opened. Give {gpt2} again"):
        load_model(made)
    assert not load_model(gpt2).model.embedding.weight.any()
    assert set(identities(resolve_model_directory(gpt2))).isdisjoint(first)
    shutil.copytree(gpt2, "copy")
    assert identities(resolve_model_directory("copy")) == identities(resolve_model_directory(gpt2))
    made = resolve_model_directory(gpt2)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file}, which has weights of the model, is missing"):
        load_model(made)
    assert [model["finished"] for model in list_models() if model["name"] in (str(gpt2), made.parent.name)] == [False]


@pytest.mark.parametrize("kind", ["safetensors", "f32", "q4_k_m"])
def test_adapters_of_the_files_and_of_any_copy_of_them_fit_both(gpt2: Path, kind: str):
    source, file = gpt2, gpt2 / "model.safetensors"
    if kind != "safetensors":
        model = open_model(gpt2)
        source = file = gpt2 / "toy.gguf"
        write_gguf(source, model.config, model.tensors, model.tokenizer, dtype=kind, name="toy")
    import_model(source, "imported")
    opened = resolve_model_directory(source, Console.silent())
    copied = {"model.safetensors": hashlib.sha256(Path("imported/model.safetensors").read_bytes()).hexdigest()}
    named = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    # What former versions recorded: a copy in the cache, then the file with its name.
    for recorded in (copied, named):
        require_base([hashlib.sha256(json.dumps(recorded).encode()).hexdigest()], opened)
    require_base(identities(opened), Path("imported"))
    require_base(identities(Path("imported")), opened)
    moved = Path("moved") if source.is_dir() else Path("renamed.gguf")
    (shutil.copytree if source.is_dir() else shutil.copy)(source, moved)
    require_base(identities(opened), resolve_model_directory(moved, Console.silent()))
    with pytest.raises(CheckpointError, match="trained on other weights"):
        require_base(["0" * 64], opened)


def test_a_damaged_link_is_told(gpt2: Path):
    made = resolve_model_directory(gpt2, Console.silent())
    (made / LINK).write_text('{"version": 1, "source": "zz", "files": []}')
    with pytest.raises(CheckpointError, match=LINK):
        load_model(made)


def test_a_run_that_keeps_its_base_keeps_the_weights_too(gpt2: Path, tmp_path: Path):
    made = load_model(gpt2)
    copy_base(made.directory, tmp_path / "base")
    assert (tmp_path / "base" / "tokenizer.json").is_file()
    shutil.rmtree(gpt2)
    base = load_model(tmp_path / "base")
    for name, weight in unique_weights(made.model).items():
        assert torch.equal(weight, unique_weights(base.model)[name])
    assert not (tmp_path / "base" / LINK).exists()


def test_a_cache_may_be_moved_with_what_was_fetched(
    hub: LoopbackHub, gpt2: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    hub.repository("org/Toy", {file.name: file.read_bytes() for file in gpt2.iterdir()})
    want = load_model("org/Toy").model(IDS)
    assert weight_files(cache) == ["model.safetensors"]
    asked = len(hub.requests)
    shutil.copytree(cache, "moved")
    shutil.rmtree(cache)
    monkeypatch.setenv("SHEEPOP_MODELS", str(Path("moved").absolute()))
    assert torch.equal(load_model("org/Toy").model(IDS), want)
    assert len(hub.requests) == asked and all(entry.is_finished for entry in cached_models())
