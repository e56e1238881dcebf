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
from sheepop.parallel.stage_memory import FLOAT, StageMemory, StepShape, share_of_others, stages_of
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
        experts = f", groups of {config.expert} share experts" if config.expert > 1 else ""
        parts = " times ".join(
            f"{size} {name}" for name, size in ({"pipeline": config.pipeline} | sizes).items() if size > 1
        )
        over = f" in {counted(self.layout.num_pieces, 'piece')}" if config.zero else ""
        most = ", ".join(f"{name} {_megabytes(value)}" for name, value in self.sent.items() if value)
        who = "Each" if config.pipeline == 1 else f"Rank {self.layout.ranks.rank}, which needs most memory,"
        return (
            f"{counted(self.layout.ranks.size, 'rank')}: {parts}{experts}; {_CUT[config.zero]}{over}. {who} holds "
            f"{_megabytes(sum(self.held.values()))} of weights, gradients and optimizer state, and at its peak about "
            f"{_megabytes(self.peak)} with activations. It sends at least {_megabytes(sum(self.sent.values()))} a step "
            f"({most})."
        )


def _sent(model: ModelConfig, layout: Layout, step: StepShape, stages: Sequence[StageMemory]) -> dict[str, float]:
    config, zero, micro_batches = layout.config, layout.config.zero, step.micro_batches
    inside = sum(block.weights.to_gather * block.weights.itemsize for stage in stages for block in stage.blocks)
    outside = sum(stage.outside.to_gather * stage.outside.itemsize for stage in stages)
    added_up = FLOAT * sum(group.to_add for stage in stages for group in stage.groups)
    tokens = step.rows * step.num_tokens / config.context * micro_batches
    stream = tokens * model.d_model * step.itemsize
    return {
        "weights": micro_batches * (outside + 2 * inside) if zero == 3 else outside + inside,
        "gradients": added_up * (micro_batches if zero >= 2 else 1),
        "sums of layers": share_of_others(config.tensor) * stream * _exchanges_of_sublayers(model, stages),
        "tokens of embedding and head": share_of_others(config.tensor)
        * _around(model, config.tensor, stages, stream, tokens),
        **_of_attention(model, config, step, tokens / config.tensor, stages),
        "tokens for experts": share_of_others(config.expert) * _of_experts(model, step, tokens / config.tensor, stages),
        "hidden states": _neighbours(config, stages) * stream / config.tensor,
        "the tied weight": 2 * share_of_others(2) * (_tied(model, layout) if _ends(layout) == 1 else 0),
    }  # fmt: skip


def _exchanges_of_sublayers(model: ModelConfig, stages: Sequence[StageMemory]) -> int:
    """How often a stage's tokens go to tensor ranks and back around sublayers.

    Each sublayer gathers and scatters them, there and back; experts read those that are here. Where a block is computed
    again this is done again, but for the last scattering, whose result only a norm behind it would keep.
    """
    found = 0
    for block in (block for stage in stages for block in stage.blocks):
        sublayers = 1 if block.is_mixture and model.experts is not None and not model.experts.shared else 2
        found += 4 * sublayers
        if block.again:
            found += 2 * sublayers - (sublayers == 2 and model.norm_position == "pre")
    return found


def _around(model: ModelConfig, tensor: int, stages: Sequence[StageMemory], stream: float, tokens: float) -> float:
    """What tensor ranks exchange before and behind all layers, forwards and backwards.

    They are the residual stream and, of parts of a vocabulary, what a loss sums up.
    """
    ends = sum(stage.is_first + stage.is_last for stage in stages)
    if not divides_vocabulary(model, tensor):
        return ends * stream
    return 2 * ends * stream + 2 * FLOAT * _OF_LOSS * tokens * sum(stage.is_last for stage in stages)


def _of_experts(model: ModelConfig, step: StepShape, tokens: float, stages: Sequence[StageMemory]) -> float:
    """What goes to experts and back of so many tokens, forwards and backwards, and again where it is computed again.

    Loads are taken to be even.
    """
    if model.experts is None:
        return 0.0
    mixtures = [block for stage in stages for block in stage.blocks if block.is_mixture]
    exchanges = 4 * len(mixtures) + 2 * sum(block.again > 0 for block in mixtures)
    return exchanges * tokens * model.experts.per_token * model.d_model * step.itemsize


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


def _of_attention(
    model: ModelConfig, parallel: ParallelConfig, step: StepShape, tokens: float, stages: Sequence[StageMemory]
) -> dict[str, float]:
    """What a context rank sends of so many tokens in attention, forwards and backwards, and again where it is computed
    again.

    Of n ranks in a ring each hands keys and values on n - 1 times there and n - 1 times back, and their gradients,
    which are float32, n times, so that they end where they belong.
    """
    blocks = [block for stage in stages for block in stage.blocks]
    again = sum(block.again > 0 for block in blocks)
    ranks, kept = parallel.context, model.kv_heads * (model.head_size + model.value_size)
    if parallel.context_method == "ring":
        passes = (ranks - 1) * (2 * len(blocks) + again) * step.itemsize + ranks * len(blocks) * FLOAT
        return {"keys and values": passes * tokens * kept}
    width = kept + model.num_heads * (model.head_size + model.value_size)
    return {"tokens for heads": share_of_others(ranks) * tokens * width * step.itemsize * (2 * len(blocks) + again)}


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if value < 1e9 else f"{value / 1e9:,.1f} GB"
