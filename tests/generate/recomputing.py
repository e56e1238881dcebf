"""A generator that reads every whole text for every token: the slow reference for the one with the paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sheepop.adapt.row_adapters import Adapter
from sheepop.generate import Generator
from sheepop.generate.engine import Engine
from sheepop.generate.runner import paged_runner
from sheepop.generate.scheduler import Grant
from sheepop.generate.transfers import with_sampled
from sheepop.model import EncoderDecoder, Memory, Transformer


class RecomputingRunner:
    """Reads the whole of every text whose next token is needed; without adapters."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def require(self, adapter: Adapter) -> None:
        raise NotImplementedError

    def prepare(self, most: int) -> None:
        raise NotImplementedError

    def run(self, grants: Sequence[Grant], sampled: Tensor | None = None) -> Tensor:
        """Returns the logits (R, V) after each text and each guess that was read."""
        device = self._model.device
        grants = [grant for grant in grants if grant.num_predictions]
        if not grants:
            return torch.empty(0, self._model.config.vocabulary, device=device)
        texts = [[*grant.reader.context, *grant.reader.drafts][: grant.chunk.end] for grant in grants]
        longest = max(map(len, texts))
        input_ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
        input_ids = with_sampled(input_ids, sampled)
        lengths = torch.tensor(list(map(len, texts)), device=device)[:, None]
        # Padding has the position of the row's last token, so that no position beyond the row's length is looked up.
        inputs: dict[str, Any] = {"positions": torch.arange(longest, device=device).minimum(lengths - 1)}
        if isinstance(self._model, EncoderDecoder):
            inputs["memory"] = self._encoded([grant.reader.source_ids for grant in grants])
        hidden_BTD = self._model.hidden_states(input_ids, **inputs)
        parts = [
            hidden_BTD[row, len(text) - grant.num_predictions : len(text)]
            for row, (text, grant) in enumerate(zip(texts, grants, strict=True))
        ]
        return self._model.read_out(torch.cat(parts)[:, None])[:, 0]

    def _encoded(self, sources: Sequence[Sequence[int] | None]) -> Memory:
        assert isinstance(self._model, EncoderDecoder)
        states = [self._model.encode(torch.tensor([list(source or ())])).states[0] for source in sources]
        mask = pad_sequence([torch.ones(len(each), dtype=torch.bool) for each in states], batch_first=True)
        return Memory(pad_sequence(states, batch_first=True), mask)


@contextmanager
def recomputing(model: Transformer) -> Iterator[None]:
    """Engines that are built here run `model` by the slow runner, and a draft by the usual one."""

    def runner(network: Transformer, *given: Any, **settings: Any) -> Any:
        return RecomputingRunner(model) if network is model else paged_runner(network, *given, **settings)

    with patch("sheepop.generate.engine.paged_runner", runner):
        yield


class RecomputingGenerator(Generator):
    def serving_engine(self, **settings: Any) -> Engine:
        with recomputing(self.model):
            return super().serving_engine(**settings)


GENERATORS = [Generator, RecomputingGenerator]
