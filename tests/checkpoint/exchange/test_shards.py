"""A model directory of ours may hold its weights in shards with an index, and is then used like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sheepop
from sheepop.checkpoint import load_model, weight_files
from sheepop.checkpoint.model_directory import open_model
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import damaged_files, write_checksums
from sheepop.jobs.exchange import export_model, import_model

from .conftest import llama_tensors

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(make, tmp_path: Path) -> Path:
    """An imported Llama whose weights are divided over several files."""
    import_model(make(), tmp_path / "ours", max_shard_size="1KB")
    return tmp_path / "ours"


def test_an_import_is_divided_where_the_limit_says_so(make, tmp_path: Path) -> None:
    source = make()
    limit = 3000
    result = import_model(source, tmp_path / "ours", max_shard_size=str(limit))
    shards = {file.name: load_file(file) for file in sorted((tmp_path / "ours").glob("*.safetensors"))}
    assert list(shards) == [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for shard in shards.values():
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= limit
    index = json.loads((tmp_path / "ours" / INDEX).read_text())
    assert index["weight_map"] == {name: file for file, shard in shards.items() for name in shard}
    assert index["metadata"]["total_size"] == sum(t.nbytes for shard in shards.values() for t in shard.values())
    assert result["bytes"] == sum(file.stat().st_size for file in (tmp_path / "ours").glob("*.safetensors"))
    assert damaged_files(tmp_path / "ours") == []


def test_without_a_limit_small_weights_are_one_file(make, tmp_path: Path) -> None:
    import_model(make(), tmp_path / "ours")
    assert [file.name for file in (tmp_path / "ours").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("size", ["", "big", "0"])
def test_what_is_no_size(make, tmp_path: Path, size: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        import_model(make(), tmp_path / "ours", max_shard_size=size)


def test_a_divided_model_is_the_same_model(make, sharded: Path, tmp_path: Path) -> None:
    import_model(tmp_path / "hf", tmp_path / "whole")
    ids = torch.arange(4, 20)[None]
    whole, divided = load_model(tmp_path / "whole"), load_model(sharded)
    assert torch.equal(divided.model(ids), whole.model(ids))
    assert divided.model.lm_head.weight is divided.model.embedding.weight
    for name, tensor in open_model(sharded).tensors.items():
        assert torch.equal(tensor.read(), whole.model.state_dict()[name])
    texts = [sheepop.load(path).generate("sheep", max_new_tokens=5, seed=1).text for path in (sharded, whole.directory)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_a_divided_model_is_exported(sharded: Path, tmp_path: Path, form: str) -> None:
    written = export_model(sharded, tmp_path / "out", format=form)
    assert written["parameters"] == sum(tensor.numel() for tensor in llama_tensors().values())
    import_model(tmp_path / "out", tmp_path / "again")
    for name, tensor in load_model(sharded).model.state_dict().items():
        assert torch.equal(load_model(tmp_path / "again").model.state_dict()[name], tensor)


def test_a_damaged_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
        load_model(sharded)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        open_model(sharded)


# Hostile: the checksums agree with what was changed.


@pytest.mark.parametrize("place", ["../weights.safetensors", "/etc/passwd", "..", "", "a\0b", 3])
def test_an_index_that_points_out_of_the_model(sharded: Path, tmp_path: Path, place: object) -> None:
    save_file({"final_norm.weight": torch.ones(8)}, tmp_path / "weights.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["final_norm.weight"] = place
    (sharded / INDEX).write_text(json.dumps(index))
    write_checksums(sharded)
    for read in (load_model, open_model):
        with pytest.raises(CheckpointError, match=r"is not the name of a file in this directory|is damaged"):
            read(sharded)


def test_a_shard_that_is_a_link_out_of_the_model(sharded: Path, tmp_path: Path) -> None:
    shard = min(sharded.glob("*.safetensors"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the directory"):
        load_model(sharded)


def test_a_tensor_that_is_in_no_shard_or_too_many(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    tensors = load_file(shards[-1])
    save_file({**tensors, "blocks.7.extra": torch.ones(2)}, shards[-1])
    index = json.loads((sharded / INDEX).read_text())
    gone = min(index["weight_map"])
    (sharded / index["weight_map"][gone]).unlink()
    index["weight_map"]["blocks.7.extra"] = shards[-1].name
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if (sharded / file).exists()}
    (sharded / INDEX).write_text(json.dumps(index))
    write_checksums(sharded)
    for read in (load_model, open_model):
        with pytest.raises(CheckpointError, match=rf"{gone} is missing; .*blocks\.7\.extra is unexpected"):
            read(sharded)


def test_one_file_and_an_index_side_by_side(make, sharded: Path, tmp_path: Path) -> None:
    import_model(tmp_path / "hf", tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", sharded)
    write_checksums(sharded)
    with pytest.raises(CheckpointError, match="contains both"):
        load_model(sharded)


def test_a_disk_that_fails_in_the_second_shard_leaves_nothing(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = weight_files.write_safetensors

    def write_one(path: Path, tensors) -> None:
        if written:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        write(path, tensors)

    monkeypatch.setattr(weight_files, "write_safetensors", write_one)
    source = make()
    with pytest.raises(Exception, match="the disk is full"):
        import_model(source, tmp_path / "ours", max_shard_size="1KB")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
