"""A tokenizer has to fit the model that it comes with, or that it is given to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers.pre_tokenizers import ByteLevel

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange.reader import read_hugging_face
from sheepop.core.errors import CheckpointError, SheepOpError
from sheepop.jobs.exchange import import_model
from sheepop.tokenizer import CharTokenizer

from .conftest import llama_tensors


def test_a_tokenizer_that_does_not_fit(make) -> None:
    directory = make()
    CharTokenizer("äöüß").save(directory)
    with pytest.raises(CheckpointError, match="132 tokens, but the model has only 130 embedding rows"):
        read_hugging_face(directory)


def byte_tokenizer(directory: Path, special: list[str], **settings: object) -> None:
    """Writes a tokenizer of the 256 bytes and `special` tokens behind them."""
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE({text: n for n, text in enumerate(sorted(ByteLevel.alphabet()))}, [])
    )
    library.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(special)
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def of_rows(make, rows: int) -> Path:
    tensors = llama_tensors() | {"model.embed_tokens.weight": torch.randn(rows, 8)}
    return make({"vocab_size": rows, "eos_token_id": 256}, tensors=tensors)


def test_added_tokens_without_a_row_of_the_embedding_are_left_out_and_named(make, tmp_path: Path) -> None:
    directory = of_rows(make, 257)
    roles = {
        "eos_token": "<end>",
        "pad_token": {"content": "[PAD]"},
        "mask_token": "[PAD]",
        "additional_special_tokens": ["<image>"],
    }
    recorded = {"256": {"content": "<end>"}, "257": {"content": "<image>"}}
    byte_tokenizer(directory, ["<end>", "<image>", "[PAD]"], **roles, added_tokens_decoder=recorded)
    (note,) = import_model(directory, tmp_path / "ours")["notes"]
    assert "no embedding for the special tokens <image>, [PAD]" in note
    tokenizer = load_model(tmp_path / "ours").tokenizer
    assert tokenizer.special_tokens == {"<end>": 256}
    assert tokenizer.special_id("pad") is None
    settings = tokenizer.settings()
    assert (settings["additional_special_tokens"], settings["added_tokens_decoder"].keys()) == ([], {"256"})
    assert max(tokenizer.encode("a<image>b", allow_special=True)) < 256


def test_a_token_that_ends_texts_and_has_no_row_does_not_fit(make) -> None:
    directory = of_rows(make, 256)
    byte_tokenizer(directory, ["<end>"], eos_token="<end>")
    with pytest.raises(CheckpointError, match="257 tokens, but the model has only 256"):
        read_hugging_face(directory)


def test_no_tokenizer_says_how_to_give_another(make, tmp_path: Path) -> None:
    directory = make()
    (directory / "tokenizer.json").unlink()
    with pytest.raises(SheepOpError, match="--tokenizer") as caught:
        import_model(directory, tmp_path / "ours")
    assert caught.value.exit_code == 3
    CharTokenizer("ä").save(tmp_path / "other")
    import_model(directory, tmp_path / "ours", tokenizer=tmp_path / "other")
    assert load_model(tmp_path / "ours").tokenizer.vocab_size == 129
