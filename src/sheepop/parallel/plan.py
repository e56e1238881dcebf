"""What a layout costs: bytes that a rank holds, at its most and always, and bytes that it sends, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sheepop.core.facts import counted
from sheepop.model import ModelConfig, Transformer
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.peak import peak_in_turn, peak_through_stages
from sheepop.parallel.pipeline import in_flight
from sheepop.parallel.ranks import Ranks
from sheepop.parallel.stage_memory import FLOAT, StageMemory, StepShape, stages_of
from sheepop.parallel.tensor import divides_vocabulary

_OF_LOSS = 4  # the greatest logit, the label's, their sum and that of their exponentials
_CUT = {
    0: "every copy whole",
    1: "the optimizer's state",
    2: "the optimizer's state and gradients",
    3: "weights, gradients and the optimizer's state",
}


@dataclass(frozen=True)
class Plan:
    """Bytes of a rank: `held` between steps with all gradients, `peak` in a step, and `sent` in a step.

    `held` are weights, gradients and the state of optimizers. `peak` is the most that its tensors take at a time,
    activations and what is gathered and handed over included; an allocator and a library for exchange hold more.

    What is sent is the least that the strategy needs, by algorithms that send as little as can be: of n ranks each
    sends (n - 1) / n of what is gathered, scattered or exchanged, and twice that of a sum that all get (Patarasuk and
    Yuan 2009).
    """

    layout: Layout
    held: Mapping[str, float]
    sent: Mapping[str, float]
    peak: float

    @classmethod
    def of(cls, model: Transformer, layout: Layout, step: StepShape, state: float = 2.0) -> Plan:
        """That of this rank of `layout`; `model` may be without numbers.

        `state` numbers are kept by the optimizer for each weight, in float32 as weights and gradients are.
        """
        return cls._of(model.config, layout, step, state, stages_of(model, layout, step))

    @classmethod
    def largest(cls, model: Transformer, layout: Layout, step: StepShape, state: float = 2.0) -> Plan:
        """That of the rank that needs most memory: those of a pipeline have other layers each."""
        stages = stages_of(model, layout, step)
        ranks = (Ranks(number * layout.stage_size, layout.ranks.size) for number in range(layout.config.pipeline))
        plans = (cls._of(model.config, Layout(rank, layout.config), step, state, stages) for rank in ranks)
        return max(plans, key=lambda plan: plan.peak)

    @classmethod
    def _of(
        cls, model: ModelConfig, layout: Layout, step: StepShape, state: float, stages: Sequence[StageMemory]
    ) -> Plan:
        config, rank = layout.config, layout.pipeline_rank
        here = [stages[number] for number in config.stages_of(rank)]
        pieces = sum(group.piece for stage in here for group in stage.groups)
        added = sum(group.added for stage in here for group in stage.groups)
        twice = _tied(model, layout) if _ends(layout) == 2 else 0.0
        held = {
            "weights": pieces,
            "gradients": pieces if config.zero >= 2 else added,
            "optimizer": state * (pieces - twice),
        }
        if config.pipeline == 1:
            most = peak_in_turn(here[0], config.zero, step.micro_batches)
        else:
            kept = in_flight(config, rank, step.micro_batches)
            most = peak_through_stages(here, kept, step.micro_batches, rank if config.puts_off_weights else None)
        always = held["weights"] + held["optimizer"] + sum(stage.lasting for stage in here)
        return cls(layout, held, _sent(model, layout, step, here), always + most)

    def __str__(self) -> str:
        config = self.layout.config
        sizes = {"data": self.layout.num_data, "context": config.context, "tensor": config.tensor}
        parts = " times ".join(
            f"{size} {name}" for name, size in ({"pipeline": config.pipeline} | sizes).items() if size > 1
        )
        over = f" in {counted(self.layout.num_pieces, 'piece')}" if config.zero else ""
        most = ", ".join(f"{name} {_megabytes(value)}" for name, value in self.sent.items() if value)
        who = "Each" if config.pipeline == 1 else f"Rank {self.layout.ranks.rank}, which needs most memory,"
        return (
            f"{counted(self.layout.ranks.size, 'rank')}: {parts}; {_CUT[config.zero]}{over}. {who} holds "
            f"{_megabytes(sum(self.held.values()))} of weights, gradients and optimizer state, and at its peak about "
            f"{_megabytes(self.peak)} with activations. It sends at least {_megabytes(sum(self.sent.values()))} a step "
            f"({most})."
        )


def _sent(model: ModelConfig, layout: Layout, step: StepShape, stages: Sequence[StageMemory]) -> dict[str, float]:
    config, zero, micro_batches = layout.config, layout.config.zero, step.micro_batches
    pieces, replicas = layout.num_pieces, layout.num_copies // layout.num_pieces
    inside = sum(block.weights.whole for stage in stages for block in stage.blocks)
    outside = sum(stage.outside.whole for stage in stages)
    gathered = {0: 0.0, 1: outside + inside, 2: outside + inside, 3: micro_batches * (outside + 2 * inside)}[zero]
    added_up = FLOAT * sum(group.padded for stage in stages for group in stage.groups)
    added_up *= micro_batches if zero >= 2 else 1
    passes = _passes(model, stages)
    tokens = step.rows * step.num_tokens / config.context * micro_batches
    stream = tokens * model.d_model * step.itemsize
    return {
        "weights": _share(pieces) * gathered,
        "gradients": (_share(pieces) + 2 * _share(replicas) / pieces) * added_up,
        "sums of layers": _share(config.tensor) * stream * passes["sublayers"],
        "tokens of embedding and head": _share(config.tensor) * _around(model, config.tensor, stages, stream, tokens),
        "tokens for heads": _share(config.context) * tokens * _width(model) * step.itemsize * passes["attention"]
        / config.tensor,
        "hidden states": _neighbours(config, stages) * stream / config.tensor,
        "the tied weight": 2 * _share(2) * (_tied(model, layout) if _ends(layout) == 1 else 0),
    }  # fmt: skip


def _passes(model: ModelConfig, stages: Sequence[StageMemory]) -> dict[str, int]:
    """How often a stage's tokens go to tensor ranks and back around sublayers, and to context ranks for attention.

    Each sublayer gathers and scatters them, there and back, and attention exchanges them twice. Where a block is
    computed again this is done again, but for the last scattering, whose result only a norm behind it would keep.
    """
    blocks = [block for stage in stages for block in stage.blocks]
    again = sum(block.again > 0 for block in blocks)
    return {
        "sublayers": 8 * len(blocks) + (3 if model.norm_position == "pre" else 4) * again,
        "attention": 2 * len(blocks) + again,
    }


def _around(model: ModelConfig, tensor: int, stages: Sequence[StageMemory], stream: float, tokens: float) -> float:
    """What tensor ranks exchange before and behind all layers, forwards and backwards.

    They are the residual stream and, of parts of a vocabulary, what a loss sums up.
    """
    ends = sum(stage.is_first + stage.is_last for stage in stages)
    if not divides_vocabulary(model, tensor):
        return ends * stream
    return 2 * ends * stream + 2 * FLOAT * _OF_LOSS * tokens * sum(stage.is_last for stage in stages)


def _neighbours(config: ParallelConfig, stages: Sequence[StageMemory]) -> int:
    """To how many stages on other ranks these hand on the residual stream, or its gradient."""
    here = {stage.number for stage in stages}
    others = {(number, number + step) for number in here for step in (-1, 1)}
    return sum(0 <= other < config.num_stages and other not in here for _, other in others)


def _ends(layout: Layout) -> int:
    """How many of the first and the last stage are this rank's."""
    return len({0, layout.config.num_stages - 1} & set(layout.config.stages_of(layout.pipeline_rank)))


def _tied(model: ModelConfig, layout: Layout) -> float:
    """A rank's piece of a weight that the first stage has and the last one too, 0 where there is none."""
    if not model.tie_weights or layout.config.pipeline == 1:
        return 0.0
    cut = layout.config.tensor if divides_vocabulary(model, layout.config.tensor) else 1
    return FLOAT * model.vocabulary * model.d_model / cut / layout.num_pieces


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _width(config: ModelConfig) -> int:
    """The numbers of a token that attention reads and gives."""
    return (config.num_heads + config.kv_heads) * (config.head_size + config.value_size)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if value < 1e9 else f"{value / 1e9:,.1f} GB"
