"""The training objective: cross-entropy of the next token, summed over supervised positions.

`linear_cross_entropy` takes hidden states and the output projection instead of logits, and processes them in chunks of
rows, so that the logits of all N positions, the largest float32 tensor of a training step, never exist.
`linear_log_probabilities` does the same for objectives that compute the weights of positions from these probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from sheepop.model.logits import (
    IGNORE_INDEX,
    LogitChunks,
    LossMemory,
    Places,
    PositionsLearnt,
    ProjectionGradients,
    WeightGradient,
    product_dtype,
    supervised_places,
)
from sheepop.model.row_losses import LossTerms, label_and_sum, losses_then_gradients, weighted_gradients
from sheepop.model.streamed_log_probabilities import streamed_log_probabilities


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns ``-sum log softmax(logits)[label]`` over labels that are not -100, in float32.

    `logits` (..., V) and `labels` (...) are already aligned: a label is the token after its position. It is a sum, not
    a mean, so that a step of several micro-batches can divide by all of its tokens.
    """
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean of `cross_entropy_sum` over supervised positions (0 if there are none)."""
    return cross_entropy_sum(logits, labels) / (labels != IGNORE_INDEX).sum().clamp(min=1)


class LossSums(NamedTuple):
    """Sums over the supervised positions of a micro-batch; both losses are scalars in float32 (or in float64)."""

    objective: Tensor  # what is minimised, z-loss and label smoothing included
    cross_entropy: Tensor  # the plain cross-entropy, without a gradient
    measured: Mapping[str, Tensor] = MappingProxyType({})  # further sums, of any shape, without a gradient


class PartOfVocabulary(Protocol):
    """Computes losses from logits (R, V) that are some columns of the vocabulary, while other ranks have the rest."""

    def losses_then_gradients(
        self, logits_RV: Tensor, labels_R: Tensor, terms: LossTerms, soft_cap: float | None, exact: torch.dtype
    ) -> Tensor:
        """Returns the sums of objective and cross-entropy (2,) over the rows, and overwrites logits by gradients."""

    def columns(self, labels_R: Tensor) -> Tensor:
        """Returns the index of each label's column among these, or an index outside them if another rank has it."""

    def joined(self, labels_R: Tensor, label_R: Tensor, log_sum_R: Tensor) -> tuple[Tensor, Tensor]:
        """Combines label logits and log-sum-exps of these columns into those of all columns.

        `label_R` is ignored where another rank has the label's column.
        """


class Projection(TypedDict, total=False):
    """How hidden states become logits chunk by chunk; every entry may be missing.

    `places` (M,) are the flat indices of the labels that are not -100, ``slice(None)`` if all are; without them they
    are computed, which synchronises with a GPU. `weight_cast` is a copy of the weight in the data type of products.
    `soft_cap` c turns logits z into ``c tanh(z / c)``. `chunk_bytes` limits the logits held at a time, and `memory`
    reuses large buffers across calls. If the weight holds only some rows of the vocabulary, `vocabulary` combines them
    with the rest. `added` are two factors (..., R) and (V, R) whose product ``low up^T`` is added to the logits before
    the soft cap: a bias has a `low` of 1.
    """

    places: Places
    weight_cast: Tensor | None
    soft_cap: float | None
    chunk_bytes: int | None
    memory: LossMemory | None
    vocabulary: PartOfVocabulary | None
    added: tuple[Tensor, Tensor] | None


