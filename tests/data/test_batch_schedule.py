from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data import (
    Batch,
    BatchSchedule,
    PackedBatches,
    PaddedBatches,
    RowSource,
    SampleOrder,
    Stages,
    TokenSplit,
    batch_hash,
)
from sheepop.data.batch_schedule import MixtureSchedule
from sheepop.data.shards import DocumentView

# Every token is another number, so that a batch says where each of its tokens came from.
DOCUMENTS = [
    list(range(1 + 100 * number, 1 + 100 * number + length)) for number, length in enumerate([30, 7, 51, 1, 22])
]
SPLIT = TokenSplit.from_documents(DOCUMENTS)
SIZES = Stages(((2, 3), (4, 5)), 8)
LENGTHS = Stages(((1, 4), (3, 6)), 12)


def plain(packing: bool = True) -> BatchSchedule:
    batches = (PackedBatches if packing else PaddedBatches)(SPLIT, max_length=12, pad_id=0)
    return BatchSchedule([RowSource(batches, SampleOrder(batches.num_samples, 7))], SIZES, LENGTHS, 7)


def mixed() -> BatchSchedule:
    views = [DocumentView(SPLIT, np.array(numbers)) for numbers in ([0, 3], [1, 2], [4])]
    batches = [PackedBatches(view, max_length=12, pad_id=0) for view in views]
    sources = [
        RowSource(cut, SampleOrder(cut.num_samples, n), view)
        for n, (cut, view) in enumerate(zip(batches, views, strict=True))
    ]
    knots = [[(0, 1.0), (6, 0.0)], [(0, 1.0)], [(2, 0.5), (5, 3.0)]]
    return BatchSchedule(sources, SIZES, LENGTHS, 7, MixtureSchedule(knots, SIZES))


SCHEDULES = {"packed": plain, "padded": lambda: plain(packing=False), "mixed": mixed}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def slow_batch(schedule: BatchSchedule, step: int) -> list[list[int]]:
    """The tokens of a step's rows, sample by sample and cut by cut, padding left out."""
    rows = schedule.rows(step)
    found = []
    for number, sample in zip(rows.sources, rows.samples, strict=True):
        batch = schedule.sources[number].batches.batch(np.array([sample]))
        tokens = batch.input_ids[0].tolist()
        for start in range(0, 12, rows.length):
            found.append([token for token in tokens[start : start + rows.length] if token])
    return found


def shown(batch: Batch) -> list[list[int]]:
    return [[token for token in row if token] for row in batch.input_ids.tolist()]


@every_schedule
def test_a_batch_is_the_rows_of_its_step_cut_to_their_length(name: str) -> None:
    schedule = SCHEDULES[name]()
    for step in range(9):
        batch = schedule.batch(step)
        length = LENGTHS.at(step)
        assert batch.input_ids.shape == (SIZES.at(step) * 12 // length, length)
        assert shown(batch) == slow_batch(schedule, step)


@every_schedule
@given(st.lists(st.integers(0, 30), max_size=5))
def test_a_step_does_not_depend_on_what_was_asked_before(name: str, steps: list[int]) -> None:
    asked, fresh = SCHEDULES[name](), {step: batch_hash(SCHEDULES[name]().batch(step)) for step in set(steps)}
    assert [batch_hash(asked.batch(step)) for step in steps] == [fresh[step] for step in steps]


@every_schedule
def test_the_token_ranges_of_a_row_hold_its_tokens(name: str) -> None:
    schedule = SCHEDULES[name]()
    for step in range(9):
        held = [
            [token for start, stop in ranges for token in SPLIT.tokens(start, stop).tolist()]
            for ranges in schedule.token_ranges(step)
        ]
        assert held == shown(schedule.batch(step))


@every_schedule
def test_every_row_of_a_source_comes_once_in_each_of_its_epochs(name: str) -> None:
    schedule = SCHEDULES[name]()
    rows = [schedule.rows(step) for step in range(60)]
    for number, source in enumerate(schedule.sources):
        samples = np.sort(np.concatenate([step.samples[step.sources == number] for step in rows]))
        counts = Counter(samples.tolist())
        assert set(counts) == set(range(source.batches.num_samples))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_without_a_warm_up_a_plan_reads_the_order_as_it_comes() -> None:
    batches = PackedBatches(SPLIT, max_length=12, pad_id=0)
    order = SampleOrder(batches.num_samples, 3)
    schedule = BatchSchedule([RowSource(batches, order)], Stages((), 4), Stages((), 12), 3)
    assert schedule.rows(5).samples.tolist() == order.indices(20, 4).tolist()


def test_sources_are_mixed_within_a_step_and_no_row_of_another_source_is_read() -> None:
    schedule = mixed()
    tokens = [{token for document in numbers for token in DOCUMENTS[document]} for numbers in ([0, 3], [1, 2], [4])]
    arranged = False
    for step in range(12):
        sources = schedule.rows(step).sources.tolist()
        arranged |= sources != sorted(sources)
        length = LENGTHS.at(step)
        of_row = [source for source in sources for _ in range(12 // length)]
        assert all(set(row) <= tokens[source] for source, row in zip(of_row, shown(schedule.batch(step)), strict=True))
    assert arranged


def test_sources_stand_in_another_order_in_another_step() -> None:
    views = [DocumentView(SPLIT, np.array(numbers)) for numbers in ([0, 3], [1, 2])]
    batches = [PackedBatches(view, max_length=4, pad_id=0) for view in views]
    sources = [RowSource(cut, SampleOrder(cut.num_samples, 1), view) for cut, view in zip(batches, views, strict=True)]
    sizes = Stages((), 8)
    schedule = BatchSchedule(sources, sizes, Stages((), 4), 7, MixtureSchedule([[(0, 1.0)], [(0, 1.0)]], sizes))
    arrangements = {tuple(schedule.rows(step).sources.tolist()) for step in range(20)}
    assert {sum(arrangement) for arrangement in arrangements} == {4}
    assert len(arrangements) > 10


def test_sources_and_mixture_must_fit() -> None:
    with pytest.raises(ValueError, match="3 sources do not fit"):
        BatchSchedule(mixed().sources, SIZES, LENGTHS, 7)
