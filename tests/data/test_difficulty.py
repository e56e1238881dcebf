from __future__ import annotations

import math
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.console import Console
from sheepop.data import Batches, PackedBatches, PaddedBatches, TokenSplit
from sheepop.data.difficulty import read_difficulty, row_difficulty, write_difficulty
from sheepop.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer("")
documents_of_ids = st.lists(st.lists(st.integers(32, 90), min_size=1, max_size=15), min_size=1, max_size=8)


def cuts(split: TokenSplit) -> list[Batches]:
    return [
        PackedBatches(split, max_length=4, pad_id=0),
        PaddedBatches(split, max_length=4, pad_id=0, stride=3),
    ]


def slow_scores(name: str, documents: list[list[int]], rows: list[tuple[int, int]]) -> list[float]:
    """The scores by loops over single tokens."""
    tokens = [(token, len(document)) for document in documents for token in document]
    counts = Counter(token for token, _ in tokens)
    scores = []
    for start, stop in rows:
        row = tokens[start:stop]
        if name == "rarity":
            scores.append(sum(-math.log(counts[token] / len(tokens)) for token, _ in row) / len(row))
        elif name == "length":
            scores.append(sum(length for _, length in row) / len(row))
        else:
            text = "".join(chr(token) for token, _ in row).encode()
            scores.append(len(zlib.compress(text)) / len(text))
    return scores


@pytest.mark.parametrize("name", ["rarity", "compression", "length"])
@given(documents_of_ids)
def test_scores_are_those_of_a_slow_loop(name: str, documents: list[list[int]]) -> None:
    split = TokenSplit.from_documents(documents)
    for batches in cuts(split):
        found = row_difficulty(name, split, batches, TOKENIZER, Console.silent())  # type: ignore[arg-type]
        rows = [batches.token_range(sample) for sample in range(batches.num_samples)]
        assert found.tolist() == pytest.approx(slow_scores(name, documents, rows))


def test_rare_tokens_varied_text_and_long_documents_are_hard() -> None:
    easy, hard = [65] * 64, [*range(33, 97)]
    split = TokenSplit.from_documents([easy, easy, easy, hard])
    batches = PackedBatches(split, max_length=64, pad_id=0)
    for name in ("rarity", "compression"):
        scores = row_difficulty(name, split, batches, TOKENIZER, Console.silent())  # type: ignore[arg-type]
        assert scores.argmax() == 3
    split = TokenSplit.from_documents([[65] * 8] * 8 + [[65] * 64])
    batches = PackedBatches(split, max_length=64, pad_id=0)
    assert row_difficulty("length", split, batches, TOKENIZER, Console.silent()).tolist() == [8.0, 64.0]


def test_stored_scores_come_back_for_what_they_belong_to_and_nothing_else(tmp_path: Path) -> None:
    path, identity = tmp_path / "scores", {"corpus": "abc", "difficulty": "rarity"}
    scores = [np.array([0.1, 0.2, 1 / 3]), np.array([5.0])]
    assert read_difficulty(path, identity, [3, 1]) is None
    write_difficulty(path, identity, scores)
    found = read_difficulty(path, identity, [3, 1])
    assert found is not None
    assert [array.tolist() for array in found] == [array.tolist() for array in scores]
    assert read_difficulty(path, {**identity, "corpus": "abd"}, [3, 1]) is None
    assert read_difficulty(path, identity, [3, 2]) is None
    assert read_difficulty(path, identity, [3]) is None
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert read_difficulty(path, identity, [3, 1]) is None
    path.write_bytes(content[:-5])
    assert read_difficulty(path, identity, [3, 1]) is None
