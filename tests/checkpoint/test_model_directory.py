"""A model comes back from disk exactly, and a damaged or foreign directory is named, never used."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sheepop.checkpoint import load_model, save_model
from sheepop.core.errors import CheckpointError
from sheepop.core.files import write_checksums
from sheepop.model import EncoderDecoder, ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer, Tokenizer


@pytest.mark.parametrize("position_encoding", ["sinusoidal", "learned", "rope"])
@pytest.mark.parametrize("tie_weights", [True, False])
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, position_encoding: str, tie_weights: bool) -> None:
    config = ModelConfig(
        vocab_size=128,
        d_model=16,
        num_layers=2,
        num_heads=2,
        position_encoding=position_encoding,
        tie_weights=tie_weights,
    )
    model = build_model(config, seed=1).eval()
    save_model(tmp_path / "m", model, CharTokenizer(), {"step": 5})
    loaded = load_model(tmp_path / "m")
    assert loaded.config == config
    assert loaded.provenance == {"step": 5}
    assert not loaded.model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert (loaded.model.lm_head.weight is loaded.model.embedding.weight) == tie_weights
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.model(ids), model(ids))


def test_an_encoder_decoder_comes_back_as_one(tmp_path: Path) -> None:
    config = ModelConfig(
        architecture="encoder_decoder", vocab_size=128, d_model=16, num_layers=1, num_encoder_layers=2, num_heads=2
    )
    model = build_model(config, seed=1).eval()
    save_model(tmp_path / "m", model, CharTokenizer(), {})
    loaded = load_model(tmp_path / "m").model
    assert isinstance(loaded, EncoderDecoder)
    sources, targets = torch.arange(20)[None], torch.arange(9)[None]
    assert torch.equal(loaded(sources, targets), model(sources, targets))
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["encoder_blocks.1.attention.q_proj.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors")
    write_checksums(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"encoder_blocks\.1\.attention\.q_proj\.weight is missing"):
        load_model(tmp_path / "m")


def test_the_tokenizer_comes_along(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    save_model(tmp_path / "m", model, tokenizer, {})
    loaded = load_model(tmp_path / "m").tokenizer
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert loaded.encode("für") == tokenizer.encode("für")


def test_tied_weights_are_stored_once(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    save_model(tmp_path / "m", model, tokenizer, {})
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert "embedding.weight" in stored
    assert "lm_head.weight" not in stored


def test_an_existing_target_is_not_overwritten(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    save_model(tmp_path / "m", model, tokenizer, {"first": True})
    with pytest.raises(CheckpointError, match="already exists"):
        save_model(tmp_path / "m", model, tokenizer, {})
    assert load_model(tmp_path / "m").provenance == {"first": True}
    save_model(tmp_path / "m", model, tokenizer, {"first": False}, replace=True)
    assert load_model(tmp_path / "m").provenance == {"first": False}


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "provenance.json"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_named(
    tmp_path: Path, model: Transformer, tokenizer: Tokenizer, name: str, damage: str
) -> None:
    save_model(tmp_path / "m", model, tokenizer, {"step": 1})
    file = tmp_path / "m" / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "m")
    assert name in str(caught.value) or str(tmp_path / "m") in str(caught.value)
    assert name in str(caught.value) or name == "config.json"


def test_a_directory_without_checksums_was_never_finished(
    tmp_path: Path, model: Transformer, tokenizer: Tokenizer
) -> None:
    save_model(tmp_path / "m", model, tokenizer, {})
    (tmp_path / "m" / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match=r"checksums\.json is missing"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "does not describe a SheepOp model"),
        ({"format": "sheepop-model", "format_version": 99, "model": {}}, "version 99"),
        ({"format": "sheepop-model", "format_version": 1, "model": {"d_modle": 3}}, "d_modle: unknown key"),
        ([1, 2], "does not describe a SheepOp model"),
    ],
)
def test_foreign_and_newer_directories_are_refused(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    save_model(tmp_path / "m", model, tokenizer, {})
    weights = load_file(tmp_path / "m" / "model.safetensors")
    del weights["final_norm.weight"]
    weights["stray"] = torch.zeros(2)
    weights["embedding.weight"] = torch.zeros(5, 16)
    save_file(weights, tmp_path / "m" / "model.safetensors")
    write_checksums(tmp_path / "m")
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "m")
    for part in ("final_norm.weight is missing", "stray is unexpected", "embedding.weight has shape (5, 16)"):
        assert part in str(caught.value)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path, model: Transformer) -> None:
    save_model(tmp_path / "m", model, CharTokenizer("äöüß€"), {})
    with pytest.raises(CheckpointError, match="133 tokens, but the model has only 131"):
        load_model(tmp_path / "m")


def test_a_pickle_in_place_of_weights_is_not_opened(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    save_model(tmp_path / "m", model, tokenizer, {})
    torch.save({"embedding.weight": torch.zeros(1)}, tmp_path / "m" / "model.safetensors")
    write_checksums(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_model(tmp_path / "m")


def test_a_loaded_model_does_not_change_with_its_file(tmp_path: Path, model: Transformer, tokenizer: Tokenizer) -> None:
    save_model(tmp_path / "m", model, tokenizer, {})
    loaded = load_model(tmp_path / "m").model
    file = tmp_path / "m" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
