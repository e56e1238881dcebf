"""What comes back for one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Completion:
    """What was written for one prompt: its continuation, or for an encoder-decoder the target for it as the source.

    `text` ends before the stop string, if one was found. `token_ids` are all tokens that were chosen, with the
    ``<eos>`` or the pieces of the stop string that ended them; `logprobs` has the natural logarithm of each one's
    probability under the model itself, before temperature and the rest of the sampling settings.

    `finish_reason` is ``stop`` (``<eos>`` or a stop string), ``length`` (`max_new_tokens`, or the end of the
    context) or ``abort`` (the caller asked to stop). `num_dropped_prompt_tokens` counts the prompt's first tokens
    that the network did not read because the context could not hold them. `seed` repeats the text. `continues_prompt`
    says whether the text goes on where the prompt ends.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float]
    prompt: str
    num_prompt_tokens: int
    num_dropped_prompt_tokens: int
    seed: int
    continues_prompt: bool = True
