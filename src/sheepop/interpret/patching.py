"""Activation patching: what of one prompt's pass, put into another's, changes the answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.interpret.trace import Trace

# Positions that are patched in one pass.
_TOGETHER = 16


@dataclass(frozen=True, eq=False)
class Patching:
    """How far the difference of two logits at the last position moves from the corrupted to the clean prompt's.

    `effect` (L + 1, T) is 0 where putting the clean residual stream there changes nothing, 1 where it brings back the
    whole difference; `clean` and `corrupted` are the differences in nats.
    """

    token_id: int
    rival: int
    clean: float
    corrupted: float
    effect: Tensor


@torch.no_grad()
def patch_residuals(clean: Trace, corrupted: Trace, token_id: int, rival: int) -> Patching:
    """Puts the residual stream of `clean` into the pass over `corrupted`, at one layer and position after the other.

    Meng et al. 2022, "Locating and Editing Factual Associations in GPT"; the measure is that of Wang et al. 2023.
    Raises `UsageError` for prompts of different lengths, and where both have the same difference.
    """
    if clean.num_tokens != corrupted.num_tokens:
        raise UsageError(
            f"The prompts have {clean.num_tokens} and {corrupted.num_tokens} tokens. Patching puts tokens in each "
            "other's place, so both must have as many."
        )
    layers, length = clean.num_layers + 1, clean.num_tokens
    good, bad = (float(_difference(trace, trace.residuals[-1:, -1:], token_id, rival)) for trace in (clean, corrupted))
    if good == bad:
        raise UsageError("Both prompts have the same difference of these logits, so there is nothing to bring back.")
    effect = torch.zeros(layers, length, dtype=torch.float64)
    for layer in range(layers):
        for start in range(0, length, _TOGETHER):
            places = torch.arange(start, min(start + _TOGETHER, length), device=clean.residuals.device)
            x_BTD = corrupted.residuals[layer].expand(len(places), -1, -1).clone()
            x_BTD[torch.arange(len(places)), places] = clean.residuals[layer, places]
            for above in range(layer, clean.num_layers):
                x_BTD = corrupted.model.run_block(above, x_BTD)
            effect[layer, start : start + len(places)] = _difference(corrupted, x_BTD[:, -1:], token_id, rival)
    return Patching(token_id, rival, good, bad, (effect - bad) / (good - bad))


def _difference(trace: Trace, states_B1D: Tensor, token_id: int, rival: int) -> Tensor:
    logits = trace.model.read_out(trace.model.finish(states_B1D))[:, -1].double().cpu()
    return logits[:, token_id] - logits[:, rival]
