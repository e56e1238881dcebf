"""The loop of generation, linearised: the output at one position becomes the input of the next.

A pass has no path back: a block reads lower layers and earlier positions only. A loop exists where a chosen token is
read again. G maps the vectors u_i at the input to the expected vectors y_i of the next tokens,
``y_i = E^T softmax(z_i)`` with the embedding E. H feeds them back one position later: ``u = r - H y``, where
``(H y)_i = -y_(i-1)`` behind the prompt. So ``y = (I + G H)^-1 G r``. Shapes: T tokens, D d_model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sheepop.interpret.control.jacobian import Jacobian
from sheepop.interpret.control.operating_point import OperatingPoint


def forward_map(point: OperatingPoint) -> Jacobian:
    """G at an operating point, (T, D) to (T, D).

    Positions and n-grams are those of the pass, because they are added to the vectors of tokens.
    """
    model = point.model

    def function(x_TD: Tensor) -> Tensor:
        p_TV = point.logits(point.run(0, point.num_layers, x_TD[None])[-1])[0].softmax(-1)
        expected_TD = p_TV @ model.embedding.weight * model.embedding_scale
        return expected_TD if model.embedding_norm is None else model.embedding_norm(expected_TD)

    return point.derivative(function, point.states[0])


class ClosedLoop:
    """The map ``(I + G H)^-1 G``, where the outputs before the positions from `first_fed` on are fed back.

    G never maps a position to an earlier one, and H maps to the next one. So a change passes H at most T - `first_fed`
    times, and the series ``G - G H G + ...`` is exact after as many terms.
    """

    def __init__(self, forward: Jacobian, first_fed: int) -> None:
        self.point, self.value = forward.point, forward.value
        self._forward, self._first = forward, first_fed

    @property
    def num_passes(self) -> int:
        """How often a change can go round the loop: the number of positions that are fed."""
        return len(self.point) - self._first

    def jvp(self, tangent: Tensor) -> Tensor:
        """Returns the change of y for a change of r."""
        total = term = self._forward.jvp(tangent)
        for _ in range(self.num_passes):
            term = self._forward.jvp(self._fed(term))
            total = total + term
        return total

    def vjp(self, cotangent: Tensor) -> Tensor:
        """Returns the transposed map of a change of y."""
        total = term = self._forward.vjp(cotangent)
        for _ in range(self.num_passes):
            term = self._forward.vjp(self._fed_back(term))
            total = total + term
        return total

    def _fed(self, y_TD: Tensor) -> Tensor:
        """``-H y``."""
        fed = torch.zeros_like(y_TD)
        fed[self._first :] = y_TD[self._first - 1 : -1]
        return fed

    def _fed_back(self, u_TD: Tensor) -> Tensor:
        """``-H^T u``."""
        fed = torch.zeros_like(u_TD)
        fed[self._first - 1 : -1] = u_TD[self._first :]
        return fed
