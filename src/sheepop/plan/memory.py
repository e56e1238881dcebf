"""The memory of training steps on one device by part, and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from sheepop.model import ModelConfig
from sheepop.model.accounting.cost import TrainingBytes, training_bytes
from sheepop.train import TrainingConfig
from sheepop.train.activation_checkpointing import StepBytes

_FLOAT32 = 4
_MOMENTS = 2  # of a weight of an adapter, which AdamW trains


@dataclass(frozen=True)
class MemoryParts:
    """The bytes of a run by part; `program` is what the process holds before it builds a network.

    `activations` are those of a micro-batch with the gradients outside the blocks, `logits` what the loss needs, and
    `cache` the keys and values of answers that the model writes between steps. `reference` is a second model. Before
    its first step the process takes as much as `preparation`, with the memory that the program keeps.
    """

    program: float
    weights: float
    gradients: float
    moments: float
    copies: float  # working copy in another data type, average of the weights
    activations: float
    logits: float
    cache: float = 0.0
    reference: float = 0.0
    preparation: float = 0.0

    @property
    def state(self) -> float:
        """What exists between steps, once all moments do."""
        return self.weights + self.moments + self.copies + self.reference

    @property
    def tensors(self) -> float:
        """The most that tensors take at a time: in a step, or while answers are written."""
        return self.state + max(self.gradients + self.activations + self.logits, self.cache)

    @property
    def peak(self) -> float:
        """The most that the process takes."""
        return max(self.preparation, self.program + self.tensors)

    def to_dict(self) -> dict[str, float]:
        """All parts, their tensors and the peak in bytes."""
        return {
            **{part.name: getattr(self, part.name) for part in fields(self)},
            "tensors": self.tensors,
            "peak": self.peak,
        }


def memory_parts(
    model: ModelConfig,
    training: TrainingConfig,
    precision: str,
    step: StepBytes,
    *,
    program: float,
    preparation: float = 0.0,
    adapters: int | None = None,
    frozen: float = 0.0,
    cache: float = 0.0,
    reference: float = 0.0,
) -> MemoryParts:
    """The parts of a step with these activations and logits.

    With `adapters`, only that many weights are trained, above weights of `frozen` bytes.
    """
    mode = training.activation_checkpointing
    blocks = len(step.activations.blocks) if training.checkpointed_blocks is None else training.checkpointed_blocks
    blocks = 0 if mode in ("auto", "none") else blocks
    kept = step.peak("none" if mode == "auto" else mode, blocks) - step.state - step.loss
    if adapters is None:
        state = training_bytes(model, training.optimizer, precision, averaged=training.ema_decay is not None)
    else:
        own = _FLOAT32 * adapters
        half = int(frozen) // 2 if precision == "bf16" else 0
        state = TrainingBytes(int(frozen) + own, own, _MOMENTS * own, half, own * (training.ema_decay is not None))
    return MemoryParts(
        program=program,
        weights=state.weights,
        gradients=state.gradients,
        moments=state.optimizer,
        copies=state.working_copy + state.average,
        activations=kept,
        logits=step.loss,
        cache=cache,
        reference=reference,
        preparation=preparation,
    )


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
