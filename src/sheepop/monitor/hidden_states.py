"""Texts as vectors of a model's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sheepop.evaluate.statistics import Floats
from sheepop.generate.runner import hidden_states
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer

_TOKENS_PER_PASS = 2048


@torch.inference_mode()
def mean_states(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str]) -> Floats:
    """The mean of the last hidden states of each text, shape (texts, D), of its first `max_seq_len` tokens."""
    longest = model.config.max_seq_len
    ids = [[*tokenizer.prefix_ids, *tokenizer.encode(text)][:longest] or [tokenizer.filler_id] for text in texts]
    order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
    found: dict[int, torch.Tensor] = {}
    while order:
        # A batch is padded to its longest text, which is the last.
        count = max(1, _TOKENS_PER_PASS // len(ids[order[-1]]))
        batch, order = order[-count:], order[:-count]
        states = hidden_states(model, [ids[place] for place in batch])
        found |= zip(batch, (each.float().mean(0) for each in states), strict=True)
    return torch.stack([found[place] for place in range(len(texts))]).double().cpu().numpy()
