"""Corrects the logits of a step by the memory of the model's training text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sheepop.generate.scheduler import Grant
from sheepop.generate.transfers import upload
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.model.head import Correct


def contexts(grants: Sequence[Grant], window: int) -> Iterator[Sequence[int]]:
    """Yields the last tokens, at most `window`, before each token that is predicted behind these chunks, in order."""
    for reader, chunk, num_predictions, _ in grants:
        known = len(reader.context)
        for stop in range(chunk.end - num_predictions + 1, chunk.end + 1):
            begin = max(0, stop - window)
            yield [*reader.context[begin:stop], *reader.drafts[max(0, begin - known) : max(0, stop - known)]]


def numbers_written(grants: Sequence[Grant]) -> Iterator[int]:
    """Yields how many tokens before each prediction behind these chunks of requests the model itself has written."""
    for reader, chunk, num_predictions, _ in grants:
        # A context that slid has lost tokens of the prompt first; all tokens of the text are known here.
        given = max(0, len(reader.context) - len(reader.token_ids))
        yield from (stop - given for stop in range(chunk.end - num_predictions + 1, chunk.end + 1))


def corrected(
    memory: CorpusMemory, logits_RV: Tensor, contexts: Sequence[Sequence[int]], written: Sequence[int] | None = None
) -> Tensor:
    """Returns the logits (R, V) after R contexts, corrected by the memory, in float32 or a finer type.

    The last `written` tokens of each context are the model's own; none are by default.
    """
    logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    width = max(1, min(memory.window, max(map(len, contexts))))
    windows = torch.zeros(len(contexts), width, dtype=torch.int64)
    for row, context in enumerate(contexts):
        tokens = context[-width:]
        windows[row, width - len(tokens) :] = torch.tensor(tokens, dtype=torch.int64)
    lengths = torch.tensor([min(width, len(context)) for context in contexts])
    depths = (torch.arange(1, width + 1) - width + lengths[:, None]).clamp(min=0)
    device = logits_RV.device
    own = None if written is None else upload(torch.tensor(written), device)
    recalled = memory.recall(upload(windows, device), upload(depths, device), only_last=True, written=own)
    return memory(logits_RV, recalled)


def correction(memory: CorpusMemory | None, contexts: Sequence[Sequence[int]]) -> Correct | None:
    """Returns the correction of logits after these contexts, one for each row; None without a memory."""
    return None if memory is None else lambda places, logits_RV: corrected(memory, logits_RV, contexts[places])
