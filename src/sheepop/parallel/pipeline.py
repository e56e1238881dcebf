"""Pipeline parallelism: each rank has some of the layers, and micro-batches go from one stage to the next and back.

Torch orders the passes of a rank and sends its tensors. The orders are: all forward passes before all backward passes
(Huang et al. 2019, "GPipe"), one of each in turn (Narayanan et al. 2019, "PipeDream", 1F1B), the same with several
stages a rank (Narayanan et al. 2021, section 2.2), or with the gradients of weights postponed to when a rank would wait
(Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ZB-V). Stages exchange the residual stream and its gradient; every
rank has the tokens of its rows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.model import Transformer
from sheepop.model.cache import Cache
from sheepop.model.experts import Routing
from sheepop.parallel.collectives import exchanged
from sheepop.parallel.config import ParallelConfig

# If a rank is lost, the others would log the whole order in addition to the error.
logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)

SCHEDULES: Mapping[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleZBVZeroBubble,
}
"""Torch's schedules by the names in the configuration."""
OF_THE_FIRST = ("embedding", "ngrams", "embedding_norm", "added_positions")
OF_THE_LAST = ("final_norm", "lm_head", REWARD_HEAD)
"""The modules outside the layers that only the first and only the last stage have."""
Inputs = Callable[[int], Mapping[str, Any]]
"""Maps the number of a micro-batch to the arguments of `Transformer.run`."""


