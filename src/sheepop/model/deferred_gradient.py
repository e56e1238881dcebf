"""The gradient of a large output weight, computed when it is read, for some tokens of the vocabulary at a time.

With weights w_n of the log-probabilities of the labels y_n, the row of token v in the gradient is
``sum_n w_n (1[y_n = v] - p_nv) h_n``. It follows from the hidden states h and one log-sum-exp for each position, which
take far less memory than the gradient (V, D) if a step learns fewer than V tokens. The logits are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sheepop.model.head import OutputHead
from sheepop.model.logits import LogitChunks, LossMemory, PositionsLearnt, WeightGradient
from sheepop.model.loss import weighted_gradients

# Tokens of the vocabulary whose gradient exists at a time, and the positions whose logits of them do.
_TOKENS = 8192
_POSITIONS = 1024


class DeferredGradient:
    """The gradient of the weight (V, D) of `head` in one step, as blocks of rows; the weight itself has no `grad`.

    Between `begin` and `clear` the log-probabilities of the head leave behind what it follows from. Parts that
    something else computed are given to `add`.
    """

    def __init__(self, head: OutputHead) -> None:
        self.weight = head.weight
        self.is_active = False
        self._head = head
        self._memory = LossMemory()
        self._learnt: list[PositionsLearnt] = []
        self._parts: list[Tensor] = []
        self._factor = 1.0

    def begin(self, is_active: bool) -> None:
        """Defers the gradient of the step that begins, or not."""
        self.clear()
        self.is_active = is_active
        self._head.deferred = self._learnt if is_active else None

    def clear(self) -> None:
        """Forgets the gradient and the memory of its logits."""
        self._learnt.clear()
        self._parts.clear()
        self._memory = LossMemory()
        self._factor = 1.0

    def add(self, gradient: Tensor) -> None:
        """Adds a gradient (V, D), dense or sparse."""
        self._parts.append(gradient.coalesce() if gradient.is_sparse else gradient)

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies the gradient by a number."""
        self._factor *= float(factor)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of the gradient."""
        norms = [torch.linalg.vector_norm(gradient) for _, gradient in self.blocks()]
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields slices of the V rows with their gradient; rows of the weight may change once they were yielded."""
        for start in range(0, len(self.weight), _TOKENS):
            rows = slice(start, min(len(self.weight), start + _TOKENS))
            gradient = torch.zeros_like(self.weight[rows])
            for learnt in self._learnt:
                self._add_losses(gradient, rows, learnt)
            for part in self._parts:
                _add_rows(gradient, rows, part)
            yield rows, gradient if self._factor == 1.0 else gradient.mul_(self._factor)

    def _add_losses(self, gradient: Tensor, rows: slice, learnt: PositionsLearnt) -> None:
        cast = None if self._head.cast is None else self._head.cast[rows]
        dtype = learnt.hidden.dtype
        chunks = LogitChunks.of(self.weight[rows], cast, dtype, self._memory)
        of_weight = WeightGradient(chunks, self._memory, gradient)
        with torch.autocast(gradient.device.type, enabled=False):
            for hidden_RD, *by_row in zip(*(torch.split(each, _POSITIONS) for each in learnt), strict=True):
                logits_RV = chunks.logits(hidden_RD, slice(None))
                by_row[0] = by_row[0] - rows.start
                for part, labels_R, log_sum_R, weights_R in chunks.blocks(logits_RV, *by_row):
                    weighted_gradients(part, labels_R, log_sum_R, weights_R, self._head.soft_cap, chunks.exact)
                of_weight.add(logits_RV, hidden_RD, chunks.weight)


def _add_rows(gradient: Tensor, rows: slice, part: Tensor) -> None:
    """Adds some `rows` of a gradient (V, D) to `gradient`."""
    if not part.is_sparse:
        gradient.add_(part[rows])
        return
    (tokens,) = part.indices()
    here = (tokens >= rows.start) & (tokens < rows.stop)
    gradient.index_add_(0, tokens[here] - rows.start, part.values()[here])