def linear_cross_entropy(
    hidden: Tensor, weight_VD: Tensor, labels: Tensor, terms: LossTerms | None = None, **projection: Unpack[Projection]
) -> LossSums:
    """Returns the loss of `hidden` (..., D) under the output projection `weight_VD` for `labels` (...), -100 for none.

    The forward pass also computes the gradients, chunk by chunk; the backward pass only multiplies them by the incoming
    gradient, and can run once. If `memory` adds the weight's gradient to that of earlier calls, which has been
    multiplied already, the backward pass recomputes the logits for it. Autocast or `weight_cast` sets the data type of
    the products. Sums and exponentials are in float32. Raises `ValueError` if shapes do not fit.
    """
    inputs = _flattened(hidden, weight_VD, labels, projection)
    if terms in (None, LossTerms()) and _is_streamed(inputs):
        loss = -_streamed(inputs).sum()
        return LossSums(loss, loss.detach())
    objective, plain = _LinearCrossEntropy.apply(*inputs, terms or LossTerms())  # type: ignore[no-untyped-call]
    return LossSums(objective, plain)


def linear_log_probabilities(
    hidden: Tensor, weight_VD: Tensor, labels: Tensor, **projection: Unpack[Projection]
) -> Tensor:
    """Returns ``log softmax(logits)[label]`` in the shape of `labels`, 0 where the label is -100.

    Arguments and arithmetic are those of `linear_cross_entropy`; the result is in float32 (or float64). The incoming
    gradient may weight positions in any way (DPO, PPO, GRPO): the backward pass recomputes the logits chunk by chunk,
    so only the hidden states and one number for each position are saved. It can run more than once. On a CPU, a weight
    that is not trained gets no logits of the whole vocabulary at all; see `streamed_log_probabilities`.
    """
    inputs = _flattened(hidden, weight_VD, labels, projection)
    if _is_streamed(inputs):
        return _streamed(inputs).view(labels.shape)
    return _LinearLogProbabilities.apply(*inputs).view(labels.shape)  # type: ignore[no-untyped-call]


def _flattened(hidden: Tensor, weight_VD: Tensor, labels: Tensor, projection: Projection) -> tuple[Any, ...]:
    """Returns the first arguments of both functions below; raises `ValueError` if shapes do not fit."""
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not fit hidden states {tuple(hidden.shape)}")
    if weight_VD.ndim != 2 or weight_VD.shape[1] != hidden.shape[-1]:
        raise ValueError(f"a head of shape {tuple(weight_VD.shape)} does not fit hidden states {tuple(hidden.shape)}")
    labels_N = labels.flatten()
    if "places" not in projection:
        projection = {**projection, "places": supervised_places(labels_N)}
    added = projection.pop("added", None)
    low, up = (None, None) if added is None else (added[0].flatten(0, -2), added[1])
    return hidden.flatten(0, -2), weight_VD, low, up, labels_N, projection.get("weight_cast"), projection


def _is_streamed(inputs: tuple[Any, ...]) -> bool:
    """Whether the vocabulary is read in parts: on a CPU that has it whole, if a network below a frozen weight learns.

    Passes without gradients read it in the same way, so that a policy and its reference round alike.
    """
    hidden_ND, weight_VD, low_NR, up_VR, *_, how = inputs
    is_frozen = not weight_VD.requires_grad and (up_VR is None or not up_VR.requires_grad)
    learns = hidden_ND.requires_grad or (low_NR is not None and low_NR.requires_grad) or not torch.is_grad_enabled()
    return is_frozen and learns and weight_VD.device.type == "cpu" and how.get("vocabulary") is None


def _streamed(inputs: tuple[Any, ...]) -> Tensor:
    """The log-probabilities (N,) of the arguments that `_flattened` returns."""
    hidden_ND, weight_VD, low_NR, up_VR, labels_N, weight_cast, how = inputs
    dtype = product_dtype(weight_VD, weight_cast)
    chunks = LogitChunks.of(weight_VD, weight_cast, dtype, None, low_NR, up_VR)
    return streamed_log_probabilities(hidden_ND, labels_N, chunks, how["places"], how.get("soft_cap"))


