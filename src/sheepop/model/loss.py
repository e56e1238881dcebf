"""The training objective: cross-entropy of the next token, summed over supervised positions.

`linear_cross_entropy` takes hidden states and the output projection instead of logits, and works through a few rows at
a time: the logits of all N positions, in float32 the largest tensor of a training step, never exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100

# Which of N positions: their indices, or all of them as ``slice(None)``.
Places = Tensor | slice

# Rows whose logits are computed by one matrix product, in bytes: enough rows for the product to be efficient.
_CHUNK_BYTES = {"cpu": 128 << 20}
_CHUNK_BYTES_ELSEWHERE = 256 << 20
# Rows that go through exponential, sum and scaling together, in bytes: on a CPU they stay in its cache meanwhile.
_BLOCK_BYTES = {"cpu": 4 << 20}


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """``-sum log softmax(logits)[label]`` over labels that are not -100, in float32.

    `logits` (..., V) and `labels` (...) are already aligned: a label is the token after its position. The sum,
    not the mean, is returned so that a step made of several micro-batches can divide by all of its tokens.
    """
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of `cross_entropy_sum` over supervised positions (0 when there are none)."""
    return cross_entropy_sum(logits, labels) / (labels != IGNORE_INDEX).sum().clamp(min=1)


class LossSums(NamedTuple):
    """Sums over the supervised positions of a micro-batch; both losses are scalars in float32 (or in float64)."""

    objective: Tensor  # what is minimised, z-loss and label smoothing included
    cross_entropy: Tensor  # the plain cross-entropy, without a gradient
    measured: Mapping[str, Tensor] = MappingProxyType({})  # what else was summed up, of any shape, without a gradient


@dataclass(frozen=True)
class LossTerms:
    """What is added to the cross-entropy of a token with logits z (V,) and ``Z = logsumexp(z)``.

    `z_loss` is the coefficient of ``Z^2``, which keeps logits from drifting (Chowdhery et al. 2022, section 5).
    `label_smoothing` is the share of the target spread evenly over the vocabulary (Szegedy et al. 2016, section 7).
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0


@dataclass
class LossMemory:
    """Memory that calls of `linear_cross_entropy` hand on to each other: on a CPU, fresh pages cost more than numbers.

    `gradient` (V, D) is where the next call makes the gradient of the weight; it is then the caller's, who may put it
    back here once nobody reads it any more. `logits` are those of a chunk, which nobody but the call itself reads.
    """

    logits: Tensor | None = None
    gradient: Tensor | None = None

    def take_logits(self, rows: int, size: int, like: Tensor) -> Tensor:
        """Memory of `rows` times `size` numbers of the data type of `like` and beside it."""
        known = self.logits
        if known is None or known.shape[0] < rows or known.shape[1] != size or known.dtype != like.dtype:
            known = self.logits = like.new_empty(rows, size)
        return known[:rows]

    def take_gradient(self, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of the shape of the weight, which is not handed out again."""
        known, self.gradient = self.gradient, None
        if known is None or known.shape != weight_VD.shape or known.dtype != dtype:
            return torch.empty_like(weight_VD, dtype=dtype)
        # A tensor of its own, which autograd takes as the gradient without a copy.
        return known.detach()


