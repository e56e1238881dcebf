"""Logits computed in chunks of rows: chunk sizes, data types, memory, and the gradient of the output weight."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function_unary

from sheepop.model.fused import fuses
from sheepop.model.native_scoring import matrix_rows

IGNORE_INDEX = -100

# Indices of some of N positions, or ``slice(None)`` for all of them.
Places = Tensor | slice

# Bytes of the logits of one chunk, which one matrix product computes: enough rows for the product to be efficient.
_CHUNK_BYTES = {"cpu": 128 << 20}
_CHUNK_BYTES_ELSEWHERE = 256 << 20
# On an NVIDIA GPU a chunk adds its product of R rows to the weight's gradient, which is read and written in float32:
# 8 V D bytes for 2 R V D operations. At 295 operations a byte (an H100's 989 TFLOP/s over 3.35 TB/s) that takes
# 4 * 295 / R of the product's time, a seventh for this many rows, and a twentieth of the chunk's three products.
_CHUNK_ROWS_CUDA = 8192
_CHUNK_SHARE_CUDA = 32  # a chunk takes at most 1/32 of a GPU's memory: 2.5 GB of 80
# Bytes of the rows that go through exponential, sum and scaling together: on a CPU they stay in its cache; on a GPU
# without a fused kernel they are copied to float32.
_BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
# Bytes of an output weight of which a second gradient costs more than computing logits again.
_LARGE = 2**28
# Bytes of the gradients of logits that a step keeps until its update, so that they are not computed again.
_KEPT_BYTES = 320 << 20
# Numbers of a matrix in another format that a product dequantises at a time.
_PART = {"cpu": 1 << 22}
_PART_ELSEWHERE = 1 << 26


def cap(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Returns ``c tanh(logits / c)`` (Gemma 2, 2024), or the unchanged logits if there is no soft cap."""
    if soft_cap is None:
        return logits
    bounded = (logits / soft_cap).tanh_()  # in place, because a large vocabulary makes each copy expensive
    return bounded * soft_cap if torch.is_grad_enabled() else bounded.mul_(soft_cap)


class PositionsLearnt(NamedTuple):
    """N positions from which a gradient of the output weight follows, see `deferred_gradient`.

    `hidden` (N, D) are in the data type of products. `weights` (N,) are those of the log-probabilities of the `labels`
    (N,) in what is minimised, and `log_sums` (N,) are log-sum-exps of the logits. `gradients` (N, V) are those of the
    logits, if they are still in memory.
    """

    hidden: Tensor
    labels: Tensor
    log_sums: Tensor
    weights: Tensor
    gradients: Tensor | None = None

    def times(self, factor: Tensor) -> PositionsLearnt:
        """The same positions with another weight of their loss."""
        if self.gradients is None:
            return self._replace(weights=self.weights * factor)
        # The hidden states are only multiplied with the gradients, which are far larger.
        return self._replace(hidden=self.hidden * factor)


@dataclass
class LearntInStep:
    """The positions that a step has learnt, and how many rows of gradients of logits losses keep for it."""

    positions: list[PositionsLearnt] = field(default_factory=list)
    num_kept: int = 0

    def clear(self) -> None:
        """Forgets them; the memory of the gradients may be used again."""
        self.positions.clear()
        self.num_kept = 0


