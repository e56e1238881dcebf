"""The sampler against hand-worked values, a slow reference in NumPy, statistics, and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sheepop.core.random import derive_seed
from sheepop.generate import GenerationConfig
from sheepop.generate.penalties import Occurrences, repetition_penalised
from sheepop.generate.sampler import Row, Sampler
from sheepop.generate.sampling_kernels import choose_by_triton, choose_natively, suits_native_sampling
from sheepop.generate.warping import (
    apply_min_p,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    apply_typical,
    draw,
    likeliest,
    uniform,
    warped,
)

# One decimal, so that equal logits are common.
LOGITS = st.lists(st.integers(-80, 80).map(lambda tenths: tenths / 10), min_size=1, max_size=30)


def next_token_probabilities(logits: torch.Tensor, *configs: GenerationConfig) -> torch.Tensor:
    """The distributions (B, V), or (V,) for one row of logits."""
    rows = warped(logits.reshape(-1, logits.shape[-1]), configs * (logits.numel() // logits.shape[-1] // len(configs)))
    return rows.softmax(-1).view(logits.shape)


def reference_softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.array([0.0 if x == -math.inf else math.exp(x - max(logits)) for x in logits])
    return weights / math.fsum(weights)


def reference_order(values: np.ndarray) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def reference(logits: list[float], config: GenerationConfig) -> np.ndarray:
    scores = np.array(logits, dtype=np.float64) / config.temperature
    order = reference_order(scores)
    if config.top_k is not None:
        scores[order[config.top_k :]] = -math.inf
    probabilities = reference_softmax(scores)
    if config.top_p < 1:
        kept: list[int] = []
        for i in order:
            kept.append(i)
            total = math.fsum(probabilities[kept])
            assume(abs(total - config.top_p) > 1e-9)
            if total > config.top_p:
                break
        probabilities = np.array([p if i in kept else 0.0 for i, p in enumerate(probabilities)])
    return probabilities / math.fsum(probabilities)


@settings(max_examples=150, deadline=None)
@given(
    logits=LOGITS,
    temperature=st.floats(0.05, 20.0),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.floats(0.01, 1.0),
)
def test_the_distribution_equals_the_slow_reference(
    logits: list[float], temperature: float, top_k: int | None, top_p: float
) -> None:
    config = GenerationConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    probabilities = next_token_probabilities(torch.tensor(logits, dtype=torch.float64), config).numpy()
    np.testing.assert_allclose(probabilities, reference(logits, config), rtol=1e-9, atol=1e-15)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.lists(st.floats(-50, 50), min_size=12, max_size=12), min_size=1, max_size=5))
def test_every_row_of_a_batch_is_on_its_own_and_sums_to_one(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows, dtype=torch.float64)
    config = GenerationConfig(top_k=7, top_p=0.9, temperature=0.7)
    together = next_token_probabilities(logits, config)
    for row, alone in zip(together, logits, strict=True):
        torch.testing.assert_close(row, next_token_probabilities(alone, config), rtol=1e-12, atol=0)
    torch.testing.assert_close(together.sum(-1), torch.ones(len(rows), dtype=torch.float64), rtol=1e-12, atol=0)


def log(probabilities: list[float] | list[list[float]]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("probabilities", "p", "kept"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.95, [0, 1, 2]),  # the sum reaches 0.95 exactly
        ([0.5, 0.3, 0.15, 0.05], 0.96, [0, 1, 2, 3]),
        ([0.5, 0.3, 0.15, 0.05], 0.9, [0, 1, 2]),  # 0.8 is short of it: the token that crosses is kept
        ([0.05, 0.15, 0.3, 0.5], 0.9, [1, 2, 3]),  # order of ids does not matter
        ([0.5, 0.3, 0.15, 0.05], 1e-13, [0]),  # never empty
        ([0.25, 0.25, 0.25, 0.25], 0.5, [0, 1]),  # of equals, the smaller ids
        ([0.2, 0.4, 0.2, 0.2], 0.6, [0, 1]),
        ([0.5, 0.3, 0.15, 0.05], 1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(probabilities: list[float], p: float, kept: list[int]) -> None:
    result = apply_top_p(log(probabilities), p)
    assert result.isfinite().nonzero().flatten().tolist() == kept


def test_kept_probabilities_are_renormalised() -> None:
    # 0.5 + 0.3 + 0.15 = 0.95 is kept, so the rest is divided by 0.95.
    config = GenerationConfig(temperature=1.0, top_p=0.95)
    expected = torch.tensor([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0], dtype=torch.float64)
    torch.testing.assert_close(next_token_probabilities(log([0.5, 0.3, 0.15, 0.05]), config), expected)
    # The two largest of four: 0.5 / 0.8 and 0.3 / 0.8.
    config = GenerationConfig(temperature=1.0, top_k=2, top_p=1.0)
    expected = torch.tensor([0.625, 0.375, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(next_token_probabilities(log([0.5, 0.3, 0.15, 0.05]), config), expected)


def test_temperature_by_hand() -> None:
    # Squaring probabilities is temperature 1/2: 4, 1 -> 16, 1 over 17.
    config = GenerationConfig(temperature=0.5, top_p=1.0)
    expected = torch.tensor([16 / 17, 1 / 17], dtype=torch.float64)
    torch.testing.assert_close(next_token_probabilities(log([0.8, 0.2]), config), expected)


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e300])
def test_no_temperature_overflows(temperature: float) -> None:
    config = GenerationConfig(temperature=temperature, top_p=1.0)
    probabilities = next_token_probabilities(torch.tensor([1e3, -1e3, 999.0], dtype=torch.float64), config)
    expected = [1.0, 0.0, 0.0] if temperature < 1 else [1 / 3] * 3
    torch.testing.assert_close(probabilities, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [1e39, 1e300])
def test_no_temperature_makes_an_impossible_token_possible(temperature: float) -> None:
    scaled = apply_temperature(torch.tensor([1.0, -torch.inf, 0.0]), temperature)  # float32 ends before
    assert scaled[1] == -torch.inf and scaled.softmax(-1).tolist() == [0.5, 0.0, 0.5]
    logits = torch.full((64, 4096), -torch.inf)
    logits[:, [7, 4000]] = torch.tensor([1.0, 0.0])
    rows = [Row(GenerationConfig(temperature=temperature, top_p=1.0), 0, seed) for seed in range(64)]
    chosen = Sampler(torch.zeros(4096, dtype=torch.bool), []).choose(logits, rows).token_ids
    assert set(chosen) == {7, 4000}


def test_top_k_of_equal_logits_keeps_exactly_k_with_the_smaller_ids() -> None:
    kept = apply_top_k(torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]), 3).isfinite()
    assert kept.tolist() == [True, True, True, False, False]


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logits = torch.tensor([1.0, -torch.inf, 3.0])
    assert apply_top_k(logits, 10).tolist() == logits.tolist()


def scores_of(logits: list[float], config: GenerationConfig, prompt: list[int], text: list[int]) -> list[float]:
    sampler = Sampler(torch.tensor([False] * len(logits)), [0])
    occurrences = Occurrences(prompt, text) if config.penalises else None
    return sampler.scores(torch.tensor([logits]), [Row(config, len(text), 0, occurrences)])[0].tolist()


def test_penalties_and_biases_by_hand() -> None:
    logits = [3.0, -3.0, 3.0, -3.0, 0.0]
    config = GenerationConfig(repetition_penalty=1.5)
    assert scores_of(logits, config, [0, 1], [4, 4]) == [2.0, -4.5, 3.0, -3.0, 0.0]
    config = GenerationConfig(presence_penalty=0.5, frequency_penalty=0.25)
    assert scores_of(logits, config, [0, 1], [4, 3, 4]) == [3.0, -3.0, 3.0, -3.75, -1.0]
    assert scores_of(logits, GenerationConfig(logit_bias={2: -4.0}), [], []) == [3.0, -3.0, -1.0, -3.0, 0.0]
    # A bias of 1 comes before the penalty that halves: (3 + 1) / 2, and presence after both.
    config = GenerationConfig(logit_bias={0: 1.0}, repetition_penalty=2.0, presence_penalty=0.5)
    assert scores_of(logits, config, [], [0]) == [1.5, -3.0, 3.0, -3.0, 0.0]


def test_a_text_does_not_end_before_its_fewest_tokens() -> None:
    config = GenerationConfig(min_new_tokens=2)
    assert [scores_of([9.0, 1.0], config, [], text)[0] for text in ([], [1], [1, 1])] == [-math.inf, -math.inf, 9.0]


def test_rows_of_a_batch_have_settings_of_their_own() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 40, dtype=torch.float64) * 3
    configs = [
        GenerationConfig(temperature=0.3, top_k=3, top_p=1.0),
        GenerationConfig(temperature=2.0, top_p=0.5),
        GenerationConfig(temperature=1.0, top_p=1.0, min_p=0.2),
        GenerationConfig(temperature=1.5, top_p=1.0, typical_p=0.4),
        GenerationConfig(temperature=0.9, top_p=1.0),
        GenerationConfig(temperature=1.2, top_k=9, top_p=0.8, min_p=0.01, typical_p=0.9),
    ]
    together = next_token_probabilities(logits, *configs)
    for row, alone, config in zip(together, logits, configs, strict=True):
        torch.testing.assert_close(row, next_token_probabilities(alone, config), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("digits", [0, 6])
def test_many_rows_are_searched_with_the_result_of_sorting_each(dtype: torch.dtype, digits: int) -> None:
    """Rows that are sorted alone are searched bit by bit in a batch; without decimals many are equal."""
    logits = (torch.randn(12, 3000, generator=torch.Generator().manual_seed(4), dtype=dtype) * 3).round(decimals=digits)
    logits[3, ::2] = -torch.inf
    logits[4] = -0.0
    cases: list[tuple[Callable[[torch.Tensor, Any], torch.Tensor], list[float]]] = [
        (apply_top_k, [1, 7, 2999, 4000]),
        (apply_top_p, [0.1, 0.9]),
        (apply_typical, [0.1, 0.9]),
    ]
    for apply, parameters in cases:
        for parameter in parameters:
            together = apply(logits, parameter)
            assert torch.equal(together, torch.cat([apply(row[None], parameter) for row in logits]))
            if apply is apply_top_k:
                assert together.isfinite().sum(-1).tolist() == [
                    min(parameter, 1500 if row == 3 else 3000) for row in range(12)
                ]


def chi_square(draws: list[int], probabilities: list[float]) -> float:
    expected = np.array(probabilities) * len(draws)
    observed = np.bincount(draws, minlength=len(probabilities))
    return float(((observed - expected) ** 2 / expected).sum())


def drawn(probabilities: list[float], seeds: list[int]) -> list[int]:
    scores = torch.tensor(probabilities, dtype=torch.float64).log().expand(len(seeds), -1)
    return draw(scores, torch.tensor(seeds))[0].tolist()


def test_sampled_frequencies_fit_the_distribution() -> None:
    probabilities = [0.35, 0.25, 0.2, 0.1, 0.07, 0.03]
    along_a_text = drawn(probabilities, [derive_seed(5, "token", place) for place in range(10_000)])
    across_seeds = drawn(probabilities, [derive_seed(seed, "token", 0) for seed in range(10_000)])
    neighbours = drawn(probabilities, list(range(10_000)))
    # The chi-square distribution with 5 degrees of freedom exceeds 20.515 once in a thousand times.
    assert chi_square(along_a_text, probabilities) < 20.515
    assert chi_square(across_seeds, probabilities) < 20.515
    assert chi_square(neighbours, probabilities) < 20.515
    # Neighbouring draws are independent: 35 degrees of freedom, 66.619 once in a thousand times.
    pairs = [6 * first + second for first, second in zip(along_a_text[::2], along_a_text[1::2], strict=True)]
    assert chi_square(pairs, np.outer(probabilities, probabilities).ravel().tolist()) < 66.619


def test_numbers_are_uniform_and_independent_of_each_other() -> None:
    numbers = uniform(torch.arange(300)[:, None], torch.arange(400))
    assert numbers.min() > 0
    assert numbers.max() < 1
    # 99 degrees of freedom, 148.23 once in a thousand times.
    assert chi_square((numbers.flatten() * 100).long().tolist(), [0.01] * 100) < 148.23
    across, along = numbers[1:] - 0.5, numbers[:-1] - 0.5
    # The mean of n products of independent numbers has the standard deviation 1 / (12 sqrt(n)).
    assert abs(float((across * along).mean())) < 4 / 12 / math.sqrt(across.numel())
    assert abs(float(((numbers[:, 1:] - 0.5) * (numbers[:, :-1] - 0.5)).mean())) < 4 / 12 / math.sqrt(across.numel())


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    assert set(drawn([0.0, 1e-300, 0.0, 1.0], list(range(500)))) == {3}


def test_a_draw_depends_on_nothing_beside_it() -> None:
    together = drawn([0.02] * 50, list(range(20)))
    assert [drawn([0.02] * 50, [seed])[0] for seed in reversed(range(20))][::-1] == together
    assert drawn([0.02] * 50, list(range(20, 40))) != together


def test_an_unlikely_candidate_more_or_less_leaves_the_draw_as_it_is() -> None:
    seeds = list(range(300))
    assert drawn([0.3, 0.3, 0.3999, 1e-4], seeds) == drawn([0.3, 0.3, 0.3999, 0.0], seeds)


def test_the_likeliest_tokens_and_their_probabilities_are_those_of_the_model() -> None:
    logits = log([[0.5, 0.3, 0.15, 0.05], [0.1, 0.1, 0.7, 0.1]])
    rows = [
        Row(GenerationConfig(temperature=0, logit_bias={0: -100.0}, top_logprobs=2), 0, 0),
        Row(GenerationConfig(temperature=0), 0, 0),
    ]
    choice = Sampler(torch.tensor([False] * 4), []).choose(logits, rows)
    assert choice.token_ids == [1, 2]
    assert choice.logprobs == pytest.approx([math.log(0.3), math.log(0.7)])
    assert choice.top_ids[0] == [0, 1]
    assert choice.top_logprobs[0] == pytest.approx([math.log(0.5), math.log(0.3)])


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_warpers_agree_with_transformers(penalty: float) -> None:
    process = pytest.importorskip("transformers.generation.logits_process")
    torch.manual_seed(0)
    logits = torch.randn(4, 300, dtype=torch.float64) * 4
    input_ids = torch.randint(0, 300, (4, 25))
    seen = torch.zeros(4, 300, dtype=torch.bool).scatter(1, input_ids, True)

    expected = process.RepetitionPenaltyLogitsProcessor(penalty)(input_ids, logits.clone())
    actual = torch.where(seen, repetition_penalised(logits, penalty), logits)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)

    expected = process.TemperatureLogitsWarper(0.7)(input_ids, expected)
    actual = apply_temperature(actual, 0.7)
    torch.testing.assert_close(actual.softmax(-1), expected.softmax(-1), rtol=1e-12, atol=0)

    for k in (1, 5, 80, 300):
        assert torch.equal(apply_top_k(actual, k).isfinite(), process.TopKLogitsWarper(k)(None, expected).isfinite())
    for p in (0.01, 0.5, 0.95, 0.999):
        assert torch.equal(apply_top_p(actual, p).isfinite(), process.TopPLogitsWarper(p)(None, expected).isfinite())

    for p in (0.01, 0.3, 0.9):
        assert torch.equal(apply_min_p(actual, p).isfinite(), process.MinPLogitsWarper(p)(None, expected).isfinite())
        typical = process.TypicalLogitsWarper(p)(None, expected)
        assert torch.equal(apply_typical(actual, p).isfinite(), typical.isfinite())

    config = GenerationConfig(temperature=0.7, top_k=40, top_p=0.9, repetition_penalty=penalty)
    expected = process.TopPLogitsWarper(0.9)(None, process.TopKLogitsWarper(40)(None, expected)).softmax(-1)
    actual = next_token_probabilities(torch.where(seen, repetition_penalised(logits, penalty), logits), config)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_what_another_rounding_may_change_is_a_near_tie(temperature: float) -> None:
    """Logits with gaps of a few epsilons: every choice that changes under noise of that size was called a near tie."""
    draws = torch.Generator().manual_seed(5)
    logits = 10_000 + torch.randint(0, 9, (4000, 12), generator=draws) * 2e-3
    config = GenerationConfig(temperature=temperature, top_p=1.0)
    rows = [Row(config, 0, seed) for seed in range(len(logits))]
    sampler = Sampler(torch.tensor([False] * 12), [])
    noise = (torch.rand(logits.shape, generator=draws) - 0.5) * 7 * 10_000 * 2**-23
    plain, moved = sampler.choose(logits, rows), sampler.choose(logits + noise, rows)
    changed = [one != other for one, other in zip(plain.token_ids, moved.token_ids, strict=True)]
    assert any(changed)
    assert not any(change and not near for change, near in zip(changed, plain.near_ties, strict=True))
    apart = sampler.choose(torch.linspace(0, 3, 12).expand(50, -1), rows[:50])
    assert sum(apart.near_ties) == 0


def test_of_equal_tokens_the_first_is_chosen_and_called_a_tie() -> None:
    row = Row(GenerationConfig(temperature=0), 0, 0)
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [3.0, 1.0, 0.0, 0.0]])
    choice = Sampler(torch.tensor([False] * 4), []).choose(logits, [row, row])
    assert choice.token_ids == [1, 0] and choice.near_ties == [True, False]
    alone = Sampler(torch.tensor([True, False]), []).choose(torch.tensor([[5.0, 1.0]]), [row])
    assert alone.token_ids == [1] and alone.near_ties == [False]


ROWS = {
    "plain": GenerationConfig(temperature=1.0, top_p=1.0),
    "default": GenerationConfig(),
    "hot": GenerationConfig(temperature=3.0, top_p=0.5),
    "cold": GenerationConfig(temperature=5e-324),
    "top-k": GenerationConfig(temperature=1.0, top_k=40, top_p=1.0),
    "one": GenerationConfig(temperature=1.0, top_k=1, top_p=1.0),
    "least top-p": GenerationConfig(temperature=1.0, top_p=1e-13),
    "min-p": GenerationConfig(temperature=1.5, top_p=1.0, min_p=0.1),
    "typical": GenerationConfig(temperature=1.0, top_p=1.0, typical_p=0.3),
    "all": GenerationConfig(temperature=0.9, top_k=500, top_p=0.9, min_p=1e-3, typical_p=0.8),
    "greedy": GenerationConfig(temperature=0.0),
}
needs_kernel = pytest.mark.skipif(
    not suits_native_sampling(torch.zeros(1, 2**13)), reason="there is no C++ compiler for the kernels"
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
KERNELS = [pytest.param(choose_natively, marks=needs_kernel), pytest.param(choose_by_triton, marks=needs_triton)]
HAS_CUDA = torch.cuda.is_available()


def chosen_on_the_device(
    kernel: Callable[..., torch.Tensor], logits: torch.Tensor, configs: list[GenerationConfig], seeds: list[int]
) -> torch.Tensor:
    """The choices of a kernel; without a GPU, Triton's interpreter runs its kernel."""
    logits = logits.to("cuda" if kernel is choose_by_triton and HAS_CUDA else "cpu")
    return kernel(logits, logits, configs, seeds).cpu()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "masked", "one", "odd", "large"])
