"""How layers and rows are cut for a pipeline, what is refused, and when each rank computes."""

from __future__ import annotations

from typing import Any

import pytest

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout, check_pipeline
from sheepop.parallel.pipeline import layers_of
from sheepop.parallel.ranks import Ranks

_NETWORK = ModelConfig(vocab_size=67, d_model=32, num_layers=6, num_heads=4, max_seq_len=16, dropout=0.0)


@pytest.mark.parametrize(("stages", "layers"), [(1, 1), (2, 7), (4, 4), (8, 30), (6, 41)])
def test_every_layer_has_one_stage_and_the_first_have_more(stages: int, layers: int) -> None:
    parts = [layers_of(stage, stages, layers) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_ranks_have_the_stages_that_the_order_needs() -> None:
    def stages(schedule: str) -> list[tuple[int, ...]]:
        config = ParallelConfig(pipeline=3, schedule=schedule)
        return [config.stages_of(rank) for rank in range(3)]

    assert stages("gpipe") == stages("1f1b") == [(0,), (1,), (2,)]
    assert stages("interleaved") == [(0, 3), (1, 4), (2, 5)]
    assert stages("zero_bubble") == [(0, 5), (1, 4), (2, 3)]  # a V: the first rank has the head too


@pytest.mark.parametrize(
    ("network", "parallel", "words"),
    [
        ({"num_layers": 3}, {"schedule": "interleaved"}, "num_layers = 3 are too few for 4 stages"),
        ({"dropout": 0.1}, {}, "model.dropout"),
        ({"architecture": "encoder_decoder"}, {}, "an encoder"),
        ({}, {"zero": 3}, "keeps its weights and gradients whole"),
    ],
)
def test_networks_that_cannot_be_cut_are_refused(network: dict[str, Any], parallel: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_pipeline(_NETWORK.replace(**network), ParallelConfig(pipeline=2, **parallel))


def test_an_order_without_a_pipeline_is_refused() -> None:
    with pytest.raises(ConfigError, match="schedule = gpipe is for pipeline of 2 ranks or more"):
        ParallelConfig(schedule="gpipe")


def test_rows_are_cut_into_equal_micro_batches_for_all_stages() -> None:
    layout = Layout(Ranks(0, 8), ParallelConfig(pipeline=4))
    assert layout.micro_batch_rows(64) == 2  # 2 data ranks of 32 rows: 16 micro-batches, four for each stage
    assert layout.micro_batch_rows(16) == 1  # 8 of one row: fewer than four for each stage, but as many as there are
    assert layout.micro_batch_rows(24) == 1  # 12 of them
    with pytest.raises(ConfigError, match=r"The 5 rows .* a multiple of 8 rows"):
        layout.micro_batch_rows(10)
    layout.check_micro_batches(64, 4)
    late = Layout(Ranks(0, 8), ParallelConfig(pipeline=4, schedule="zero_bubble"))
    assert late.micro_batch_rows(16) == 1
    with pytest.raises(ConfigError, match=r"8 or more and a multiple of .* Use a multiple of 16 rows"):
        late.micro_batch_rows(8)
    with pytest.raises(ConfigError, match=r"makes 8 micro-batches of .*pipeline = 4, 8 at least"):
        late.check_micro_batches(64, 8)
    with pytest.raises(ConfigError, match=r"makes 4 micro-batches of .* A pipeline needs equal ones"):
        layout.check_micro_batches(64, 16)
    with pytest.raises(ConfigError, match=r"makes 8 micro-batches of .* A pipeline needs equal ones"):
        layout.check_micro_batches(60, 8)