def layers_of(stage: int, num_stages: int, num_layers: int) -> range:
    """Returns the layers of a stage; if they do not divide, the first stages have one more: the last has the head."""
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def in_flight(config: ParallelConfig, rank: int, count: int) -> tuple[int, ...]:
    """Returns the most of `count` micro-batches that each stage of a rank keeps at a time.

    ``1f1b`` runs forward passes until the first micro-batch comes back (Narayanan et al. 2019). With two stages a rank,
    the number of passes before that follows Narayanan et al. 2021, section 2.2, and Qi et al. 2024, section 6.
    """
    size = config.pipeline
    if config.schedule == "gpipe":
        return (count,)
    if config.schedule == "1f1b":
        return (min(count, size - rank),)
    if config.schedule == "zero_bubble":
        return min(count, 2 * size - 1 - rank), min(count, rank + 1)
    in_a_round = count // max(1, count // size)
    passes = min(2 * count, in_a_round + 2 * (size - 1 - rank) + 1)
    behind = sum(number // in_a_round % 2 for number in range(passes))
    return passes - behind, behind


class Stage(Transformer):
    """Some layers of a network; the first stage also has the embedding, and the last one the final norm and the head.

    `inputs_of` gives the inputs of a micro-batch other than the residual stream, `arithmetic` is the context of its
    passes, and `loss_of_experts` computes what its layers with experts add to the loss.
    """

    inputs_of: Inputs
    loss_of_experts: Callable[[Stage, tuple[Routing, ...], int], Tensor]
    arithmetic: Callable[[], AbstractContextManager[None]]
    is_first: bool
    is_last: bool
    layers_here: range

    @classmethod
    def of(cls, network: Transformer, layers: range) -> Stage:
        """Returns the stage with `layers` of `network`; the modules that hold weights are shared with it."""
        stage = copy.copy(network)
        stage._modules, stage._buffers = network._modules.copy(), network._buffers.copy()
        stage.__class__ = cls
        assert isinstance(stage, cls)
        stage.layers_here = layers
        stage.is_first, stage.is_last = layers.start == 0, layers.stop == len(network.blocks)
        stage.blocks = nn.ModuleList(network.blocks[layer] for layer in layers)
        stage.kinds = network.kinds[layers.start : layers.stop]
        for name in [*(() if stage.is_first else OF_THE_FIRST), *(() if stage.is_last else OF_THE_LAST)]:
            setattr(stage, name, None)
        return stage

    def name_in_network(self, name: str) -> str:
        """Returns the name that a parameter of this stage has in the whole network."""
        words = name.split(".")
        if words[0] == "blocks":
            words[1] = str(int(words[1]) + self.layers_here.start)
        return ".".join(words)

    def forward(self, arrived: Tensor, number: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the residual stream (B, T, D) after these layers, normalised after the last.

        `arrived` is the residual stream before them; the first stage ignores it.
        """
        self._arrived = arrived
        with self.arithmetic():
            hidden_BTD, routings = super().run(**self.inputs_of(int(number)))
        if not routings:
            return hidden_BTD
        added = self.loss_of_experts(self, routings, int(number))
        found: Tensor = _With.apply(hidden_BTD, added)  # type: ignore[no-untyped-call]
        return found

    def enter(
        self, input_ids: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Returns the residual stream that arrived, or in the first stage the embeddings."""
        return super().enter(input_ids, positions, documents, cache) if self.is_first else self._arrived

    def finish(self, x_BTD: Tensor) -> Tensor:
        """Applies the final norm in the last stage."""
        return super().finish(x_BTD) if self.is_last else x_BTD

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next(self.parameters()).device


class Pipeline:
    """This rank's stages of `network`, and torch's schedule for them; the ranks of one pipeline are `group`.

    The residual stream has the data type `dtype`.
    """

    def __init__(
        self, network: Transformer, config: ParallelConfig, group: dist.ProcessGroup, device: str, dtype: torch.dtype
    ) -> None:
        self.config, self.group, self.device, self.dtype = config, group, device, dtype
        self._numbers = config.stages_of(dist.get_rank(group))
        layers = [layers_of(number, config.num_stages, len(network.blocks)) for number in self._numbers]
        self.stages = [Stage.of(network, each) for each in layers]
        self._shape: tuple[int, ...] = ()
        self._schedule: Any = None

    def run(self, count: int, shape: tuple[int, int], inputs_of: Inputs, end: Callable[[Tensor, int], Tensor]) -> None:
        """Runs forward and backward passes of `count` micro-batches of `shape` (B, T), and adds to the gradients.

        `end` takes the last stage's hidden states of a micro-batch and its number, and returns their gradient. Raises
        `ValueError` for too few micro-batches.
        """
        if count < self.config.fewest_micro_batches:
            raise ValueError(
                f"{count} micro-batches are too few for {self.config.schedule} over {self.config.pipeline}"
            )
        for stage in self.stages:
            stage.inputs_of = inputs_of
        self._end = end
        if self._shape != (count, *shape):
            self._shape, self._schedule = (count, *shape), self._build(count, shape)
        numbers = torch.arange(count)
        arrives = [numbers] if any(stage.is_first for stage in self.stages) else []
        target = numbers if any(stage.is_last for stage in self.stages) else None
        try:
            self._schedule.step(*arrives, number=numbers, target=target, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch wraps the error of a stage into one that lists its tensors

    def _build(self, count: int, shape: tuple[int, int]) -> Any:
        def example(position: int) -> Tensor:
            if position == 0:
                return torch.empty(1, dtype=torch.int64, device="meta")
            size = (*shape, self.stages[0].config.d_model)
            return torch.empty(size, dtype=self.dtype, device="meta", requires_grad=True)

        stages: list[Any] = [
            PipelineStage(
                stage,
                number,
                self.config.num_stages,
                torch.device(self.device),
                input_args=example(number),
                output_args=example(number + 1),
                group=self.group,
            )
            for number, stage in zip(self._numbers, self.stages, strict=True)
        ]
        settings: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        takes_one = self.config.num_stages == self.config.pipeline
        return SCHEDULES[self.config.schedule](stages[0] if takes_one else stages, count, **settings)

    def _loss(self, hidden_BTD: Tensor, number: Tensor) -> Tensor:
        """Returns 0 as a loss whose gradient is the right one; the backward pass of head and loss has run by then."""
        gradient = self._end(hidden_BTD, int(number))
        return exchanged(hidden_BTD, _zero, _known, gradient)


class _With(torch.autograd.Function):
    """Returns x; in the backward pass the second argument, a part of the loss, gets its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.one


def _zero(x: Tensor, gradient: Tensor) -> Tensor:
    return x.new_zeros(())


def _known(_: Tensor, gradient: Tensor) -> Tensor:
    return gradient
