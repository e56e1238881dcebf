"""Scores one text, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sheepop.core.errors import UsageError
from sheepop.generate.likelihood import require_memory, window_length
from sheepop.generate.recall import correction
from sheepop.model import EncoderDecoder, Transformer
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.tokenizer import Tokenizer


@dataclass(frozen=True)
class Score:
    """The predicted tokens of a text, `token_ids`, with their `logprobs` (natural logarithms) and `ranks` (from 1).

    They were read in windows of `context` tokens. The first token of a text is predicted only if the tokenizer puts a
    prefix token before it.
    """

    token_ids: list[int]
    pieces: list[str]
    logprobs: list[float]
    ranks: list[int]
    num_bytes: int
    context: int

    @property
    def loss(self) -> float:
        """The mean loss, in nats per token."""
        return -math.fsum(self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """e to the power of the loss."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the predicted tokens."""
        return -math.fsum(self.logprobs) / math.log(2) / self.num_bytes


@torch.inference_mode()
def score_text(
    model: Transformer,
    tokenizer: Tokenizer,
    text: str,
    *,
    context: int | None = None,
    memory: CorpusMemory | None = None,
) -> Score:
    """Predicts every token of `text` from the tokens before it, with the `memory` of the training text if it is given.

    A text longer than a window of `context` tokens, by default at most 2,048, is read in windows that overlap by half,
    so that each token is predicted once, from at least half a window. Raises `UsageError` for a text without a token to
    predict, a window that is longer than the model's context, and one that does not fit the free memory.
    """
    if isinstance(model, EncoderDecoder):
        raise UsageError("An encoder-decoder predicts targets from sources, so a text alone has no score.")
    token_ids = [*tokenizer.prefix_ids, *tokenizer.encode(text)]
    if len(token_ids) < 2:
        raise UsageError("The text has no token that follows another, so there is nothing to predict.")
    length = window_length(model, context)
    stride = max(1, length // 2)
    logprobs: list[float] = []
    ranks: list[int] = []
    network = model.sharing_copy().eval()
    require_memory(network, min(length, len(token_ids)), min(length, len(token_ids)))
    end = 1
    while end < len(token_ids):
        begin = max(0, end - 1 - (length - stride))
        stop = min(len(token_ids), begin + length + 1)
        window = torch.tensor(token_ids[begin:stop], device=model.device)
        hidden_TD = network.hidden_states(window[None, :-1])[0, end - begin - 1 :]
        before = [] if memory is None else [token_ids[begin:place] for place in range(end, stop)]
        found = network.lm_head.judge(hidden_TD, window[end - begin :], correct=correction(memory, before))
        logprobs += found.logprobs.tolist()
        ranks += found.ranks.tolist()
        end = stop
    predicted = token_ids[1:]
    of_tokens = [tokenizer.token_bytes(token_id) for token_id in predicted]
    pieces = [data.decode("utf-8", errors="replace") for data in of_tokens]
    return Score(predicted, pieces, logprobs, ranks, sum(map(len, of_tokens)), length)
