"""Invariants of every trace: sums, zeros and equalities that fail if a number in the trace is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sheepop.adapt.stored_weight import StoredWeight
from sheepop.interpret.parts import FrozenNorm, parts_of
from sheepop.interpret.trace import Trace, attentions_of

# The largest error of a sum relative to its largest number: in float32 a few hundred roundings of long sums, in half
# precision the roundings of a number that every block rounds once.
_LIMITS = {torch.float64: 1e-11, torch.float32: 3e-5, torch.float16: 0.02, torch.bfloat16: 0.1}
_WEIGHTS = "*attention.weights"
# Products with integer weights round their inputs, some to 16 bits.
_QUANTISED = 1e-3


@dataclass(frozen=True)
class Check:
    """An invariant with its largest `error` and the `limit` of that error."""

    name: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the error is at most the limit; false for NaN."""
        return self.error <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """The check as plain data."""
        return {**asdict(self), "holds": self.holds}


@torch.no_grad()
def check_trace(trace: Trace) -> list[Check]:
    """Computes the invariants of a trace; those of attention cover every head of every layer."""
    outputs = ["*attention_output", "*feed_forward_output"]
    outputs += ["*layer_input_output"] if trace.config.layer_inputs is not None else []
    values = trace.collect([_WEIGHTS, *outputs], {_WEIGHTS: _sums})
    rows, future = _attention(trace, values)
    parts = max(_error(parts_of(trace, -1, each).total, each.residuals[-1, -1].double()) for each in trace.streams)
    blocks = _blocks(trace, values)
    return [
        Check("weights of every row sum to 1", rows, _limit(trace)),
        Check("weights of later tokens are 0", future, 0.0),
        Check("residual stream after every block = stream before it + its branches", blocks, _limit(trace)),
        Check("residual stream after the last block = sum of all parts", parts, _limit(trace)),
        *_logits(trace),
    ]


def _sums(weights_HTS: Tensor) -> Tensor:
    """The sums of all rows, followed by the largest weight right of the diagonal."""
    sums = weights_HTS.sum(-1, dtype=torch.float64)
    return torch.cat([sums.flatten(), weights_HTS.triu(1).max().double()[None]])


def _attention(trace: Trace, found: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest distance of a row's sum, with the sink's share, from 1, and the largest weight of a later token."""
    worst = future = 0.0
    for stream in trace.streams:
        for path, block in stream.paths():
            for kind, attention in attentions_of(block):
                values = found[f"{path}.{kind}.weights"]
                if stream.causal and kind == "attention":
                    future = max(future, float(values[-1]))
                sums = values[:-1].view(trace.config.num_heads, -1)
                if attention.sinks is not None:
                    sums = sums + _sink_shares(trace, f"{path}.{kind}", attention.sinks.double()[:, None])
                worst = max(worst, float((sums - 1).abs().max()))
    return worst, future


def _sink_shares(trace: Trace, path: str, sinks_H1: Tensor) -> Tensor:
    """The share of the sinks of an attention layer in every row (H, T), from its scores."""
    scores = trace.collect([f"{path}.scores"])[f"{path}.scores"].double()
    return (sinks_H1 - torch.logaddexp(scores.logsumexp(-1), sinks_H1)).exp()


def _blocks(trace: Trace, values: Mapping[str, Tensor]) -> float:
    """The largest error of x + attention + feed-forward, with the norms after these sums in post-norm blocks."""
    worst = 0.0
    for stream in trace.streams:
        for layer, (path, block) in enumerate(stream.paths()):
            found = stream.residuals[layer].double()
            mixers = [name for name, _ in attentions_of(block)] if block.mixer is None else ["attention"]
            for name in (*mixers, "feed_forward"):
                found = found + values[f"{path}.{name}_output"].double()
                if block.position == "post":
                    frozen = FrozenNorm.of(getattr(block, f"{name}_norm"), found)
                    found = frozen.linear(found) + frozen.shift
            if block.layer_input is not None:
                found = found + values[f"{path}.layer_input_output"].double()
            if block.factor is not None:
                found = found * block.factor.double()
            worst = max(worst, _error(found, stream.residuals[layer + 1].double()))
    return worst


def _logits(trace: Trace) -> list[Check]:
    """Compares the traced logits with the last row of the lens, with two untraced passes, and with a prefix.

    The logits of a few positions are in memory at a time.
    """
    length = trace.num_tokens
    ids = torch.tensor([trace.token_ids], device=trace.model.device)
    eager = trace.model.sharing_copy()
    eager.config = trace.model.config.replace(attention_backend="eager")
    passes = [trace.states(ids, eager), trace.states(ids), trace.states(ids[:, : max(1, length // 2)])]
    of_lens, *errors = (_LargestError() for _ in range(4))
    lens = trace.log_probabilities(trace.residuals[-1])
    for (places, traced), (_, log_p) in zip(trace.logits_of(trace.final), lens, strict=True):
        of_lens.add(log_p, traced.double().log_softmax(-1))
        for error, final_TD in zip(errors, passes, strict=True):
            if places.start < len(final_TD):
                found = trace.model.read_out(final_TD[None, places])[0]
                error.add(found, traced[: len(found)].double())
    stepwise, untraced, prefix = (error.relative for error in errors)
    return [
        Check("last row of the lens = the prediction", of_lens.relative, _limit(trace)),
        Check("traced logits = untraced logits step by step, bit for bit", stepwise, 0.0),
        Check("traced logits = untraced logits of the fast kernels", untraced, _limit(trace)),
        Check("later tokens do not change earlier logits", prefix, _limit(trace)),
    ]


class _LargestError:
    """The largest difference between numbers found and expected in parts, relative to the largest number expected."""

    def __init__(self) -> None:
        # Plain numbers, since small tensors between large ones would keep the memory of these from being used again.
        self._differences, self._largest = list[float](), list[float]()

    def add(self, found: Tensor, expected: Tensor) -> None:
        """Adds a part."""
        self._differences.append(float((found.double() - expected).abs().max()))
        self._largest.append(float(expected.abs().max()))

    @property
    def relative(self) -> float:
        """The error; NaN if any number is."""
        difference, largest = torch.tensor([self._differences, self._largest], dtype=torch.float64).amax(1)
        return float(difference / largest.clamp(min=1e-30))


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number expected."""
    error = _LargestError()
    error.add(found, expected)
    return error.relative


def _limit(trace: Trace) -> float:
    is_quantised = any(isinstance(weight, StoredWeight) for weight in trace.model.parameters())
    return max(_LIMITS[trace.residuals.dtype], _QUANTISED if is_quantised else 0.0)
