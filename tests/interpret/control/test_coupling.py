"""Generation as a closed loop: shared noise, Lyapunov exponents, repetition and entropy, with known answers."""

from __future__ import annotations

import math

import pytest
import torch

from sheepop.core.errors import UsageError
from sheepop.generate import GenerationConfig
from sheepop.interpret.control.loops import (
    Loop,
    SoftLoop,
    coincidence,
    divergence,
    entropy_and_slope,
    find_loop,
    lyapunov_exponent,
    repeat_chances,
    survival,
)
from sheepop.model import ModelConfig, Transformer, build_model

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.4])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def model() -> Transformer:
    sizes = {"vocab_size": 7, "d_model": 8, "num_layers": 2, "num_heads": 2, "max_seq_len": 32}
    return build_model(ModelConfig(**sizes), 0).double().eval()


def test_shared_noise_chooses_the_same_token_as_often_as_by_hand() -> None:
    assert coincidence(P, Q).tolist() == pytest.approx([0.3, 0.25, 0.2])
    draws = -(-torch.rand(40_000, 3, generator=generator(), dtype=torch.float64).log()).log()
    first, second = (P.log() + draws).argmax(-1), (Q.log() + draws).argmax(-1)
    assert float((first != second).double().mean()) == pytest.approx(0.25, abs=0.01)


def test_coincidence_with_impossible_tokens() -> None:
    """Where only one distribution has a token, no draw is that of both; equal distributions always agree."""
    assert coincidence(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5])).tolist() == pytest.approx(
        [0, 1 / 3, 0]
    )
    assert coincidence(P, P).tolist() == pytest.approx(P.tolist())
    assert coincidence(torch.eye(2)[0], torch.eye(2)[1]).tolist() == [0, 0]


def test_divergence_by_hand() -> None:
    expected = sum(p * math.log(p / q) for p, q in zip(P.tolist(), Q.tolist(), strict=True))
    assert float(divergence(P.log() + 3, Q.log())) == pytest.approx(expected)


def test_survival_of_two_fixed_distributions_is_a_power() -> None:
    """The first text always predicts P and the second Q, so that each step keeps three quarters of the pairs."""
    found = survival(
        lambda text: (P if int(text[0, 0]) == 0 else Q).log().expand(len(text), -1),
        torch.tensor([0]),
        torch.tensor([1]),
        steps=4,
        pairs=3,
        generator=generator(),
    )
    assert found.equal == pytest.approx([0.75**step for step in range(1, 5)], rel=1e-6)
    assert found.divergence == pytest.approx([float(divergence(P.log(), Q.log()))] * 4)
    assert found.length == pytest.approx(sum(found.equal))


def test_survival_by_importance_is_that_of_plain_trials(model: Transformer) -> None:
    first, second = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])

    def predict(text: torch.Tensor) -> torch.Tensor:
        return model(text)[:, -1]

    found = survival(predict, first, second, steps=3, pairs=400, generator=generator())
    noise = -(-torch.rand(400, 3, 7, generator=generator(), dtype=torch.float64).log()).log()
    texts = [first.expand(400, -1), second.expand(400, -1)]
    alive, shares = torch.ones(400, dtype=torch.bool), []
    with torch.no_grad():
        for step in range(3):
            chosen = [(predict(text).log_softmax(-1) + noise[:, step]).argmax(-1) for text in texts]
            alive &= chosen[0] == chosen[1]
            texts = [torch.cat((text, new[:, None]), -1) for text, new in zip(texts, chosen, strict=True)]
            shares.append(float(alive.double().mean()))
    assert found.equal == pytest.approx(shares, abs=0.06)
    assert shares[-1] < 0.9


def test_the_logistic_map_has_the_exponent_ln_2() -> None:
    found = lyapunov_exponent(
        lambda x: 4 * x * (1 - x), torch.tensor([0.3], dtype=torch.float64), generator(), steps=2000, settling=10
    )
    assert found.value == pytest.approx(math.log(2), abs=0.02)
    assert abs(found.value - math.log(2)) < 4 * found.error


def test_a_linear_map_has_the_logarithm_of_its_largest_eigenvalue() -> None:
    matrix = torch.tensor([[0.5, 1.0], [0.0, 0.8]], dtype=torch.float64)
    found = lyapunov_exponent(
        lambda x: matrix @ x, torch.ones(2, dtype=torch.float64), generator(), steps=50, settling=60
    )
    assert found.value == pytest.approx(math.log(0.8), abs=1e-6)


