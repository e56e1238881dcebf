"""Derivatives that are applied to vectors and never stored, and what products with them tell.

Shapes are those of the function: its point and its value may be tensors of any shape. N is the number of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.random import torch_generator

Product = Callable[[Tensor], Tensor]
FEWEST_PROBES = 4


class LinearMap(Protocol):
    """A linear map J that is applied and never stored, from the shape of `point` to that of `value`."""

    point: Tensor
    value: Tensor

    def jvp(self, tangent: Tensor) -> Tensor:
        """Returns ``J tangent``, in the shape of the value."""

    def vjp(self, cotangent: Tensor) -> Tensor:
        """Returns ``J^T cotangent``, in the shape of the point."""


class Jacobian:
    """The derivative J of `function` at `point`, a `LinearMap`. The graph of the function is built once.

    ``u -> J^T u`` is linear in u, so its own derivative, transposed, is J: both products cost about one pass each, and
    every operation of the function needs only a backward pass that can be differentiated. `proceed` is called before
    each product, and may raise to end an analysis. Products raise `CheckpointError` if they, or their lengths, are not
    finite.
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], point: Tensor, proceed: Callable[[], None] = lambda: None
    ) -> None:
        self._proceed = proceed
        self.point = point.detach().clone().requires_grad_()
        with torch.enable_grad():
            self.value = function(self.point)
            self._cotangent = torch.zeros_like(self.value, requires_grad=True)
            (self._pulled,) = torch.autograd.grad(self.value, self.point, self._cotangent, create_graph=True)

    def jvp(self, tangent: Tensor) -> Tensor:
        """Returns ``J tangent``, in the shape of the value."""
        self._proceed()
        return _finite(torch.autograd.grad(self._pulled, self._cotangent, tangent, retain_graph=True)[0])

    def vjp(self, cotangent: Tensor) -> Tensor:
        """Returns ``J^T cotangent``, in the shape of the point."""
        self._proceed()
        return _finite(torch.autograd.grad(self.value, self.point, cotangent, retain_graph=True)[0])


def _finite(product: Tensor) -> Tensor:
    if not product.norm().isfinite():  # whose square may be too large where the numbers are not
        raise CheckpointError(
            f"A derivative of the network is not finite at this prompt: its numbers are too large for "
            f"{str(product.dtype).removeprefix('torch.')}. Use an earlier checkpoint, or try --dtype float64."
        )
    return product


