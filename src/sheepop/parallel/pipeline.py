"""Pipeline parallelism: ranks have some of the layers each, and micro-batches go from one to the next and back.

In which order a rank computes, and what it sends meanwhile, is torch's part: all forward passes before all backward
passes (Huang et al. 2019, "GPipe"), one of each in turn (Narayanan et al. 2019, "PipeDream", 1F1B), the same with
several stages a rank (Narayanan et al. 2021, section 2.2), or with the gradients of weights put off to where a rank
would wait (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ZB-V). What is sent is the residual stream and its
gradient; every rank has the tokens of its rows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer
from sheepop.model.cache import Cache
from sheepop.model.experts import Routing
from sheepop.parallel.config import ParallelConfig

# When a rank is lost the others would print the whole order, beside the error that says so.
logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)

_ONE_STAGE = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
SCHEDULES_OF_STAGES = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleZBVZeroBubble,
}
"""Torch's schedules of several stages a rank, by the names that `ParallelConfig` has."""
OF_THE_FIRST = ("embedding", "ngrams", "embedding_norm", "added_positions")
OF_THE_LAST = ("final_norm", "lm_head", REWARD_HEAD)
"""The parts of a network outside its layers that only its first and its last stage have."""
Inputs = Callable[[int], Mapping[str, Any]]
"""What the network reads of a micro-batch, by its number: the arguments of `Transformer.run`."""


def check_pipeline(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network that cannot be cut into so many stages."""
    if parallel.pipeline == 1:
        return
    if config.num_layers < parallel.num_stages:
        raise ConfigError(
            f"model.num_layers = {config.num_layers} are too few for {parallel.num_stages} stages: "
            f"parallel.pipeline = {parallel.pipeline} with parallel.schedule = {parallel.schedule}. Use fewer."
        )
    refused = {
        "an encoder": config.architecture != "decoder",
        "model.dropout, which stages would draw otherwise than one device": config.dropout > 0,
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(f"parallel.pipeline is for a decoder, and not for one with {name}.")
    if parallel.zero >= 2:
        raise ConfigError(
            f"parallel.zero = {parallel.zero} does not go with parallel.pipeline: a stage keeps its weights and "
            "gradients whole during a step, while micro-batches come and go. Use parallel.zero=1."
        )


def layers_of(stage: int, num_stages: int, num_layers: int) -> range:
    """The layers of a stage: as many as others have, or one more in the first ones, since the last has the head."""
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def numbers_of(config: ParallelConfig, group: dist.ProcessGroup) -> tuple[int, ...]:
    """Which stages are this rank's."""
    return config.stages_of(dist.get_rank(group))


def in_flight(config: ParallelConfig, rank: int, count: int) -> tuple[int, ...]:
    """How many of `count` micro-batches each stage of a rank keeps at a time, where these are the most.

    ``1f1b`` goes forwards until the first micro-batch comes back (Narayanan et al. 2019); with two stages there are as
    many passes before (Narayanan et al. 2021, section 2.2; Qi et al. 2024, section 6).
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
    """Some of the layers of a network; the first stage has the embedding too, and the last one norm and head.

    `inputs_of` says what it reads of a micro-batch beside what the stage before it hands on, `arithmetic` in which
    context, and `loss_of_experts` what its layers with experts add to the loss.
    """

    inputs_of: Inputs
    loss_of_experts: Callable[[Stage, tuple[Routing, ...], int], Tensor]
    arithmetic: Callable[[], AbstractContextManager[None]]
    is_first: bool
    is_last: bool
    layers_here: range

    @classmethod
    def of(cls, network: Transformer, layers: range) -> Stage:
        """Those of `network`, with modules of its own but for the layers and what else holds weights."""
        stage = copy.copy(network)
        stage._modules, stage._buffers = network._modules.copy(), network._buffers.copy()
        stage.__class__ = cls
        assert isinstance(stage, cls)
        stage.layers_here = layers
        stage.is_first, stage.is_last = layers.start == 0, layers.stop == len(network.blocks)
        stage.blocks = nn.ModuleList(network.blocks[layer] for layer in layers)
        stage.windows = network.windows[layers.start : layers.stop]
        for name in [*(() if stage.is_first else OF_THE_FIRST), *(() if stage.is_last else OF_THE_LAST)]:
            setattr(stage, name, None)
        return stage

    def name_in_network(self, name: str) -> str:
        """What a parameter of this stage is called in the whole network."""
        words = name.split(".")
        if words[0] == "blocks":
            words[1] = str(int(words[1]) + self.layers_here.start)
        return ".".join(words)

    def forward(self, arrived: Tensor, number: Tensor) -> Tensor:  # type: ignore[override]
        """The residual stream (B, T, D) behind these layers, normalised behind the last.

        `arrived` is that before them, in the first stage a number that says nothing.
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
        """What arrived, unless this is the first stage."""
        return super().enter(input_ids, positions, documents, cache) if self.is_first else self._arrived

    def finish(self, x_BTD: Tensor) -> Tensor:
        """The final norm, in the last stage."""
        return super().finish(x_BTD) if self.is_last else x_BTD

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.parameters()).device


@dataclass
class Pipeline:
    """The stages of this rank and the ways of micro-batches through them; `group` are the ranks of one pipeline.

    The residual stream has the data type `dtype`.
    """

    config: ParallelConfig
    group: dist.ProcessGroup
    stages: Sequence[Stage]
    device: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._shape: tuple[int, ...] = ()
        self._schedule: Any = None

    @classmethod
    def of(
        cls, network: Transformer, config: ParallelConfig, group: dist.ProcessGroup, device: str, dtype: torch.dtype
    ) -> Pipeline:
        """This rank's part of `network`."""
        layers = [layers_of(number, config.num_stages, len(network.blocks)) for number in numbers_of(config, group)]
        return cls(config, group, [Stage.of(network, each) for each in layers], device, dtype)

    def run(self, count: int, shape: tuple[int, int], inputs_of: Inputs, end: Callable[[Tensor, int], Tensor]) -> None:
        """Forward and backward passes of `count` micro-batches, which add to the gradients of the stages.

        The residual stream has the `shape` (B, T) between stages.

        `end` takes the hidden states of one behind the last stage, and gives their gradient.
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
            raise error.__cause__ from None  # torch wraps what a stage raises into a list of its tensors

    def _build(self, count: int, shape: tuple[int, int]) -> Any:
        """The schedule for micro-batches of a shape."""

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
            for number, stage in zip(numbers_of(self.config, self.group), self.stages, strict=True)
        ]
        settings: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if self.config.schedule in _ONE_STAGE:
            return _ONE_STAGE[self.config.schedule](stages[0], count, **settings)
        return SCHEDULES_OF_STAGES[self.config.schedule](stages, count, **settings)

    def _loss(self, hidden_BTD: Tensor, number: Tensor) -> Tensor:
        """A scalar whose gradient is that of the loss; head and loss are gone back through by then."""
        found: Tensor = _Known.apply(hidden_BTD, self._end(hidden_BTD, int(number)))  # type: ignore[no-untyped-call]
        return found


class _With(torch.autograd.Function):
    """Hands on the first, and lets the gradient of the second, a part of the loss, go back beside that of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.one


class _Known(torch.autograd.Function):
    """A number whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None
