"""Impulse response: one token's vector is changed, and the change is followed through layers and later tokens.

Shapes: P directions, T tokens, D d_model, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.interpret.control.coupling import divergence
from sheepop.interpret.control.drawing import heat_map
from sheepop.interpret.control.finding import PromptFinding, columns
from sheepop.interpret.control.jacobian import signs
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.pictures import Picture, labels_of


@dataclass(frozen=True, eq=False)
class Impulse(PromptFinding):
    """The response to a change of the embedding at `position`, whose length is `size` of the embedding's.

    `response` (L + 1, T) is the length of the change of the stream, relative to that of the impulse, as the root mean
    square over random directions. `linear` is what the derivative predicts for the same directions, and `divergence`
    (T,) the mean change of the predictions, KL(before, after) in nats. `most_before` is the largest absolute change
    before the position.
    """

    verb: ClassVar[str] = "impulse"
    derived: ClassVar[tuple[str, ...]] = ("nonlinearity",)
    labels: list[str]
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

    def table(self) -> list[str]:
        """The response at the token and at later ones, after each block."""
        rows = []
        for layer, response in enumerate(self.response):
            later = response[self.position + 1 :]
            own = f"{float(response[self.position]):.3f}"
            name = "embedding" if layer == 0 else f"block {layer - 1}"
            most = "-" if not len(later) else f"{float(later.max()):.3f}"
            total = f"{float(response.square().sum().sqrt()):.3f}"
            rows.append([name, own, most, total])
        return columns(["after", f"token {self.position}", "most at a later token", "all tokens"], rows)

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
        rows = ["embedding", *(f"block {layer}" for layer in range(len(self.response) - 1))]
        title = f"Response to a change at token {self.position}"
        yield heat_map("impulse", title, self.response, rows, self.labels, "Length over the impulse's", decades=4)


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
        streams = torch.stack(point.run(0, point.num_layers, embedded + changes))
        logits = point.logits(streams[-1])
        moved = divergence(logits[-1], logits[:-1]).mean(0)
    streams = torch.cat([(embedded + changes)[None], streams])
    apart = streams[:, :-1] - streams[:, -1:]
    derivative = point.derivative(lambda x_TD: torch.cat(point.run(0, point.num_layers, x_TD[None])), embedded)
    predicted = torch.stack([torch.cat([change[None], derivative.jvp(change)]) for change in changes[:-1]], 1)
    response, linear = ((each.double().square().sum(-1).mean(1).sqrt() / length).cpu() for each in (apart, predicted))
    return Impulse(
        point.notes,
        point.tokens,
        labels_of(point.trace),
        position,
        size,
        response,
        linear,
        moved.cpu(),
        float(apart[:, :, :position].abs().max()) if position else 0.0,
    )
