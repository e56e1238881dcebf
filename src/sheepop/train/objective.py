"""Objectives: functions from the model and a batch to the summed losses that a step minimises.

The objective of a network with experts also balances their loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sheepop.data import Batch
from sheepop.model import IGNORE_INDEX, LossSums, LossTerms, ModelConfig, Outputs
from sheepop.model.experts import Routing
from sheepop.model.sections import ExpertsConfig
from sheepop.train.config import TrainingConfig
from sheepop.train.placement import Network, Placement
from sheepop.train.tensor_batch import TensorBatch

LOADS = "expert_loads"
BALANCE, ROUTER_Z = "load_balancing_loss", "router_z_loss"


@dataclass(frozen=True, eq=False)
class StepLoss:
    """The losses of one optimizer step, still on the device; reading them waits for the step."""

    sums: Tensor  # (2,): the sums of the objective and of the cross-entropy over all supervised tokens
    num_tokens: int
    measured: Mapping[str, Tensor] = field(default_factory=dict)  # as in `LossSums`, summed over the micro-batches

    def means(self) -> tuple[float, float]:
        """The mean objective and the cross-entropy, in nats per token."""
        objective, cross_entropy = self.sums.tolist()
        return objective / max(1, self.num_tokens), cross_entropy / max(1, self.num_tokens)


class Objective(Protocol):
    """The summed loss of a micro-batch; a step of several micro-batches divides it once by all its tokens.

    Inherit the last four methods: their bodies are right for most objectives.
    """

    def supervised(self, batch: Batch) -> int:
        """The number of units (positions, or pairs) in the batch that the mean loss is taken over."""

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The sums, over the supervised positions, of the objective and of the cross-entropy to report."""

    def of_step(self, network: Network, batches: Iterable[TensorBatch], total: Callable[[Tensor], Tensor]) -> Objective:
        """The objective for the `batches` of one step; called without gradients, before any loss of the step.

        `batches` are on the device, and `total` sums over all ranks.
        """
        return self

    def layer_sums(self, network: Network, batch: TensorBatch, routings: Mapping[int, Routing]) -> LossSums:
        """The losses of layers with experts, by their number among these layers, if `network` does not return them."""
        raise ValueError("this objective has no losses for layers with experts")

    def step_taken(self, placement: Placement, losses: StepLoss) -> None:
        """Called after the optimizer has taken the step of these losses."""
        return

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """The metrics to log in addition to the cross-entropy."""
        return {}


@dataclass(frozen=True)
class NextToken(Objective):
    """The objective of pre-training: cross-entropy of the next token, plus the losses in `terms`."""

    terms: LossTerms = field(default_factory=LossTerms)

    @classmethod
    def configured(cls, config: TrainingConfig) -> NextToken:
        """The objective with the terms of a run's configuration."""
        return cls(LossTerms(z_loss=config.z_loss, label_smoothing=config.label_smoothing))

    def supervised(self, batch: Batch) -> int:
        """The number of positions whose label is not -100."""
        return int(np.count_nonzero(batch.labels != IGNORE_INDEX))

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """``-sum log p(label)`` over those positions, with and without the added terms."""
        hidden_BTD = network.hidden_states(batch.inputs)
        return network.head.cross_entropy(hidden_BTD, batch.labels, self.terms, batch.supervised)

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """The objective, if it is not the cross-entropy."""
        return {} if self.terms == LossTerms() else {"objective": losses.means()[0]}


OBJECTIVES: dict[str, Callable[[TrainingConfig], Objective]] = {"next_token": NextToken.configured}
"""The objectives that `training.objective` can name, as functions of the training settings."""


def with_experts(objective: Objective, config: ModelConfig) -> Objective:
    """Returns `objective`, wrapped in `BalancedExperts` if the network has experts."""
    if config.experts is None:
        return objective
    num_layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    return BalancedExperts(objective, config.experts, num_layers)