def test_a_kernel_chooses_as_the_sampler_in_pytorch(kind: str, kernel: Callable[..., torch.Tensor]) -> None:
    """Every setting on each kind of logits: the same tokens as PyTorch in float64."""
    draws = torch.Generator().manual_seed(2)
    size = {"one": 1, "odd": 37, "large": 9000}.get(kind, 3000)
    is_slow = kernel is choose_by_triton and not HAS_CUDA
    known = {name: config for name, config in ROWS.items() if kernel is choose_natively or config.typical_p == 1}
    each = 1 if is_slow else 40
    configs = [config for config in known.values() for _ in range(each)]
    seeds = [derive_seed(7, kind, number) for number in range(len(configs))]
    logits = torch.randn(len(configs), size, generator=draws) * (0.3 if kind == "flat" else 4.0)
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[:, torch.randperm(size, generator=draws)[: size - 3]] = -torch.inf
    found = chosen_on_the_device(kernel, logits, configs, seeds)
    exact = logits.double()
    numbers = [number for number, config in enumerate(configs) if not config.greedy]
    expected, lead, _ = likeliest(exact)
    chosen = warped(exact[numbers], [configs[number] for number in numbers])
    races = chosen - (-torch.log1p(-uniform(torch.tensor(seeds)[numbers, None], torch.arange(size)).double())).log()
    expected[numbers], lead[numbers], _ = likeliest(races)
    heat = torch.tensor([config.temperature or 1.0 for config in configs], dtype=torch.float64)
    differs = (found[:, 0] != expected).nonzero()[:, 0]
    assert len(differs) == 0, [(list(known)[int(row) // each], lead[row]) for row in differs]
    same = (found[:, 0] == expected) & lead.isfinite() & (heat > 1e-30)
    torch.testing.assert_close(found[same, 1], (lead * heat)[same], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[:, 2], exact.amax(-1))
    torch.testing.assert_close(found[:, 3], exact.logsumexp(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[:, 4], exact.gather(-1, found[:, :1].long())[:, 0])
    assert (found[:, 5] == (kind != "masked")).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_without_numbers_harms_no_other_row(kernel: Callable[..., torch.Tensor]) -> None:
    logits = torch.randn(4, 2**13, generator=torch.Generator().manual_seed(1))
    configs, seeds = [GenerationConfig()] * 4, [1, 2, 3, 4]
    expected = chosen_on_the_device(kernel, logits, configs, seeds)
    for bad in (torch.nan, torch.inf, -torch.inf):
        damaged = logits.clone()
        damaged[1, 77] = bad
        damaged[2] = bad
        found = chosen_on_the_device(kernel, damaged, configs, seeds)
        assert torch.equal(found[[0, 3]], expected[[0, 3]])
        assert found[:, 5].tolist() == [1, 0, 0, 1]
        assert (found[1:3, 0] >= 0).all() and (found[1:3, 0] < 2**13).all()


@needs_kernel
@pytest.mark.parametrize("size", [1, 37, 500_000])
def test_the_kernel_leaves_forbidden_tokens_out_and_the_logits_as_they_are(size: int) -> None:
    """In the smallest and in large vocabularies; the sum of all probabilities includes them."""
    logits = torch.randn(3, size, generator=torch.Generator().manual_seed(4))
    configs = [GenerationConfig(temperature=0), GenerationConfig(), GenerationConfig(temperature=1.5, top_k=3)]
    forbidden = torch.tensor([], dtype=torch.long) if size == 1 else torch.cat([logits.argmax(-1), torch.tensor([0])])
    before, masked = logits.clone(), logits.clone()
    masked[:, forbidden] = -torch.inf
    found = choose_natively(logits, logits, configs, [1, 2, 3], forbidden)
    assert torch.equal(logits, before)
    expected = choose_natively(logits, masked, configs, [1, 2, 3])
    assert torch.equal(found, expected)
    assert not set(found[:, 0].long().tolist()) & set(forbidden.tolist())
    torch.testing.assert_close(found[:, 3], logits.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    # What one row must not choose yet, among it a forbidden token, does not concern the others.
    banned = [] if size == 1 else [(2, int(found[2, 0])), (0, int(forbidden[0])), (2, int(found[1, 0]))]
    for row, token in banned:
        masked[row, token] = -torch.inf
    found = choose_natively(logits, logits, configs, [1, 2, 3], forbidden, banned)
    assert torch.equal(found, choose_natively(logits, masked, configs, [1, 2, 3]) if banned else expected)
    assert torch.equal(logits, before)
    assert not {(row, token) for row, token in enumerate(found[:, 0].long().tolist())} & set(banned)


@needs_kernel
@pytest.mark.parametrize("size", [300, 20_000])
def test_hidden_tokens_do_not_count_among_the_top_k(size: int) -> None:
    """Neither those that no row may choose nor those of one row, wherever they rank."""
    draws = torch.Generator().manual_seed(6)
    logits = torch.randn(200, size, generator=draws) * 3
    ranked = logits.sum(0).argsort(descending=True)  # no row's own order
    forbidden = torch.cat([logits[:20].topk(6).indices[:, 2:].flatten().unique(), ranked[:3]])
    banned = [(row, int(logits[row].topk(9).indices[row % 9])) for row in range(200)]
    masked = logits.clone()
    masked[:, forbidden] = -torch.inf
    for row, token in banned:
        masked[row, token] = -torch.inf
    configs = [GenerationConfig(temperature=3.0, top_k=1 + row % 40, top_p=1.0) for row in range(200)]
    found = choose_natively(logits, logits, configs, list(range(200)), forbidden, banned)
    expected = choose_natively(masked, masked, configs, list(range(200)))
    assert torch.equal(found[:, :3], expected[:, :3])
    for row, config in enumerate(configs):  # and the kept ones are those of PyTorch
        kept = warped(masked[row : row + 1], [config])[0] > -torch.inf
        assert kept[int(found[row, 0])]


@needs_kernel
def test_zeros_with_different_signs_are_equally_likely() -> None:
    """The first zero is the largest score, and its distance to the others is -0 where they have the other sign."""
    configs = [GenerationConfig(temperature=1.0, **kept) for kept in ({"top_p": 0.9}, {"top_k": 3}, {"typical_p": 0.9})]
    zeros = torch.zeros(3, 2**10)
    signed = zeros.clone()
    signed[:, ::3] = -0.0
    found, expected = (choose_natively(x, x, configs, [1, 2, 3]) for x in (signed, zeros))
    assert torch.equal(found, expected)
    assert found[1, 0] < 3


@needs_kernel
def test_the_kernel_refuses_logits_and_scores_that_do_not_fit() -> None:
    logits, configs = torch.zeros(2, 50), [GenerationConfig()] * 2
    for scores, ids in ((logits[:1], None), (logits[:, :49], None), (logits.double(), None), (logits, torch.zeros(1))):
        with pytest.raises(ValueError, match="for a native kernel; it is"):
            choose_natively(logits, scores, configs, [1, 2], ids)


@needs_kernel
def test_natively_sampled_frequencies_fit_the_distribution() -> None:
    probabilities = torch.tensor([0.35, 0.25, 0.2, 0.1, 0.07, 0.03], dtype=torch.float64)
    logits = torch.full((10_000, 8192), -torch.inf)
    logits[:, 1000:1006] = probabilities.log().float()
    configs = [GenerationConfig(temperature=1.0, top_p=1.0)] * len(logits)
    found = choose_natively(logits, logits, configs, [derive_seed(5, "token", place) for place in range(10_000)])
    assert chi_square((found[:, 0].long() - 1000).tolist(), probabilities.tolist()) < 20.515


def test_penalties_follow_a_text_as_it_grows_and_are_not_changed_by_guesses() -> None:
    config = GenerationConfig(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    known, sampler = list[int](), Sampler(torch.tensor([False] * 5), [])
    growing = Occurrences([3, 1, 3], known)
    logits = torch.full((2, 5), 4.0)
    for text in ([], [0], [0, 1], [0, 1, 1]):
        rows = [Row(config, len(text), 0, growing), Row(config, len(text) + 2, 0, growing, None, [2, 2])]
        for line, written in zip(sampler.scores(logits, rows).tolist(), (text, [*text, 2, 2]), strict=True):
            expected = [
                (2.0 if token in (1, 3, *written) else 4.0)
                - (0.5 + 0.25 * written.count(token) if token in written else 0.0)
                for token in range(5)
            ]
            assert line == expected
        known.append((0, 1, 1, 4)[len(text)])
