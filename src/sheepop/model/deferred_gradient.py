"""The gradient of a large output weight, computed when it is read, for some tokens of the vocabulary at a time.

With weights w_n of the log-probabilities of the labels y_n, the row of token v in the gradient is
``sum_n g_nv h_n``, where ``g_nv = w_n (1[y_n = v] - p_nv)`` is the gradient of a logit. It follows from the hidden
states h and one log-sum-exp for each position, which take far less memory than the gradient (V, D) if a step learns
fewer than V tokens. The gradients of logits that are no longer in memory are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sheepop.model.head import OutputHead
from sheepop.model.logits import LearntInStep, LogitChunks, LossMemory, PositionsLearnt, WeightGradient
from sheepop.model.row_losses import weighted_gradients

# Tokens of the vocabulary whose gradient exists at a time, and the positions whose logits of them do.
_TOKENS = 4096
_POSITIONS = 1024
# Rows of a triangle that one product computes.
_SIDE = 64
# How much longer products with a triangle in strips take than one product of as many operations.
_STRIPS_COST = 1.5


class DeferredGradient:
    """The gradient of the weight (V, D) of `head` in one step, as blocks of rows; the weight itself has no `grad`.

    Between `begin` and `clear` the losses of the head leave behind what it follows from. Parts that something else
    computed are given to `add`.
    """

    def __init__(self, head: OutputHead) -> None:
        self.weight = head.weight
        self.is_active = False
        self._head = head
        self._memory = LossMemory()
        self._learnt = LearntInStep()
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
        """The norm of the gradient, from fewer numbers where there are fewer positions than columns."""
        count = sum(len(learnt.labels) for learnt in self._learnt.positions)
        is_sparse = all(part.is_sparse for part in self._parts)
        # Products with a triangle cost R (R + side) / 2 V operations, and the gradient R D V.
        if is_sparse and count and _STRIPS_COST * (count + _SIDE) / 2 < self.weight.shape[1]:
            return self._norm_by_positions(count)
        norms = [torch.linalg.vector_norm(gradient) for _, gradient in self.blocks()]
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields slices of the V rows with their gradient, which the next one overwrites.

        Rows of the weight may change once they were yielded.
        """
        memory = self.weight.new_empty(min(_TOKENS, len(self.weight)), self.weight.shape[1])
        for rows in self._slices():
            gradient = memory[: rows.stop - rows.start].zero_()  # new memory would take longer than the arithmetic
            of_weight = WeightGradient(self._chunks(rows), self._memory, gradient)
            for hidden_RD, gradients_RV in self._gradients_of_logits(rows):
                of_weight.add(gradients_RV, hidden_RD, gradient)
            for part in self._parts:
                _add_rows(gradient, rows, part)
            yield rows, gradient if self._factor == 1.0 else gradient.mul_(self._factor)

    def _norm_by_positions(self, count: int) -> Tensor:
        """The norm of ``G^T H + E`` with gradients of logits G (R, V), hidden states H (R, D) and sparse parts E.

        With ``H^T = Q U`` for an orthogonal Q and a triangle U (R, R), the first part has the norm of ``U G``. The
        square is ``|U G|^2 + 2 <G^T H, E> + |E|^2``, summed in float64, since these may cancel out.
        """
        hidden_RD = torch.cat([learnt.hidden for learnt in self._learnt.positions]).double()
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        triangle_RR = torch.linalg.qr(hidden_RD.t(), mode="r").R.to(exact)
        tokens, values = self._sparse_rows(hidden_RD)
        square = values.square().sum()
        gradients_RV = hidden_RD.new_empty(count, min(_TOKENS, len(self.weight)), dtype=exact)
        for rows in self._slices():
            place, part_RV = 0, gradients_RV[:, : rows.stop - rows.start]
            for _, gradients in self._gradients_of_logits(rows):
                part_RV[place : place + len(gradients)] = gradients
                place += len(gradients)
            for start in range(0, len(triangle_RR), _SIDE):
                strip = triangle_RR[start : start + _SIDE, start:] @ part_RV[start:]
                square += torch.linalg.vector_norm(strip, dtype=torch.float64).square()
            here = (tokens >= rows.start) & (tokens < rows.stop)
            of_tokens = part_RV[:, tokens[here] - rows.start].double().t() @ hidden_RD
            square += 2 * (of_tokens * values[here]).sum()
        return square.clamp(min=0).sqrt().mul(abs(self._factor)).to(self.weight.dtype)

    def _sparse_rows(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the sparse parts: tokens (N,), each once, and their rows (N, D) with the data type of `like`."""
        values = torch.cat([like[:0], *(part.values().to(like.dtype) for part in self._parts)])
        every = [part.indices()[0] for part in self._parts]
        tokens, places = torch.unique(torch.cat([torch.zeros(0, dtype=torch.int64), *every]), return_inverse=True)
        return tokens, torch.zeros(len(tokens), like.shape[1], dtype=like.dtype).index_add_(0, places, values)

    def _slices(self) -> Iterator[slice]:
        """Slices of the vocabulary."""
        for start in range(0, len(self.weight), _TOKENS):
            yield slice(start, min(len(self.weight), start + _TOKENS))

    def _chunks(self, rows: slice) -> LogitChunks:
        """Returns what computes the logits of some tokens of the vocabulary."""
        cast = None if self._head.cast is None else self._head.cast[rows]
        dtype = self._learnt.positions[0].hidden.dtype if self._learnt.positions else self.weight.dtype
        return LogitChunks.of(self.weight[rows], cast, dtype, self._memory)

    def _gradients_of_logits(self, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields hidden states (R, D) and the gradients (R, V) of their logits for some tokens, until the next ones."""
        chunks = self._chunks(rows)
        for learnt in self._learnt.positions:
            if learnt.gradients is not None:
                yield learnt.hidden, learnt.gradients[:, rows]
            else:
                yield from self._computed_again(chunks, rows, learnt)

    def _computed_again(
        self, chunks: LogitChunks, rows: slice, learnt: PositionsLearnt
    ) -> Iterator[tuple[Tensor, Tensor]]:
        with torch.autocast(self.weight.device.type, enabled=False):
            for hidden_RD, *by_row in zip(*(torch.split(each, _POSITIONS) for each in learnt[:-1]), strict=True):
                logits_RV = chunks.logits(hidden_RD, slice(None))
                by_row[0] = by_row[0] - rows.start
                for part, labels_R, log_sum_R, weights_R in chunks.blocks(logits_RV, *by_row):
                    weighted_gradients(part, labels_R, log_sum_R, weights_R, self._head.soft_cap, chunks.exact)
                yield hidden_RD, logits_RV


def _add_rows(gradient: Tensor, rows: slice, part: Tensor) -> None:
    """Adds some `rows` of a gradient (V, D) to `gradient`."""
    if not part.is_sparse:
        gradient.add_(part[rows])
        return
    (tokens,) = part.indices()
    here = (tokens >= rows.start) & (tokens < rows.stop)
    gradient.index_add_(0, tokens[here] - rows.start, part.values()[here])
