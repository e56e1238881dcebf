from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import DataError
from sheepop.data.documents import (
    Document,
    batched_by_size,
    is_empty,
    read_stored,
    split_text,
    stored_file,
)

lines_text = st.lists(st.sampled_from(["a", " b", "\tc d", "", "  ", "\u2028", "\x0c", "é"])).flatmap(
    lambda lines: st.lists(st.sampled_from(["\n", "\r\n", "\r"]), min_size=len(lines), max_size=len(lines)).map(
        lambda ends: "".join(line + end for line, end in zip(lines, ends, strict=True))
    )
)


@given(st.text())
def test_a_file_is_one_document_and_exact(text: str) -> None:
    assert split_text(text, "file") == [text]


@given(st.tuples(lines_text, st.sampled_from(["", "end", "  "])).map("".join))
def test_lines_lose_only_their_ends(text: str) -> None:
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    joined = "\n".join(split_text(text, "line"))
    assert joined == unified.removesuffix("\n")


@given(st.tuples(lines_text, st.sampled_from(["", "end", "  "])).map("".join))
def test_blocks_agree_with_a_loop_over_lines(text: str) -> None:
    # The loop: collect lines with their ends, close a block at each line of white space.
    expected, block = [], ""
    for line in re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z", text):
        if line.isspace():
            expected.append(block)
            block = ""
        else:
            block += line
    expected = [re.sub(r"(\r\n|\r|\n)$", "", b) for b in [*expected, block] if b]
    assert split_text(text, "blank_line") == expected


def test_blocks_by_hand() -> None:
    text = "\n\nTitle\r\n\r\n  indented\n    more\n \t\n\n\nlast\n"
    assert split_text(text, "blank_line") == ["Title", "  indented\n    more", "last"]
    assert split_text("a\r\nb", "blank_line") == ["a\r\nb"]
    assert split_text(" \n ", "blank_line") == []


def test_lines_by_hand() -> None:
    assert split_text("a\n\n b\r\nc\rd", "line") == ["a", "", " b", "c", "d"]
    assert split_text("a\n", "line") == ["a"]
    assert split_text("one\x0btwo\x85three", "line") == ["one\x0btwo\x85three"]


def test_a_long_run_of_blanks_is_cut_in_linear_time() -> None:
    text = "\n" + " " * 300_000 + "x" + "\n " * 100_000
    assert split_text(text, "blank_line") == [" " * 300_000 + "x"]


@pytest.mark.parametrize(("text", "expected"), [("", True), (" \n\t\u3000", True), (" x", False)])
def test_empty_means_white_space_only(text: str, expected: bool) -> None:
    assert is_empty(text) is expected


def test_the_id_is_the_hash_of_the_content() -> None:
    # b2sum -l 128 of the five bytes "hello"
    assert Document.of("hello", "a.txt", 0).id == "46fb7408d4f285228f4af516ea25851b"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_documents_come_back_whole(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    directory = tmp_path_factory.mktemp("documents")
    documents = [Document.of(text, f'dir/é\n,"text":"{i}.txt', i) for i, text in enumerate(texts)]
    with stored_file(directory, "train") as writer:
        for document in documents:
            writer.write(document.stored().line)
    assert list(read_stored(directory, "train")) == [document.stored() for document in documents]
    assert list(read_stored(directory, "val")) == []


def test_a_document_larger_than_a_block_is_read_whole(tmp_path: Path) -> None:
    text = "".join(chr(33 + i % 90) for i in range(3_000_000))
    with stored_file(tmp_path, "train") as writer:
        writer.write(Document.of(text, "a", 0).stored().line)
        writer.write(Document.of("small", "b", 0).stored().line)
    assert [stored.document().text for stored in read_stored(tmp_path, "train")] == [text, "small"]


def test_damage_is_named(tmp_path: Path) -> None:
    with stored_file(tmp_path, "train") as writer:
        writer.write(Document.of("text " * 100, "a", 0).stored().line)
    path = tmp_path / "train-00000.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train-00000.jsonl.zst is damaged"):
        list(read_stored(tmp_path, "train"))


def test_batches_hold_consecutive_documents_of_bounded_size() -> None:
    documents = [Document.of("x" * size, "a", i).stored() for i, size in enumerate([3, 3, 5, 20, 1, 1])]
    batches = list(batched_by_size(documents, 10))
    assert [[d.document().part for d in batch] for batch in batches] == [[0, 1], [2], [3], [4, 5]]
