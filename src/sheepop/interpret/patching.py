"""Activation patching: which states of one prompt's pass change the answer of another prompt's pass."""

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
    """How much patching restores the difference of two logits at the last position.

    `effect` (L + 1, T) is 0 where the clean residual stream changes nothing, and 1 where it restores the whole
    difference of the clean prompt; `source_effect` is the same for an encoder's stream, if there is one. `clean` and
    `corrupted` are the differences of both prompts in nats.
    """

    token_id: int
    rival: int
    clean: float
    corrupted: float
    effect: Tensor
    source_effect: Tensor | None


@torch.no_grad()
def patch_residuals(clean: Trace, corrupted: Trace, token_id: int, rival: int) -> Patching:
    """Replaces the residual stream in the pass over `corrupted` by that of `clean`, at each layer and position in turn.

    See Meng et al. 2022, "Locating and Editing Factual Associations in GPT"; the measure is that of Wang et al. 2023.
    Raises `UsageError` if the prompts have different lengths, or equal differences of the logits.
    """
    for one, other in zip(clean.streams, corrupted.streams, strict=True):
        if one.num_tokens != other.num_tokens:
            raise UsageError(
                f"The prompts have {one.num_tokens} and {other.num_tokens} tokens. Patching replaces the states of "
                "one by those of the other, so both must have equally many."
            )
    good, bad = (float(_difference(trace, trace.residuals[-1:, -1:], token_id, rival)) for trace in (clean, corrupted))
    if good == bad:
        raise UsageError("Both prompts have the same difference of these logits, so there is nothing to restore.")
    effects = []
    for one, other in zip(clean.streams, corrupted.streams, strict=True):
        effect = torch.zeros(one.residuals.shape[:2], dtype=torch.float64)
        for layer in range(len(effect)):
            for start in range(0, one.num_tokens, _TOGETHER):
                positions = torch.arange(start, min(start + _TOGETHER, one.num_tokens), device=one.residuals.device)
                x_BTD = other.residuals[layer].expand(len(positions), -1, -1).clone()
                x_BTD[torch.arange(len(positions)), positions] = one.residuals[layer, positions]
                x_BTD = other.run_from(layer, x_BTD)
                if other is corrupted.source:
                    x_BTD = _read_source(corrupted, x_BTD)
                effect[layer, start : start + len(positions)] = _difference(corrupted, x_BTD[:, -1:], token_id, rival)
        effects.append((effect - bad) / (good - bad))
    return Patching(token_id, rival, good, bad, effects[-1], effects[0] if len(effects) > 1 else None)


def _read_source(trace: Trace, x_BSD: Tensor) -> Tensor:
    """The target's stream (B, T, D) after its last block, given `x_BSD`, the output of the encoder's blocks."""
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
