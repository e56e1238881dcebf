"""How well a model predicts a text that is given: the log-probability of every token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sheepop.core.errors import UsageError
from sheepop.model import EncoderDecoder, Transformer
from sheepop.tokenizer import Tokenizer


@dataclass(frozen=True)
class Score:
    """`logprobs` (natural logarithms) of the tokens that were predicted, `token_ids`; `ranks` count from 1.

    The first token of a text is predicted only where the tokenizer puts one before every text.
    """

    token_ids: list[int]
    pieces: list[str]
    logprobs: list[float]
    ranks: list[int]
    num_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return -math.fsum(self.logprobs) / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """e to the power of the loss."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits for each byte of the tokens that were predicted."""
        return -math.fsum(self.logprobs) / math.log(2) / self.num_bytes


@torch.inference_mode()
def score_text(model: Transformer, tokenizer: Tokenizer, text: str) -> Score:
    """Predicts every token of `text` from those before it.

    A text longer than the context is read in windows that overlap by a half: each token is predicted once, from half a
    context at least. Raises `UsageError` for a text without a token to predict.
    """
    if isinstance(model, EncoderDecoder):
        raise UsageError("An encoder-decoder predicts targets from sources, so a text alone has no score.")
    token_ids = [*tokenizer.prefix_ids, *tokenizer.encode(text)]
    if len(token_ids) < 2:
        raise UsageError("The text has no token that follows another, so there is nothing to predict.")
    length = model.config.max_seq_len
    stride = max(1, length // 2)
    logprobs: list[float] = []
    ranks: list[int] = []
    network = model.sharing_copy().eval()
    end = 1
    while end < len(token_ids):
        begin = max(0, end - 1 - (length - stride))
        stop = min(len(token_ids), begin + length + 1)
        window = torch.tensor(token_ids[begin:stop], device=model.device)
        hidden_TD = network.hidden_states(window[None, :-1])[0, end - begin - 1 :]
        found = network.read_out(hidden_TD[None])[0].float().log_softmax(-1)
        chosen = found.gather(-1, window[end - begin :, None])
        logprobs += chosen[:, 0].tolist()
        ranks += ((found > chosen).sum(-1) + 1).tolist()
        end = stop
    predicted = token_ids[1:]
    sizes = tokenizer.byte_lengths()
    pieces = [tokenizer.token_bytes(token_id).decode("utf-8", errors="replace") for token_id in predicted]
    return Score(predicted, pieces, logprobs, ranks, int(sizes[predicted].sum()))
