"""The container is the one that other programs read and write; what is damaged is refused before it is believed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.checkpoint.gguf import native_decoding
from sheepop.checkpoint.gguf.container import (
    CHECKSUM_KEY,
    Container,
    TensorEntry,
    checksum_placeholder,
    verify_checksum,
    write_container,
)
from sheepop.checkpoint.gguf.metadata import Value, ValueType, f32s, i32s, texts, value_of
from sheepop.checkpoint.gguf.native_decoding import joined_texts
from sheepop.checkpoint.gguf.quantized_types import BF16, F16, F32, TYPES
from sheepop.core.errors import CheckpointError, UsageError

METADATA = {
    "general.architecture": value_of("llama"),
    "whole": value_of(2**32 - 1),
    "real": value_of(1e-5),
    "truth": value_of(True),
    "words": texts(["", "ä€漢🐑", "two words"]),
    "whole.list": i32s([-1, 0, 2**31 - 1]),
    "real.list": f32s([0.5, -2.0]),
    "truth.list": value_of([True, False]),
    CHECKSUM_KEY: checksum_placeholder(0),
}
PLANS = [
    TensorEntry("vector", F32, (5,)),
    TensorEntry("half", F16, (3, 4)),
    TensorEntry("brain", BF16, (2, 3, 4)),
    TensorEntry("blocks", TYPES["q8_0"], (2, 64)),
]


def numbers_of(entry: TensorEntry) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(entry.name))
    return torch.randn(entry.shape, generator=generator)


def encoded(entry: TensorEntry) -> list[torch.Tensor]:
    """The bytes in two pieces, as a large tensor would come."""
    rows = numbers_of(entry).reshape(-1, entry.shape[-1])
    return [entry.kind.encode(rows[:1]), entry.kind.encode(rows[1:])]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_container(tmp_path / "toy.gguf", METADATA, PLANS, encoded)
    return tmp_path / "toy.gguf"


def test_what_is_written_is_read_by_llama_cpps_own_package(path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    assert {name: reader.fields[name].contents() for name in list(METADATA)[:-1]} == {
        "general.architecture": "llama",
        "whole": 2**32 - 1,
        "real": pytest.approx(1e-5),
        "truth": True,
        "words": ["", "ä€漢🐑", "two words"],
        "whole.list": [-1, 0, 2**31 - 1],
        "real.list": [0.5, -2.0],
        "truth.list": [True, False],
    }
    assert [tensor.name for tensor in reader.tensors] == [entry.name for entry in PLANS]
    for tensor, entry in zip(reader.tensors, PLANS, strict=True):
        assert tuple(reversed(tensor.shape.tolist())) == entry.shape
        assert tensor.data_offset % 32 == 0
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(entry.shape)
        rows = numbers_of(entry).reshape(-1, entry.shape[-1])
        wanted = entry.kind.decode(entry.kind.encode(rows), entry.shape[-1]).float().reshape(entry.shape)
        assert np.array_equal(found, wanted.numpy()), entry.name


def test_what_llama_cpps_own_package_writes_is_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, -1.5])
    writer.add_array("some.bytes", [1, 2, 3])
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    blocks = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor(
        "blocks",
        gguf.quants.quantize(blocks, gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Container(tmp_path / "theirs.gguf") as container:
        assert container.metadata["llama.block_count"] == value_of(3)
        assert container.metadata["tokenizer.ggml.tokens"] == texts(["a", "b"])
        assert container.metadata["tokenizer.ggml.scores"] == f32s([0.5, -1.5])
        assert container.read("matrix").tolist() == matrix.tolist()
        assert container.read("blocks").shape == (1, 64)
        assert (container.read("blocks") - torch.from_numpy(blocks)).abs().max() <= 0.5 / 127 + 1e-4
        assert container.tensors["blocks"].start % 64 == 0


def test_version_2_is_read_like_version_3(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 2)
    path.write_bytes(content)
    with Container(path) as container:
        assert container.read("vector").tolist() == numbers_of(PLANS[0]).tolist()


def test_what_was_read_outlives_the_file(path: Path) -> None:
    with Container(path) as container:
        vector = container.read("vector")
    path.unlink()
    vector += 1
    assert vector.tolist() == (numbers_of(PLANS[0]) + 1).tolist()


def test_the_checksum_is_that_of_the_file_with_zeros_in_its_place(path: Path) -> None:
    content = path.read_bytes()
    with Container(path) as container:
        verify_checksum(container)
        recorded = container.metadata[CHECKSUM_KEY].content
    assert isinstance(recorded, str)
    digest = recorded[-64:]
    assert hashlib.sha256(content.replace(digest.encode(), b"0" * 64)).hexdigest() == digest


def change(path: Path, *, at: int, to: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(to)] = to
    path.write_bytes(content)


def place_behind(path: Path, marker: str) -> int:
    """The place of the first byte behind a name or key in the file."""
    encoded_marker = struct.pack("<Q", len(marker)) + marker.encode()
    return path.read_bytes().index(encoded_marker) + len(encoded_marker)


U64_MAX = struct.pack("<Q", 2**64 - 1)
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "magic": (lambda path: change(path, at=0, to=b"GGML"), r"begins with b'GGML'"),
    "version 1": (lambda path: change(path, at=4, to=struct.pack("<I", 1)), "GGUF version 1; SheepOp reads 2 and 3"),
    "version 4": (lambda path: change(path, at=4, to=struct.pack("<I", 4)), "GGUF version 4; SheepOp reads 2 and 3"),
    "big endian": (lambda path: change(path, at=4, to=struct.pack(">I", 3)), "big-endian"),
    "count of tensors": (
        lambda path: change(path, at=8, to=U64_MAX),
        "18,446,744,073,709,551,615 tensors; SheepOp reads",
    ),
    "count of keys": (
        lambda path: change(path, at=16, to=U64_MAX),
        "18,446,744,073,709,551,615 metadata values; SheepOp reads at most",
    ),
    "count of tensors beyond the file": (
        lambda path: change(path, at=8, to=struct.pack("<Q", 10**5)),
        "claims 100,000 tensors, but only",
    ),
    "length of a key": (lambda path: change(path, at=24, to=U64_MAX), "key 0 claims to be"),
    "length of a text": (
        lambda path: change(path, at=place_behind(path, "general.architecture") + 4, to=U64_MAX),
        "'general.architecture' claims to be 18,446,744,073,709,551,615 bytes long",
    ),
    "length beyond the file": (
        lambda path: change(path, at=place_behind(path, "general.architecture") + 4, to=struct.pack("<Q", 10**6)),
        "needs 1,000,000 bytes, but only",
    ),
    "unknown type of a value": (
        lambda path: change(path, at=place_behind(path, "whole"), to=struct.pack("<I", 13)),
        "'whole' has the unknown type 13",
    ),
    "text that is not UTF-8": (
        lambda path: change(path, at=place_behind(path, "general.architecture") + 12, to=b"\xff"),
        "not UTF-8",
    ),
    "list of lists": (
        lambda path: change(path, at=place_behind(path, "words") + 4, to=struct.pack("<I", 9)),
        "'words' is a list of lists",
    ),
    "length of a list": (
        lambda path: change(path, at=place_behind(path, "words") + 8, to=U64_MAX),
        "'words' claims 18,446,744,073,709,551,615 entries; SheepOp reads at most 16,777,216",
    ),
    "list beyond the file": (
        lambda path: change(path, at=place_behind(path, "whole.list") + 8, to=struct.pack("<Q", 2**20)),
        "'whole.list' claims 1,048,576 entries, but only",
    ),
    "a key twice": (
        lambda path: change(path, at=place_behind(path, "truth") - 5, to=b"whole"),
        "the key 'whole' occurs twice",
    ),
    "dimensions": (
        lambda path: change(path, at=place_behind(path, "vector"), to=struct.pack("<I", 2**32 - 1)),
        "'vector' claims 4,294,967,295 dimensions",
    ),
    "size of 0": (lambda path: change(path, at=place_behind(path, "vector") + 4, to=bytes(8)), "is empty"),
    "sizes whose product overflows": (
        lambda path: change(path, at=place_behind(path, "half") + 4, to=struct.pack("<QQ", 2**63, 2**63)),
        "'half' of shape .* would end at byte",
    ),
    "rows that are no blocks": (
        lambda path: change(path, at=place_behind(path, "blocks") + 4, to=struct.pack("<Q", 65)),
        "cannot have the type q8_0",
    ),
    "rows shorter than a block": (
        lambda path: change(path, at=place_behind(path, "blocks") + 20, to=struct.pack("<I", 12)),
        r"'blocks' of shape \(2, 64\) cannot have the type q4_k",
    ),
    "type with more bytes than the file has": (
        lambda path: change(path, at=place_behind(path, "blocks") + 4, to=struct.pack("<QQIQ", 2**20, 2, 14, 128)),
        "'blocks' of shape .* would end at byte",
    ),
    "type we do not read": (
        lambda path: change(path, at=place_behind(path, "blocks") + 20, to=struct.pack("<I", 24)),
        r"1 of 4 tensors have types that SheepOp does not read: i8 \('blocks' is i8\)\. It reads f32, f16, bf16, q4_0",
    ),
    "type nobody knows": (
        lambda path: change(path, at=place_behind(path, "blocks") + 20, to=struct.pack("<I", 777)),
        "number 777",
    ),
    "place that is not aligned": (
        lambda path: change(path, at=place_behind(path, "half") + 24, to=struct.pack("<Q", 33)),
        "begins at 33, which is not a multiple of 32",
    ),
    "place beyond the file": (
        lambda path: change(path, at=place_behind(path, "half") + 24, to=struct.pack("<Q", 2**40)),
        "'half' of shape .* would end at byte",
    ),
    "places that overlap": (
        lambda path: change(path, at=place_behind(path, "half") + 24, to=struct.pack("<Q", 0)),
        "'vector' and 'half' overlap|'half' and 'vector' overlap",
    ),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-40]) and None, "would end at byte"),
    "empty": (lambda path: path.write_bytes(b"") and None, "it is empty"),
    "missing": (lambda path: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_is_said(path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        Container(path)
    assert str(path) in str(caught.value) or "types that SheepOp does not read" in str(caught.value)


def test_another_error_while_it_is_read_is_not_hidden(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise UsageError("SHEEPOP_NATIVE = fast is unknown")

    monkeypatch.setattr(native_decoding, "_text_functions", refused)
    with pytest.raises(UsageError, match="SHEEPOP_NATIVE = fast is unknown"):
        Container(path)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    write_container(tmp_path / "toy.gguf", METADATA, [PLANS[0], PLANS[1], PLANS[0]], encoded)
    with pytest.raises(CheckpointError, match="the tensor 'vector' occurs twice"):
        Container(tmp_path / "toy.gguf")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        Container(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (value_of(0), "not a power of two"),
        (value_of(48), "not a power of two"),
        (value_of(2**20), "not a power of two"),
        (value_of("32"), "not an integer of 4 bytes"),
        (Value(ValueType.U64, 32), "not an integer of 4 bytes"),
    ],
)
def test_an_alignment_that_is_none_is_refused(tmp_path: Path, value: Value, message: str) -> None:
    metadata = {"general.alignment": value, **METADATA}
    write_container(tmp_path / "toy.gguf", metadata, PLANS, encoded)
    with pytest.raises(CheckpointError, match=message):
        Container(tmp_path / "toy.gguf")


@given(
    key=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    value=st.one_of(
        st.integers(0, 2**32 - 1).map(value_of),
        st.floats(width=32).map(value_of),
        st.booleans().map(value_of),
        st.text(st.characters(codec="utf-8")).map(value_of),
        st.lists(st.text(st.characters(codec="utf-8")), max_size=5).map(texts),
        st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(i32s),
        st.lists(st.floats(width=32), max_size=5).map(f32s),
        st.lists(st.booleans(), max_size=5).map(value_of),
    ),
)
@settings(max_examples=50)
def test_every_value_comes_back(tmp_path_factory: pytest.TempPathFactory, key: str, value: Value) -> None:
    path = tmp_path_factory.mktemp("values") / "toy.gguf"
    write_container(path, {f"a.{key}": value, CHECKSUM_KEY: checksum_placeholder(0)}, [], lambda entry: [])
    with Container(path) as container:
        assert container.metadata[f"a.{key}"] == value


@pytest.mark.parametrize("is_native", [True, False])
def test_texts_are_joined_and_none_ends_beyond_the_content(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_native:
        monkeypatch.setattr(native_decoding, "_text_functions", lambda: None)
    words = ["", "sheep", "\u00e9", "", "graze " * 40, ""]
    listed = b"".join(struct.pack("<Q", len(word.encode())) + word.encode() for word in words)
    for count in (0, 1, 2, len(words)):
        found = joined_texts(memoryview(b"head" + listed + b"tail"), 4, count)
        assert found is not None
        text, starts, end = found
        assert [text[a:b].tobytes().decode() for a, b in pairwise(starts.tolist())] == words[:count]
        assert end == 4 + sum(8 + len(word.encode()) for word in words[:count])
    assert joined_texts(memoryview(listed[:-1]), 0, len(words)) is None
    assert joined_texts(memoryview(struct.pack("<Q", 2**64 - 1) + b"text"), 0, 1) is None
