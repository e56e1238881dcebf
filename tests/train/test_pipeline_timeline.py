"""The times of the passes in a pipeline's step, as the papers give them."""

from __future__ import annotations

import itertools

import pytest

from sheepop.parallel.config import ParallelConfig
from sheepop.train.pipeline_timeline import BACKWARD, FORWARD, timeline, waiting


def test_two_micro_batches_through_two_stages_one_of_each_in_turn() -> None:
    found = {
        (span.rank, span.work.kind, span.work.micro_batch): (span.start, span.end)
        for span in timeline(ParallelConfig(pipeline=2), 2)
    }
    assert found == {
        (0, FORWARD, 0): (0, 1), (0, FORWARD, 1): (1, 2), (0, BACKWARD, 0): (4, 6), (0, BACKWARD, 1): (7, 9),
        (1, FORWARD, 0): (1, 2), (1, BACKWARD, 0): (2, 4), (1, FORWARD, 1): (4, 5), (1, BACKWARD, 1): (5, 7),
    }  # fmt: skip


@pytest.mark.parametrize("count", [8, 16])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_ranks_wait_as_long_as_the_papers_say(schedule: str, count: int) -> None:
    config = ParallelConfig.model_validate({"pipeline": 4, "schedule": schedule})
    spans = timeline(config, count)
    passes = 3 if schedule == "zero_bubble" else 2
    assert len({(span.work, span.rank) for span in spans}) == len(spans) == count * config.num_stages * passes
    lost = {"gpipe": 3 / count, "1f1b": 3 / count, "interleaved": 3 / 2 / count, "zero_bubble": 0.5 / count}
    assert waiting(spans) == pytest.approx(lost[schedule])
    for rank in range(4):  # one thing at a time
        own = sorted((span.start, span.end) for span in spans if span.rank == rank)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
