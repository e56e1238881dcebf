"""The incremental cache against the network without one, logit for logit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from sheepop.generate.runner import IncrementalRunner, RecomputingRunner, Runner, pad
from sheepop.model import ModelConfig, Transformer, build_model

KINDS = [
    {"position_encoding": positions, "norm": norm, "num_kv_heads": num_kv_heads, "activation": activation}
    for (positions, activation), norm, num_kv_heads in product(
        [("sinusoidal", "gelu"), ("learned", "relu"), ("rope", "swiglu")], ["layernorm", "rmsnorm"], [1, 2, 4]
    )
]


@contextmanager
def counted_positions(model: Transformer) -> Iterator[list[int]]:
    """The number of token positions of every forward pass."""
    counts: list[int] = []
    hook = model.embedding.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))
    yield counts
    hook.remove()


def kind_name(kind: dict[str, object]) -> str:
    return "-".join(map(str, kind.values()))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_logits_equal_those_of_the_whole_sequence_run_alone(
    toy_model: Callable[..., Transformer], kind: dict[str, object]
) -> None:
    model = toy_model(**kind)
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(0, 128, (length,), generator=generator).tolist() for length in (30, 18, 25, 18)]
    prompts = [row[:-12] for row in rows]  # 18, 6, 13 and 6 tokens, then 12 more one by one
    whole = [model(torch.tensor([row]))[0] for row in rows]
    for runner in (IncrementalRunner(model), RecomputingRunner(model)):
        logits = runner.start(prompts, [13] * 4)
        for step in range(12):
            for row in range(4):
                expected = whole[row][len(prompts[row]) - 1 + step]
                torch.testing.assert_close(logits[row], expected, rtol=0, atol=3e-5)
            logits = runner.step([row[step - 12] for row in rows])
        torch.testing.assert_close(logits, torch.stack([row[-1] for row in whole]), rtol=0, atol=3e-5)


@torch.no_grad()
@pytest.mark.parametrize("runner_class", [IncrementalRunner, RecomputingRunner])
def test_rows_that_leave_do_not_change_those_that_stay(
    toy_model: Callable[..., Transformer], runner_class: Callable[[Transformer], Runner]
) -> None:
    model = toy_model(position_encoding="rope", num_kv_heads=2)
    rows = [[5, 6, 7, 8, 9, 10], [20, 21], [30, 31, 32, 33]]
    runner = runner_class(model)
    runner.start(rows, [10] * 3)
    runner.keep_rows([1, 2])
    runner.step([22, 34])
    runner.keep_rows([0])
    logits = runner.step([23])
    expected = model(torch.tensor([[20, 21, 22, 23]]))[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_step_runs_one_position_per_row(toy_model: Callable[..., Transformer]) -> None:
    model = toy_model()
    with counted_positions(model) as counts:
        runner = IncrementalRunner(model)
        runner.start([[5, 6, 7], [8]], [4, 4])
        for _ in range(3):
            runner.step([9, 10])
    assert counts == [6, 2, 2, 2]  # the prefill is padded to two rows of three
    with counted_positions(model) as counts:
        whole = RecomputingRunner(model)
        whole.start([[5, 6, 7], [8]], [4, 4])
        whole.step([9, 10])
    assert counts == [6, 8]


@torch.no_grad()
def test_every_row_may_use_the_whole_context(toy_model: Callable[..., Transformer]) -> None:
    model = toy_model(max_seq_len=16, position_encoding="learned")
    short, long = [3, 4], list(range(10, 24))
    runner = IncrementalRunner(model)
    runner.start([short, long], [15, 3])
    tokens = list(range(30, 44))
    runner.step([tokens[0], 99])
    runner.step([tokens[1], 98])  # the long row is full: 16 positions
    runner.keep_rows([0])
    for token in tokens[2:]:
        logits = runner.step([token])
    expected = model(torch.tensor([short + tokens]))[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_padding_stands_behind() -> None:
    assert pad([[7, 8, 9], [4]])[:, 0].tolist() == [7, 4]
    assert pad([[7, 8, 9], [4]]).shape == (2, 3)


@torch.no_grad()
def test_at_124_million_parameters_logits_agree_within_a_ten_thousandth() -> None:
    model = build_model(ModelConfig(preset="gpt2"), seed=3).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    row = torch.randint(0, 50257, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = model(torch.tensor([row]), logits_to_keep=5)[0]
    runner = IncrementalRunner(model)
    logits = [runner.start([row[:8]], [5])] + [runner.step([token]) for token in row[8:]]
    difference = (torch.cat(logits) - whole).abs().max()
    assert difference / whole.abs().max() < 1e-4
