"""Losses of rows of logits and their gradients: step by step in place, or in a form that a GPU runs as one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.model.fused import fused
from sheepop.model.logits import cap


@dataclass(frozen=True)
class LossTerms:
    """Terms added to the cross-entropy of a token with logits z (V,) and ``Z = logsumexp(z)``.

    `z_loss` is the coefficient of ``Z^2``, which keeps logits from drifting (Chowdhery et al. 2022, section 5).
    `label_smoothing` is the share of the target spread evenly over the vocabulary (Szegedy et al. 2016, section 7).
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0


def _losses_then_gradients(
    logits_RV: Tensor, labels_R: Tensor, terms: LossTerms, soft_cap: float | None, exact: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns sums of objective and cross-entropy (2,) and the log-sum-exp of each row (R,).

    It overwrites `logits_RV` with the gradient of the objective. With ``p = softmax(z)``, ``Z = logsumexp(z)``,
    smoothing e and z-loss c it is ``(1 + 2 c Z) p - e / V`` for a row, minus ``1 - e`` at the label; a soft cap
    multiplies it by ``1 - (z / cap)^2``.
    """
    z_RV = cap(logits_RV.to(exact), soft_cap)
    slope_RV = None if soft_cap is None else 1 - (z_RV / soft_cap).square()
    labels_R1, keep, spread = labels_R[:, None], 1.0 - terms.label_smoothing, terms.label_smoothing
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
    return torch.stack((objective.sum(), plain.sum())), log_sum[:, 0]


def _label_and_sum(
    logits_RV: Tensor, labels_R: Tensor, soft_cap: float | None, exact: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the logit of the label (R,) and the log-sum-exp of all logits (R,)."""
    z_RV = cap(logits_RV.to(exact), soft_cap)
    largest = z_RV.amax(1, keepdim=True)
    total = (z_RV - largest).exp_().sum(1, keepdim=True)
    return z_RV.gather(1, labels_R[:, None])[:, 0], (total.log() + largest)[:, 0]


def _weighted_gradients(
    logits_RV: Tensor,
    labels_R: Tensor,
    log_sum_R: Tensor,
    weights_R: Tensor,
    soft_cap: float | None,
    exact: torch.dtype,
) -> None:
    """Overwrites `logits_RV` with the gradient of ``sum w log p(label)``: ``-w softmax(z)``, plus w at the label.

    `log_sum_R` comes from `_label_and_sum`. A label may be outside the columns. A soft cap multiplies the gradient by
    ``1 - (z / cap)^2``.
    """
    z_RV = cap(logits_RV.to(exact), soft_cap)
    slope_RV = None if soft_cap is None else 1 - (z_RV / soft_cap).square()
    p_RV = z_RV.sub_(log_sum_R[:, None]).exp_().mul_(-weights_R[:, None])
    is_here_R = (labels_R >= 0) & (labels_R < p_RV.shape[1])
    places_R1 = labels_R.clamp(0, p_RV.shape[1] - 1)[:, None]
    p_RV.scatter_add_(1, places_R1, (weights_R * is_here_R).to(exact)[:, None])
    if slope_RV is not None:
        p_RV.mul_(slope_RV)
    if p_RV is not logits_RV:
        logits_RV.copy_(p_RV)


def _losses_then_gradients_at_once(
    logits_RV: Tensor, labels_R: Tensor, terms: LossTerms, soft_cap: float | None, exact: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`_losses_then_gradients` in a form that compiles to one kernel without temporary tensors the size of the logits.

    The kernel reads each row of logits for its sum and again for its gradient, which overwrites the row. The row stays
    in the processor's cache in between.
    """
    z_RV = cap(logits_RV.to(exact), soft_cap)
    keep, spread, size = 1.0 - terms.label_smoothing, terms.label_smoothing, z_RV.shape[1]
    label_R, log_sum_R = _label_and_sum_at_once(logits_RV, labels_R, soft_cap, exact)
    plain_R = log_sum_R - label_R
    objective_R = log_sum_R - keep * label_R + terms.z_loss * log_sum_R.square()
    if spread:
        objective_R = objective_R - spread * z_RV.mean(1)
    scale_R = 1.0 + 2.0 * terms.z_loss * log_sum_R
    chosen_RV = _is_chosen(labels_R, z_RV).to(z_RV.dtype)
    gradients_RV = (z_RV - log_sum_R[:, None]).exp() * scale_R[:, None] - spread / size - keep * chosen_RV
    if soft_cap is not None:
        gradients_RV = gradients_RV * (1 - (z_RV / soft_cap).square())
    sums = torch.stack((objective_R.sum(), plain_R.sum()))
    logits_RV.copy_(gradients_RV)
    return sums, log_sum_R


def _label_and_sum_at_once(
    logits_RV: Tensor, labels_R: Tensor, soft_cap: float | None, exact: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`_label_and_sum` in a form that compiles to one kernel."""
    z_RV = cap(logits_RV.to(exact), soft_cap)
    largest = z_RV.amax(1, keepdim=True)
    total = (z_RV - largest).exp().sum(1, keepdim=True)
    # A sum over the row is part of the kernel that overwrites it; torch 2.11 moves `gather` behind that kernel.
    label_R = torch.where(_is_chosen(labels_R, z_RV), z_RV, 0.0).sum(1)
    return label_R, (total.log() + largest)[:, 0]


def _weighted_gradients_at_once(
    logits_RV: Tensor,
    labels_R: Tensor,
    log_sum_R: Tensor,
    weights_R: Tensor,
    soft_cap: float | None,
    exact: torch.dtype,
) -> None:
    """`_weighted_gradients` in a form that compiles to one kernel."""
    z_RV = cap(logits_RV.to(exact), soft_cap)
    slope_RV = None if soft_cap is None else 1 - (z_RV / soft_cap).square()
    p_RV = (z_RV - log_sum_R[:, None]).exp_()
    gradients_RV = (_is_chosen(labels_R, p_RV).to(p_RV.dtype) - p_RV).mul_(weights_R[:, None])
    logits_RV.copy_(gradients_RV if slope_RV is None else gradients_RV.mul_(slope_RV))


def _is_chosen(columns_R: Tensor, like_RV: Tensor) -> Tensor:
    """Whether each entry is in the column of its row, by a comparison, which fuses better than a scatter."""
    return torch.arange(like_RV.shape[1], device=like_RV.device) == columns_R[:, None]


losses_then_gradients = fused(_losses_then_gradients_at_once, _losses_then_gradients)
label_and_sum = fused(_label_and_sum_at_once, _label_and_sum)
weighted_gradients = fused(_weighted_gradients_at_once, _weighted_gradients)
