"""The index and the memory of a corpus, against loops over lists."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from sheepop.model.corpus_index import CorpusIndex
from sheepop.model.corpus_memory import LEVELS, ROW_LEVELS, CorpusMemory, in_rows

VOCABULARY, LONGEST = 5, 9


def corpus(count: int = 300, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def made_memory(tokens: Tensor, longest: int = LONGEST, row_length: int = 12) -> CorpusMemory:
    torch.manual_seed(0)
    return CorpusMemory(CorpusIndex.build(tokens, VOCABULARY, longest), row_length).double()


def followers(tokens: list[int], context: list[int]) -> list[int]:
    """What follows a context in the ring of tokens, by looking at every place."""
    ring, size = tokens * (1 + LONGEST), len(context)
    return sorted(ring[place + size] for place in range(len(tokens)) if ring[place : place + size] == context)


@pytest.mark.parametrize("count", [1, 2, 40, 300])
def test_the_index_finds_what_follows_each_context(count: int) -> None:
    tokens, rows = corpus(count), corpus(2 * 12, seed=1).view(2, 12)
    index = CorpusIndex.build(tokens, VOCABULARY, LONGEST)
    depths = torch.arange(1, 13).expand(2, 12)
    found = index.find(rows, depths)
    for row in range(2):
        for place in range(12):
            for length in range(1, min(place + 1, LONGEST) + 1):
                context = rows[row, place + 1 - length : place + 1].tolist()
                begin, end = (bound[row, place] for bound in found[length - 1]) if length <= len(found) else (0, 0)
                assert sorted(index.following[begin:end].tolist()) == followers(tokens.tolist(), context)


def test_a_context_is_not_longer_than_its_depth() -> None:
    index = CorpusIndex.build(corpus(), VOCABULARY, LONGEST)
    found = index.find(corpus(6, seed=2)[None], torch.tensor([[1, 2, 1, 2, 3, 2]]))
    known = [[bool(end[0, place] > begin[0, place]) for begin, end in found] for place in range(6)]
    assert [sum(lengths) for lengths in known] == [1, 2, 1, 2, 3, 2]


def test_levels_are_the_longest_contexts_with_so_many_places() -> None:
    tokens, rows = corpus(), corpus(8, seed=3)[None]
    found = made_memory(tokens).recall(rows, torch.arange(1, 9)[None])
    for place in range(8):
        by_length = [
            followers(tokens.tolist(), rows[0, place - length : place + 1].tolist()) for length in range(place + 1)
        ]
        for level, least in enumerate(LEVELS):
            longest = max(
                (length for length, found_here in enumerate(by_length, 1) if len(found_here) >= least), default=0
            )
            assert found.lengths[place, level] == longest
            seen = by_length[longest - 1] if longest else []
            assert found.counts[place, level] == len(seen)
            if 0 < len(seen) <= 32:  # all of them are read
                counts = Counter(seen)
                assert found.kinds[place, level] == len(counts)
                shares = {
                    int(token): float(share)
                    for token, share in zip(found.tokens[place], found.shares[place, :, level], strict=True)
                    if share
                }
                assert shares == pytest.approx({token: count / len(seen) for token, count in counts.items()})


def before_in_row(row: list[int], depths: list[int], place: int, row_length: int) -> list[tuple[int, int]]:
    """The length of the common context and the place, for each earlier place of a row; longest first, then newest."""
    found = []
    for other in range(max(0, place - row_length + 1), place):
        length, most = 0, min(depths[place], depths[other], other - (place - row_length), 32)
        while length < most and row[place - length] == row[other - length]:
            length += 1
        found.append((length, other))
    return sorted((each for each in found if each[0]), reverse=True)[:32]


@pytest.mark.parametrize("row_length", [3, 12, 60])
def test_levels_of_the_row_are_the_longest_contexts_that_it_had_so_often(row_length: int) -> None:
    rows = torch.cat([corpus(2 * 30, seed=1).view(2, 30), torch.zeros(2, 10, dtype=torch.int64)], 1)  # and repetition
    depths = torch.cat([torch.arange(1, 26), torch.arange(1, 16)]).expand(2, 40)  # a second document begins at 25
    found = in_rows(rows, depths, row_length)
    for row in range(2):
        tokens = rows[row].tolist()
        for place in range(40):
            matches = before_in_row(tokens, depths[row].tolist(), place, row_length)
            for level, least in enumerate(ROW_LEVELS):
                shortest = matches[least - 1][0] if len(matches) >= least else min(1, len(matches))
                read = [tokens[other + 1] for length, other in matches if length >= shortest]
                at = row * 40 + place
                assert found.lengths[at, level] == shortest
                assert found.counts[at, level] == len(read)
                assert [each for each in found.tokens[at, level].tolist() if each >= 0] == read


@pytest.mark.parametrize("written", [[0, 1], [7, 19], [20, 3]])
def test_what_a_model_wrote_itself_is_not_read(written: list[int]) -> None:
    rows, depths = corpus(40, seed=1).view(2, 20), torch.arange(1, 21).expand(2, 20)
    found = in_rows(rows, depths, 60, only_last=True, written=torch.tensor(written))
    for row, tokens in enumerate(rows.tolist()):
        matches = before_in_row(tokens, depths[row].tolist(), 19, 60)
        given = [(length, other) for length, other in matches if other + 1 < 20 - written[row]]
        shortest = given[0][0] if given else 0
        read = [tokens[other + 1] for length, other in given if length == shortest]
        assert found.lengths[row, 0] == shortest
        assert [each for each in found.tokens[row, 0].tolist() if each >= 0] == read


def test_the_last_position_alone_recalls_what_it_recalls_among_all() -> None:
    memory, rows, depths = made_memory(corpus()), corpus(40, seed=8).view(2, 20), torch.arange(1, 21).expand(2, 20)
    for whole, last in zip(memory.recall(rows, depths), memory.recall(rows, depths, only_last=True), strict=True):
        assert torch.equal(whole.unflatten(0, (2, 20))[:, -1], last)
    # Filling before a row changes nothing.
    filled = torch.cat([rows[:, :7], rows], 1)
    for whole, last in zip(
        memory.recall(filled, torch.cat([torch.zeros(2, 7, dtype=torch.int64), depths], 1), only_last=True),
        memory.recall(rows, depths, only_last=True),
        strict=True,
    ):
        assert torch.equal(whole, last)


def test_corrections_are_those_of_float32_under_autocast() -> None:
    memory, rows = made_memory(corpus()).float(), corpus(20, seed=4)[None]
    logits = torch.randn(20, VOCABULARY, generator=torch.Generator().manual_seed(5))
    recalled = memory.recall(rows, torch.arange(1, 21)[None])
    with torch.no_grad():
        expected = memory(logits, recalled)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(memory(logits, recalled), expected)


def test_corrected_logits_are_a_distribution_and_other_tokens_keep_their_odds() -> None:
    memory, rows = made_memory(corpus()), corpus(20, seed=4)[None]
    logits = torch.randn(20, VOCABULARY + 30, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    recalled = memory.recall(rows, torch.arange(1, 21)[None])
    with torch.no_grad():
        found = memory(logits, recalled)
    assert found.softmax(-1).sum(-1).tolist() == pytest.approx([1.0] * 20, abs=1e-12)
    torch.testing.assert_close(found[:, VOCABULARY:], logits[:, VOCABULARY:])  # which the corpus does not have
    assert not torch.equal(found[:, :VOCABULARY], logits[:, :VOCABULARY])


def test_a_correction_depends_on_nothing_after_its_token() -> None:
    memory, rows = made_memory(corpus()), corpus(20, seed=6)[None]
    changed = rows.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % VOCABULARY
    depths = torch.arange(1, 21)[None]
    before, after = memory.recall(rows, depths), memory.recall(changed, depths)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[:12], other[:12])
    assert not torch.equal(before.shares[12:], after.shares[12:])


@pytest.mark.parametrize("row_length", [0, 12])
def test_without_a_known_context_nothing_is_corrected(row_length: int) -> None:
    memory = made_memory(torch.zeros(50, dtype=torch.int64), row_length=row_length)
    logits = torch.randn(3, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    recalled = memory.recall(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3]]))
    assert torch.equal(memory(logits, recalled), logits)
