"""Influence: how far each token of a prompt reaches the states of later tokens.

Shapes: T tokens, D d_model, L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sheepop.core.facts import visible_line
from sheepop.interpret.control.drawing import heat_map
from sheepop.interpret.control.finding import PromptFinding, columns
from sheepop.interpret.control.jacobian import LinearMap, probed, root_intervals
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.pictures import Picture, labels_of
from sheepop.interpret.trace import Trace

_SHOWN = 12


@dataclass(frozen=True, eq=False)
class Influence(PromptFinding):
    """Influences (T, T): row i is the token that is reached, column j the token that reaches it.

    `influence` is ``|dh_i^L / dh_j^0|_F / sqrt(D)``, the typical length of the change of the last state of token i for
    a change of length 1 of the embedding of token j. `error` is half its interval of 95 percent, relative to it.
    `rollout` and `attention` are weights whose rows sum to 1.
    """

    verb: ClassVar[str] = "influence"
    derived: ClassVar[tuple[str, ...]] = ("disagreement",)
    labels: list[str]
    influence: Tensor
    error: Tensor
    rollout: Tensor
    attention: Tensor

    @property
    def shares(self) -> dict[str, Tensor]:
        """The three measures with rows that sum to 1, by name."""
        own = self.influence / self.influence.sum(1, keepdim=True)
        return {"influence": own, "rollout": self.rollout, "attention": self.attention}

    @property
    def disagreement(self) -> dict[str, Tensor]:
        """How far rollout and attention weights are from the shares of influence in each row (T,).

        It is the total variation distance: the share that would have to move to other tokens.
        """
        own, *_ = (shares := self.shares).values()
        return {name: (shares[name] - own).abs().sum(1) / 2 for name in ("rollout", "attention")}

    def table(self) -> list[str]:
        """The tokens that reach the last one the most, with their shares by each measure."""
        last = {name: rows[-1] for name, rows in self.shares.items()}
        order = last["influence"].argsort(descending=True)[:_SHOWN].tolist()
        rows = [
            [
                visible_line(self.tokens[token]),
                str(token),
                f"{float(self.influence[-1, token]):.3g}",
                f"{float(self.error[-1, token]):.0%}",
                *(f"{float(share[token]):.1%}" for share in last.values()),
            ]
            for token in order
        ]
        head = ["token", "position", "influence", "error", "its share", "rollout", "attention"]
        return ["Tokens that reach the last state:", *columns(head, rows)]

    def sentences(self) -> list[str]:
        """Which token reaches the last one the most, and where the measures disagree."""
        found = []
        if len(self.tokens) > 1:
            most = {name: int(rows[-1, :-1].argmax()) for name, rows in self.shares.items()}
            words = {name: self.named(token) for name, token in most.items()}
            found.append(
                f"Besides its own token, the last state depends most on {words['influence']}; attention rollout names "
                f"{words['rollout']}, and the mean attention weights {words['attention']}."
            )
        for name, apart in self.disagreement.items():
            row = int(apart.argmax())
            found.append(
                f"Shares of {name} and of influence differ by {float(apart.mean()):.0%} on average, and by "
                f"{float(apart[row]):.0%} for {self.named(row)}."
            )
        return found

    def pictures(self) -> Iterator[Picture]:
        """A map of each measure."""
        files = {
            "influence": ("influence", "Share of influence"),
            "rollout": ("influence_rollout", "Attention rollout"),
            "attention": ("influence_attention", "Mean attention weight"),
        }
        for name, shares in self.shares.items():
            yield heat_map(*files[name], shares, self.labels, self.labels, "Share of the row")


def influence(point: OperatingPoint, *, probes: int = 4, seed: int = 0) -> Influence:
    """Measures all influences at an operating point, by `probes` backward passes for each token."""
    found, error = influences(point.between(0, point.num_layers), probes, seed)
    rollout, attention = _by_attention(point.trace)
    return Influence(point.notes, point.tokens, labels_of(point.trace), found, error, rollout, attention)


def influences(
    jacobian: LinearMap, probes: int = 4, seed: int = 0, rows: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Returns ``|dy_i / dx_j|_F / sqrt(D)`` of a function (T, D) to (T, E), and half its interval relative to it.

    They are those of all outputs i, or of `rows`. For a random cotangent u of row i with covariance 1,
    ``E |J_ij^T u|^2 = |J_ij|_F^2``.
    """
    squares = []
    for row in range(len(jacobian.value)) if rows is None else rows:

        def pulled(cotangent: Tensor, row: int = row) -> Tensor:
            given = torch.zeros_like(jacobian.value)
            given[row] = cotangent
            return jacobian.vjp(given)

        found = probed(pulled, jacobian.value[row], probes, seed, "influence", row)
        squares.append(torch.stack([each.mean(1).cpu() for each in found], 1))
    value, low, high = root_intervals(torch.stack(squares))
    return value, ((high - low) / (2 * value)).nan_to_num(0.0)


def _by_attention(trace: Trace) -> tuple[Tensor, Tensor]:
    """Attention rollout (T, T) (Abnar and Zuidema 2020), and the weights' mean over all heads and layers.

    Rollout multiplies the mean weights of the layers, each averaged with the identity of the residual stream. Layers
    without attention pass each token on by itself. Rows with attention sinks are made to sum to 1.
    """
    patterns = ["blocks.*.attention.weights"]
    weights = trace.collect(patterns, lambda weights_HTS: weights_HTS.double().mean(0).cpu())
    means = [each / each.sum(1, keepdim=True) for each in weights.values()]
    rolled = identity = torch.eye(trace.num_tokens, dtype=torch.float64)
    for mean in means:
        rolled = (mean + identity) / 2 @ rolled
    return rolled, torch.stack(means).mean(0)
