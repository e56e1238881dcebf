"""Which tokens the network reads next: one budget for new tokens and chunks of prompts, of whoever comes first.

Requests that write take their tokens first; prompts are read in chunks with what is left of the budget, so that none
stops the others (Agrawal et al. 2023, Sarathi). Where blocks lack, the request that comes last gives up its own and
reads its text again later; what it wrote is not lost. There is no tensor here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.generate.blocks import BlockManager, BlockTable, Chunk, Copy


class Reader(Protocol):
    """A text that the network reads: `context`, and `drafts` behind it that are guesses; only equal salts share."""

    context: list[int]
    drafts: list[int]
    salt: str
    table: BlockTable | None


class Schedulable(Protocol):
    """A request: the texts that it still writes, at most `width` at a time, and its place in the order."""

    @property
    def readers(self) -> Sequence[Reader]:
        """All of them are scheduled together, or none."""

    @property
    def width(self) -> int:
        """The most readers that it will have."""

    @property
    def source_ids(self) -> list[int] | None:
        """What an encoder reads for it, where the network has one."""

    @property
    def order(self) -> tuple[int, int]:
        """Its priority, where 0 comes before 1, and its number."""


class Grant(NamedTuple):
    """What a step reads of a text."""

    reader: Reader
    chunk: Chunk

    @property
    def num_predictions(self) -> int:
        """How many tokens can be chosen: one behind the whole text, and one behind each guess that is read."""
        return min(self.chunk.count, max(0, self.chunk.end - len(self.reader.context) + 1))


@dataclass
class Share:
    """What one request gets of a step."""

    request: Schedulable
    grants: list[Grant] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to read."""
        return sum(grant.chunk.count for grant in self.grants)


class QueueFullError(UsageError):
    """There is no room for another request."""


class Scheduler:
    """Requests that wait and requests that run, and what each of them reads in a step.

    A step reads at most `max_tokens`, of at most `max_sequences` texts; at most `max_waiting` requests wait for others
    to end.
    """

    def __init__(self, manager: BlockManager, *, max_tokens: int, max_sequences: int, max_waiting: int) -> None:
        if max_tokens < max_sequences:
            raise UsageError(
                f"max_tokens = {max_tokens} is less than max_sequences = {max_sequences}, and every text that is "
                "written needs a token of a step. Raise the first or lower the second."
            )
        self.manager = manager
        self.max_tokens, self.max_sequences, self.max_waiting = max_tokens, max_sequences, max_waiting
        self.waiting: list[Schedulable] = []
        self.running: list[Schedulable] = []
        self.num_preemptions = 0

    def require_room(self, request: Schedulable, longest: int) -> None:
        """Raises `UsageError` where a request whose texts get `longest` tokens would not fit even alone."""
        if request.width > self.max_sequences:
            raise UsageError(
                f"The request writes {request.width} texts at a time, and max_sequences = {self.max_sequences}. "
                "Ask for fewer, or raise max_sequences."
            )
        for kind, reach in enumerate(self.manager.reaches):
            needed = request.width * self.manager.num_blocks_for(longest)
            if reach is not None:
                held = self.manager.num_blocks_for(reach) + 1
                needed = min(needed, request.width * (held + 1) + self.manager.num_blocks_for(self.max_tokens))
            if needed > self.manager.num_blocks[kind]:
                raise UsageError(
                    f"The request may need {needed} blocks of the cache, and there are "
                    f"{self.manager.num_blocks[kind]}. Ask for fewer tokens or texts, or give the cache more memory."
                )

    def add(self, request: Schedulable) -> None:
        """Lets a request wait for its turn; raises `QueueFullError`."""
        can_start = self.max_sequences - sum(running.width for running in self.running)
        if len(self.waiting) >= self.max_waiting + can_start:
            raise QueueFullError(f"{counted(len(self.waiting), 'request')} already wait. Try again later.")
        insort(self.waiting, request, key=lambda other: other.order)

    def remove(self, request: Schedulable) -> None:
        """Forgets a request; its blocks are free."""
        self._release(request)
        (self.running if request in self.running else self.waiting).remove(request)

    def schedule(self) -> list[Share]:
        """What is read in the next step; blocks for it are reserved."""
        shares: dict[int, Share] = {}
        budget, before = self.max_tokens, self.num_preemptions
        for request in sorted(self.running, key=lambda request: (self._reads_prompt(request), request.order)):
            if request in self.running:
                budget -= self._grant(request, budget, shares)
        while self.waiting and budget > 0 and self.num_preemptions == before:
            request = self.waiting[0]
            if sum(other.width for other in (*self.running, request)) > self.max_sequences or not self._admit(
                request, budget, shares
            ):
                break
            budget -= shares[id(request)].num_tokens
        return list(shares.values())

    def _admit(self, request: Schedulable, budget: int, shares: dict[int, Share]) -> bool:
        """Lets the first that waits run, if there are blocks for its first chunk."""
        share = self._reserve(request, budget)
        if share is None:
            self._release(request)
            return False
        self.waiting.remove(request)
        self.running.append(request)
        shares[id(request)] = share
        return True

    def _grant(self, request: Schedulable, budget: int, shares: dict[int, Share]) -> int:
        """Gives a running request its tokens, and how many they are; the last in order makes room."""
        while (share := self._reserve(request, budget)) is None:
            last = max(self.running, key=lambda other: other.order)
            self._preempt(last)
            shares.pop(id(last), None)
            if last is request:
                return 0
        shares[id(request)] = share
        return share.num_tokens

    def _reserve(self, request: Schedulable, budget: int) -> Share | None:
        """Blocks for as much of the request's texts as the budget allows; None where blocks lack.

        The newest tokens of its texts are read in one step, so that all of them can be continued together.
        """
        tables = [self._table(reader) for reader in request.readers]
        counts = [
            len(reader.context) + len(reader.drafts) - table.num_tokens
            for reader, table in zip(request.readers, tables, strict=True)
        ]
        if sum(counts) > budget:
            counts = [count - 1 for count in counts]
        ends = list(accumulate(counts))
        counts = [max(0, min(count, budget - end + count)) for count, end in zip(counts, ends, strict=True)]
        missing = [self.manager.num_missing(table, count) for table, count in zip(tables, counts, strict=True)]
        if any(sum(kind) > free for kind, free in zip(zip(*missing, strict=True), self.manager.num_free, strict=True)):
            return None
        share = Share(request)
        for reader, table, count in zip(request.readers, tables, counts, strict=True):
            if count > 0:
                copies = self.manager.reserve(table, count)
                assert copies is not None
                share.copies += copies
                share.grants.append(Grant(reader, Chunk(table, table.num_tokens, count)))
        return share

    def _table(self, reader: Reader) -> BlockTable:
        if reader.table is None:
            reader.table = self.manager.open(reader.context, reader.salt)
        return reader.table

    def _preempt(self, request: Schedulable) -> None:
        self._release(request)
        self.running.remove(request)
        insort(self.waiting, request, key=lambda other: other.order)
        self.num_preemptions += 1

    def _release(self, request: Schedulable) -> None:
        for reader in request.readers:
            if reader.table is not None:
                self.manager.close(reader.table)
                reader.table = None

    def _reads_prompt(self, request: Schedulable) -> bool:
        """Whether a text of the request has more than its newest token to read."""
        return any(
            reader.table is None or len(reader.context) - reader.table.num_tokens > 1 for reader in request.readers
        )