@dataclass(frozen=True)
class BalancedExperts(Objective):
    """An objective plus the losses of the routers of `num_layers` layers.

    It adds, for every token, the mean over the layers of ``a E sum_e f_e P_e + b mean(logsumexp(logits)^2)``, where a
    and b are `experts.load_balancing_loss` and `experts.router_z_loss`; see `sheepop.model.experts.Routing`. Only
    supervised positions count. The second term is a sum over tokens, so it does not depend on how a step is cut into
    micro-batches; the first term balances the loads within each micro-batch.
    """

    objective: Objective
    config: ExpertsConfig
    num_layers: int

    def supervised(self, batch: Batch) -> int:
        """The number that the wrapped objective returns."""
        return self.objective.supervised(batch)

    def of_step(self, network: Network, batches: Iterable[TensorBatch], total: Callable[[Tensor], Tensor]) -> Objective:
        """The wrapped objective for the step, with the losses of the routers."""
        return replace(self, objective=self.objective.of_step(network, batches, total))

    def loss_sums(self, network: Network, batch: TensorBatch) -> LossSums:
        """The objective's sums plus the routers' losses; ``expert_loads`` (L, E) counts the tokens of each expert.

        Raises `RuntimeError` if the objective does not run the network exactly once.
        """
        recording = _Recording(network)
        sums = self.objective.loss_sums(recording, batch)
        routings = recording.only_run().routings
        if not routings:
            return sums  # the ranks that have these layers call `layer_sums`
        added = self.layer_sums(network, batch, dict(enumerate(routings)))
        return LossSums(sums.objective + added.objective, sums.cross_entropy, {**sums.measured, **added.measured})

    def layer_sums(self, network: Network, batch: TensorBatch, routings: Mapping[int, Routing]) -> LossSums:
        """The routers' losses of some of the layers, and their loads, with 0 for the other layers."""
        places = batch.supervised
        num_tokens = batch.labels.numel() if isinstance(places, slice) else places.numel()
        found = [routing.of(places) for routing in routings.values()]
        share = len(found) / self.num_layers
        counts_LE = torch.stack([routing.counts for routing in found])
        of_rows_LE = network.over_rows(counts_LE)
        all_L = [None] * len(found) if of_rows_LE is counts_LE else list(of_rows_LE)
        balances = [routing.load_balancing_loss(of_all) for routing, of_all in zip(found, all_L, strict=True)]
        balance = num_tokens * torch.stack(balances).mean() * share
        router_z = num_tokens * torch.stack([routing.z_loss() for routing in found]).mean() * share
        loads_LE = counts_LE.new_zeros(self.num_layers, counts_LE.shape[1])
        loads_LE[list(routings)] = counts_LE
        measured = {BALANCE: balance.detach(), ROUTER_Z: router_z.detach(), LOADS: loads_LE}
        added = self.config.load_balancing_loss * balance + self.config.router_z_loss * router_z
        return LossSums(added, torch.zeros_like(added), measured)

    @torch.no_grad()
    def step_taken(self, placement: Placement, losses: StepLoss) -> None:
        """Changes the bias of every expert by `experts.bias_update_rate` to balance the loads (Wang et al. 2024)."""
        self.objective.step_taken(placement, losses)
        if self.config.bias_update_rate:
            for mixture, loads_E in zip(placement.model.mixtures.values(), losses.measured[LOADS], strict=True):
                # In whole numbers, so that the sign of the distance from the mean is exact.
                direction_E = torch.sign(loads_E.sum() - len(loads_E) * loads_E)
                mixture.router.balance.add_(direction_E, alpha=self.config.bias_update_rate)

    def metrics(self, losses: StepLoss) -> dict[str, Any]:
        """The objective, the routers' losses, and the greatest and the least load, overall and by layer.

        A load is an expert's share of a layer's tokens times the number of experts: 1 is even.
        """
        loads_LE = losses.measured[LOADS].double()
        relative_LE = loads_LE * loads_LE.shape[1] / loads_LE.sum(1, keepdim=True).clamp(min=1)
        most_L, least_L = relative_LE.amax(1).tolist(), relative_LE.amin(1).tolist()
        return {
            **self.objective.metrics(losses),
            "objective": losses.means()[0],
            **{name: losses.measured[name].item() / max(1, losses.num_tokens) for name in (BALANCE, ROUTER_Z)},
            "expert_load_max": max(most_L),
            "expert_load_min": min(least_L),
            "expert_load_max_by_layer": most_L,
            "expert_load_min_by_layer": least_L,
        }


class _Recording:
    """A network for one call of an objective; it keeps the outputs of its forward passes."""

    def __init__(self, network: Network) -> None:
        self.head, self.modules, self.over_rows = network.head, network.modules, network.over_rows
        self._network = network
        self._runs: list[Outputs] = []

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        self._runs.append(self._network.run(inputs))
        return self._runs[-1]

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        return self.run(inputs).hidden_states

    def only_run(self) -> Outputs:
        if len(self._runs) != 1:
            raise RuntimeError(
                f"the objective ran the network {len(self._runs)} times for a micro-batch; the losses of the routers "
                "need exactly one pass over its tokens"
            )
        return self._runs[0]
