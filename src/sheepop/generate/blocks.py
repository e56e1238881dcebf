"""Which block of the cache holds which tokens: counted, shared, and found again by their contents; without tensors.

A sequence's keys and values lie in blocks of `block_size` tokens, which its table lists (Kwon et al. 2023,
PagedAttention). Layers that look back equally far are of one kind and have their own blocks, so that layers with a
window keep no more than it. A full block is found again by all tokens up to its last one and a salt: only sequences
with the same salt share blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_NO_CONTENT = -1


class Copy(NamedTuple):
    """The contents of `source` are needed in `target` before anything is written there; blocks of one kind."""

    kind: int
    source: int
    target: int


@dataclass
class BlockTable:
    """The blocks of one sequence: `blocks[kind][i]` holds its tokens from i * block_size on, None where no more needed.

    `num_tokens` are stored. `chain` names the contents of the full blocks, from the first on.
    """

    salt: str
    blocks: list[list[int | None]]
    num_tokens: int = 0
    chain: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """The next `count` tokens of a sequence, behind the `start` tokens that the blocks of its table hold."""

    table: BlockTable
    start: int
    count: int

    @property
    def end(self) -> int:
        """Tokens of the sequence once these are stored."""
        return self.start + self.count


class _Pool:
    """The blocks of one kind: how many tables hold each, and which are free, the longest unused first."""

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.content = [_NO_CONTENT] * num_blocks
        self.found: dict[int, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def take(self) -> tuple[int, int]:
        """A free block, and the content that it loses."""
        block, _ = self.free.popitem(last=False)
        lost, self.content[block], self.references[block] = self.content[block], _NO_CONTENT, 1
        if lost != _NO_CONTENT:
            del self.found[lost]
        return block, lost

    def hold(self, block: int) -> None:
        """One more table holds the block."""
        if self.references[block] == 0:
            del self.free[block]
        self.references[block] += 1

    def let_go(self, block: int) -> None:
        """One table less holds the block; one that holds nothing to find again is the next to be taken."""
        self.references[block] -= 1
        if self.references[block] == 0:
            self.free[block] = None
            self.free.move_to_end(block, last=self.content[block] != _NO_CONTENT)


class BlockManager:
    """Hands out the blocks of every kind of layer.

    `reaches[kind]` is how many of its last tokens a sequence needs there to go on, itself included; None is all.
    `num_blocks[kind]` are there.
    """

    def __init__(self, num_blocks: Sequence[int], reaches: Sequence[int | None], block_size: int) -> None:
        self.block_size, self.reaches, self.num_blocks = block_size, tuple(reaches), tuple(num_blocks)
        self._pools = [_Pool(count) for count in num_blocks]
        # Contents by the one before and the tokens themselves, which a dictionary compares: no two are taken for one.
        self._contents: dict[tuple[int | str, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int | str, tuple[int, ...]]] = {}
        self._next_content = 0

    @property
    def num_free(self) -> tuple[int, ...]:
        """Blocks of each kind that no table holds."""
        return tuple(len(pool.free) for pool in self._pools)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def open(self, tokens: Sequence[int], salt: str = "") -> BlockTable:
        """A table for a sequence, which holds the longest beginning of `tokens` that is in the cache; never all of it.

        The last token is left out, since the network has to read one to predict the next.
        """
        chain = self._known(tokens, salt)
        count = next(count for count in range(len(chain), -1, -1) if self._can_resume(chain[:count]))
        table = BlockTable(salt, [[] for _ in self._pools], count * self.block_size, chain[:count])
        for kind, pool in enumerate(self._pools):
            first = self._first_needed(kind, table.num_tokens)
            table.blocks[kind] = [None if i < first else pool.found[chain[i]] for i in range(count)]
            for block in table.blocks[kind][first:]:
                assert block is not None
                pool.hold(block)
        return table

    def num_missing(self, table: BlockTable, num_tokens: int) -> tuple[int, ...]:
        """The blocks of each kind that `reserve` would take."""
        total = self.num_blocks_for(table.num_tokens + num_tokens)
        return tuple(
            max(0, total - len(table.blocks[kind])) + (num_tokens > 0 and self._is_shared(kind, table))
            for kind in range(len(self._pools))
        )

    def reserve(self, table: BlockTable, num_tokens: int) -> list[Copy] | None:
        """Gives the table room of its own for `num_tokens` more; None, and nothing is changed, where blocks lack."""
        missing = self.num_missing(table, num_tokens)
        if any(count > free for count, free in zip(missing, self.num_free, strict=True)):
            return None
        copies = []
        for kind, pool in enumerate(self._pools):
            blocks, count = table.blocks[kind], missing[kind]
            if num_tokens > 0 and self._is_shared(kind, table):
                place = table.num_tokens // self.block_size
                shared, own = blocks[place], self._take(kind)
                assert shared is not None
                pool.let_go(shared)
                blocks[place] = own
                copies.append(Copy(kind, shared, own))
                count -= 1
            blocks += [self._take(kind) for _ in range(count)]
        return copies

    def advance(self, table: BlockTable, tokens: Sequence[int], num_tokens: int) -> None:
        """Says that the first `num_tokens` of a sequence's `tokens` are stored; lets go of what no layer needs now."""
        table.num_tokens = num_tokens
        for place in range(len(table.chain), num_tokens // self.block_size):
            content = self._name(table, tuple(tokens[place * self.block_size : (place + 1) * self.block_size]))
            table.chain.append(content)
            for pool, blocks in zip(self._pools, table.blocks, strict=True):
                block = blocks[place]
                if block is not None and content not in pool.found:
                    pool.found[content], pool.content[block] = block, content
        for kind, (pool, blocks) in enumerate(zip(self._pools, table.blocks, strict=True)):
            for place in reversed(range(self._first_needed(kind, num_tokens))):
                block = blocks[place]
                if block is None:
                    break
                pool.let_go(block)
                blocks[place] = None

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same tokens in the same blocks."""
        filled = self.num_blocks_for(table.num_tokens)
        copied = [blocks[:filled] for blocks in table.blocks]
        for pool, blocks in zip(self._pools, copied, strict=True):
            for block in blocks:
                if block is not None:
                    pool.hold(block)
        return BlockTable(table.salt, copied, table.num_tokens, list(table.chain))

    def close(self, table: BlockTable) -> None:
        """Lets go of all blocks; what they hold can be found until they are needed, the last blocks first."""
        for pool, blocks in zip(self._pools, table.blocks, strict=True):
            for block in reversed(blocks):
                if block is not None:
                    pool.let_go(block)
        table.blocks, table.num_tokens, table.chain = [[] for _ in self._pools], 0, []

    def _take(self, kind: int) -> int:
        block, lost = self._pools[kind].take()
        if lost != _NO_CONTENT and not any(lost in pool.found for pool in self._pools):
            del self._contents[self._keys.pop(lost)]
        return block

    def _name(self, table: BlockTable, tokens: tuple[int, ...]) -> int:
        """The number of a content, the same for the same tokens behind the same content."""
        key = (table.chain[-1] if table.chain else table.salt, tokens)
        if key not in self._contents:
            self._contents[key], self._keys[self._next_content] = self._next_content, key
            self._next_content += 1
        return self._contents[key]

    def _known(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The contents of the first full blocks of `tokens`, as far as there are any; the last token is left out."""
        chain: list[int] = []
        for place in range((len(tokens) - 1) // self.block_size):
            block = tuple(tokens[place * self.block_size : (place + 1) * self.block_size])
            content = self._contents.get((chain[-1] if chain else salt, block))
            if content is None:
                break
            chain.append(content)
        return chain

    def _can_resume(self, chain: Sequence[int]) -> bool:
        """Whether every kind holds what a sequence needs to go on behind these blocks."""
        return all(
            content in pool.found
            for kind, pool in enumerate(self._pools)
            for content in chain[self._first_needed(kind, len(chain) * self.block_size) :]
        )

    def _first_needed(self, kind: int, num_tokens: int) -> int:
        """The first block that the token behind `num_tokens` needs."""
        reach = self.reaches[kind]
        return 0 if reach is None else max(0, num_tokens - reach + 1) // self.block_size

    def _is_shared(self, kind: int, table: BlockTable) -> bool:
        """Whether the next token would be written into a block that another table holds too."""
        place, used = divmod(table.num_tokens, self.block_size)
        block = table.blocks[kind][place] if used else None
        return block is not None and self._pools[kind].references[block] > 1
