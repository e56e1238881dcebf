"""Activation patching: what of one prompt's pass, put into another's, changes the answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.interpret.trace import Trace
from sheepop.model import EncoderDecoder, Memory

# Positions that are patched in one pass.
_TOGETHER = 16


@dataclass(frozen=True, eq=False)
class Patching:
    """How far the difference of two logits at the last position moves from the corrupted to the clean prompt's.

    `effect` (L + 1, T) is 0 where putting the clean residual stream there changes nothing, 1 where it brings back the
    whole difference; `source_effect` is that of an encoder's stream, if there is one. `clean` and `corrupted` are the
    differences in nats.
    """

    token_id: int
    rival: int
    clean: float
    corrupted: float
    effect: Tensor
    source_effect: Tensor | None


@torch.no_grad()
def patch_residuals(clean: Trace, corrupted: Trace, token_id: int, rival: int) -> Patching:
    """Puts the residual stream of `clean` into the pass over `corrupted`, at one layer and position after the other.

    Meng et al. 2022, "Locating and Editing Factual Associations in GPT"; the measure is that of Wang et al. 2023.
    Raises `UsageError` for prompts of different lengths, and where both have the same difference.
    """
    for one, other in zip(clean.streams, corrupted.streams, strict=True):
        if one.num_tokens != other.num_tokens:
            raise UsageError(
                f"The prompts have {one.num_tokens} and {other.num_tokens} tokens. Patching puts tokens in each "
                "other's place, so both must have as many."
            )
    good, bad = (float(_difference(trace, trace.residuals[-1:, -1:], token_id, rival)) for trace in (clean, corrupted))
    if good == bad:
        raise UsageError("Both prompts have the same difference of these logits, so there is nothing to bring back.")
    effects = []
    for one, other in zip(clean.streams, corrupted.streams, strict=True):
        effect = torch.zeros(one.residuals.shape[:2], dtype=torch.float64)
        for layer in range(len(effect)):
            for start in range(0, one.num_tokens, _TOGETHER):
                places = torch.arange(start, min(start + _TOGETHER, one.num_tokens), device=one.residuals.device)
                x_BTD = other.residuals[layer].expand(len(places), -1, -1).clone()
                x_BTD[torch.arange(len(places)), places] = one.residuals[layer, places]
                for above in range(layer, len(other.blocks)):
                    x_BTD = other.run_block(above, x_BTD)
                if other is corrupted.source:
                    x_BTD = _read_source(corrupted, x_BTD)
                effect[layer, start : start + len(places)] = _difference(corrupted, x_BTD[:, -1:], token_id, rival)
        effects.append((effect - bad) / (good - bad))
    return Patching(token_id, rival, good, bad, effects[-1], effects[0] if len(effects) > 1 else None)


def _read_source(trace: Trace, x_BSD: Tensor) -> Tensor:
    """The target's stream (B, T, D) behind its last block, where the encoder's blocks gave `x_BSD`."""
    model = trace.model
    assert isinstance(model, EncoderDecoder)
    memory = Memory(model.finish_encoder(x_BSD))
    x_BTD = trace.residuals[0].expand(len(x_BSD), -1, -1)
    for layer in range(trace.num_layers):
        x_BTD = model.run_target_block(layer, x_BTD, memory)
    return x_BTD


def _difference(trace: Trace, states_B1D: Tensor, token_id: int, rival: int) -> Tensor:
    logits = trace.model.read_out(trace.model.finish(states_B1D))[:, -1].double().cpu()
    return logits[:, token_id] - logits[:, rival]
