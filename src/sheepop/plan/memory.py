"""The memory of training steps on one device by part, and the largest micro-batch that fits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from sheepop.model import ModelConfig
from sheepop.model.accounting.cost import TrainingBytes, parameter_shapes, training_bytes
from sheepop.model.initialization import parameter_role
from sheepop.train import TrainingConfig
from sheepop.train.activation_checkpointing import StepBytes

_FLOAT32 = 4
_MOMENTS = 2  # of a weight of an adapter, which AdamW trains


@dataclass(frozen=True)
class MemoryParts:
    """The bytes of a run by part; `program` is what the process holds before it builds a network.

    `activations` are those of a micro-batch with the gradients outside the blocks, `logits` what the loss needs, and
    `cache` the keys and values of answers that the model writes between steps. Activations and gradients need not
    exist at the same time: `step` is the most that a step takes beside the state. `reference` is a second model. Before
    its first step the process takes as much as `preparation`, with the memory that the program keeps. The libraries
    that draw the `report` load after the last step, when the process still keeps the memory of the steps.
    """

    program: float
    weights: float
    gradients: float
    moments: float
    copies: float  # working copy in another data type, average of the weights
    activations: float
    logits: float
    step: float
    cache: float = 0.0
    reference: float = 0.0
    preparation: float = 0.0
    report: float = 0.0

    @property
    def state(self) -> float:
        """What exists between steps, once all moments do."""
        return self.weights + self.moments + self.copies + self.reference

    @property
    def tensors(self) -> float:
        """The most that tensors take at a time: in a step, or while answers are written."""
        return self.state + max(self.step, self.cache)

    @property
    def peak(self) -> float:
        """The most that the process takes."""
        return max(self.preparation, self.program + self.tensors + self.report)

    def to_dict(self) -> dict[str, float]:
        """All parts, their tensors and the peak in bytes."""
        return {
            **{part.name: getattr(self, part.name) for part in fields(self)},
            "tensors": self.tensors,
            "peak": self.peak,
        }


@dataclass(frozen=True)
class Trained:
    """What a step trains: the bytes of the gradients of each block, and what the backward pass of each one adds.

    An `update` of the weights allocates so many bytes. With `adapters` only that many weights are trained, above
    weights of `frozen` bytes.
    """

    of_blocks: Sequence[float]
    back: Sequence[float]
    update: float = 0.0
    adapters: int | None = None
    frozen: float = 0.0

    def state(self, model: ModelConfig, training: TrainingConfig, precision: str) -> TrainingBytes:
        """The bytes of weights, gradients and optimizer."""
        is_averaged = training.ema_decay is not None
        if self.adapters is None:
            return training_bytes(model, training.optimizer, precision, averaged=is_averaged)
        own, half = _FLOAT32 * self.adapters, int(self.frozen) // 2 if precision == "bf16" else 0
        return TrainingBytes(int(self.frozen) + own, own, _MOMENTS * own, half, own * is_averaged)


def memory_parts(
    model: ModelConfig,
    training: TrainingConfig,
    precision: str,
    step: StepBytes,
    trained: Trained,
    **others: float,
) -> MemoryParts:
    """The parts of a step with these activations and logits; `others` are further parts."""
    mode = "none" if training.activation_checkpointing == "auto" else training.activation_checkpointing
    blocks = len(step.activations.blocks) if training.checkpointed_blocks is None else training.checkpointed_blocks
    state, activations = trained.state(model, training, precision), step.activations
    kept = [activations.kept(number, mode, blocks) for number in range(len(activations.blocks))]
    is_one = (training.micro_batch_size or training.global_batch_size) >= training.global_batch_size
    return MemoryParts(
        weights=state.weights,
        gradients=state.gradients,
        moments=state.optimizer,
        copies=state.working_copy + state.average,
        activations=step.peak(mode, 0 if mode == "none" else blocks) - step.state - step.loss,
        logits=step.loss,
        step=_most_in_a_step(step, trained, kept, state.gradients, is_one=is_one),
        **others,
    )


def _most_in_a_step(
    step: StepBytes, trained: Trained, kept: Sequence[float], gradients: float, *, is_one: bool
) -> float:
    """The most bytes of a step beside the state, whose blocks keep `kept`.

    At the loss all activations exist. The backward pass frees those of a block once it has its gradients. In a step of
    several micro-batches all gradients exist from the second one on.
    """
    activations = step.activations
    left, made = activations.rest + sum(kept), 0.0 if is_one else gradients
    most = made + left + activations.rest + step.loss
    for block, own, back, of_block in reversed(
        list(zip(activations.blocks, kept, trained.back, trained.of_blocks, strict=True))
    ):
        most = max(most, made + left + max(0.0, block.everything - own) + back)
        left -= own
        made += of_block if is_one else 0.0
    return max(most, gradients + trained.update)


def update_bytes(model: ModelConfig, optimizer: str) -> float:
    """The bytes that an update of all weights allocates.

    Muon orthogonalises all matrices of a shape together, with six copies of them and two products of each with itself.
    """
    groups = defaultdict[tuple[int, ...], int](int)
    for name, shape in parameter_shapes(model).items():
        if optimizer == "muon" and "blocks." in name and parameter_role(name, shape) != "vector":
            groups[shape] += math.prod(shape)
    needed = (count * (6 + 2 * min(shape[-2:]) / max(shape[-2:])) for shape, count in groups.items())
    return _FLOAT32 * max(needed, default=0.0)


def largest_that_fits(sizes: Sequence[int], peak: Callable[[int], float], usable: float) -> int | None:
    """The largest of the ascending `sizes` whose `peak` is at most `usable`; None if none is. Peaks grow with sizes."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if peak(sizes[middle]) <= usable:
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None
