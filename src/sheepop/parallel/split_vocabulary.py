"""Losses of logits whose vocabulary is split over tensor ranks, without gathering the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sheepop.model import LossTerms
from sheepop.model.logits import cap
from sheepop.model.loss import PartOfVocabulary
from sheepop.parallel.parts import SharingRanks


@dataclass(frozen=True)
class SplitVocabulary(PartOfVocabulary):
    """Losses when each of `ranks` has some rows of a vocabulary of `size`, in their order; see `SharingRanks.own`.

    For every token the ranks exchange a few numbers and a maximum.
    """

    ranks: SharingRanks
    size: int

    def columns(self, labels_R: Tensor) -> Tensor:
        """Returns the labels as indices into this rank's rows; they may lie outside."""
        return labels_R - self.ranks.own(self.size).start

    def joined(self, labels_R: Tensor, label_R: Tensor, log_sum_R: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `PartOfVocabulary`."""
        columns_R = self.columns(labels_R)
        is_here_R = (columns_R >= 0) & (columns_R < len(self.ranks.own(self.size)))
        largest_R = log_sum_R.clone()
        dist.all_reduce(largest_R, dist.ReduceOp.MAX, group=self.ranks.group)
        numbers = torch.stack((torch.where(is_here_R, label_R, 0), (log_sum_R - largest_R).exp()))
        dist.all_reduce(numbers, group=self.ranks.group)
        label_R, total_R = numbers.unbind()
        return label_R, total_R.log() + largest_R

    def losses_then_gradients(
        self, logits_RV: Tensor, labels_R: Tensor, terms: LossTerms, soft_cap: float | None, exact: torch.dtype
    ) -> Tensor:
        """Implements `PartOfVocabulary`."""
        rows, group = logits_RV.shape[1], self.ranks.group
        z_RV = cap(logits_RV.to(exact), soft_cap)
        slope_RV = None if soft_cap is None else 1 - (z_RV / soft_cap).square()
        keep, spread = 1.0 - terms.label_smoothing, terms.label_smoothing
        places_R = self.columns(labels_R)
        is_here_R = (places_R >= 0) & (places_R < rows)
        places_R1 = places_R.clamp(0, rows - 1)[:, None]
        largest_R = z_RV.amax(1)
        dist.all_reduce(largest_R, dist.ReduceOp.MAX, group=group)
        label_R = torch.where(is_here_R, z_RV.gather(1, places_R1)[:, 0], 0)
        sum_R = z_RV.sum(1)
        total_R = z_RV.sub_(largest_R[:, None]).exp_().sum(1)
        numbers = torch.stack((label_R, sum_R, total_R))
        dist.all_reduce(numbers, group=group)
        label_R, sum_R, total_R = numbers.unbind()
        log_sum_R = total_R.log() + largest_R
        plain_R = log_sum_R - label_R
        objective_R = log_sum_R - keep * label_R - spread * sum_R / self.size + terms.z_loss * log_sum_R.square()
        z_RV.mul_(((1.0 + 2.0 * terms.z_loss * log_sum_R) / total_R)[:, None])
        if spread:
            z_RV.sub_(spread / self.size)
        z_RV.scatter_add_(1, places_R1, -keep * is_here_R[:, None].to(exact))
        if slope_RV is not None:
            z_RV.mul_(slope_RV)
        if z_RV is not logits_RV:
            logits_RV.copy_(z_RV)
        return torch.stack((objective_R.sum(), plain_R.sum()))
