"""The placement for a pipeline: each rank has some of the layers, and micro-batches pass from rank to rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sheepop.model import LossSums, Outputs, Transformer
from sheepop.model.experts import Routing
from sheepop.model.head import OutputHead
from sheepop.parallel.layout import PIPELINE
from sheepop.parallel.pipeline import Pipeline, Stage
from sheepop.train.placement import Pass
from sheepop.train.sharded import ShardedModel
from sheepop.train.tensor_batch import TensorBatch

_TIED = "embedding.weight"


class PipelinedModel(ShardedModel):
    """A `ShardedModel` with this rank's stages of a pipeline; the parameters of other stages are empty here.

    A weight that embedding and head share is in the first and in the last stage, which sum their gradients.
    """

    # `_cut`, which the constructor calls, makes these.
    _pipeline: Pipeline
    _has_start: bool
    _has_end: bool
    _forms: dict[str, tuple[torch.Size, torch.dtype]] | None  # shapes and types of the metrics of all ranks
    _ends: dist.ProcessGroup | None  # the ranks with the first and the last stage, if they share a weight

    def _cut(self, network: Transformer, mesh: DeviceMesh) -> Sequence[Transformer]:
        config, group = self.layout.config, mesh[PIPELINE].get_group()
        self._pipeline = Pipeline(network, config, group, self.device, self._dtype or torch.float32)
        for stage in self._pipeline.stages:
            stage.arithmetic = self.arithmetic
        self._has_start = any(stage.is_first for stage in self._pipeline.stages)
        self._has_end = any(stage.is_last for stage in self._pipeline.stages)
        self._forms = None
        # Every rank must create all groups.
        size, ends = self.layout.stage_size, []
        if network.config.tie_weights and config.stages_of(0)[-1] != config.num_stages - 1:
            ends = [[place, place + size * (config.pipeline - 1)] for place in range(size)]
        groups = [dist.new_group(ranks) for ranks in ends]
        is_end = self._has_start or self._has_end
        self._ends = groups[self.layout.ranks.rank % size] if groups and is_end else None
        return self._pipeline.stages

    def _names(self, part: Transformer) -> list[str]:
        return [cast(Stage, part).name_in_network(name) for name in super()._names(part)]

    def _group(self, mesh: DeviceMesh) -> dist.ProcessGroup | None:
        return mesh[PIPELINE].get_group()

    def _counts(self, name: str) -> bool:
        return super()._counts(name) and (name != _TIED or self._has_start)

    def begin_step(self) -> None:
        """Updates the second copy of a tied weight, if both are here."""
        for parameter, spread in self._spread:
            piece = spread.to_local()
            if piece.data_ptr() != parameter.data_ptr():
                piece.detach().copy_(parameter.data)

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        """Raises `RuntimeError`, because no rank computes a whole pass."""
        raise RuntimeError("a pipeline runs whole steps: see compute")

    def compute(self, batches: Sequence[TensorBatch], pass_of: Pass) -> list[LossSums]:
        """Runs all stages in the order of `parallel.schedule`; ranks without the last stage return losses of 0."""
        batches = [batch.to(self.device) for batch in batches]
        *groups, num_tokens = batches[0].labels.shape
        if any(batch.labels.shape != batches[0].labels.shape for batch in batches):
            raise RuntimeError("the micro-batches of a step do not have one shape")
        shape = math.prod(groups), num_tokens // self.layout.config.tensor
        found: dict[int, LossSums] = {}

        def end(hidden_BTD: Tensor, number: int) -> Tensor:
            self._cast_head()
            arrived_BTD = hidden_BTD.detach().requires_grad_()
            ended = _End(self.head, self._parts[-1], arrived_BTD, self.over_rows)
            found[number] = pass_of(number, batches[number], ended).back()
            assert arrived_BTD.grad is not None
            return arrived_BTD.grad

        def loss_of_experts(stage: Stage, routings: tuple[Routing, ...], number: int) -> Tensor:
            here = [layer + stage.layers_here.start for layer in stage.mixtures]
            numbers = [layer_numbers.index(layer) for layer in here]
            loss = pass_of.of_layers(number, batches[number], self, dict(zip(numbers, routings, strict=True)))
            added[stage.layers_here.start, number] = loss.sums._replace(objective=loss.sums.objective.detach())
            return loss.scaled

        layer_numbers = list(self.model.mixtures)
        added: dict[tuple[int, int], LossSums] = {}
        for stage in self._pipeline.stages:
            stage.loss_of_experts = loss_of_experts
        self._pipeline.run(len(batches), shape, lambda number: self._of_this_rank(batches[number].rows), end)
        self._hand_over()
        if self._ends is not None and (tied := self.model.get_parameter(_TIED)).requires_grad:
            if tied.grad is None:  # a reward model does not use its output projection
                tied.grad = torch.zeros_like(tied)
            dist.all_reduce(tied.grad, group=self._ends)
        return self._known_to_all([sums for _, sums in [*sorted(found.items()), *sorted(added.items())]])

    def _known_to_all(self, losses: list[LossSums]) -> list[LossSums]:
        """Adds zeros for the metrics of other stages, so that all ranks reduce the same metrics."""
        if self._forms is None:
            forms = {name: (value.shape, value.dtype) for sums in losses for name, value in sums.measured.items()}
            self._forms = {name: form for others in self.pieces.told(forms) for name, form in others.items()}
        zeros = {
            name: torch.zeros(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in self._forms.items()
        }
        nothing = torch.zeros((), device=self.device)
        return [*losses, LossSums(nothing, nothing, zeros)]


@dataclass(frozen=True)
class _End:
    """A network whose only forward pass has already been computed up to the hidden states."""

    head: OutputHead
    modules: Transformer
    arrived: Tensor
    over_rows: Callable[[Tensor], Tensor]

    def run(self, inputs: Mapping[str, Any]) -> Outputs:
        return Outputs(self.arrived, ())

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        return self.arrived
