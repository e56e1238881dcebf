"""Files that are written as a stream are those of the library; a header that lies is refused before it is believed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.safetensors_file import open_safetensors, write_safetensors
from sheepop.core.errors import CheckpointError

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(st.lists(st.integers(0, 5), max_size=3), DTYPES),
        max_size=6,
    )
)
def test_the_library_reads_what_is_written(tmp_path_factory, described):
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        for name, (shape, dtype) in described.items()
    }
    path = tmp_path_factory.mktemp("stream") / "model.safetensors"
    write_safetensors(path, {name: LazyTensor.of(tensor) for name, tensor in tensors.items()})
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_view_is_written_as_the_numbers_that_it_shows(tmp_path: Path):
    matrix = torch.arange(12.0).reshape(3, 4)
    write_safetensors(tmp_path / "m", {"t": LazyTensor.of(matrix.t()), "c": LazyTensor.of(matrix[:, 1:3])})
    read = load_file(tmp_path / "m")
    assert torch.equal(read["t"], matrix.t())
    assert torch.equal(read["c"], matrix[:, 1:3])


def test_files_of_the_library_are_opened_without_reading_them(tmp_path: Path):
    tensors = {"a": torch.randn(3, 4).bfloat16(), "b": torch.randn(5), "none": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "m")
    found = open_safetensors(tmp_path / "m")
    assert {name: (lazy.shape, lazy.dtype) for name, lazy in found.items()} == {
        "a": ((3, 4), torch.bfloat16),
        "b": ((5,), torch.float32),
        "none": ((0, 2), torch.float32),
    }
    assert all(torch.equal(found[name].read(), tensor) for name, tensor in tensors.items())
    # Read instead of mapped: a later change of the file does not reach the tensors.
    loaded = {name: lazy.load() for name, lazy in found.items()}
    size = (tmp_path / "m").stat().st_size
    with (tmp_path / "m").open("r+b") as file:
        file.write(bytes(size))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    (tmp_path / "m").write_bytes(bytes(20))
    with pytest.raises(CheckpointError, match="became shorter"):
        found["b"].load()


def test_a_tensor_that_is_not_as_announced(tmp_path: Path):
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="a is torch"):
            write_safetensors(tmp_path / "m", {"a": LazyTensor((2,), torch.float32, lambda other=other: other)})


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path):
    save_file({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.uint16)}, tmp_path / "m")
    with pytest.raises(CheckpointError, match="the tensor b has the dtype U16, which SheepOp does not read"):
        open_safetensors(tmp_path / "m")


GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
}


def spoiled(**changes: Any) -> bytes:
    table = {**GOOD, "b": {**GOOD["b"], **changes}}
    return json.dumps(table).encode()


def file_of(header: bytes, length: int | None = None, numbers: int = 24) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + bytes(numbers)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        file_of(b"{}", length=2**63),
        file_of(b"{}", length=2**64 - 1),
        file_of(b"{}", length=10**9),
        file_of(json.dumps(GOOD).encode(), length=10),
        file_of(b"no json at all"),
        file_of(b"[1, 2]"),
        file_of(b"\xff\xfe\xfd"),
        file_of(b"[" * 50_000),
        file_of(json.dumps(GOOD).encode(), numbers=23),
        file_of(json.dumps(GOOD).encode(), numbers=25),
        file_of(spoiled(data_offsets=[-8, 8])),
        file_of(spoiled(data_offsets=[24, 8])),
        file_of(spoiled(data_offsets=[4, 20])),
        file_of(spoiled(data_offsets=[0, 16])),
        file_of(spoiled(data_offsets=[12, 28]), numbers=28),
        file_of(spoiled(data_offsets=[8, 2**62])),
        file_of(spoiled(data_offsets=[8])),
        file_of(spoiled(data_offsets="8")),
        file_of(spoiled(shape=[2, 3])),
        file_of(spoiled(shape=[-2, -2])),
        file_of(spoiled(shape=[2**40, 2**40])),
        file_of(spoiled(shape=[2**64, 1])),
        file_of(spoiled(shape=None)),
        file_of(spoiled(dtype="F31")),
        file_of(spoiled(dtype=7)),
    ],
)
def test_a_header_that_lies_is_refused_with_the_name_of_the_file(tmp_path: Path, content: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        open_safetensors(path)


@settings(max_examples=200)
@given(st.data())
def test_any_changed_byte_of_a_header_gives_an_error_or_the_same_amount_of_numbers(tmp_path_factory, data):
    content = bytearray(file_of(json.dumps(GOOD).encode()))
    place = data.draw(st.integers(0, len(content) - 25))
    content[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flip") / "model.safetensors"
    path.write_bytes(content)
    try:
        found = open_safetensors(path)
    except CheckpointError:
        return
    assert sum(lazy.num_bytes for lazy in found.values()) == 24
    for lazy in found.values():
        assert tuple(lazy.read().shape) == lazy.shape


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(CheckpointError, match="is missing"):
        open_safetensors(tmp_path / "nowhere")
