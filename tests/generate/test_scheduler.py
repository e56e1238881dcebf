"""The scheduler: every request is read to its end, in order, within the budget, however few blocks there are."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import UsageError
from sheepop.generate.blocks import BlockManager, BlockTable
from sheepop.generate.scheduler import QueueFullError, Scheduler, Share

BLOCK = 4


@dataclass
class Text:
    context: list[int]
    goal: int
    drafts: list[int] = field(default_factory=list)
    salt: str = ""
    table: BlockTable | None = None


@dataclass
class Job:
    order: tuple[int, int]
    texts: list[Text]

    @property
    def width(self) -> int:
        return len(self.texts)

    @property
    def readers(self) -> list[Text]:
        return [text for text in self.texts if len(text.context) < text.goal]


def take_step(scheduler: Scheduler, shares: list[Share]) -> None:
    """Does the work of the engine: every text that was read to its end grows by a token."""
    for share in shares:
        for reader, chunk, *_ in share.grants:
            assert isinstance(reader, Text)
            scheduler.manager.advance(chunk.table, reader.context, chunk.end)
        job = share.request
        assert isinstance(job, Job)
        grown = [grant.reader for grant in share.grants if grant.num_predictions]
        assert len(grown) in (0, len(job.readers))  # all texts of a request continue together
        for text in grown:
            assert isinstance(text, Text)
            text.context.append(len(text.context) % 3)
            if len(text.context) >= text.goal:
                assert text.table is not None
                scheduler.manager.close(text.table)
                text.table = None
        if not job.readers:
            scheduler.remove(job)


jobs = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 20), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=8
)


@settings(deadline=None, max_examples=200)
@given(jobs, st.integers(4, 20), st.integers(3, 6), st.lists(st.integers(0, 6), max_size=8))
def test_every_request_comes_to_its_end(
    asked: list[tuple[int, int, int, int]], max_tokens: int, max_sequences: int, arrivals: list[int]
) -> None:
    total = 3 * -(-32 // BLOCK)  # as much as one request may need
    reaches = (None, 5)
    manager = BlockManager([total, total], reaches, BLOCK)
    scheduler = Scheduler(
        manager, max_tokens=max(max_tokens, max_sequences), max_sequences=max_sequences, max_waiting=100
    )
    todo = [
        Job((priority, number), [Text([7] * length, length + more) for _ in range(width)])
        for number, (priority, length, more, width) in enumerate(asked)
    ]
    everything = list(todo)
    steps = 0
    while todo or scheduler.waiting or scheduler.running:
        while todo and (not arrivals or steps >= arrivals[len(todo) % len(arrivals)]):
            scheduler.add(todo.pop(0))
        shares = scheduler.schedule()
        assert sum(share.num_tokens for share in shares) <= scheduler.max_tokens
        assert sum(len(job.readers) for job in scheduler.running) <= max_sequences
        if scheduler.running:
            assert shares
        take_step(scheduler, shares)
        steps += 1
        assert steps < 5000
    assert all(len(text.context) == text.goal for job in everything for text in job.texts)
    assert manager.num_free == (total, total)


def test_those_that_write_are_not_stopped_by_a_long_prompt() -> None:
    scheduler = Scheduler(BlockManager([64], [None], BLOCK), max_tokens=8, max_sequences=4, max_waiting=9)
    writer = Job((0, 0), [Text([1, 2], 20)])
    scheduler.add(writer)
    take_step(scheduler, scheduler.schedule())
    scheduler.add(Job((0, 1), [Text(list(range(40)), 50)]))
    for _ in range(5):
        shares = scheduler.schedule()
        assert [share.num_tokens for share in shares] == [1, 7]
        take_step(scheduler, shares)


def test_a_request_of_higher_priority_goes_first_and_the_last_in_order_gives_up_its_blocks() -> None:
    scheduler = Scheduler(BlockManager([6], [None], BLOCK), max_tokens=64, max_sequences=4, max_waiting=9)
    late, early = Job((1, 0), [Text([5] * 11, 30)]), Job((0, 1), [Text([6] * 11, 30)])
    scheduler.add(late)
    scheduler.add(early)
    assert scheduler.waiting == [early, late]
    for _ in range(4):
        take_step(scheduler, scheduler.schedule())
    assert (scheduler.running, scheduler.waiting) == ([early], [late])
    assert scheduler.num_preemptions == 1
    assert late.texts[0].table is None
    assert len(late.texts[0].context) > 11


def test_a_full_queue_and_a_budget_below_the_number_of_texts_are_refused() -> None:
    manager = BlockManager([6], [None], BLOCK)
    scheduler = Scheduler(manager, max_tokens=64, max_sequences=2, max_waiting=1)
    for number in range(3):
        scheduler.add(Job((0, number), [Text([5], 9)]))
    with pytest.raises(QueueFullError, match="The queue is full, with 3 requests"):
        scheduler.add(Job((0, 3), [Text([5], 9)]))
    with pytest.raises(UsageError, match="max_tokens = 3 is less than max_sequences = 4"):
        Scheduler(manager, max_tokens=3, max_sequences=4, max_waiting=1)


def test_the_tokens_of_a_preempted_request_go_to_the_others() -> None:
    """A writer's token is granted before a reader of higher priority takes its blocks: the reader gets that token."""
    scheduler = Scheduler(BlockManager([6], [None], BLOCK), max_tokens=8, max_sequences=4, max_waiting=9)
    scheduler.add(Job((1, 0), [Text([5] * 8, 30)]))
    take_step(scheduler, scheduler.schedule())
    scheduler.add(Job((0, 1), [Text([6] * 20, 30)]))
    for tokens in ([1, 7], [8]):
        shares = scheduler.schedule()
        assert [share.num_tokens for share in shares] == tokens
        take_step(scheduler, shares)
    assert scheduler.num_preemptions == 1
