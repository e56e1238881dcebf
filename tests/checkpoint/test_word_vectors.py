from __future__ import annotations

import contextlib
import gzip
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.checkpoint.word_vectors import read_word_vectors, vector_dimension
from sheepop.core.errors import ConfigError, DataError

VECTORS = {"the": [1.5, -2.0, 0.25], "hello": [0.1, 1e-7, 3.0], "日本": [-1.0, 0.5, 2.5], ".": [7.0, 8.0, 9.0]}
IDS = {b"hello": [5, 9], "日本".encode(): [2], b"absent": [1]}


def text(vectors: Mapping[str, Sequence[float]], *, header: bool = True, end: str = "\n") -> bytes:
    first = f"{len(vectors)} {len(next(iter(vectors.values())))}\n" if header else ""
    lines = [" ".join([word, *(repr(number) for number in numbers)]) + end for word, numbers in vectors.items()]
    return (first + "".join(lines)).encode()


def binary(vectors: Mapping[str, Sequence[float]], *, end: bytes = b"\n") -> bytes:
    size = len(next(iter(vectors.values())))
    records = [word.encode() + b" " + struct.pack(f"<{size}f", *numbers) + end for word, numbers in vectors.items()]
    return f"{len(vectors)} {size}\n".encode() + b"".join(records)


HELLO_FIRST = {word: VECTORS[word] for word in ("hello", "the", "日本", ".")}
FORMS = {
    "word2vec text": text(VECTORS),
    "fastText vec": text(VECTORS, end=" \n"),
    "Windows": text(VECTORS, end="\r\n"),
    "GloVe": text(VECTORS, header=False),
    "word2vec binary": binary(VECTORS),
    "binary without line ends": binary(VECTORS, end=b""),
    "byte-order mark": b"\xef\xbb\xbf" + text(VECTORS),
    "byte-order mark before a word": b"\xef\xbb\xbf" + text(HELLO_FIRST, header=False),
    "columns": text(VECTORS, header=False).replace(b" ", b"  "),
    "tabs": text(VECTORS).replace(b" ", b"\t"),
}


@pytest.mark.parametrize("form", FORMS)
def test_wanted_words_give_their_tokens_the_numbers_of_the_file(form: str, tmp_path: Path):
    path = tmp_path / "vectors"
    path.write_bytes(FORMS[form])
    found = read_word_vectors(path, IDS, 3)
    assert found.num_words == 4 and vector_dimension(path) == 3
    table = dict(zip(found.ids.tolist(), found.vectors.tolist(), strict=True))
    expected = {5: VECTORS["hello"], 9: VECTORS["hello"], 2: VECTORS["日本"]}
    assert table == {token_id: np.float32(numbers).tolist() for token_id, numbers in expected.items()}


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs", "Z", "Cc")), min_size=1, max_size=5),
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
)
@settings(max_examples=60)
def test_text_and_binary_files_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, vectors: dict[str, list[float]], is_binary: bool
):
    path = tmp_path_factory.getbasetemp() / "written"
    path.write_bytes(binary(vectors) if is_binary else text(vectors))
    ids = {word.encode(): [number] for number, word in enumerate(vectors)}
    found = read_word_vectors(path, ids, 4)
    order = np.argsort(found.ids)
    np.testing.assert_array_equal(found.vectors[order], np.array(list(vectors.values()), dtype=np.float32))


def test_a_word_with_spaces_is_no_other_word_and_the_first_of_two_counts(tmp_path: Path):
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2 3\n. . . 4 5 6\nhello 7 8 9\nhello 0 0 0\n")
    found = read_word_vectors(path, {b".": [0], b"hello": [1], b". . .": [2]}, 3)
    assert found.ids.tolist() == [2, 1] and found.vectors.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert (found.num_words, found.num_repeated) == (4, 1)


def test_memory_is_that_of_the_words_found(tmp_path: Path):
    resource = pytest.importorskip("tracemalloc")
    path = tmp_path / "large.txt"
    row = " 0.123456" * 50 + "\n"
    path.write_text("".join(f"w{number}{row}" for number in range(5_000)))
    resource.start()
    found = read_word_vectors(path, {b"w3": [0], b"w4999": [1]}, 50)
    peak = resource.get_traced_memory()[1]
    resource.stop()
    assert found.ids.tolist() == [0, 1] and found.num_words == 5_000
    assert peak < path.stat().st_size / 8


def test_vectors_of_another_size_are_refused(tmp_path: Path):
    path = tmp_path / "vectors.txt"
    path.write_bytes(text(VECTORS))
    with pytest.raises(
        ConfigError, match=r"have 3 numbers, but the model's have 64 \(model\.d_model\)\. Set model\.d_model=3"
    ):
        read_word_vectors(path, IDS, 64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<ii", 793712314, 12) + b"x" * 50, r"complete fastText model, .* Use the \.vec file"),
        (gzip.compress(text(VECTORS), mtime=0), "compressed with gzip. Unpack it first"),
        (b"", "is not a file of word vectors"),
        (b"one\n", "is not a file of word vectors"),
        (b"word not numbers\n", "is not a file of word vectors"),
        (b"\x00" * 5000, "is not a file of word vectors"),
        (b"99999999999 99999999999\n", "is not a file of word vectors"),
        (text(VECTORS)[:-8], "is damaged: word 4 does not have 3 numbers"),
        (b"5 3\n" + text(VECTORS, header=False), "states 5 words, but it has 4"),
        (b"2 3\na 1 2 3\nhello 1 x 3\n", "the vector of 'hello' contains a value that is not a number"),
        (b"2 3\na 1 2 3\nhello 1 1_0 3\n", "the vector of 'hello' contains a value that is not a number"),
        (b"2 3\na 1 2 3\nhello 1 2 1_0\n", "word 2 does not have 3 numbers"),
        (b"2 3\na  1  2  3\nhello  1  2\n", "word 2 does not have 3 numbers"),
        (b"2 3\na 1 2 3\nhello 1 nan 3\n", "the vector of 'hello' contains numbers that are not finite"),
        (b"2 3\na 1 2 3\nhello 1 2\n", "word 2 does not have 3 numbers"),
        (b"2 3\na 1 2 3\nhello 1 2 3 4\n", "word 2 does not have 3 numbers"),
        (b"2 3\na 1 2 3\nhello 1 2 1e50\n", "the vector of 'hello' contains numbers that are not finite"),
        (b"1 3\na 1 2 3\nhello 1 2 3\n", "damaged or truncated: its header states 1 words, but it has 2"),
        (b"2 3\na 1 2 3\n" + b"b" * 5000 + b" 1 2 3\n", "word 2 does not have 3 numbers"),
        (binary(VECTORS)[:-3], "damaged or truncated: word 4 of 4 is incomplete"),
        (binary(VECTORS) + b"more 1234", "more than the 4 words stated in its header"),
        (binary({"a": [1.0], "hello": [float("inf")]}).replace(b"2 1", b"2 1"), "numbers that are not finite"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(content: bytes, message: str, tmp_path: Path):
    path = tmp_path / "vectors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_word_vectors(path, IDS, 1 if b"2 1\n" in content else 3)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="absent cannot be read: No such file"):
        vector_dimension(tmp_path / "absent")


@given(st.binary(max_size=200), st.integers(0, 200))
@settings(max_examples=100)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int):
    path = tmp_path_factory.getbasetemp() / "noise"
    for content in (noise, binary(VECTORS)[:place] + noise, text(VECTORS)[:place] + noise):
        path.write_bytes(content)
        with contextlib.suppress(DataError, ConfigError):
            assert read_word_vectors(path, IDS, 3).vectors.shape[1] == 3
