"""An export is complete, divided as asked for, and kept only when it reads back as the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sheepop.checkpoint import load_model, save_model, weight_files
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import damaged_files, write_checksums, write_json
from sheepop.jobs.exchange import export_model, import_model
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer

LLAMA = {"preset": "llama-1m", "vocab_size": 130, "d_model": 16, "num_heads": 2, "num_layers": 2, "max_seq_len": 32}


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save_model(tmp_path / "ours", build_model(ModelConfig(**LLAMA), seed=3), CharTokenizer(), {"step": 1})
    return tmp_path / "ours"


def test_an_export_imported_again_is_the_same_model(ours: Path, tmp_path: Path) -> None:
    export_model(ours, tmp_path / "hf")
    assert damaged_files(tmp_path / "hf") == []
    import_model(tmp_path / "hf", tmp_path / "again")
    one, other = load_model(ours), load_model(tmp_path / "again")
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    assert one.tokenizer.fingerprint() == other.tokenizer.fingerprint()
    assert other.provenance["imported"]["family"] == "llama"


@pytest.mark.parametrize("limit", [1, 3000, 9000, 10**9])
def test_shards_hold_no_more_than_asked_for_and_the_index_names_all(ours: Path, tmp_path: Path, limit: int) -> None:
    export_model(ours, tmp_path / "hf", max_shard_size=str(limit))
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    shards = {file.name: load_file(file) for file in files}
    for shard in shards.values():
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= limit
    if limit == 10**9:
        assert list(shards) == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, shard in shards.items() for name in shard}
    assert index["metadata"]["total_size"] == sum(t.nbytes for shard in shards.values() for t in shard.values())
    assert list(shards) == [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]


def test_a_disk_that_changes_a_bit_is_noticed_and_nothing_is_kept(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = weight_files.write_safetensors

    def write_badly(path: Path, tensors) -> None:
        write(path, tensors)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(weight_files, "write_safetensors", write_badly)
    with pytest.raises(CheckpointError, match=r"other values in final_norm\.weight"):
        export_model(ours, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_damaged_model_is_not_exported(ours: Path, tmp_path: Path) -> None:
    content = bytearray((ours / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (ours / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        export_model(ours, tmp_path / "hf")


def test_the_tokens_that_end_a_text_go_into_a_gguf_file_and_come_back(ours: Path, tmp_path: Path) -> None:
    write_json(ours / "generation_config.json", {"eos_token_id": [3, 9, 11], "temperature": 0.5})
    write_checksums(ours)
    notes = export_model(ours, tmp_path / "toy.gguf", format="gguf")["notes"]
    assert not any("does not end a text" in note for note in notes)
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(tmp_path / "toy.gguf").fields
    names = ("eos", "eot", "eom")
    assert [fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in names] == [3, 9, 11]
    import_model(tmp_path / "toy.gguf", tmp_path / "own")
    assert load_model(tmp_path / "own").end_ids == (3, 9, 11)
    import_model(tmp_path / "toy.gguf", tmp_path / "given", tokenizer=ours)
    assert load_model(tmp_path / "given").end_ids == (3, 9, 11)


def test_tokens_that_end_a_text_and_have_no_place_in_a_gguf_file_are_told(ours: Path, tmp_path: Path) -> None:
    write_json(ours / "generation_config.json", {"eos_token_id": [3, 9, 11, 13]})
    write_checksums(ours)
    notes = export_model(ours, tmp_path / "toy.gguf", format="gguf")["notes"]
    assert notes[-1] == "Unlike SheepOp, llama.cpp does not end a text at the token 13."
    notes = export_model(ours, tmp_path / "bare.gguf", format="gguf", with_tokenizer=False)["notes"]
    assert notes == ["The tokens that end a text are left out, because the tokenizer is."]


def test_a_gguf_file_whose_tokenizer_says_it_all_needs_no_generation_settings(ours: Path, tmp_path: Path) -> None:
    export_model(ours, tmp_path / "toy.gguf", format="gguf")
    import_model(tmp_path / "toy.gguf", tmp_path / "again")
    assert load_model(tmp_path / "again").end_ids == ()
    assert not (tmp_path / "again" / "generation_config.json").exists()


def test_another_tokenizer_that_is_too_large_for_a_gguf_file_is_refused(ours: Path, tmp_path: Path) -> None:
    export_model(ours, tmp_path / "toy.gguf", format="gguf")
    CharTokenizer("äöüß").save(tmp_path / "large")
    with pytest.raises(CheckpointError, match="132 tokens, but the model has only 130"):
        import_model(tmp_path / "toy.gguf", tmp_path / "again", tokenizer=tmp_path / "large")
    assert not (tmp_path / "again").exists()


def test_what_training_alone_knows_is_reported(tmp_path: Path) -> None:
    config = ModelConfig(**LLAMA, dropout=0.1, experts={"count": 4, "router_z_loss": 0.5})
    save_model(tmp_path / "ours", build_model(config, seed=3), CharTokenizer(), {})
    notes = export_model(tmp_path / "ours", tmp_path / "hf")["notes"]
    assert [note.split(" = ")[0] for note in notes] == ["dropout", "experts.router_z_loss"]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["attention_dropout"] == 0.0


def test_a_router_that_is_balanced_by_biases_is_refused(tmp_path: Path) -> None:
    model = build_model(ModelConfig(**LLAMA, experts={"count": 4}), seed=3)
    model.get_buffer("blocks.1.feed_forward.router.balance")[2] = 0.1
    save_model(tmp_path / "ours", model, CharTokenizer(), {})
    with pytest.raises(CheckpointError, match="balance is not zero"):
        export_model(tmp_path / "ours", tmp_path / "hf")


def test_an_encoder_decoder_is_refused(ours: Path, tmp_path: Path) -> None:
    found = json.loads((ours / "config.json").read_text())
    found["model"]["architecture"] = "encoder_decoder"
    (ours / "config.json").write_text(json.dumps(found))
    write_checksums(ours)
    for form in ("hf", "gguf"):
        with pytest.raises(CheckpointError, match="is an encoder-decoder"):
            export_model(ours, tmp_path / "out", format=form)


def test_an_output_in_use(ours: Path, tmp_path: Path) -> None:
    export_model(ours, tmp_path / "hf")
    with pytest.raises(UsageError, match="--overwrite"):
        export_model(ours, tmp_path / "hf")
    export_model(ours, tmp_path / "hf", overwrite=True, dtype="bfloat16")
    assert load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    with pytest.raises(UsageError, match="is not an export"):
        export_model(tmp_path / "hf", ours, overwrite=True)
    assert load_model(ours).provenance == {"step": 1}


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_an_output_within_the_model_or_around_it_is_refused(ours: Path, tmp_path: Path, form: str) -> None:
    for place, words in ((ours, "is inside"), (ours / "sub" / "out", "is inside"), (tmp_path, "contains")):
        with pytest.raises(UsageError, match=words):
            export_model(ours, place, format=form, overwrite=True)
    assert load_model(ours).provenance == {"step": 1}
    assert not (ours / "sub").exists()