@dataclass(frozen=True)
class SingularValue:
    """An estimate of a singular value. A true one is within `residual` of it."""

    value: float
    residual: float


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The ends of a spectrum: a few `largest` singular values, falling, and `smallest`, rising.

    No estimate is above the largest singular value or below the smallest. `is_whole` says that the search went through
    the whole space, so that all values are exact but for rounding. `direction` has length 1 and the shape of the point:
    it is multiplied by the largest value.
    """

    largest: tuple[SingularValue, ...]
    smallest: tuple[SingularValue, ...]
    direction: Tensor
    steps: int
    is_whole: bool


def singular_values(
    jacobian: LinearMap, count: int = 3, steps: int = 32, *, tolerance: float = 1e-3, seed: int = 0
) -> Spectrum:
    """Finds the ends of the spectrum by Golub-Kahan bidiagonalisation with full reorthogonalisation.

    Stops after `steps` steps of two products each, or when the residuals of the `count` largest and smallest values are
    below `tolerance` times the largest (Golub and Kahan 1965; Golub and Van Loan, "Matrix Computations", 10.4).
    """
    # The search begins in the smaller space, which it can go through.
    spaces: list[tuple[Product, Tensor]] = [(jacobian.jvp, jacobian.point), (jacobian.vjp, jacobian.value)]
    is_turned = jacobian.value.numel() < jacobian.point.numel()
    (first, begin), (second, end) = reversed(spaces) if is_turned else spaces
    most = min(begin.numel(), steps)
    right, left = Basis(begin, most + 1, seed), Basis(end, most, seed + 1)
    diagonal, above = list[float](), list[float]()
    right.add(torch.zeros_like(begin), math.inf)
    while True:
        diagonal.append(left.add(first(right.last), max(diagonal, default=0.0)))
        is_whole = len(diagonal) == begin.numel()
        beyond = 0.0 if is_whole else right.add(second(left.last), max(diagonal))
        last, values, turned = torch.linalg.svd(bidiagonal(diagonal, above))
        # Products are rounded, too.
        rounding = torch.finfo(begin.dtype).eps * float(values[0])
        residuals = (beyond * last[-1].abs()).clamp(min=rounding).tolist()
        found = [SingularValue(*pair) for pair in zip(values.tolist(), residuals, strict=True)]
        largest, smallest = tuple(found[:count]), tuple(found[: -count - 1 : -1])
        enough = max(value.residual for value in (*largest, *smallest)) <= tolerance * largest[0].value
        if len(diagonal) == most or (enough and len(diagonal) >= 2 * count):
            break
        above.append(beyond)
    direction = left.combined(last[:, 0]) if is_turned else right.combined(turned[0])
    return Spectrum(largest, smallest, direction, len(diagonal), is_whole)


def bidiagonal(diagonal: list[float], above: list[float]) -> Tensor:
    """The matrix in float64 with this diagonal and the numbers `above` it."""
    numbers = torch.tensor(diagonal, dtype=torch.float64), torch.tensor(above, dtype=torch.float64)
    return torch.diag(numbers[0]) + torch.diag(numbers[1], 1)


class Basis:
    """Orthonormal vectors of the shape of `like`, at most `most` of them: the directions that a Krylov method keeps."""

    def __init__(self, like: Tensor, most: int, seed: int = 0) -> None:
        self._shape, self._rows, self._count = like.shape, like.detach().new_empty(most, like.numel()), 0
        self._generator = torch_generator(seed, "singular vectors")

    @property
    def last(self) -> Tensor:
        """The newest vector."""
        return self._rows[self._count - 1].view(self._shape)

    def add(self, vector: Tensor, scale: float) -> float:
        """Adds the direction of what of `vector` is new, and returns its length.

        If that is no more than rounding relative to `scale`, a random direction is added, and the length is 0.
        """
        new = self._beside(vector.flatten())
        length = float(new.norm())
        if length <= 100 * torch.finfo(new.dtype).eps * scale:
            random = torch.randn(len(new), generator=self._generator, dtype=torch.float64).to(new)
            new, length = self._beside(random), 0.0
        self._rows[self._count] = new / new.norm()
        self._count += 1
        return length

    def combined(self, weights: Tensor) -> Tensor:
        """Returns the sum of the first vectors times `weights`."""
        return (weights.to(self._rows) @ self._rows[: len(weights)]).view(self._shape)

    def _beside(self, vector: Tensor) -> Tensor:
        rows = self._rows[: self._count]
        for _ in range(2):  # rounding leaves a part behind the first time
            vector = vector - (rows @ vector) @ rows
        return vector


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval of 95 percent."""

    value: float
    low: float
    high: float

    @classmethod
    def of_root(cls, squares: Tensor) -> Interval:
        """The root of the mean of samples (N,), as `root_intervals` gives it."""
        return cls(*root_intervals(squares).tolist())


def root_intervals(squares: Tensor) -> Tensor:
    """The roots of the means of samples (..., N) with Student's intervals: value, low and high (3, ...).

    Raises `UsageError` for fewer than four samples.
    """
    count = squares.shape[-1]
    if count < FEWEST_PROBES:
        raise UsageError(f"An interval needs at least {FEWEST_PROBES} probes, not {count}. Use more.")
    from scipy.special import stdtrit  # loads slowly

    samples = squares.double().cpu()
    mean, half = samples.mean(-1), float(stdtrit(count - 1, 0.975)) * samples.std(-1) / math.sqrt(count)
    return torch.stack([mean, mean - half, mean + half]).clamp(min=0).sqrt()


def signs(like: Tensor, seed: int, *purpose: str | int) -> Tensor:
    """Returns random numbers -1 and 1 in the shape and data type of `like`: a probe, whose covariance is 1."""
    drawn = torch.randint(0, 2, like.shape, generator=torch_generator(seed, *purpose))
    return (2 * drawn - 1).to(like)


def probed(product: Product, like: Tensor, probes: int, seed: int, *purpose: str | int) -> Iterator[Tensor]:
    """The squares, in float64, of products with random vectors of the shape of `like`.

    For v with covariance 1, ``E |J v|^2 = |J|_F^2`` (Hutchinson 1990).
    """
    for probe in range(probes):
        yield product(signs(like, seed, *purpose, probe)).double().square()


def typical_gain(jacobian: LinearMap, probes: int = 8, seed: int = 0) -> Interval:
    """Estimates ``|J|_F / sqrt(N)``, the gain of a random direction. The smaller of the two spaces is probed."""
    count = jacobian.point.numel()
    forward = count <= jacobian.value.numel()
    product, like = (jacobian.jvp, jacobian.point) if forward else (jacobian.vjp, jacobian.value)
    return Interval.of_root(torch.stack([found.sum() / count for found in probed(product, like, probes, seed, "gain")]))
