"""The block manager: assigns blocks of the cache to tokens, with reference counts and prefix caching.

The keys and values of a sequence are stored in blocks of `block_size` tokens, which its block table lists (Kwon et al.
2023, PagedAttention). Layers with the same window are one kind and have their own blocks, so that they keep no more
than their window. The blocks of recurrent states, which are large, are few: a chunk passes over most of them. A full
block is found again by a salt and all tokens up to its last one; only sequences with the same salt share blocks. This
module uses no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_NO_CONTENT = -1


class Copy(NamedTuple):
    """A copy of block `source` into `target`, both of one kind, to make before anything is written to `target`."""

    kind: int
    source: int
    target: int


@dataclass(eq=False)
class BlockTable:
    """The blocks of one sequence: `blocks[kind][i]` holds its tokens from i * block_size on; None if no longer needed.

    `num_tokens` tokens are stored, and up to `room` can be without another call of `BlockManager.reserve`. `chain` has
    the content number of each full block, from the first on. The first `released[kind]` blocks are no longer needed.
    `version` grows when `blocks` changes.
    """

    salt: str
    blocks: list[list[int | None]]
    num_tokens: int = 0
    chain: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    version: int = 0
    room: int = 0


class Chunk(NamedTuple):
    """The next `count` tokens of a sequence, after the `start` tokens that are stored in the blocks of its table."""

    table: BlockTable
    start: int
    count: int  # type: ignore[assignment]

    @property
    def end(self) -> int:
        """The number of stored tokens of the sequence, this chunk included."""
        return self.start + self.count


def blocks_held(reach: int, span: int | None, block_size: int) -> int:
    """The most blocks of a kind that a sequence holds; without a `span`, besides the new blocks of a pass."""
    new = 0 if span is None else -(-span // block_size) + 1
    return -(-reach // block_size) + 2 + new  # the last tokens may begin inside a block, and a shared one is copied


class _Pool:
    """The blocks of one kind, with reference counts; free blocks are ordered by last use, the oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.content = [_NO_CONTENT] * num_blocks
        self.found: dict[int, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def retain(self, block: int) -> None:
        """Adds a reference to the block."""
        if self.references[block] == 0:
            del self.free[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Drops a reference to the block; a free block without cached content is taken first."""
        self.references[block] -= 1
        if self.references[block] == 0:
            self.free[block] = None
            self.free.move_to_end(block, last=self.content[block] != _NO_CONTENT)


class BlockManager:
    """Hands out the blocks of every kind of layer, `num_blocks[kind]` of each.

    `reaches[kind]` is how many of its last tokens a sequence needs to continue, the next one included; None is all. If
    `spans[kind]` is a number, a chunk gets only blocks for its last so many tokens and its last full block, so that
    only sequences that continue there find it again; None (by default in all kinds) means blocks for all tokens.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        reaches: Sequence[int | None],
        block_size: int,
        spans: Sequence[int | None] | None = None,
    ) -> None:
        self.block_size, self.reaches, self.num_blocks = block_size, tuple(reaches), tuple(num_blocks)
        self.spans = (None,) * len(self.reaches) if spans is None else tuple(spans)
        self._pools = [_Pool(count) for count in num_blocks]
        self._limited = [kind for kind, reach in enumerate(self.reaches) if reach is not None]
        # Contents by the preceding content and the tokens, which a dictionary compares: no collision is possible.
        self._contents: dict[tuple[int | str, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int | str, tuple[int, ...]]] = {}
        self._next_content = 0

    @property
    def num_free(self) -> tuple[int, ...]:
        """The number of free blocks of each kind."""
        return tuple(len(pool.free) for pool in self._pools)

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks_held(self, kind: int, longest: int, width: int, per_pass: int) -> int:
        """The most blocks that `width` sequences of up to `longest` tokens hold, in passes of up to `per_pass`."""
        reach, span, whole = self.reaches[kind], self.spans[kind], width * self.num_blocks_for(longest)
        if reach is None:
            return whole
        held = width * blocks_held(reach, span, self.block_size)
        return min(whole, held + (self.num_blocks_for(per_pass) if span is None else 0))

    def open(self, tokens: Sequence[int], salt: str = "") -> BlockTable:
        """Opens a table for a sequence with the longest prefix of `tokens` that is in the cache.

        The prefix excludes the last token, since the network has to read one to predict the next.
        """
        chain = self._known(tokens, salt)
        count = next(count for count in range(len(chain), -1, -1) if self._can_resume(chain[:count]))
        table = BlockTable(salt, [[] for _ in self._pools], count * self.block_size, chain[:count])
        for kind, pool in enumerate(self._pools):
            first = self._first_needed(kind, table.num_tokens)
            table.released.append(first)
            table.blocks[kind] = [None if i < first else pool.found[chain[i]] for i in range(count)]
            for block in table.blocks[kind][first:]:
                assert block is not None
                pool.retain(block)
        return table

    def num_missing(self, table: BlockTable, num_tokens: int) -> tuple[int, ...]:
        """The number of blocks of each kind that `reserve` would take."""
        total = self.num_blocks_for(table.num_tokens + num_tokens)
        return tuple(
            max(0, total - self._first_new(kind, table, num_tokens)) + (num_tokens > 0 and self._is_shared(kind, table))
            for kind in range(len(self._pools))
        )

    def reserve(self, table: BlockTable, num_tokens: int) -> list[Copy] | None:
        """Gives the table unshared room for `num_tokens` more tokens; returns the copies to make.

        If blocks are missing, returns None and changes nothing.
        """
        missing = self.num_missing(table, num_tokens)
        if any(count > free for count, free in zip(missing, self.num_free, strict=True)):
            return None
        table.version += 1
        copies = []
        for kind, pool in enumerate(self._pools):
            blocks, count = table.blocks[kind], missing[kind]
            if num_tokens > 0 and self._is_shared(kind, table):
                index = table.num_tokens // self.block_size
                shared, own = blocks[index], self._take(kind)
                assert shared is not None
                pool.release(shared)
                blocks[index] = own
                copies.append(Copy(kind, shared, own))
                count -= 1
            blocks += [None] * (self._first_new(kind, table, num_tokens) - len(blocks))
            blocks += [self._take(kind) for _ in range(count)]
        if num_tokens > 0:
            table.room = self.num_blocks_for(table.num_tokens + num_tokens) * self.block_size
        return copies

    def advance(
        self, table: BlockTable, tokens: Sequence[int], num_tokens: int, *, findable: int | None = None
    ) -> None:
        """Records that the first `num_tokens` of `tokens` are stored; releases blocks that no layer needs any more.

        Only the first `findable` tokens, by default all, are found by other sequences. The last tokens may be negative,
        which means that they are not known yet: their block is not shared before.
        """
        table.num_tokens = num_tokens
        found = num_tokens if findable is None else min(findable, num_tokens)
        for index in range(len(table.chain), found // self.block_size):
            if tokens[(index + 1) * self.block_size - 1] < 0:
                break
            content = self._content(table, tuple(tokens[index * self.block_size : (index + 1) * self.block_size]))
            table.chain.append(content)
            for pool, blocks in zip(self._pools, table.blocks, strict=True):
                block = blocks[index]
                if block is not None and content not in pool.found:
                    pool.found[content], pool.content[block] = block, content
        for kind in self._limited:
            pool, blocks = self._pools[kind], table.blocks[kind]
            first = self._first_needed(kind, num_tokens)
            for index in reversed(range(table.released[kind], first)):
                block = blocks[index]
                if block is not None:
                    pool.release(block)
                    blocks[index] = None
            table.released[kind] = max(table.released[kind], first)

    def fork(self, table: BlockTable) -> BlockTable:
        """Returns a second table of the same tokens in the same blocks."""
        table.room = 0
        filled = self.num_blocks_for(table.num_tokens)
        copied = [blocks[:filled] for blocks in table.blocks]
        for pool, blocks in zip(self._pools, copied, strict=True):
            for block in blocks:
                if block is not None:
                    pool.retain(block)
        return BlockTable(table.salt, copied, table.num_tokens, list(table.chain), list(table.released))

    def close(self, table: BlockTable) -> None:
        """Releases all blocks; their contents stay cached until the blocks are taken again, the last ones first."""
        for pool, blocks in zip(self._pools, table.blocks, strict=True):
            for block in reversed(blocks):
                if block is not None:
                    pool.release(block)
        table.blocks, table.num_tokens, table.chain = [[] for _ in self._pools], 0, []
        table.version += 1
        table.released, table.room = [0] * len(self._pools), 0

    def forget(self) -> None:
        """Forgets all tables and what the blocks hold: every block is free, and no new sequence finds it."""
        self._pools = [_Pool(count) for count in self.num_blocks]
        self._contents.clear()
        self._keys.clear()

    def _take(self, kind: int) -> int:
        """Takes the oldest free block, and forgets its content if no other kind has it."""
        pool = self._pools[kind]
        block, _ = pool.free.popitem(last=False)
        lost, pool.content[block], pool.references[block] = pool.content[block], _NO_CONTENT, 1
        if lost != _NO_CONTENT:
            del pool.found[lost]
            if not any(lost in pool.found for pool in self._pools):
                del self._contents[self._keys.pop(lost)]
        return block

    def _content(self, table: BlockTable, tokens: tuple[int, ...]) -> int:
        """Returns a number for a block's tokens and all tokens before them; equal ones have the same number."""
        key = (table.chain[-1] if table.chain else table.salt, tokens)
        if key not in self._contents:
            self._contents[key], self._keys[self._next_content] = self._next_content, key
            self._next_content += 1
        return self._contents[key]

    def _known(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The known contents of the first full blocks of `tokens`, up to the first unknown; excludes the last token."""
        chain: list[int] = []
        for index in range((len(tokens) - 1) // self.block_size):
            block = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
            content = self._contents.get((chain[-1] if chain else salt, block))
            if content is None:
                break
            chain.append(content)
        return chain

    def _can_resume(self, chain: Sequence[int]) -> bool:
        """Whether the blocks that a sequence needs to continue after `chain` are cached in every kind."""
        return all(
            content in pool.found
            for kind, pool in enumerate(self._pools)
            for content in chain[self._first_needed(kind, len(chain) * self.block_size) :]
        )

    def _first_needed(self, kind: int, num_tokens: int) -> int:
        """The index of the first block that the token after `num_tokens` tokens needs."""
        reach = self.reaches[kind]
        return 0 if reach is None else max(0, num_tokens - reach + 1) // self.block_size

    def _first_new(self, kind: int, table: BlockTable, num_tokens: int) -> int:
        """The index of the first block that `reserve` adds; blocks before it that do not exist are passed over."""
        span, begin = self.spans[kind], len(table.blocks[kind])
        if span is None:
            return begin
        end = table.num_tokens + num_tokens
        return max(begin, min(end // self.block_size - 1, (end - span) // self.block_size))

    def _is_shared(self, kind: int, table: BlockTable) -> bool:
        """Whether the next token would be written into a block that another table shares."""
        index, used = divmod(table.num_tokens, self.block_size)
        block = table.blocks[kind][index] if used else None
        return block is not None and self._pools[kind].references[block] > 1
