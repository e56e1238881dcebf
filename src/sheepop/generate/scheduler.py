"""The scheduler: which tokens the network reads in each step, within one budget of tokens.

Requests that are decoding take their tokens first; prompts are read in chunks with the rest of the budget, so that a
long prompt does not block the others (Agrawal et al. 2023, Sarathi). If blocks run out, the last request in order is
preempted: it frees its blocks and later reads its text, which is kept, again. This module uses no tensors.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.generate.blocks import BlockManager, BlockTable, Chunk, Copy

if TYPE_CHECKING:
    from sheepop.adapt.row_adapters import Adapter


@dataclass(eq=False)
class Reader:
    """A text that the network reads, with an adapter or as it is: `context`, then the guessed tokens `drafts`.

    Only equal salts share blocks. The last tokens of `context` may be negative: they are not known yet. `source_ids`
    are the tokens that the encoder reads, if there is one, and `token_ids` those that the network has written.
    """

    context: list[int]
    salt: str = ""
    table: BlockTable | None = None
    drafts: list[int] = field(default_factory=list)
    adapter: Adapter | None = None
    source_ids: list[int] | None = None
    token_ids: list[int] = field(default_factory=list)


class Schedulable(Protocol):
    """A request: its unfinished texts, at most `width` at a time, and its position in the order."""

    @property
    def readers(self) -> Sequence[Reader]:
        """The unfinished texts, which are scheduled all together or not at all."""

    @property
    def width(self) -> int:
        """The most readers that the request will have."""

    @property
    def order(self) -> tuple[int, int]:
        """The priority (smaller first) and the number of the request."""


R = TypeVar("R", bound=Schedulable)


class Grant(NamedTuple):
    """The chunk of a text that a step reads; `num_predictions` tokens are sampled behind it.

    `copies` of blocks come before.
    """

    reader: Reader
    chunk: Chunk
    num_predictions: int
    copies: Sequence[Copy]

    @classmethod
    def of(cls, reader: Reader, table: BlockTable, count: int, copies: Sequence[Copy]) -> Grant:
        """The next `count` tokens; one is sampled after the whole context, and one after each guess that is read."""
        behind = table.num_tokens + count - len(reader.context) + 1
        predictions = count if behind > count else max(0, behind)
        return cls(reader, Chunk(table, table.num_tokens, count), predictions, copies)


@dataclass(slots=True)
class Share(Generic[R]):
    """One request's part of a step."""

    request: R
    grants: list[Grant]

    @property
    def num_tokens(self) -> int:
        """The number of tokens to read."""
        return sum([grant.chunk.count for grant in self.grants])


class QueueFullError(UsageError):
    """The queue has no room for another request."""


