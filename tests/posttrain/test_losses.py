"""Losses and advantages against loops over plain numbers, and the values that they must begin with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sheepop.posttrain.policy import bounded_weight_loss, clipped_policy_loss, clipped_value_loss, divergence
from sheepop.posttrain.preference import (
    Completions,
    PairwisePreference,
    PreferenceLoss,
    kto_loss,
    log_odds,
    pairwise_reward_loss,
)
from sheepop.posttrain.reward_methods import (
    generalised_advantages,
    group_advantages,
    leave_one_out_advantages,
    whitened,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def completions(seed: int, *, reference: bool = True) -> Completions:
    lengths = torch.randint(1, 40, (6,), generator=torch.Generator().manual_seed(seed))
    policy = -drawn(6, seed=seed).abs() * lengths - 0.1
    return Completions(policy, policy + drawn(6, seed=seed + 9) if reference else None, lengths)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def one_by_one(loss: PreferenceLoss, chosen: Completions, rejected: Completions) -> list[float]:
    found = []
    for i in range(len(chosen.policy)):
        c, r = float(chosen.policy[i]), float(rejected.policy[i])
        mean_c, mean_r = c / int(chosen.lengths[i]), r / int(rejected.lengths[i])
        if loss.kind == "simpo":
            found.append(-log_sigmoid(loss.beta * (mean_c - mean_r) - loss.margin))
            continue
        if loss.kind == "orpo":
            odds = [math.log(math.exp(m) / (1 - math.exp(m))) for m in (mean_c, mean_r)]
            found.append(-mean_c - loss.beta * log_sigmoid(odds[0] - odds[1]))
            continue
        assert chosen.reference is not None
        assert rejected.reference is not None
        ratio_c, ratio_r = c - float(chosen.reference[i]), r - float(rejected.reference[i])
        h, e = loss.beta * (ratio_c - ratio_r), loss.label_smoothing
        per_token = ratio_c / int(chosen.lengths[i]) - ratio_r / int(rejected.lengths[i])
        found.append(
            {
                "sigmoid": -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h),
                "robust": (-(1 - e) * log_sigmoid(h) + e * log_sigmoid(-h)) / (1 - 2 * e),
                "hinge": max(0.0, 1 - h),
                "ipo": (per_token - 1 / (2 * loss.beta)) ** 2,
            }[loss.kind]
        )
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "sigmoid"},
        {"kind": "sigmoid", "beta": 2.0, "label_smoothing": 0.2},
        {"kind": "robust", "label_smoothing": 0.1},
        {"kind": "hinge", "beta": 0.7},
        {"kind": "ipo", "beta": 0.3},
        {"kind": "simpo", "beta": 2.0, "margin": 0.5},
        {"kind": "orpo", "beta": 0.25},
    ],
    ids=str,
)
def test_a_preference_loss_is_its_formula(settings: dict[str, Any]) -> None:
    loss, chosen, rejected = PreferenceLoss(**settings), completions(1), completions(2)
    expected = torch.tensor(one_by_one(loss, chosen, rejected))
    torch.testing.assert_close(loss(chosen, rejected), expected, rtol=1e-4, atol=1e-5)


def test_before_the_first_step_the_policy_is_the_reference() -> None:
    """Then h is 0: the loss of DPO is ln 2, and its gradient draws pairs apart with beta / 2."""
    policy = (-drawn(5).abs() * 9).requires_grad_()
    other = (-drawn(5, seed=1).abs() * 9).requires_grad_()
    lengths = torch.full((5,), 7)
    chosen, rejected = (Completions(p, p.detach().clone(), lengths) for p in (policy, other))
    loss = PreferenceLoss(beta=0.1)(chosen, rejected)
    torch.testing.assert_close(loss, torch.full((5,), math.log(2)))
    loss.sum().backward()
    assert policy.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(policy.grad, torch.full((5,), -0.05))
    torch.testing.assert_close(other.grad, torch.full((5,), 0.05))
    assert (PreferenceLoss().rewards(chosen) == 0).all()


def test_losses_without_a_reference_ask_for_none_and_the_others_refuse() -> None:
    chosen, rejected = completions(1, reference=False), completions(2, reference=False)
    for kind in ("simpo", "orpo"):
        loss = PreferenceLoss(kind)  # type: ignore[arg-type]
        assert loss(chosen, rejected).isfinite().all()
        torch.testing.assert_close(loss.rewards(chosen), 0.1 * chosen.policy / chosen.lengths)
    with pytest.raises(ValueError, match="needs the log-probabilities of a reference"):
        PreferenceLoss()(chosen, rejected)


def test_log_odds_are_exact_near_certainty_and_impossibility() -> None:
    found = log_odds(torch.tensor([-1e-6, -100.0, -math.log(2)], dtype=torch.float64))
    expected = torch.tensor([math.log(1e6) - 5e-7, -100.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_kto_by_hand() -> None:
    found = completions(3)
    desirable = torch.tensor([True, False, True, False, False, True])
    for z in (0.4, -3.0):  # a negative estimate of a divergence counts as 0
        loss = kto_loss(found, desirable, torch.tensor(z), beta=0.5, weights=(1.0, 1.5))
        for i, ratio in enumerate(found.log_ratios.tolist()):
            away = (ratio - max(0.0, z)) * (1 if desirable[i] else -1)
            wanted = (1.0 if desirable[i] else 1.5) * (1 - 1 / (1 + math.exp(-0.5 * away)))
            assert float(loss[i]) == pytest.approx(wanted, rel=1e-5)


MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)


def test_advantages_are_the_sums_of_the_paper() -> None:
    """Sum over l of (gamma gae_lambda)^l times the error at the l-th token from there, over the tokens that count."""
    rewards, values = drawn(3, 6), drawn(3, 6, seed=1)
    spoiled = torch.where(MASK, rewards, torch.nan), torch.where(MASK, values, torch.nan)
    advantages, returns = generalised_advantages(*spoiled, MASK, gamma=0.9, gae_lambda=0.8)
    for row in range(3):
        places = MASK[row].nonzero()[:, 0].tolist()
        r, v = [float(rewards[row, t]) for t in places], [float(values[row, t]) for t in places] + [0.0]
        errors = [r[i] + 0.9 * v[i + 1] - v[i] for i in range(len(places))]
        for i, t in enumerate(places):
            wanted = sum((0.9 * 0.8) ** (n - i) * errors[n] for n in range(i, len(places)))
            assert float(advantages[row, t]) == pytest.approx(wanted, abs=1e-5)
            assert float(returns[row, t]) == pytest.approx(wanted + v[i], abs=1e-5)
    assert (advantages[~MASK] == 0).all()


def test_whitening_takes_mean_and_deviation_of_what_counts() -> None:
    values = torch.where(MASK, drawn(3, 6) * 3 + 7, torch.nan)
    found = whitened(values, MASK)
    assert float(found[MASK].mean()) == pytest.approx(0, abs=1e-6)
    assert float(found[MASK].std()) == pytest.approx(1, abs=1e-5)
    assert (found[~MASK] == 0).all()
    single = torch.zeros_like(MASK)
    single[0, 0] = True
    assert float(whitened(values, single)[0, 0]) == 0
    assert (whitened(values, torch.zeros_like(MASK)) == 0).all()


def test_groups_are_compared_within_themselves() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, 3.0, 6.0, 9.0]])
    root = math.sqrt(15)
    expected = torch.tensor(
        [[0.8660, -0.8660, -0.8660, 0.8660], [0, 0, 0, 0], [-4.5 / root, -1.5 / root, 1.5 / root, 4.5 / root]]
    )
    torch.testing.assert_close(group_advantages(rewards), expected.double(), rtol=1e-4, atol=1e-4)
    centred, left_out = group_advantages(rewards, scaled=False)[2], leave_one_out_advantages(rewards)[2]
    assert (centred.tolist(), left_out.tolist()) == ([-4.5, -1.5, 1.5, 4.5], [-6.0, -2.0, 2.0, 6.0])
    with pytest.raises(ValueError, match="a group needs at least two, got 1"):
        leave_one_out_advantages(rewards[:, :1])


@pytest.mark.parametrize("reward", [0.1, 0.7, 100.3])
def test_equal_rewards_have_no_advantage(reward: float) -> None:
    """The mean of eight times 0.7 is not 0.7 in binary numbers."""
    rewards = torch.full((1, 8), reward)
    for found in (
        group_advantages(rewards),
        group_advantages(rewards, scaled=False),
        leave_one_out_advantages(rewards),
        group_advantages(rewards.double()),
    ):
        assert found.tolist() == [[0.0] * 8]


def test_estimates_of_the_divergence_have_its_mean_or_its_gradient() -> None:
    """Of two distributions over five tokens, by the exact expectation over what the policy writes."""
    logits, other = drawn(5).double().requires_grad_(), drawn(5, seed=4).double()
    policy, reference = logits.log_softmax(0), other.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    ratios = policy - reference
    for kind in ("k1", "k3"):
        estimate = (policy.exp() * divergence(ratios, kind)).sum()  # type: ignore[arg-type]
        torch.testing.assert_close(estimate, exact)
    assert (divergence(ratios, "k3") >= 0).all()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    weighed = (policy.detach().exp() * divergence(ratios, "k2")).sum()
    (found,) = torch.autograd.grad(weighed, logits)
    torch.testing.assert_close(found, wanted)


def test_the_policy_loss_is_clipped_where_it_would_go_too_far() -> None:
    old, advantages = drawn(2, 3), torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
    ratios = torch.tensor([[1.5, 1.0, 0.5], [1.5, 1.0, 0.5]])
    new = (old + ratios.log()).requires_grad_()
    loss, clipped = clipped_policy_loss(new - old, advantages, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(loss.detach(), torch.tensor([[-1.3, -1.0, -0.5], [1.5, 1.0, 0.8]]))
    assert clipped.tolist() == [[True, False, False], [False, False, True]]
    loss.sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, -1.0, -0.5], [1.5, 1.0, 0.0]]))


def test_the_first_minibatch_has_the_ratio_1() -> None:
    log_probabilities = drawn(3, 4).requires_grad_()
    advantages = drawn(3, 4, seed=2)
    loss, clipped = clipped_policy_loss(log_probabilities - log_probabilities.detach(), advantages)
    torch.testing.assert_close(loss.detach(), -advantages)
    assert not clipped.any()
    loss.sum().backward()
    assert log_probabilities.grad is not None
    torch.testing.assert_close(log_probabilities.grad, -advantages)


def test_cispo_bounds_the_weight_of_a_token_and_keeps_its_gradient() -> None:
    new = drawn(1, 4).requires_grad_()
    ratios, advantages = torch.tensor([[1.5, 1.1, 0.5, 0.9]]), torch.tensor([[2.0, 2.0, -1.0, -1.0]])
    loss, clipped = bounded_weight_loss(new, new - new.detach() + ratios.log(), advantages, clip_low=0.2, clip_high=0.3)
    # MiniMax-M1, eq. 4: the clipped ratio, without a gradient, times the advantage times log pi.
    weights = torch.tensor([[1.3 * 2.0, 1.1 * 2.0, 0.8 * -1.0, 0.9 * -1.0]])
    torch.testing.assert_close(loss.detach(), -weights * new.detach())
    assert clipped.tolist() == [[True, False, True, False]]
    loss.sum().backward()
    torch.testing.assert_close(new.grad, -weights)


def test_losses_are_added_with_their_weights() -> None:
    chosen, rejected = completions(1), completions(2)
    kinds = {"sigmoid": 0.8, "ipo": 0.3, "simpo": 1.5}
    losses = {kind: PreferenceLoss(kind, 0.4, margin=0.2) for kind in kinds}  # type: ignore[arg-type]
    mixed = PairwisePreference([(weight, losses[kind]) for kind, weight in kinds.items()])
    singles = [one_by_one(loss, chosen, rejected) for loss in losses.values()]
    expected = [sum(w * x for w, x in zip(kinds.values(), each, strict=True)) for each in zip(*singles, strict=True)]
    assert mixed.of_pairs(chosen, rejected).tolist() == pytest.approx(expected, rel=1e-4)


def test_the_value_loss_takes_the_worse_of_free_and_clipped() -> None:
    old, returns = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, 0.1])
    values = torch.tensor([0.5, 0.1, 0.5, 0.15]).requires_grad_()
    loss = clipped_value_loss(values, old, returns, clip=0.2)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.8**2, 0.9**2, 1.5**2, 0.05**2]) / 2)
    torch.testing.assert_close(
        clipped_value_loss(values, old, returns, clip=None).detach(), torch.tensor([0.25, 0.81, 2.25, 0.0025]) / 2
    )


def test_the_reward_loss_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, 0.0]), torch.tensor([0.5, 1.0])
    found = pairwise_reward_loss(chosen, rejected, margin=torch.tensor([0.5, 0.0]), centring=0.01)
    expected = [-log_sigmoid(1.0) + 0.01 * 2.5**2, -log_sigmoid(-1.0) + 0.01]
    torch.testing.assert_close(found, torch.tensor(expected))
    torch.testing.assert_close(pairwise_reward_loss(chosen, chosen), torch.full((2,), math.log(2)))
