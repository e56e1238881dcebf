"""Influence and impulse response: how far each token of a prompt reaches the states of later tokens.

Shapes: T tokens, D d_model, L layers, H heads, P random directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.core.facts import counted, visible_line
from sheepop.interpret.control.finding import PromptFinding, columns, heat_map
from sheepop.interpret.control.jacobian import LinearMap, probed, root_intervals, signs
from sheepop.interpret.control.loops import divergence
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.pictures import Picture
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
    derived: ClassVar[tuple[str, ...]] = ("labels", "disagreement")
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
            [visible_line(self.tokens[token]), token]
            + [float(of[token]) for of in (self.influence[-1], self.error[-1], *last.values())]
            for token in order
        ]
        head = ["token", "position", "influence:.3g", "error:.0%", "its share:.1%", "rollout:.1%", "attention:.1%"]
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
        titles = ("Share of influence", "Attention rollout", "Mean attention weight")
        files = ("influence", "influence_rollout", "influence_attention")
        for name, title, shares in zip(files, titles, self.shares.values(), strict=True):
            yield heat_map(name, title, shares, self.labels, self.labels, "Share of the row")


def influence(point: OperatingPoint, *, probes: int = 4, seed: int = 0) -> Influence:
    """Measures all influences at an operating point, by `probes` backward passes for each token."""
    found, error = influences(point.between(0, point.num_layers), probes, seed)
    rollout, attention = _by_attention(point.trace)
    return Influence(point.notes, point.tokens, found, error, rollout, attention)


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


@dataclass(frozen=True, eq=False)
class Impulse(PromptFinding):
    """The response to a change of the embedding at `position`, whose length is `size` of the embedding's.

    `response` (L + 1, T) is the length of the change of the stream, relative to that of the impulse, as the root mean
    square over random directions. `linear` is what the derivative predicts for the same directions, and `divergence`
    (T,) the mean change of the predictions, KL(before, after) in nats. `most_before` is the largest absolute change
    before the position.
    """

    verb: ClassVar[str] = "impulse"
    derived: ClassVar[tuple[str, ...]] = ("labels", "nonlinearity")
    position: int
    size: float
    response: Tensor
    linear: Tensor
    divergence: Tensor
    most_before: float

    @property
    def nonlinearity(self) -> float:
        """The largest distance between response and prediction, relative to the largest response."""
        return float((self.response - self.linear).abs().max() / self.response.max())

    @property
    def places(self) -> list[str]:
        """What the rows of `response` are behind."""
        return ["embedding", *(f"block {layer}" for layer in range(len(self.response) - 1))]

    def table(self) -> list[str]:
        """The response at the token and at later ones, after each block."""
        rows = []
        for name, response in zip(self.places, self.response, strict=True):
            later = response[self.position + 1 :].tolist()
            rows.append([name, float(response[self.position]), max(later, default="-"), float(response.norm())])
        head = ["after", f"token {self.position}:.3f", "most at a later token:.3f", "all tokens:.3f"]
        return columns(head, rows)

    def sentences(self) -> list[str]:
        """How the impulse grows, where it arrives, and that nothing arrives before it."""
        start = f"A change of {self.size:.2%} of the embedding of {self.named(self.position)}"
        found = [f"{start} is multiplied by {float(self.response[-1].square().sum().sqrt()):.3g} over all blocks."]
        if self.position:
            nothing = "exactly 0" if self.most_before == 0 else f"up to {self.most_before:.2e}, which should be 0"
            found.append(f"Before token {self.position} the response is {nothing}.")
        if later := len(self.tokens) - self.position - 1:
            place = self.position + 1 + int(self.response[-1, self.position + 1 :].argmax())
            found.append(
                f"Of {counted(later, 'later token')} the last state of {self.named(place)} changes most, "
                f"{float(self.response[-1, place]):.3g} times the impulse."
            )
        place = int(self.divergence.argmax())
        found.append(
            f"The prediction after token {place} changes most, by {float(self.divergence[place]):.2e} nats. The "
            f"derivative predicts all responses within {self.nonlinearity:.1%} of the largest."
        )
        return found

    def pictures(self) -> Iterator[Picture]:
        """The response after each block at each token."""
        title, meaning = f"Response to a change at token {self.position}", "Length over the impulse's"
        yield heat_map("impulse", title, self.response, self.places, self.labels, meaning, decades=4)


def impulse(point: OperatingPoint, position: int, *, size: float = 0.01, probes: int = 8, seed: int = 0) -> Impulse:
    """Follows changes of the embedding at `position` (-1 is the last) in `probes` random directions.

    Raises `UsageError` for a position outside the prompt, and for a size that is not positive.
    """
    position = point.position(position)
    if not size > 0:
        raise UsageError(f"--size must be positive, not {size}. It is a share of the embedding's length.")
    embedded = point.states[0]
    changes = torch.zeros(probes + 1, *embedded.shape, dtype=embedded.dtype, device=embedded.device)
    length = size * float(embedded[position].norm())
    for probe in range(probes):
        direction = signs(embedded[position], seed, "impulse", probe)
        changes[probe, position] = direction * (length / direction.norm())
    with torch.no_grad():
        # The last row is not changed, and computed by the same operations as the others.
        streams = torch.stack(point.through(embedded + changes))
        logits = point.logits(streams[-1])
        moved = divergence(logits[-1], logits[:-1]).mean(0)
    streams = torch.cat([(embedded + changes)[None], streams])
    apart = streams[:, :-1] - streams[:, -1:]
    derivative = point.derivative(lambda x_TD: torch.cat(point.through(x_TD[None])), embedded)
    predicted = torch.stack([torch.cat([change[None], derivative.jvp(change)]) for change in changes[:-1]], 1)
    response, linear = ((each.double().square().sum(-1).mean(1).sqrt() / length).cpu() for each in (apart, predicted))
    before = float(apart[:, :, :position].abs().max()) if position else 0.0
    return Impulse(point.notes, point.tokens, position, size, response, linear, moved.cpu(), before)