class Scheduler(Generic[R]):
    """Schedules the waiting and running requests.

    A step reads at most `max_tokens` tokens of at most `max_sequences` texts; at most `max_waiting` requests wait for
    others to end.
    """

    def __init__(self, manager: BlockManager, *, max_tokens: int, max_sequences: int, max_waiting: int) -> None:
        if max_tokens < max_sequences:
            raise UsageError(
                f"max_tokens = {max_tokens} is less than max_sequences = {max_sequences}, but every running text needs "
                "a token per step. Raise the first or lower the second."
            )
        self.manager = manager
        self.max_tokens, self.max_sequences, self.max_waiting = max_tokens, max_sequences, max_waiting
        self.waiting: list[R] = []
        self.running: list[R] = []
        self.num_preemptions = 0

    def require_room(self, request: R, longest: int) -> None:
        """Raises `UsageError` if a request with texts of up to `longest` tokens would not fit even alone."""
        if request.width > self.max_sequences:
            raise UsageError(
                f"The request writes {request.width} texts at a time, but max_sequences = {self.max_sequences}. "
                "Request fewer texts, or raise max_sequences."
            )
        for kind in range(len(self.manager.reaches)):
            needed = self.manager.num_blocks_held(kind, longest, request.width, self.max_tokens)
            if needed > self.manager.num_blocks[kind]:
                raise UsageError(
                    f"The request may need {needed} blocks of the cache, which has only "
                    f"{self.manager.num_blocks[kind]}. Request fewer tokens or texts, or give the cache more memory."
                )

    def add(self, request: R) -> None:
        """Adds a request to the queue; raises `QueueFullError`."""
        can_start = self.max_sequences - sum(running.width for running in self.running)
        if len(self.waiting) >= self.max_waiting + can_start:
            raise QueueFullError(f"The queue is full, with {counted(len(self.waiting), 'request')}. Try again later.")
        insort(self.waiting, request, key=_order)

    def remove(self, request: R) -> None:
        """Removes a request, if it was added, and frees its blocks."""
        self._release(request)
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)

    def reset(self, waiting: Sequence[R]) -> None:
        """Keeps only requests that are `waiting`, and forgets what every block holds and who has it."""
        self.manager.forget()
        self.running, self.waiting = [], list(waiting)
        for reader in (reader for request in waiting for reader in request.readers):
            reader.table = None

    def schedule(self) -> list[Share[R]]:
        """Chooses the tokens of the next step and reserves blocks for them."""
        shares: dict[int, Share[R]] = {}
        budget, before = self.max_tokens, self.num_preemptions
        for request in sorted(self.running, key=_reads_prompt):  # each in order, since a sort keeps it
            if self.num_preemptions == before or request in self.running:
                budget = self._grant(request, budget, shares)
        while self.waiting and budget > 0 and self.num_preemptions == before:
            request = self.waiting[0]
            if sum(other.width for other in (*self.running, request)) > self.max_sequences:
                break
            share = self._reserve(request, budget)
            if share is None:
                self._release(request)
                break
            insort(self.running, self.waiting.pop(0), key=_order)
            shares[id(request)] = share
            budget -= share.num_tokens
        return [share for share in shares.values() if share.grants]

    def _grant(self, request: R, budget: int, shares: dict[int, Share[R]]) -> int:
        """Schedules a running request, preempting the last in order while blocks are missing.

        Returns the tokens that the step can still read; those of a preempted request are among them again.
        """
        while (share := self._reserve(request, budget)) is None:
            last = self.running.pop()
            self._release(last)
            insort(self.waiting, last, key=_order)
            self.num_preemptions += 1
            if (dropped := shares.pop(id(last), None)) is not None:
                budget += dropped.num_tokens
            if last is request:
                return budget
        shares[id(request)] = share
        return budget - share.num_tokens

    def _reserve(self, request: R, budget: int) -> Share[R] | None:
        """Reserves blocks for as many of the request's tokens as the budget allows; None if blocks are missing.

        The newest tokens of all its texts are read in the same step, so that the texts continue together.
        """
        wanted, total = [], 0
        for reader in request.readers:
            if reader.table is None:
                reader.table = self.manager.open(reader.context, reader.salt)
            count = len(reader.context) + len(reader.drafts) - reader.table.num_tokens
            wanted.append((reader, reader.table, count))
            total += count
        if total > budget:
            for place, (reader, table, count) in enumerate(wanted):
                count = max(0, count - 1)
                wanted[place] = reader, table, max(0, min(count, budget))
                budget -= count
        lacking = [(table, count) for _, table, count in wanted if table.num_tokens + count > table.room and count > 0]
        if lacking:
            missing = [self.manager.num_missing(table, count) for table, count in lacking]
            needed = [sum(kind) for kind in zip(*missing, strict=True)]
            if any(count > free for count, free in zip(needed, self.manager.num_free, strict=True)):
                return None
        share = Share(request, [])
        for reader, table, count in wanted:
            if count > 0:
                copies = self.manager.reserve(table, count) if table.num_tokens + count > table.room else []
                assert copies is not None
                share.grants.append(Grant.of(reader, table, count, copies))
        return share

    def _release(self, request: R) -> None:
        for reader in request.readers:
            if reader.table is not None:
                self.manager.close(reader.table)
                reader.table = None


_order = attrgetter("order")


def _reads_prompt(request: Schedulable) -> bool:
    """Whether a text of the request has unread tokens before its newest one; its last text has the most."""
    reader = request.readers[-1]
    return reader.table is None or len(reader.context) - reader.table.num_tokens > 1
