"""Log-probabilities under an output projection that is not trained, from a part of the vocabulary at a time.

With logits ``z_v = w_v h``, the gradient of ``log p(y) = z_y - log sum_v e^(z_v)`` for h, ``w_y - sum_v p_v w_v``, does
not depend on what is minimised. So the forward pass sums both up, and no logit is kept or computed twice. The sums are
relative to the largest logit so far and are rescaled when it grows (Milakov and Gimelshein 2018, algorithm 3). A part
of the weight stays in the processor's cache between its products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sheepop.model.logits import LogitChunks, Places, cap, chunk_rows, parts_of

# Numbers of a part of the weight, and the rows whose logits of its tokens exist at a time.
_PART = 1 << 19
_ROWS = 1024


def streamed_log_probabilities(
    hidden_ND: Tensor, labels_N: Tensor, chunks: LogitChunks, places: Places, soft_cap: float | None
) -> Tensor:
    """Returns the log-probabilities of labels (N,) in float32 or a finer type, 0 for rows that are not in `places`.

    The weight and the factors are those of `chunks`. Only the hidden states and `chunks.low` can have a gradient.
    """
    found: Tensor = _Streamed.apply(  # type: ignore[no-untyped-call]
        hidden_ND, chunks.low, labels_N, chunks, places, soft_cap
    )
    return found


def streamed_bytes(num_tokens: int, vocab_size: int, width: int, dtype: torch.dtype) -> int:
    """Returns the largest number of bytes of logits and of sums of hidden states' size that exist at a time."""
    exact, rows = torch.promote_types(dtype, torch.float32).itemsize, min(_ROWS, num_tokens)
    logits = rows * min(vocab_size, max(1, _PART // width)) * (dtype.itemsize + exact)
    return logits + 2 * rows * width * exact


class _Streamed(torch.autograd.Function):
    """`streamed_log_probabilities`, with the factor `low` (N, K) of the logits as an argument of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        low_NK: Tensor | None,
        labels_N: Tensor,
        chunks: LogitChunks,
        places: Places,
        soft_cap: float | None,
    ) -> Tensor:
        log_p_N = torch.zeros(labels_N.shape, dtype=chunks.exact, device=hidden_ND.device)
        is_learning = any(ctx.needs_input_grad[:2])
        directions = [torch.zeros_like(each) for each in (hidden_ND, low_NK) if each is not None and is_learning]
        count = labels_N.numel() if isinstance(places, slice) else places.numel()
        with torch.autocast(hidden_ND.device.type, enabled=False):
            tokens = min(len(chunks.weight), max(1, _PART // hidden_ND.shape[1]))
            most = max(1, min(_ROWS, chunk_rows(count, tokens, chunks.dtype, hidden_ND.device.type)))
            for start in range(0, count, most):
                part = slice(start, min(count, start + most))
                rows = part if isinstance(places, slice) else places[part]
                low_RK = None if low_NK is None else low_NK[rows].to(chunks.dtype)
                log_p_N[rows], found = _summed(
                    chunks, hidden_ND[rows].to(chunks.dtype), low_RK, labels_N[rows], soft_cap, is_learning
                )
                for whole, own in zip(directions, found, strict=False):
                    whole[rows] = own.to(whole.dtype)
        ctx.save_for_backward(*directions)
        return log_p_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights_N: Tensor) -> tuple[Tensor | None, ...]:
        found = [direction * weights_N[:, None].to(direction.dtype) for direction in ctx.saved_tensors]
        return *found, *[None] * (6 - len(found))


def _summed(
    chunks: LogitChunks,
    hidden_RD: Tensor,
    low_RK: Tensor | None,
    labels_R: Tensor,
    soft_cap: float | None,
    is_learning: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the log-probabilities of the labels (R,), and their gradients for hidden states and `low`, if wanted."""
    size = max(1, _PART // hidden_RD.shape[1])
    logits = hidden_RD.new_empty(0)
    label_R1, total_R1 = hidden_RD.new_zeros(2, len(hidden_RD), 1, dtype=chunks.exact)
    largest_R1 = torch.full_like(total_R1, -torch.inf)
    inputs = [each for each in (hidden_RD, low_RK) if each is not None and is_learning]
    means, own = ([torch.zeros_like(each, dtype=chunks.exact) for each in inputs] for _ in range(2))
    for place, weight_PD in parts_of(chunks.weight, chunks.dtype, size):
        if not len(logits):
            logits = hidden_RD.new_empty(len(hidden_RD), len(weight_PD))  # the first part is the largest
        part_RP = torch.mm(hidden_RD, weight_PD.t(), out=logits[:, : len(weight_PD)])
        factors = [weight_PD]
        if low_RK is not None and chunks.up is not None:
            factors.append(chunks.up[place])
            part_RP.addmm_(low_RK, factors[1].t())
        z_RP = cap(part_RP.to(chunks.exact), soft_cap)
        slope_RP = None if soft_cap is None else 1 - (z_RP / soft_cap).square()
        before_R1, largest_R1 = largest_R1, torch.maximum(largest_R1, z_RP.amax(1, keepdim=True))
        rescaling_R1 = (before_R1 - largest_R1).exp_()
        (here,) = ((labels_R >= place.start) & (labels_R < place.stop)).nonzero(as_tuple=True)
        columns = labels_R[here] - place.start
        label_R1[here, 0] = z_RP[here, columns]
        e_RP = z_RP.sub_(largest_R1).exp_()
        total_R1.mul_(rescaling_R1).add_(e_RP.sum(1, keepdim=True))
        if slope_RP is not None:
            e_RP.mul_(slope_RP)
        for mean, mine, factor in zip(means, own, factors, strict=False):
            mean.mul_(rescaling_R1).add_(e_RP.to(chunks.dtype) @ factor)
            rows = factor[columns].to(chunks.exact)
            mine[here] = rows if slope_RP is None else rows * slope_RP[here, columns][:, None]
    found = tuple(mine.addcdiv_(mean, total_R1, value=-1) for mean, mine in zip(means, own, strict=True))
    return (label_R1 - largest_R1 - total_R1.log())[:, 0], found