class _LinearCrossEntropy(torch.autograd.Function):
    """Maps hidden states (N, D), weight (V, D) and labels (N,) to two sums, and computes gradients in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        low_NR: Tensor | None,
        up_VR: Tensor | None,
        labels_N: Tensor,
        weight_cast: Tensor | None,
        how: Projection,
        terms: LossTerms,
    ) -> tuple[Tensor, Tensor]:
        dtype = product_dtype(weight_VD, weight_cast)
        chunks = LogitChunks.of(weight_VD, weight_cast, dtype, how.get("memory"), low_NR, up_VR)
        hidden, weight, low, up = ctx.needs_input_grad[:4]
        ctx.deferred = chunks.memory.deferred if weight and low_NR is None and terms == LossTerms() else None
        ctx.later = weight and ctx.deferred is None and chunks.memory.sum_so_far(weight_VD) is not None
        now = weight and ctx.deferred is None and not ctx.later
        gradients = ProjectionGradients(chunks, hidden_ND, (hidden, now, low, up))
        sums = torch.zeros(2, dtype=chunks.exact, device=hidden_ND.device)
        computed = _gradients_of_chunks(chunks, hidden_ND, labels_N, how, terms, deferred=ctx.deferred is not None)
        for found, rows, logits_RV, hidden_RD, learnt in computed:
            sums += found
            gradients.add(rows, logits_RV, hidden_RD, learnt)
        ctx.gradients, ctx.learnt = gradients.results(weight_VD, up_VR), gradients.learnt()
        if ctx.later:
            ctx.save_for_backward(hidden_ND, weight_VD, low_NR, up_VR, labels_N, weight_cast)
            ctx.how = how, terms, dtype
        objective, plain = sums.unbind()
        ctx.mark_non_differentiable(plain)
        return objective, plain

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_objective: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the backward pass of linear_cross_entropy can run only once; compute the loss again")
        gradients, ctx.gradients = list(ctx.gradients), None
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(grad_objective)
        if ctx.deferred is not None:
            ctx.deferred.positions.extend(each.times(grad_objective) for each in ctx.learnt)
        if ctx.later:
            hidden_ND, weight_VD, low_NR, up_VR, labels_N, weight_cast = ctx.saved_tensors
            how, terms, dtype = ctx.how
            chunks = LogitChunks.of(weight_VD, weight_cast, dtype, how["memory"], low_NR, up_VR)
            of_weight = WeightGradient(chunks, chunks.memory, chunks.memory.sum_so_far(weight_VD))
            computed = _gradients_of_chunks(chunks, hidden_ND, labels_N, how, terms)
            for _sums, _rows, logits_RV, hidden_RD, _learnt in computed:
                of_weight.add(logits_RV.mul_(grad_objective), hidden_RD, weight_VD)
            gradients[1] = of_weight.result(weight_VD)
        return *gradients, None, None, None, None


def _gradients_of_chunks(
    chunks: LogitChunks, hidden_ND: Tensor, labels_N: Tensor, how: Projection, terms: LossTerms, deferred: bool = False
) -> Iterator[tuple[Tensor, Places, Tensor, Tensor, PositionsLearnt | None]]:
    """Yields both sums of each chunk, its rows, the objective's gradient of their logits, and their hidden states.

    If the weight's gradient is `deferred`, for which there may be no `terms`, also what it follows from.
    """
    soft_cap, vocabulary = how.get("soft_cap"), how.get("vocabulary")
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for rows in chunks.rows(labels_N, how["places"], how.get("chunk_bytes")):
            hidden_RD = hidden_ND[rows].to(chunks.dtype)
            logits_RV, labels_R = chunks.logits(hidden_RD, rows), labels_N[rows]
            sums, learnt = torch.zeros(2, dtype=chunks.exact, device=hidden_ND.device), None
            if vocabulary is not None:
                sums = vocabulary.losses_then_gradients(logits_RV, labels_R, terms, soft_cap, chunks.exact)
            else:
                log_sum_R = torch.empty_like(labels_R, dtype=chunks.exact)
                for part, wanted, log_sums in chunks.blocks(logits_RV, labels_R, log_sum_R):
                    found, log_sums[:] = losses_then_gradients(part, wanted, terms, soft_cap, chunks.exact)
                    sums += found
                if deferred:
                    learnt = PositionsLearnt(hidden_RD, labels_R, log_sum_R, -torch.ones_like(log_sum_R))
            yield sums, rows, logits_RV, hidden_RD, learnt


class _LinearLogProbabilities(torch.autograd.Function):
    """Maps hidden states (N, D), weight (V, D) and labels (N,) to log p (N,), and recomputes logits in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        low_NR: Tensor | None,
        up_VR: Tensor | None,
        labels_N: Tensor,
        weight_cast: Tensor | None,
        how: Projection,
    ) -> Tensor:
        soft_cap, vocabulary = how.get("soft_cap"), how.get("vocabulary")
        dtype = product_dtype(weight_VD, weight_cast)
        chunks = LogitChunks.of(weight_VD, weight_cast, dtype, how.get("memory"), low_NR, up_VR)
        log_p_N = torch.zeros(labels_N.shape, dtype=chunks.exact, device=hidden_ND.device)
        log_sum_N = torch.zeros_like(log_p_N)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            # The backward pass begins with the chunk that is computed last.
            for rows in reversed(list(chunks.rows(labels_N, how["places"], how.get("chunk_bytes")))):
                logits_RV = chunks.logits(hidden_ND[rows].to(dtype), rows)
                labels_R = labels_N[rows]
                if vocabulary is not None:
                    labels_R = vocabulary.columns(labels_R).clamp(0, logits_RV.shape[1] - 1)
                blocks = chunks.blocks(logits_RV, labels_R)
                found = [label_and_sum(part, wanted, soft_cap, chunks.exact) for part, wanted in blocks]
                label_R, log_sum_R = (torch.cat(parts) for parts in zip(*found, strict=True))
                if vocabulary is not None:
                    label_R, log_sum_R = vocabulary.joined(labels_N[rows], label_R, log_sum_R)
                log_p_N[rows], log_sum_N[rows] = label_R - log_sum_R, log_sum_R
        # Autograd refuses saved tensors that changed in place, such as a weight, whose logits would differ by now.
        ctx.save_for_backward(hidden_ND, weight_VD, low_NR, up_VR, labels_N, weight_cast, log_sum_N)
        ctx.how = how, dtype
        ctx.call = chunks.memory.latest = object()
        return log_p_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, low_NR, up_VR, labels_N, weight_cast, log_sum_N = ctx.saved_tensors
        how, dtype = ctx.how
        vocabulary = how.get("vocabulary")
        chunks = LogitChunks.of(weight_VD, weight_cast, dtype, how.get("memory"), low_NR, up_VR)
        needed = list(ctx.needs_input_grad)
        deferred = chunks.memory.deferred if needed[1] and low_NR is None else None
        needed[1] = needed[1] and deferred is None
        gradients = ProjectionGradients(chunks, hidden_ND, needed, chunks.memory.sum_so_far(weight_VD))
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for rows in chunks.rows(labels_N, how["places"], how.get("chunk_bytes")):
                hidden_RD = hidden_ND[rows].to(dtype)
                known_RV = chunks.memory.logits_of(ctx.call, len(hidden_RD))
                logits_RV = chunks.logits(hidden_RD, rows) if known_RV is None else known_RV
                labels_R = labels_N[rows] if vocabulary is None else vocabulary.columns(labels_N[rows])
                by_row = labels_R, log_sum_N[rows], weights_N[rows]
                for part, wanted, log_sum_R, weights_R in chunks.blocks(logits_RV, *by_row):
                    weighted_gradients(part, wanted, log_sum_R, weights_R, how.get("soft_cap"), chunks.exact)
                learnt = None if deferred is None else PositionsLearnt(hidden_RD, *by_row)
                gradients.add(rows, logits_RV, hidden_RD, learnt)
        if deferred is not None:
            deferred.positions.extend(gradients.learnt())
        return *gradients.results(weight_VD, up_VR), None, None, None
