"""The objective of PPO and GRPO, and what they make of rewards, against loops over plain numbers."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from sheepop.core.errors import ConfigError
from sheepop.model import IGNORE_INDEX, ModelConfig, Transformer, build_model
from sheepop.posttrain.config import GRPOConfig, PPOConfig
from sheepop.posttrain.conversations import Transcript
from sheepop.posttrain.policy import ADVANTAGES, OLD, REFERENCE, WEIGHTS, AnswerBatch, PolicyObjective, repetition
from sheepop.posttrain.reward_methods import GroupPolicy, ProximalPolicy, token_rewards
from sheepop.posttrain.rewards import Answer, Written
from sheepop.posttrain.rollouts import cut_by_tokens
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import FinishedNetwork

LENGTHS, PROMPTS = [5, 9, 3, 7], [2, 4, 1, 3]


@pytest.fixture(scope="module")
def model() -> Transformer:
    sizes: dict[str, Any] = {"vocab_size": 30, "d_model": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 16}
    return build_model(ModelConfig(**sizes, dropout=0.0), seed=3, device="cpu").eval()


def answers(seed: int = 0, **numbers: float) -> AnswerBatch:
    """Four answers of different lengths, with numbers drawn for each of their tokens."""
    draw = np.random.default_rng(seed)
    ids, labels = np.zeros((4, 9), np.int64), np.full((4, 9), IGNORE_INDEX, np.int64)
    for row, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        ids[row, :length] = draw.integers(1, 30, length)
        labels[row, prompt - 1 : length - 1] = ids[row, prompt:length]
    found = {name: draw.normal(0, scale, (4, 9)).astype(np.float32) for name, scale in numbers.items()}
    return AnswerBatch.of(ids, labels, np.array(LENGTHS), {WEIGHTS: np.ones((4, 9), np.float32), **found})


def log_probabilities(model: Transformer, batch: AnswerBatch, temperature: float) -> list[list[float]]:
    """For each answer the log-probability of each of its tokens, one unpadded answer after the other, in float64."""
    found = []
    for row, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        ids = torch.from_numpy(batch.input_ids[row : row + 1, :length])
        with torch.no_grad():
            log_p = (model(ids)[0].double() / temperature).log_softmax(-1)
        found.append([float(log_p[t - 1, ids[0, t]]) for t in range(prompt, length)])
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_is_that_of_a_loop_over_tokens(model: Transformer, temperature: float) -> None:
    batch = answers(**{ADVANTAGES: 1.0, OLD: 0.3, REFERENCE: 0.3})
    truth = log_probabilities(model, batch, temperature)
    for row, (prompt, found) in enumerate(zip(PROMPTS, truth, strict=True)):
        for name in (OLD, REFERENCE):  # near the present ones, on both sides of the clips
            batch.numbers[name][row, prompt - 1 : prompt - 1 + len(found)] += np.array(found, np.float32)
    objective = PolicyObjective(temperature=temperature, clip_low=0.1, clip_high=0.3, entropy_coef=0.05, kl_coef=0.2)
    expected = clipped = 0.0
    for row, (prompt, found) in enumerate(zip(PROMPTS, truth, strict=True)):
        for place, log_p in enumerate(found):
            t = prompt - 1 + place
            advantage, old, reference = (float(batch.numbers[name][row, t]) for name in (ADVANTAGES, OLD, REFERENCE))
            ratio = math.exp(log_p - old)
            bounded = min(max(ratio, 0.9), 1.3)
            expected += max(-advantage * ratio, -advantage * bounded)
            clipped += -advantage * bounded > -advantage * ratio
            expected += 0.05 * log_p**2 / 2
            r = log_p - reference
            expected += 0.2 * (math.exp(-r) - 1 + r)
    sums = objective.loss_sums(FinishedNetwork(model), TensorBatch.from_numpy(batch, "cpu"))
    assert sums.objective.item() == pytest.approx(expected, rel=1e-4)
    assert sums.measured["clipped"].item() == clipped > 0
    assert sums.measured["tokens"].item() == sum(map(len, truth)) == objective.supervised(batch)


@pytest.mark.parametrize("surrogate", ["clipped", "cispo"])
def test_the_ratio_of_an_answer_is_the_geometric_mean_of_its_tokens(model: Transformer, surrogate: Any) -> None:
    """GSPO (Zheng et al. 2025, eq. 5 to 7), in a loop; also as the weight of CISPO."""
    batch = answers(**{ADVANTAGES: 0.0, OLD: 0.3})
    truth, expected = log_probabilities(model, batch, 1.0), 0.0
    for row, (prompt, found) in enumerate(zip(PROMPTS, truth, strict=True)):
        places = slice(prompt - 1, prompt - 1 + len(found))
        batch.numbers[OLD][row, places] += np.array(found, np.float32)
        advantage = (1.5, -1.0, 0.5, -2.0)[row]
        batch.numbers[ADVANTAGES][row] = advantage
        batch.numbers[WEIGHTS][row] = 1 / len(found)
        old = batch.numbers[OLD][row, places].astype(float)
        ratio = math.exp(sum(new - before for new, before in zip(found, old, strict=True)) / len(found))
        bounded = min(max(ratio, 0.97), 1.04)
        if surrogate == "cispo":
            expected += sum(-advantage * bounded * log_p for log_p in found) / len(found)
        else:
            expected += max(-advantage * ratio, -advantage * bounded)
    objective = PolicyObjective(clip_low=0.03, clip_high=0.04, surrogate=surrogate, of_answers=True)
    sums = objective.loss_sums(FinishedNetwork(model), TensorBatch.from_numpy(batch, "cpu"))
    assert sums.objective.item() == pytest.approx(expected, rel=1e-4)


def test_the_divergence_from_the_old_policy_is_that_of_its_samples(model: Transformer) -> None:
    batch = answers(**{ADVANTAGES: 1.0, OLD: 0.0})
    new = log_probabilities(model, batch, 1.0)
    draw, expected = np.random.default_rng(8), 0.0
    for row, (prompt, found) in enumerate(zip(PROMPTS, new, strict=True)):
        for place, log_p in enumerate(found):
            old = log_p + draw.normal(0, 0.5)
            batch.numbers[OLD][row, prompt - 1 + place] = old
            # An unbiased estimate of KL(old, new) on a sample of old: the ratio of new to old, minus 1, minus its log.
            expected += math.exp(log_p - old) - 1 - (log_p - old)
    sums = PolicyObjective().loss_sums(FinishedNetwork(model), TensorBatch.from_numpy(batch, "cpu"))
    assert sums.measured["divergence_from_old"].item() == pytest.approx(expected, rel=1e-4)


def test_padding_makes_no_difference_to_losses_or_gradients(model: Transformer) -> None:
    batch, objective = answers(**{ADVANTAGES: 1.0}), PolicyObjective(clip_low=0.2)
    found = []
    for pieces in ([slice(0, 4)], [slice(row, row + 1) for row in range(4)]):
        model.zero_grad()
        total = 0.0
        for piece in pieces:
            sums = objective.loss_sums(FinishedNetwork(model), TensorBatch.from_numpy(batch.rows(piece), "cpu"))
            sums.objective.backward()
            total += sums.objective.item()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        found.append((total, gradients))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_entropy_term_has_the_gradient_of_the_entropy() -> None:
    """Over all outcomes of a small distribution: E[(log p) grad log p] = -grad H."""
    logits = torch.tensor([0.3, -1.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad(-(log_p.exp() * log_p).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((log_p.exp().detach() * log_p.square() / 2).sum(), logits)
    torch.testing.assert_close(found, -expected)


def written(rewards: list[float], finished: list[bool] | None = None) -> Written:
    count = len(rewards)
    made = [Answer("p", "a", list(range(LENGTHS[n % 4]))) for n in range(count)]
    prompts = [Transcript(made[n].token_ids, [(PROMPTS[n % 4], LENGTHS[n % 4])]) for n in range(count)]
    logprobs = [[-0.5 - place / 8 for place in range(LENGTHS[n % 4] - PROMPTS[n % 4])] for n in range(count)]
    parts = [{"check.py": reward} for reward in rewards]
    return Written(made, prompts, finished or [True] * count, rewards, parts, logprobs)


def mask_of(count: int) -> torch.Tensor:
    mask = torch.zeros(count, 9, dtype=torch.bool)
    for row in range(count):
        mask[row, PROMPTS[row % 4] - 1 : LENGTHS[row % 4] - 1] = True
    return mask


def test_the_reward_comes_with_the_last_token_and_each_pays_for_its_divergence() -> None:
    mask, price = mask_of(4), torch.full((4, 9), 0.5)
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask, price)
    for row in range(4):
        own = rewards[row][mask[row]].tolist()
        assert own == pytest.approx([-0.5] * (len(own) - 1) + [row + 1 - 0.5])
    assert rewards[~mask].abs().max() == 0


def test_rewards_are_normalised_over_all_answers_so_far_and_penalties_come_after() -> None:
    config = PPOConfig(missing_eos_penalty=2.0, kl_coef=0, gamma=1, gae_lambda=1, whiten=False)
    method, mask, zeros = ProximalPolicy(config), mask_of(4), torch.zeros(4, 9)
    seen: list[float] = []
    for rewards in ([3.0, 5.0, 11.0, -2.0], [100.0, 101.0, 99.5, 98.0]):
        is_finished = [True, True, False, True]
        found = method.numbers(written(rewards, is_finished), mask, zeros, None, zeros)["returns"]
        seen += rewards
        expected = [(reward - statistics.mean(seen)) / statistics.stdev(seen) for reward in rewards]
        expected[2] -= 2.0
        for row in range(4):
            assert found[row][mask[row]].tolist() == pytest.approx([expected[row]] * int(mask[row].sum()), rel=1e-5)
        method = again(method, config)


def test_equal_rewards_say_nothing() -> None:
    method, mask, zeros = ProximalPolicy(PPOConfig(whiten=False)), mask_of(4), torch.zeros(4, 9)
    assert method.numbers(written([0.1] * 4), mask, zeros, zeros, zeros)["returns"].abs().max() < 1e-6


def again(method: ProximalPolicy, config: PPOConfig) -> ProximalPolicy:
    """The method as a resumed run has it."""
    other = ProximalPolicy(config)
    other.restore(method.state())
    return other


def test_a_target_needs_a_weight_to_adapt() -> None:
    with pytest.raises(ConfigError, match="kl_target adapts kl_coef, which is 0"):
        PPOConfig(kl_coef=0, kl_target=2.0)


def test_the_price_of_divergence_follows_its_target() -> None:
    method = ProximalPolicy(PPOConfig(kl_coef=0.1, kl_target=2.0, kl_horizon=100))
    mask = mask_of(4)
    log_p, values = torch.where(mask, 1.0, 0.0), torch.zeros(4, 9)
    method.numbers(written([0.0] * 4), mask, log_p, torch.zeros(4, 9), values)
    # 14 tokens of 1 nat in 4 answers are 3.5, more than 0.2 above 2: the error is cut to 0.2.
    assert method.metrics()["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
    assert again(method, PPOConfig(kl_coef=0.1, kl_target=2.0)).metrics() == method.metrics()


@pytest.mark.parametrize(
    ("loss_type", "weights"),
    [("dapo", [1, 1, 1, 1]), ("grpo", [1 / 3, 1 / 5, 1 / 2, 1 / 4]), ("dr_grpo", [1 / 8] * 4)],
)
def test_weights_say_what_a_step_is_a_mean_of(loss_type: str, weights: list[float]) -> None:
    config = GRPOConfig(group_size=2, loss_type=loss_type, max_new_tokens=8, baseline="centred")  # type: ignore[arg-type]
    method, mask = GroupPolicy(config), mask_of(4)
    judged = written([1.0, 0.0, 0.0, 4.0])
    judged = judged.learnt_from(method.advantages(judged))
    numbers = method.numbers(judged, mask, torch.zeros(4, 9), None, None)
    for row, (weight, advantage) in enumerate(zip(weights, [0.5, -0.5, -2.0, 2.0], strict=True)):
        assert numbers[WEIGHTS][row][mask[row]].tolist() == pytest.approx([weight] * int(mask[row].sum()))
        assert numbers[ADVANTAGES][row][mask[row]].tolist() == pytest.approx([advantage] * int(mask[row].sum()))


def test_equal_groups_and_truncated_answers_are_left_out_where_asked() -> None:
    rewards, finished = [1.0, 1.0, 0.0, 1.0], [True, True, True, False]
    keep = GroupPolicy(GRPOConfig(group_size=2, baseline="centred"))
    assert keep.advantages(written(rewards, finished)) == [0.0, 0.0, -0.5, 0.5]
    leave = GroupPolicy(
        GRPOConfig(group_size=2, baseline="centred", equal_groups="leave_out", truncated_answers="leave_out")
    )
    assert leave.advantages(written(rewards, finished)) == [None, None, -0.5, None]
    missing = [math.nan, 1.0, 4.0, math.nan, 2.0, math.nan]
    of_three = {name: GroupPolicy(GRPOConfig(group_size=3, baseline=name)) for name in ("centred", "leave_one_out")}  # type: ignore[arg-type]
    assert of_three["centred"].advantages(written(missing)) == [None, -1.5, 1.5, None, 0.0, None]
    assert of_three["leave_one_out"].advantages(written(missing)) == [None, -3.0, 3.0, None, 0.0, None]
    punished = GroupPolicy(GRPOConfig(group_size=2, baseline="leave_one_out", missing_eos_penalty=3.0))
    assert punished.advantages(written(rewards, finished)) == [0.0, 0.0, 2.0, -2.0]


def test_repetition_counts_what_stood_before() -> None:
    assert repetition([1, 2, 3]) == 0
    assert repetition([1, 2, 3, 4, 5, 6]) == 0
    assert repetition([1] * 7) == 3 / 4


def test_a_long_answer_loses_reward_evenly_within_the_buffer() -> None:
    """Yu et al. 2025, eq. 13, with answers of 3, 5, 2 and 4 tokens: from 3 on, each costs a third of 1.5."""
    config = GRPOConfig(group_size=4, baseline="centred", max_new_tokens=5, overlong_buffer=3, overlong_penalty=1.5)
    rewards = [1.0 - 0.5, 2.0 - 1.5, 0.0, 1.0 - 1.0]
    found = GroupPolicy(config).advantages(written([1.0, 2.0, 0.0, 1.0]))
    assert found == pytest.approx([reward - sum(rewards) / 4 for reward in rewards])
    with pytest.raises(ValueError, match="below max_new_tokens = 5"):
        GRPOConfig(max_new_tokens=5, overlong_buffer=5)


def test_tokens_are_weighted_by_their_probability_in_training_over_that_in_the_sampler() -> None:
    config = GRPOConfig(group_size=2, loss_type="dapo", sampler_ratio_cap=1.2)
    made, mask = written([1.0, 0.0, 1.0, 0.0]).learnt_from([1.0] * 4), mask_of(4)
    log_p = torch.full((4, 9), torch.nan)
    expected = torch.zeros(4, 9)
    draw = np.random.default_rng(2)
    for row in range(4):
        for place, sampled in enumerate(made.logprobs[row]):
            t = PROMPTS[row] - 1 + place
            log_p[row, t] = sampled + draw.normal(0, 0.4)
            expected[row, t] = min(math.exp(float(log_p[row, t]) - sampled), 1.2)
    method = GroupPolicy(config)
    torch.testing.assert_close(method.numbers(made, mask, log_p, None, None)[WEIGHTS], expected)
    assert method.metrics()["sampler_ratio_max"] == pytest.approx(
        max(math.exp(float(log_p[row, PROMPTS[row] - 1 + place]) - sampled)
            for row in range(4) for place, sampled in enumerate(made.logprobs[row]))
    )  # fmt: skip
    with pytest.raises(ValueError, match="at temperature 1"):
        GRPOConfig(sampler_ratio_cap=2.0, temperature=0.7)


def test_answers_of_like_length_share_a_micro_batch() -> None:
    lengths, chosen = np.array([5, 9, 3, 7, 20, 3]), np.array([5, 0, 1, 2, 3, 4])
    # Two of 9 are 18 tokens, and one of 20 is too many, but cannot be cut.
    assert [piece.tolist() for piece in cut_by_tokens(chosen, lengths, 18)] == [[4], [1, 3], [0, 5, 2]]
    assert cut_by_tokens(chosen[:0], lengths, 18) == []


def test_the_samplers_probabilities_stand_at_their_tokens() -> None:
    made, mask = written([1.0, 0.0, 1.0, 0.0]), mask_of(4)
    found = made.log_probabilities(mask)
    for row in range(4):
        assert found[row][mask[row]].tolist() == pytest.approx(made.logprobs[row])
    assert found[~mask].abs().max() == 0
