"""A model in several files, as llama.cpp's own package splits it, is read as a whole or refused by name."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sheepop.checkpoint import resolve_model_directory
from sheepop.checkpoint.gguf.reader import open_gguf, read_gguf
from sheepop.checkpoint.model_directory import open_model
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError

from ...hub_server import LoopbackHub

gguf = pytest.importorskip("gguf")


def split(source: Path, folder: Path, tensors_per_part: int = 12) -> list[Path]:
    """The model of a file of ours, with all of its keys, in parts."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "toy.gguf", architecture, split_max_tensors=tensors_per_part)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.fixture
def parts(tmp_path: Path, make: Callable[..., Any]) -> list[Path]:
    found = split(make("llama").write(tmp_path / "whole.gguf"), tmp_path / "parts")
    assert [part.name for part in found] == [f"toy-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return found


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_opens_the_model(parts: list[Path], make: Callable[..., Any], given: int) -> None:
    toy = make("llama")
    model = read_gguf(parts[given])
    assert model.config == toy.config
    assert model.tokenizer.fingerprint() == toy.tokenizer.fingerprint()
    assert model.source["file"] == parts[0].name
    assert model.tensors.keys() == toy.tensors.keys()
    for name, tensor in toy.tensors.items():
        assert torch.equal(model.tensors[name].read(), tensor.read()), name


def test_what_was_read_outlives_the_parts(parts: list[Path], make: Callable[..., Any]) -> None:
    with open_gguf(parts[0]) as file:
        tensor = file.tensors["blocks.2.feed_forward.down_proj.weight"].read()
    assert torch.equal(tensor, make("llama").tensors["blocks.2.feed_forward.down_proj.weight"].read())
    with pytest.raises(ValueError, match="closed"):
        file.tensors["blocks.2.feed_forward.down_proj.weight"].read()


def remove(parts: list[Path]) -> None:
    parts[1].unlink()
    parts[2].unlink()


def exchange(parts: list[Path]) -> None:
    content = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(content)


def cut(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-200])


def rename(parts: list[Path]) -> None:
    parts[0].rename(parts[0].with_name("toy.gguf"))
    parts[0] = parts[0].with_name("toy.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            remove,
            "one of 3 parts of a model, of which toy-00002-of-00003.gguf, toy-00003-of-00003.gguf cannot be found",
        ),
        (exchange, r"toy-00002-of-00003\.gguf says that it is part 3 of 3, unlike its name"),
        (cut, r"toy-00002-of-00003\.gguf is damaged or not a GGUF file: .* would end at byte"),
        (rename, r"toy\.gguf is one of 3 parts of a model, but its name does not end in -00001-of-00003\.gguf"),
    ],
)
def test_parts_that_are_not_whole_are_named(
    parts: list[Path], change: Callable[[list[Path]], None], message: str
) -> None:
    change(parts)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(parts[0])


def test_parts_of_another_model_are_refused(parts: list[Path], tmp_path: Path, make: Callable[..., Any]) -> None:
    whole = make("llama", num_layers=2).write(tmp_path / "other.gguf")
    others = split(whole, tmp_path / "others", tensors_per_part=8)
    assert len(others) == 3
    shutil.copy(others[2], parts[2])
    with pytest.raises(
        CheckpointError, match=re.escape(f"{parts[2]} has another value of split.tensors.count than toy-")
    ):
        open_gguf(parts[0])


def test_a_tensor_in_two_parts_is_refused(parts: list[Path]) -> None:
    content = parts[2].read_bytes()
    name = gguf.GGUFReader(parts[0]).tensors[-1].name.encode()
    own = next(t.name.encode() for t in gguf.GGUFReader(parts[2]).tensors if len(t.name) == len(name))
    parts[2].write_bytes(content.replace(own, name))
    with pytest.raises(
        CheckpointError, match=f"has the tensor '{name.decode()}', which toy-00001-of-00003.gguf has too"
    ):
        open_gguf(parts[0])


def test_a_published_model_in_several_files_is_fetched_whole(
    hub: LoopbackHub, parts: list[Path], make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHEEPOP_MODELS", str(tmp_path / "cache"))
    hub.repository("org/Parts-GGUF", {f"q/{part.name}": part.read_bytes() for part in parts})
    for name in ("org/Parts-GGUF", f"org/Parts-GGUF/q/{parts[1].name}"):
        found = open_model(resolve_model_directory(name, Console.silent())).tensors
        for tensor, expected in make("llama").tensors.items():
            assert torch.equal(found[tensor].read(), expected.read()), tensor


def test_a_change_of_any_part_is_seen_whichever_is_given(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHEEPOP_MODELS", str(tmp_path / "cache"))
    first = resolve_model_directory(parts[1], Console.silent())
    assert resolve_model_directory(parts[1], Console.silent()) == first
    os.utime(parts[2])
    assert resolve_model_directory(parts[1], Console.silent()) != first