def test_the_divergence_is_finite_where_the_sampler_removes_tokens() -> None:
    """Each text has its own predictions, and a sampler of the likeliest token only, so that both always differ."""

    def predict(texts_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(texts_BT[:, :1] == 0, P.log(), Q.log())

    def likeliest(logits_BV: torch.Tensor) -> torch.Tensor:
        return logits_BV.masked_fill(logits_BV < logits_BV.amax(-1, keepdim=True), -torch.inf)

    texts = torch.tensor([0]), torch.tensor([1])
    found = survival(predict, *texts, steps=1, pairs=2, generator=generator(), warp=likeliest)
    by_hand = sum(p * math.log(p / q) for p, q in zip(P.tolist(), Q.tolist(), strict=True))
    assert found.equal == [0.0] and found.divergence == [pytest.approx(by_hand)]


def test_the_soft_loop_steps_as_its_equation_says(model: Transformer) -> None:
    loop, ids = SoftLoop(model, temperature=0.7), torch.tensor([3, 1, 5])
    with torch.no_grad():
        found = loop(loop.state(ids))
        weights = (model(ids[None])[0, -1] / 0.7).softmax(-1)
        expected = torch.stack((*model.embedding.weight[[1, 5]] * model.embedding_scale, torch.zeros(8)))
        expected[2] = sum(weights[token] * model.embedding.weight[token] * model.embedding_scale for token in range(7))
    assert torch.allclose(found, expected)


def test_benettins_exponent_is_that_of_two_near_trajectories(model: Transformer) -> None:
    loop = SoftLoop(model, temperature=0.3)
    state = loop.state(torch.tensor([3, 1, 5, 2]))
    found = lyapunov_exponent(loop, state, generator(), steps=20, settling=5)
    apart = torch.randn(state.shape, generator=generator(), dtype=state.dtype)
    distance, logs = 1e-6, []
    other = state + distance * apart / apart.norm()
    with torch.no_grad():
        for step in range(25):
            state, other = loop(state), loop(other)
            size = (other - state).norm()
            if step >= 5:
                logs.append(float((size / distance).log()))
            other = state + (other - state) * (distance / size)
    assert found.value == pytest.approx(sum(logs) / len(logs), abs=1e-3)


def test_a_model_that_reads_ids_has_no_soft_loop() -> None:
    sizes = {"vocab_size": 7, "d_model": 8, "num_layers": 1, "num_heads": 2, "max_seq_len": 8, "ngrams": {}}
    with pytest.raises(UsageError, match="reads the token ids themselves"):
        SoftLoop(build_model(ModelConfig(**sizes), 0), 1.0)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_entropy_and_its_slope(temperature: float) -> None:
    logits = torch.randn(4, 9, generator=generator(), dtype=torch.float64) * 3
    logits[0, 2] = -torch.inf
    entropy, slope = entropy_and_slope(logits, temperature)
    expected = torch.distributions.Categorical(logits=logits / temperature).entropy()
    assert torch.allclose(entropy, expected)
    step = 1e-5
    higher, lower = (entropy_and_slope(logits, temperature + way * step)[0] for way in (1, -1))
    assert torch.allclose(slope, (higher - lower) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], Loop((2, 3, 1, 2)[1:], 3)),
        ([5, 5, 5, 5, 5, 5, 5, 5], Loop((5,), 8)),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], None),
        ([7, 7, 7], None),
        ([1, 2, 1, 2, 1, 2, 1, 2, 9], None),
        ([], None),
    ],
)
def test_loops_are_found_at_the_end_of_a_text(ids: list[int], expected: Loop | None) -> None:
    assert find_loop(ids) == expected


def test_repeat_chances_are_products_of_the_samplers_probabilities(model: Transformer) -> None:
    before, phrase = [1, 2], [3, 4]
    whole = GenerationConfig(top_k=None, top_p=1.0, temperature=0.5)
    settings = [whole, whole.replace(temperature=1.0, repetition_penalty=1.3)]
    plain, penalised = repeat_chances(model, before, phrase, settings, repeats=3)

    def expected(repeats: int, temperature: float, penalty: float) -> float:
        total, ids = 1.0, [*before, *phrase * repeats]
        for token in phrase:
            with torch.no_grad():
                logits = model(torch.tensor([ids]))[0, -1].tolist()
            for seen in set(ids):
                logits[seen] = logits[seen] / penalty if logits[seen] > 0 else logits[seen] * penalty
            powers = [math.exp(logit / temperature) for logit in logits]
            total *= powers[token] / sum(powers)
            ids.append(token)
        return total

    assert plain.by_repeats == pytest.approx([expected(repeats, 0.5, 1.0) for repeats in (1, 2, 3)])
    assert penalised.by_repeats == pytest.approx([expected(repeats, 1.0, 1.3) for repeats in (1, 2, 3)])
    odds = [chance / (1 - chance) for chance in plain.by_repeats]
    assert plain.gain == pytest.approx((odds[2] / odds[0]) ** 0.5)