def linear_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    terms: LossTerms | None = None,
    *,
    places: Places | None = None,
    weight_cast: Tensor | None = None,
    soft_cap: float | None = None,
    chunk_bytes: int | None = None,
    memory: LossMemory | None = None,
) -> LossSums:
    """The loss of `hidden` (..., D) under the output projection `weight_VD`, for `labels` (...), -100 for none.

    The gradients are computed together with the loss, chunk by chunk, so going backward only multiplies them by the
    incoming gradient; they can be asked for once. Under autocast the products are taken in its data type; a copy
    of the weight in that type may be handed in as `weight_cast`. Sums and exponentials are in float32.

    `places` (M,) are the flat indices of the labels that are not -100, ``slice(None)`` when all are: finding them makes
    the host wait for a GPU. `soft_cap` c makes logits z ``c tanh(z / c)``. `chunk_bytes` bounds the logits held at a
    time, and `memory` keeps them, and what else is large, for the next call. Raises `ValueError` when shapes do not
    fit.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not fit hidden states {tuple(hidden.shape)}")
    if weight_VD.ndim != 2 or weight_VD.shape[1] != hidden.shape[-1]:
        raise ValueError(f"a head of shape {tuple(weight_VD.shape)} does not fit hidden states {tuple(hidden.shape)}")
    labels_N = labels.flatten()
    if places is None:
        places = _places(labels_N)
    objective, plain = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2),
        weight_VD,
        labels_N,
        places,
        weight_cast,
        terms or LossTerms(),
        soft_cap,
        chunk_bytes,
        memory or LossMemory(),
    )
    return LossSums(objective, plain)


def logits_bytes(num_tokens: int, vocab_size: int, dtype: torch.dtype, device: str) -> int:
    """What `linear_cross_entropy` holds of the logits of `num_tokens` tokens at a time, at most."""
    return _chunk_rows(num_tokens, vocab_size, dtype, device, None) * vocab_size * dtype.itemsize


def score_tokens(
    hidden: Tensor, weight_VD: Tensor, labels: Tensor, *, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy and the number of right guesses, chunk by chunk; no gradients.

    Shapes as in `linear_cross_entropy`. A guess is the likeliest token, of equals the first.
    """
    with torch.no_grad():
        hidden_ND, labels_N = hidden.flatten(0, -2), labels.flatten()
        work = _Work.of(hidden_ND, weight_VD, None, LossMemory())
        loss = torch.zeros((), dtype=work.exact, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in work.chunks(labels_N, _places(labels_N), None):
                logits_RV = work.logits(hidden_ND[rows].to(work.dtype))
                for part, wanted in work.blocks(logits_RV, labels_N[rows]):
                    loss += F.cross_entropy(cap(part.to(work.exact), soft_cap), wanted, reduction="sum")
                    correct += (part.argmax(-1) == wanted).sum()
        return loss, correct


def _places(labels_N: Tensor) -> Places:
    supervised = labels_N != IGNORE_INDEX
    return slice(None) if bool(supervised.all()) else supervised.nonzero()[:, 0]


@dataclass(frozen=True)
class _Work:
    """In what arithmetic logits are computed, and how many rows at a time."""

    dtype: torch.dtype  # of matrix products
    exact: torch.dtype  # of exponentials and sums
    weight: Tensor  # (V, D), in `dtype`
    memory: LossMemory

    @classmethod
    def of(cls, hidden_ND: Tensor, weight_VD: Tensor, weight_cast: Tensor | None, memory: LossMemory) -> _Work:
        device = hidden_ND.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        elif weight_cast is not None:
            dtype = weight_cast.dtype
        else:
            dtype = weight_VD.dtype
        exact = torch.float32 if dtype.itemsize < 4 else dtype
        weight = weight_VD if weight_cast is None else weight_cast
        return cls(dtype, exact, weight.detach().to(dtype), memory)

    def chunks(self, labels_N: Tensor, places: Places, chunk_bytes: int | None) -> Iterator[Places]:
        """The supervised rows in parts of about equal size."""
        count = labels_N.numel() if isinstance(places, slice) else places.numel()
        size = _chunk_rows(count, self.weight.shape[0], self.dtype, self.weight.device.type, chunk_bytes)
        for start in range(0, count, max(1, size)):
            stop = min(count, start + size)
            yield slice(start, stop) if isinstance(places, slice) else places[start:stop]

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """The logits of a chunk (R, V), in the memory of the chunk before."""
        memory = self.memory.take_logits(hidden_RD.shape[0], self.weight.shape[0], hidden_RD)
        return torch.mm(hidden_RD, self.weight.t(), out=memory)

    def blocks(self, logits_RV: Tensor, labels_R: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels cut into as many rows as are worked through together."""
        rows = self.block_rows(logits_RV)
        return zip(torch.split(logits_RV, rows), torch.split(labels_R, rows), strict=True)

    def block_rows(self, matrix: Tensor) -> int:
        """How many rows of a matrix are worked through together."""
        limit = _BLOCK_BYTES.get(matrix.device.type)
        return matrix.shape[0] if limit is None else max(1, limit // (matrix.shape[1] * self.exact.itemsize))


def _chunk_rows(count: int, vocab_size: int, dtype: torch.dtype, device: str, chunk_bytes: int | None) -> int:
    """How many of `count` rows of logits are computed at a time: chunks of about equal size."""
    limit = chunk_bytes or _CHUNK_BYTES.get(device, _CHUNK_BYTES_ELSEWHERE)
    most = max(1, limit // (vocab_size * dtype.itemsize))
    num_chunks = max(1, -(-count // most))
    return -(-count // num_chunks)


class _LinearCrossEntropy(torch.autograd.Function):
    """Hidden states (N, D), weight (V, D), labels (N,) to two sums; the gradients are made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        places: Places,
        weight_cast: Tensor | None,
        terms: LossTerms,
        soft_cap: float | None,
        chunk_bytes: int | None,
        memory: LossMemory,
    ) -> tuple[Tensor, Tensor]:
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        work = _Work.of(hidden_ND, weight_VD, weight_cast, memory)
        sums = torch.zeros(2, dtype=work.exact, device=hidden_ND.device)
        grad_hidden = torch.zeros_like(hidden_ND) if for_hidden else None
        grad_weight = _WeightGradient(work) if for_weight else None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in work.chunks(labels_N, places, chunk_bytes):
                hidden_RD = hidden_ND[rows].to(work.dtype)
                logits_RV = work.logits(hidden_RD)
                for part, wanted in work.blocks(logits_RV, labels_N[rows]):
                    sums += _losses_then_gradients(part, wanted, terms, soft_cap, work.exact)
                if grad_hidden is not None:
                    grad_hidden[rows] = (logits_RV @ work.weight).to(hidden_ND.dtype)
                if grad_weight is not None:
                    grad_weight.add(logits_RV, hidden_RD)
        ctx.gradients = (grad_hidden, None if grad_weight is None else grad_weight.result(weight_VD))
        objective, plain = sums.unbind()
        ctx.mark_non_differentiable(plain)
        return objective, plain

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_objective: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of linear_cross_entropy were handed out already; compute the loss again")
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        for gradient in (grad_hidden, grad_weight):
            if gradient is not None:
                gradient.mul_(grad_objective)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


class _WeightGradient:
    """The sum over chunks of ``dlogits^T hidden`` (V, D).

    Products in half precision are added up in float32, a few rows of the vocabulary at a time, so that on a CPU a
    product is still in its cache when it is added.
    """

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._sum: Tensor | None = None

    def add(self, gradients_RV: Tensor, hidden_RD: Tensor) -> None:
        first = self._sum is None
        if self._sum is None:
            self._sum = self._work.memory.take_gradient(self._work.weight, self._work.exact)
        if self._work.dtype == self._work.exact:
            self._sum.addmm_(gradients_RV.t(), hidden_RD, beta=0.0 if first else 1.0)
            return
        size = self._work.block_rows(self._sum)
        for part, gradients in zip(torch.split(self._sum, size), torch.split(gradients_RV, size, dim=1), strict=True):
            product = gradients.t() @ hidden_RD
            part.copy_(product) if first else part.add_(product)

    def result(self, weight_VD: Tensor) -> Tensor:
        """In the weight's data type; zeros when there was no chunk."""
        return torch.zeros_like(weight_VD) if self._sum is None else self._sum.to(weight_VD.dtype)


def cap(logits: Tensor, soft_cap: float | None) -> Tensor:
    """``c tanh(logits / c)`` (Gemma 2, 2024), or the logits as they are."""
    if soft_cap is None:
        return logits
    bounded = (logits / soft_cap).tanh_()  # of new memory, which a large vocabulary makes dear
    return bounded * soft_cap if torch.is_grad_enabled() else bounded.mul_(soft_cap)


def _losses_then_gradients(
    logits_RV: Tensor, labels_R: Tensor, terms: LossTerms, soft_cap: float | None, exact: torch.dtype
) -> Tensor:
    """Sums of objective and cross-entropy (2,); `logits_RV` is overwritten by the gradient of the objective.

    With ``p = softmax(z)``, ``Z = logsumexp(z)``, smoothing e and z-loss c the gradient of a row is
    ``(1 + 2 c Z) p - e / V``, less ``1 - e`` at the label; a soft cap multiplies it by ``1 - (z / cap)^2``.
    """
    z_RV = cap(logits_RV.to(exact), soft_cap)
    slope_RV = None if soft_cap is None else 1 - (z_RV / soft_cap).square()
    keep, spread = 1.0 - terms.label_smoothing, terms.label_smoothing
    labels_R1 = labels_R[:, None]
    label_logit = z_RV.gather(1, labels_R1)
    mean_logit = z_RV.mean(1, keepdim=True) if spread else 0.0
    largest = z_RV.amax(1, keepdim=True)
    total = z_RV.sub_(largest).exp_().sum(1, keepdim=True)
    log_sum = total.log() + largest
    plain = log_sum - label_logit
    objective = log_sum - keep * label_logit - spread * mean_logit + terms.z_loss * log_sum.square()
    z_RV.mul_((1.0 + 2.0 * terms.z_loss * log_sum) / total)
    if spread:
        z_RV.sub_(spread / z_RV.shape[1])
    z_RV.scatter_(1, labels_R1, z_RV.gather(1, labels_R1) - keep)
    if slope_RV is not None:
        z_RV.mul_(slope_RV)
    if z_RV is not logits_RV:
        logits_RV.copy_(z_RV)
    return torch.stack((objective.sum(), plain.sum()))
