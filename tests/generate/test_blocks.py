"""The block manager against a model of it: tokens stay in the blocks of their tables; no block is lost or reused."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sheepop.generate.blocks import BlockManager, BlockTable

SIZE = 4
REACHES = (None, 6, 3, 3)
SPANS = (None, None, None, 10)  # two tokens before the next one, and eight that may be dropped
COUNTS = (14, 10, 8, 9)
tokens_of_text = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class Sequence:
    """A sequence as its user sees it: all its tokens, and its block table."""

    def __init__(self, tokens: list[int], table: BlockTable) -> None:
        self.tokens, self.table = tokens, table


class BlocksAsMemory(RuleBasedStateMachine):
    """Writes every token into the block that the table lists, and checks after every step that it is still there."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(COUNTS, REACHES, SIZE, SPANS)
        self.memory = [[[None] * SIZE for _ in range(count)] for count in COUNTS]
        self.open: list[Sequence] = []

    @rule(target=sequences, tokens=tokens_of_text, salt=st.sampled_from(["", "a"]))
    def begin(self, tokens: list[int], salt: str) -> Sequence:
        table = self.manager.open(tokens, salt)
        assert table.num_tokens < len(tokens)
        sequence = Sequence(tokens, table)
        self.open.append(sequence)
        return sequence

    @rule(sequence=sequences, count=st.integers(1, 9), more=st.integers(0, 1), kept=st.integers(1, 9))
    def write(self, sequence: Sequence, count: int, more: int, kept: int) -> None:
        """Stores up to `count` more tokens and keeps `kept` of them, as when guesses are rejected."""
        table, free = sequence.table, self.manager.num_free
        missing = self.manager.num_missing(table, count)
        copies = self.manager.reserve(table, count)
        assert (copies is None) == any(lack > have for lack, have in zip(missing, free, strict=True))
        if copies is None:
            assert self.manager.num_free == free
            return
        taken = [before - after for before, after in zip(free, self.manager.num_free, strict=True)]
        assert taken == list(missing)
        for kind, source, target in copies:
            self.memory[kind][target] = list(self.memory[kind][source])
        sequence.tokens += [more] * max(0, table.num_tokens + count - len(sequence.tokens))
        for place in range(table.num_tokens, table.num_tokens + count):
            for kind, blocks in enumerate(table.blocks):
                if (block := blocks[place // SIZE]) is not None:
                    self.memory[kind][block][place % SIZE] = (table.salt, *sequence.tokens[: place + 1])
        stored = table.num_tokens + min(kept, count)
        self.manager.advance(table, sequence.tokens, stored)
        del sequence.tokens[stored + 1 :]

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: Sequence) -> Sequence:
        twin = Sequence(list(sequence.tokens), self.manager.fork(sequence.table))
        self.open.append(twin)
        return twin

    @rule(sequence=consumes(sequences))
    def end(self, sequence: Sequence) -> None:
        self.manager.close(sequence.table)
        self.open.remove(sequence)

    @invariant()
    def every_token_that_is_needed_lies_where_the_table_says(self) -> None:
        for sequence in self.open:
            table = sequence.table
            for kind, reach in enumerate(REACHES):
                first = 0 if reach is None else max(0, table.num_tokens - reach + 1)
                for place in range(first, table.num_tokens):
                    stored = self.memory[kind][table.blocks[kind][place // SIZE]][place % SIZE]
                    assert stored == (table.salt, *sequence.tokens[: place + 1])

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        for kind, (count, free) in enumerate(zip(COUNTS, self.manager.num_free, strict=True)):
            held = Counter(block for s in self.open for block in s.table.blocks[kind] if block is not None)
            assert free + len(held) == count

    @invariant()
    def windows_keep_no_more_than_they_need(self) -> None:
        for sequence in self.open:
            for kind, reach in enumerate(REACHES):
                if reach is not None:
                    blocks = sequence.table.blocks[kind]
                    filled = blocks[: -(-sequence.table.num_tokens // SIZE)]
                    assert sum(block is not None for block in filled) <= -(-(reach - 1) // SIZE) + 1


TestBlocksAsMemory = BlocksAsMemory.TestCase
TestBlocksAsMemory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_beginning_is_found_again_and_its_last_token_is_left_to_read() -> None:
    manager = BlockManager([8], [None], 4)
    first = manager.open(list(range(9)))
    assert first.num_tokens == 0
    manager.reserve(first, 9)
    manager.advance(first, list(range(9)), 9)
    manager.close(first)
    assert manager.open([*range(8), 99]).num_tokens == 8
    assert manager.open(list(range(8))).num_tokens == 4
    assert manager.open([*range(4), 7, 7]).num_tokens == 4
    assert manager.open([7, *range(8)]).num_tokens == 0
    assert manager.open(list(range(9)), salt="another tenant").num_tokens == 0


def test_a_chunk_passes_over_blocks_that_a_text_does_not_need_to_go_on() -> None:
    tokens = list(range(30))
    manager = BlockManager([10, 8], [None, 2], 4, [None, 1])
    table = manager.open(tokens)
    assert manager.num_missing(table, 22) == (6, 2)
    manager.reserve(table, 22)
    assert [block is not None for block in table.blocks[1]] == [False] * 4 + [True] * 2
    manager.advance(table, tokens, 22)
    fork = manager.fork(table)
    copies = manager.reserve(fork, 8)
    assert copies is not None and [kind for kind, _, _ in copies] == [0, 1]
    manager.advance(fork, tokens, 30)
    for each in (table, fork):
        manager.close(each)
    assert manager.num_free == manager.num_blocks
    # Found again behind the blocks that the chunks have, not behind others.
    assert manager.open([*tokens[:28], 0, 0]).num_tokens == 28
    assert manager.open([*tokens[:22], 0, 0]).num_tokens == 20
    assert manager.open([*tokens[:18], 0, 0]).num_tokens == 0


def test_the_longest_unused_block_is_the_first_to_be_forgotten() -> None:
    manager = BlockManager([4], [None], 2)
    for text in ([1, 1, 0], [2, 2, 0]):
        table = manager.open(text)
        manager.reserve(table, 2)
        manager.advance(table, text, 2)
        manager.close(table)
    third = manager.open([3, 3, 3, 3, 3, 3])
    manager.reserve(third, 6)  # both blocks without content, and one with content
    assert manager.open([1, 1, 0]).num_tokens == 0
    assert manager.open([2, 2, 0]).num_tokens == 2
