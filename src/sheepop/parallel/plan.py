"""What a layout costs: bytes that a rank holds and sends, from the shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sheepop.core.facts import counted
from sheepop.model import ModelConfig, Transformer
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout

_FLOAT = 4
_OF_LOSS = 4  # the greatest logit, the label's, their sum and that of their exponentials
_CUT = {
    0: "every copy whole",
    1: "the optimizer's state",
    2: "the optimizer's state and gradients",
    3: "weights, gradients and the optimizer's state",
}


@dataclass(frozen=True)
class Plan:
    """Bytes a rank: `held` of weights, gradients and the state of optimizers, and `sent` in a step, by what it is.

    What is sent is the least that the strategy needs, by algorithms that send as little as can be: of n ranks each
    sends (n - 1) / n of what is gathered, scattered or exchanged, and twice that of a sum that all get (Patarasuk and
    Yuan 2009).
    """

    layout: Layout
    held: Mapping[str, float]
    sent: Mapping[str, float]

    @classmethod
    def of(
        cls, model: Transformer, layout: Layout, *, rows: int, num_tokens: int, micro_batches: int, state: float = 2.0
    ) -> Plan:
        """For steps in which a rank computes `micro_batches` of `rows` with `num_tokens`, whole rows.

        `state` numbers are kept by the optimizer for each weight. Numbers are float32.
        """
        config, zero = layout.config, layout.config.zero
        here = _numbers(model, config.tensor)
        pieces, replicas = layout.num_pieces, layout.num_copies // layout.num_pieces
        blocks = _numbers_of_blocks(model, config.tensor)
        tokens = rows * num_tokens / config.context * micro_batches
        added = micro_batches if zero >= 2 else 1
        gathers = {0: 0.0, 1: here, 2: here, 3: micro_batches * (here + blocks)}[zero]
        sent = {
            "weights": _share(pieces) * gathers,
            "gradients": added * (_share(pieces) * here + 2 * _share(replicas) * here / pieces),
            "sums of layers": 4 * 2 * _share(config.tensor) * tokens * model.config.d_model * len(model.layers),
            "tokens of embedding and head": _share(config.tensor) * tokens * _around(model.config, config.tensor),
            **_of_attention(model.config, config, tokens * len(model.layers) / config.tensor),
        }
        held = {
            "weights": here / (pieces if zero == 3 else 1),
            "gradients": here / (pieces if zero >= 2 else 1),
            "optimizer": state * here / pieces,
        }
        return cls(layout, _in_bytes(held), _in_bytes(sent))

    def __str__(self) -> str:
        config = self.layout.config
        sizes = {"data": self.layout.num_data, "context": config.context, "tensor": config.tensor}
        parts = " times ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
        over = f" in {counted(self.layout.num_pieces, 'piece')}" if config.zero else ""
        most = ", ".join(f"{name} {_megabytes(value)}" for name, value in self.sent.items() if value)
        return (
            f"{counted(self.layout.ranks.size, 'rank')}: {parts}; {_CUT[config.zero]}{over}. Each holds "
            f"{_megabytes(sum(self.held.values()))} of weights, gradients and optimizer state, and sends at least "
            f"{_megabytes(sum(self.sent.values()))} a step ({most})."
        )


def _around(config: ModelConfig, tensor: int) -> int:
    """The numbers of a token that tensor ranks exchange before and behind all layers, forwards and backwards.

    They are the residual stream and, of parts of a vocabulary, what a loss sums up.
    """
    return 4 * config.d_model + 2 * _OF_LOSS if config.vocabulary % tensor == 0 else 2 * config.d_model


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _numbers(model: Transformer, tensor: int) -> float:
    """The parameters of a tensor rank, where others are not taken into account."""
    inner = {id(parameter) for parameter in model.blocks.parameters()}
    outside = {name: each for name, each in model.named_parameters() if id(each) not in inner}
    cut = tensor if model.config.vocabulary % tensor == 0 else 1
    rows = {"embedding.weight", "lm_head.weight"}
    return sum(each.numel() / (cut if name in rows else 1) for name, each in outside.items()) + _numbers_of_blocks(
        model, tensor
    )


def _numbers_of_blocks(model: Transformer, tensor: int) -> float:
    """Those of its blocks: of matrices it has a part."""
    found = 0.0
    for name, parameter in model.blocks.named_parameters():
        is_split = parameter.ndim > 1 or name.endswith(("_proj.bias", "sinks"))
        whole = not is_split or name.endswith(("o_proj.bias", "down_proj.bias"))
        found += parameter.numel() / (1 if whole else tensor)
    return found


def _of_attention(config: ModelConfig, parallel: ParallelConfig, tokens: float) -> dict[str, float]:
    """The numbers that a context rank sends of so many tokens in attention, forwards and backwards.

    Of n ranks in a ring each hands keys and values on n - 1 times there and n - 1 times back, and their gradients n
    times, which end where they belong.
    """
    ranks, kept = parallel.context, config.kv_heads * (config.head_size + config.value_size)
    if parallel.context_method == "ring":
        return {"keys and values": (3 * ranks - 2) * tokens * kept}
    given = config.num_heads * (config.head_size + config.value_size)
    return {"tokens for heads": 2 * _share(ranks) * tokens * (given + kept)}


def _in_bytes(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: _FLOAT * count for name, count in numbers.items()}


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if value < 1e9 else f"{value / 1e9:,.1f} GB"