@dataclass
class LossMemory:
    """Buffers that loss calls reuse: on a CPU, allocating new pages costs more than the arithmetic.

    `gradient` (V, D) receives the weight's gradient in the next call and then belongs to the caller, which may put it
    back when it is no longer read. `logits` are those of a chunk, the `latest` of which a backward pass may read again.
    If `weight` has a gradient already, its backward passes add to that in place, so that a second one never exists. If
    `deferred` is given, losses leave their positions there instead of computing a gradient of the weight, and the
    gradients of their logits in the first rows of `logits`, as long as `_KEPT_BYTES` are enough.
    """

    logits: Tensor | None = None
    gradient: Tensor | None = None
    weight: Tensor | None = None
    deferred: LearntInStep | None = None
    latest: object = None

    def take_logits(self, rows: int, size: int, like: Tensor) -> Tensor:
        """Returns a buffer (rows, size) with the data type and device of `like`."""
        known, self.latest = self.logits, None
        kept, room = 0, 0
        if self.deferred is not None:
            kept, room = self.deferred.num_kept, kept_rows(size, like.dtype)
        if known is None or known.shape[0] < kept + rows or known.shape[1] != size or known.dtype != like.dtype:
            # Rows that nobody writes take no memory.
            known = self.logits = None  # freed before the larger one is allocated
            known = self.logits = like.new_empty(kept + rows + room, size)
        return known[kept : kept + rows]

    def keep(self, gradients_RV: Tensor) -> int:
        """Keeps as many rows of the buffer taken last as there is room for until the step ends; returns how many."""
        assert self.deferred is not None
        count, size = gradients_RV.shape
        kept = min(count, kept_rows(size, gradients_RV.dtype) - self.deferred.num_kept)
        self.deferred.num_kept += kept
        return kept

    def logits_of(self, call: object, rows: int) -> Tensor | None:
        """The logits of the last chunk that the forward pass `call` computed, once, unless they were overwritten."""
        latest, self.latest = self.latest, None
        if latest is not call or self.logits is None:
            return None
        kept = 0 if self.deferred is None else self.deferred.num_kept
        return self.logits[kept : kept + rows]

    def sum_so_far(self, weight_VD: Tensor) -> Tensor | None:
        """Returns the gradient that backward passes for the weight add to; None if they make one of their own."""
        return weight_VD.grad if weight_VD is self.weight else None

    def take_gradient(self, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a buffer with the shape of the weight, which later calls do not reuse."""
        known, self.gradient = self.gradient, None
        if known is None or known.shape != weight_VD.shape or known.dtype != dtype:
            return torch.empty_like(weight_VD, dtype=dtype)
        # A new tensor on the same memory, which autograd takes as the gradient without a copy.
        return known.detach()


def kept_rows(vocab_size: int, dtype: torch.dtype) -> int:
    """Returns how many rows of gradients of logits a step keeps at most."""
    return _KEPT_BYTES // (vocab_size * dtype.itemsize)


def adds_in_place(weight_bytes: int, device: str) -> bool:
    """Whether the losses of a step add to one gradient of an output weight, so that a second one never exists."""
    return device == "cpu" and weight_bytes >= _LARGE


def adds_exactly(device: str) -> bool:
    """Whether a product of half precision can add to a sum in float32."""
    return device == "cuda"


def logits_bytes(num_tokens: int, vocab_size: int, dtype: torch.dtype, device: str) -> int:
    """Returns the largest number of bytes of logits that a loss over `num_tokens` tokens holds at a time."""
    return chunk_rows(num_tokens, vocab_size, dtype, device) * vocab_size * dtype.itemsize


def supervised_places(labels_N: Tensor) -> Places:
    """Returns where labels are not -100; on a GPU this synchronises with the host."""
    supervised = labels_N != IGNORE_INDEX
    return slice(None) if bool(supervised.all()) else supervised.nonzero()[:, 0]


def product_dtype(weight_VD: Tensor, weight_cast: Tensor | None) -> torch.dtype:
    """Returns the data type of products with the weight: that of autocast, of `weight_cast`, or of the weight."""
    device = weight_VD.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight_VD.dtype if weight_cast is None else weight_cast.dtype


@dataclass(frozen=True)
class LogitChunks:
    """Computes the logits of hidden states under `weight`, chunk by chunk; see `Projection.added`."""

    dtype: torch.dtype  # of matrix products
    exact: torch.dtype  # of exponentials and sums
    weight: Tensor  # (V, D), in `dtype`
    memory: LossMemory
    low: Tensor | None  # (N, R)
    up: Tensor | None  # (V, R), in `dtype`

    @classmethod
    def of(
        cls,
        weight_VD: Tensor,
        weight_cast: Tensor | None,
        dtype: torch.dtype,
        memory: LossMemory | None,
        low_NR: Tensor | None = None,
        up_VR: Tensor | None = None,
    ) -> LogitChunks:
        """Returns chunks with products in `dtype`; the weight is cast unless `weight_cast` is given."""
        weight = weight_VD if weight_cast is None else weight_cast
        exact = torch.float32 if dtype.itemsize < 4 else dtype
        weight = weight.detach()
        weight = weight if has_torch_function_unary(weight) else weight.to(dtype)
        up = None if up_VR is None else up_VR.detach().to(dtype)
        return cls(dtype, exact, weight, memory or LossMemory(), low_NR, up)

    def rows(self, labels_N: Tensor, places: Places, chunk_bytes: int | None) -> Iterator[Places]:
        """Yields the supervised rows in chunks of about equal size."""
        count = labels_N.numel() if isinstance(places, slice) else places.numel()
        size = chunk_rows(count, self.weight.shape[0], self.dtype, self.weight.device.type, chunk_bytes)
        for start in range(0, count, max(1, size)):
            stop = min(count, start + size)
            yield slice(start, stop) if isinstance(places, slice) else places[start:stop]

    def logits(self, hidden_RD: Tensor, rows: Places) -> Tensor:
        """Returns the logits (R, V) of the hidden states of some rows, which overwrite those of the chunk before."""
        memory = self.memory.take_logits(hidden_RD.shape[0], self.weight.shape[0], hidden_RD)
        for place, part in parts_of(self.weight, self.dtype):
            torch.mm(hidden_RD, part.t(), out=memory[:, place])
        if self.low is not None and self.up is not None:
            memory.addmm_(self.low[rows].to(self.dtype), self.up.t())
        return memory

    def blocks(self, logits_RV: Tensor, *by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Splits logits and other per-row tensors into blocks of rows that are processed together."""
        rows = self.block_rows(logits_RV)
        return zip(*(torch.split(tensor, rows) for tensor in (logits_RV, *by_row)), strict=True)

    def block_rows(self, matrix: Tensor) -> int:
        """Returns how many rows of a matrix are processed together."""
        device = matrix.device.type
        return matrix.shape[0] if fuses(device) else block_rows(matrix.shape[1], self.exact, device)


class ProjectionGradients:
    """Gradients of hidden states (N, D), weight (V, D), `low` (N, R) and `up` (V, R), those of them that are `needed`.

    They are added from the gradients of the logits of each chunk; that of the weight is added to `sum_so_far` in place.
    """

    def __init__(
        self, chunks: LogitChunks, hidden_ND: Tensor, needed: Sequence[bool], sum_so_far: Tensor | None = None
    ) -> None:
        self._chunks = chunks
        self._learnt: list[PositionsLearnt] = []
        self._hidden = torch.zeros_like(hidden_ND) if needed[0] else None
        self._weight = WeightGradient(chunks, chunks.memory, sum_so_far) if needed[1] else None
        self._low = torch.zeros_like(chunks.low) if needed[2] and chunks.low is not None else None
        self._up = WeightGradient(chunks, LossMemory()) if needed[3] else None

    def add(self, rows: Places, gradients_RV: Tensor, hidden_RD: Tensor, learnt: PositionsLearnt | None = None) -> None:
        """Adds those of a chunk; `learnt` are its positions if the weight's gradient is deferred."""
        if self._hidden is not None:
            self._hidden[rows] = product_back(gradients_RV, self._chunks.weight).to(self._hidden.dtype)
        if self._weight is not None:
            self._weight.add(gradients_RV, hidden_RD, self._chunks.weight)
        if learnt is not None:
            kept = self._chunks.memory.keep(gradients_RV)
            for part, gradients in ((slice(kept), gradients_RV[:kept]), (slice(kept, None), None)):
                if len(learnt.labels[part]):
                    some = PositionsLearnt(*(each[part] for each in learnt[:-1]))
                    self._learnt.append(some._replace(gradients=gradients))
        low, up = self._chunks.low, self._chunks.up
        if low is not None and up is not None:
            if self._low is not None:
                self._low[rows] = (gradients_RV @ up).to(low.dtype)
            if self._up is not None:
                self._up.add(gradients_RV, low[rows].to(up.dtype), up)

    def learnt(self) -> list[PositionsLearnt]:
        """The positions whose gradients are kept, chunk by chunk, and then all others together."""
        kept = [each for each in self._learnt if each.gradients is not None]
        rest = [each[:-1] for each in self._learnt if each.gradients is None]
        joined = [PositionsLearnt(*map(torch.cat, zip(*rest, strict=True)))] if rest else []
        return kept + joined

    def results(self, weight_VD: Tensor, up_VR: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the four gradients, None where it is not needed."""
        of_weight = None if self._weight is None else self._weight.result(weight_VD)
        of_up = None if self._up is None or up_VR is None else self._up.result(up_VR)
        return self._hidden, of_weight, self._low, of_up


class WeightGradient:
    """The sum over chunks of ``dlogits^T hidden`` (V, D).

    Products in half precision are summed in float32: on an NVIDIA GPU by the matrix product itself, elsewhere for a few
    rows of the vocabulary at a time, so that a product is still in the CPU's cache when it is added. It is added to
    `sum_so_far`, if given, in place.
    """

    def __init__(self, chunks: LogitChunks, memory: LossMemory, sum_so_far: Tensor | None = None) -> None:
        self._chunks, self._memory = chunks, memory
        self._sum, self._has_own = sum_so_far, sum_so_far is None

    def add(self, gradients_RV: Tensor, hidden_RD: Tensor, weight_VD: Tensor) -> None:
        """Adds the product of a chunk for a weight of that shape."""
        first = self._sum is None
        if self._sum is None:
            self._sum = self._memory.take_gradient(weight_VD, self._chunks.exact)
        if self._chunks.dtype == self._chunks.exact:
            self._sum.addmm_(gradients_RV.t(), hidden_RD, beta=0.0 if first else 1.0)
            return
        if adds_exactly(gradients_RV.device.type):
            exact = self._chunks.exact
            torch.addmm(self._sum, gradients_RV.t(), hidden_RD, exact, beta=0.0 if first else 1.0, out=self._sum)
            return
        size = self._chunks.block_rows(self._sum)
        for part, gradients in zip(torch.split(self._sum, size), torch.split(gradients_RV, size, dim=1), strict=True):
            product = gradients.t() @ hidden_RD
            part.copy_(product) if first else part.add_(product)

    def result(self, weight_VD: Tensor) -> Tensor | None:
        """Returns the sum in the weight's data type; zeros if there was no chunk, None if it was added to another."""
        if not self._has_own:
            return None
        return torch.zeros_like(weight_VD) if self._sum is None else self._sum.to(weight_VD.dtype)


def score_tokens(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    *,
    soft_cap: float | None = None,
    added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the summed cross-entropy and the number of correct predictions, computed in chunks without gradients.

    Shapes as in `loss.linear_cross_entropy`. The prediction is the most likely token, the first one in a tie.
    """
    with torch.no_grad():
        hidden_ND, labels_N = hidden.flatten(0, -2), labels.flatten()
        low, up = (None, None) if added is None else (added[0].flatten(0, -2), added[1])
        chunks = LogitChunks.of(weight_VD, None, product_dtype(weight_VD, None), None, low, up)
        loss = torch.zeros((), dtype=chunks.exact, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in chunks.rows(labels_N, supervised_places(labels_N), None):
                logits_RV = chunks.logits(hidden_ND[rows].to(chunks.dtype), rows)
                for part, wanted in chunks.blocks(logits_RV, labels_N[rows]):
                    loss += F.cross_entropy(cap(part.to(chunks.exact), soft_cap), wanted, reduction="sum")
                    correct += (part.argmax(-1) == wanted).sum()
        return loss, correct


def parts_of(weight_NK: Tensor, dtype: torch.dtype, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yields a matrix in `dtype`, `size` rows at a time; without it whole, or if stored in another format in parts."""
    count = len(weight_NK)
    size = count if size is None else size
    if has_torch_function_unary(weight_NK):
        size = min(size, max(1, _PART.get(weight_NK.device.type, _PART_ELSEWHERE) // weight_NK.shape[1]))
    for start in range(0, count, size):
        rows = slice(start, min(count, start + size))
        yield rows, matrix_rows(weight_NK, rows).to(dtype)


def product_back(gradient: Tensor, weight_NK: Tensor) -> Tensor:
    """Returns ``gradient W`` (..., K) for a gradient (..., N), the gradient of x in ``x W^T``.

    Parts of a matrix in another format are added in float32.
    """
    found = None
    for rows, part in parts_of(weight_NK, gradient.dtype):
        if rows.stop - rows.start == len(weight_NK):
            return gradient @ part
        product = gradient[..., rows] @ part
        found = product.to(torch.promote_types(product.dtype, torch.float32)) if found is None else found.add_(product)
    assert found is not None
    return found.to(gradient.dtype)


def chunk_rows(count: int, vocab_size: int, dtype: torch.dtype, device: str, chunk_bytes: int | None = None) -> int:
    """Returns how many of `count` rows of logits are computed at a time, in chunks of about equal size."""
    row = vocab_size * dtype.itemsize
    if chunk_bytes is None and device == "cuda":
        most = min(_CHUNK_ROWS_CUDA, _cuda_memory() // _CHUNK_SHARE_CUDA // row)
    else:
        most = (chunk_bytes or _CHUNK_BYTES.get(device, _CHUNK_BYTES_ELSEWHERE)) // row
    num_chunks = max(1, -(-count // max(1, most)))
    return -(-count // num_chunks)


def block_rows(vocab_size: int, dtype: torch.dtype, device: str) -> int:
    """Returns how many rows of logits in `dtype` go through exponential and sum together."""
    return max(1, _BLOCK_BYTES.get(device, _CHUNK_BYTES_ELSEWHERE) // (vocab_size * dtype.itemsize))


@functools.cache
def _cuda_memory() -> int:
    """Returns the GPU's total memory in bytes, not the free memory: the chunk size affects a run's rounding."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
