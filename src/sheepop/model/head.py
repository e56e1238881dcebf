"""The output projection: from hidden states to logits, a loss or scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sheepop.model.logits import (
    LearntInStep,
    LossMemory,
    Places,
    adds_in_place,
    block_rows,
    cap,
    chunk_rows,
    score_tokens,
)
from sheepop.model.loss import (
    LossSums,
    PartOfVocabulary,
    Projection,
    linear_cross_entropy,
    linear_log_probabilities,
)
from sheepop.model.native_scoring import score_natively, suits_native_scoring
from sheepop.model.row_losses import LossTerms

Correct = Callable[[slice, Tensor], Tensor]
"""Returns the logits (R, V) of a slice of the rows, corrected."""


class Judged(NamedTuple):
    """The `logprobs` of tokens (M,) in nats, and their `ranks`: 1 plus the number of likelier tokens.

    `best_logprobs` are those of the likeliest tokens; `is_likeliest` is True where that is the token, the first in a
    tie.
    """

    logprobs: Tensor
    ranks: Tensor
    is_likeliest: Tensor
    best_logprobs: Tensor


class OutputHead(nn.Linear):
    """Maps hidden states (..., D) to logits (..., V), or to losses without holding all logits at once.

    A `soft_cap` c turns logits z into ``c tanh(z / c)``. `cast` is a copy of the weight in the data type of training
    steps, if that differs from the weight's; the gradient still goes to `weight`. With a `vocabulary`, losses use a
    weight that holds only some of its rows. If `deferred` is given, losses leave there what the gradient of the weight
    follows from; see `deferred_gradient`.
    """

    vocabulary: PartOfVocabulary | None = None

    def __init__(self, d_model: int, vocab_size: int, soft_cap: float | None = None, *, bias: bool = False) -> None:
        super().__init__(d_model, vocab_size, bias=bias)
        self.soft_cap = soft_cap
        self.cast: Tensor | None = None
        self.deferred: LearntInStep | None = None
        self._memory: LossMemory | None = None
        self._gradient: Tensor | None = None

    @property
    def own_weight(self) -> Tensor:
        """The weight that losses use."""
        return self.weight

    @property
    def own_bias(self) -> Tensor | None:
        """The bias that losses use."""
        return self.bias

    def added(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns what losses add to the logits, as two factors; see `loss.Projection`."""
        bias = self.own_bias
        return None if bias is None else (hidden.new_ones(*hidden.shape[:-1], 1), bias[:, None])

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the hidden states."""
        return cap(super().forward(hidden), self.soft_cap)

    def keep_memory(self) -> None:
        """Makes later calls reuse the memory of large tensors, so a gradient stays valid only until `begin_step`."""
        self._memory = LossMemory()

    def begin_step(self) -> None:
        """Must be called before the first loss of a step. Frees the gradient's memory for reuse if `grad` is None.

        The losses after the first one of a step add to the `grad` of a large weight in place.
        """
        if self._memory is None:
            return
        self._memory.deferred = self.deferred
        if self.deferred is not None:
            self._gradient = self._memory.gradient = None
        elif self.weight.requires_grad and self.weight.grad is None:
            is_large = adds_in_place(self.weight.nbytes, self.weight.device.type)
            self._memory.weight = self.weight if is_large else None
            if self._gradient is None:
                self._gradient = torch.empty_like(self.weight, requires_grad=False)
            self._memory.gradient = self._gradient

    def cross_entropy(
        self, hidden: Tensor, labels: Tensor, terms: LossTerms | None = None, places: Places | None = None
    ) -> LossSums:
        """Returns the loss of hidden states (B, T, D) for labels (B, T); see `loss.linear_cross_entropy`."""
        return linear_cross_entropy(hidden, self.own_weight, labels, terms, **self._projection(hidden, places))

    def log_probabilities(self, hidden: Tensor, labels: Tensor, places: Places | None = None) -> Tensor:
        """``log p(label)`` (B, T), 0 where the label is -100; see `loss.linear_log_probabilities`."""
        return linear_log_probabilities(hidden, self.own_weight, labels, **self._projection(hidden, places))

    def score(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy and the number of correct predictions; see `logits.score_tokens`."""
        return score_tokens(hidden, self.weight, labels, soft_cap=self.soft_cap, added=self.added(hidden))

    def _projection(self, hidden: Tensor, places: Places | None) -> Projection:
        parts: Projection = {"weight_cast": self.cast, "soft_cap": self.soft_cap, "memory": self._memory}
        parts |= {"vocabulary": self.vocabulary, "added": self.added(hidden)}
        return parts if places is None else {**parts, "places": places}

    @property
    def _is_plain(self) -> bool:
        """Whether logits are those of the weight and the bias alone: no adapter, no rank and no hook changes them."""
        return type(self).forward is OutputHead.forward and not self._forward_hooks and not self._forward_pre_hooks

    def blocks_of_logits(self, hidden_ND: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields slices of the N rows with their logits (R, V), in float32 or a finer type, and forgets them after.

        A chunk of rows is one product; its blocks are small enough for the processor's cache.
        """
        size = chunk_rows(len(hidden_ND), self.out_features, hidden_ND.dtype, hidden_ND.device.type)
        for start in range(0, len(hidden_ND), max(1, size)):
            logits_RV = self(hidden_ND[start : start + size])
            exact = torch.promote_types(logits_RV.dtype, torch.float32)
            for part_RV in logits_RV.split(block_rows(logits_RV.shape[1], exact, logits_RV.device.type)):
                yield slice(start, start + len(part_RV)), part_RV.to(exact)
                start += len(part_RV)
            del logits_RV, part_RV  # so that two chunks never exist at a time

    @torch.no_grad()
    def judge(
        self, hidden_ND: Tensor, token_ids_M: Tensor, rows_M: Tensor | None = None, correct: Correct | None = None
    ) -> Judged:
        """Judges each token as the next one after the hidden state in its row, by default one token for each row.

        `rows_M` are ascending. `correct` changes the logits of some rows. All results are on the CPU.
        """
        rows = torch.arange(len(hidden_ND)) if rows_M is None else rows_M.cpu()
        if correct is None and self._is_plain and suits_native_scoring(hidden_ND, self.weight):
            scored = score_natively(hidden_ND, self.weight, self.bias, self.soft_cap, token_ids_M, rows)
            best = (scored.top - scored.log_sum)[rows].float()
            likeliest = scored.likeliest[rows] == token_ids_M
            return Judged((scored.own - scored.log_sum[rows]).float(), scored.larger + 1, likeliest, best)
        tokens = token_ids_M.to(hidden_ND.device)
        # Results have their memory from the start: small tensors made between large ones would keep the memory of these
        # from being used again.
        kinds = (torch.float64, torch.int64, torch.bool, torch.float64)
        found = Judged(*(torch.empty(len(rows), dtype=kind) for kind in kinds))
        exact = torch.float32
        for places, logits_RV in self.blocks_of_logits(hidden_ND):
            if correct is not None:
                logits_RV = correct(places, logits_RV)
            exact = logits_RV.dtype
            begin, end = torch.searchsorted(rows, torch.tensor([places.start, places.stop])).tolist()
            where = (rows[begin:end] - places.start).to(hidden_ND.device)
            likeliest = logits_RV.argmax(-1)  # on a CPU three times as fast as `max`
            best = logits_RV.gather(1, likeliest[:, None])[:, 0]
            log_sum = logits_RV.logsumexp(-1)
            own = logits_RV[where, tokens[begin:end]]
            of_tokens = logits_RV if rows_M is None else logits_RV[where]
            found.logprobs[begin:end] = own - log_sum[where]
            # A sum of floats, exact below 2^24, takes a fifth of the time of a sum of truth values.
            found.ranks[begin:end] = (of_tokens > own[:, None]).float().sum(-1).long() + 1
            found.is_likeliest[begin:end] = likeliest[where] == tokens[begin:end]
            found.best_logprobs[begin:end] = (best - log_sum)[where]
            del logits_RV, of_tokens
        return found._replace(logprobs=found.logprobs.to(exact), best_logprobs=found.best_logprobs.to(exact))
