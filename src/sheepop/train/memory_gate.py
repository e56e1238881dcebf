"""Builds the memory of a training text, and trains its gate on documents that were kept apart from training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sheepop.core.random import numpy_generator, torch_generator
from sheepop.data import PackedBatches
from sheepop.data.shards import DocumentView, TokenSplit
from sheepop.model import IGNORE_INDEX, Transformer
from sheepop.model.corpus_index import CorpusIndex
from sheepop.model.corpus_memory import CorpusMemory, Expected, Recalled
from sheepop.train.config import MemoryConfig
from sheepop.train.memory_documents import other_documents, reserved_documents
from sheepop.train.precision import autocast
from sheepop.train.tensor_batch import TensorBatch

_ROWS = 32  # read together
_PASSES, _BATCH, _LEAST_STEPS = 12, 512, 300
_RATE, _DECAY, _WARMUP = 6e-3, 1e-2, 50


@dataclass(frozen=True, eq=False)
class Observed:
    """What is known of N tokens: what the memory recalls, what the network expects, and the token itself.

    `logprobs` (N,) are those of the tokens without the memory, `is_token` (N, C) is true for a recalled token that is
    the token.
    """

    recalled: Recalled
    expected: Expected
    logprobs: Tensor
    is_token: Tensor

    def loss(self, memory: CorpusMemory, chosen: Tensor | slice) -> Tensor:
        """The mean of ``-log p`` of some tokens, with the memory, without all logits.

        With corrections d of the recalled tokens c, ``log p(x) = log q(x) + d(x) - log(1 + sum_c q(c) (e^d(c) - 1))``.
        """
        expected = self.expected.rows(chosen)
        corrections = memory.corrections(self.recalled.rows(chosen), expected)
        grown = (expected.logprobs.exp() * torch.expm1(corrections)).sum(-1)
        return (torch.log1p(grown) - (corrections * self.is_token[chosen]).sum(-1) - self.logprobs[chosen]).mean()


def build_memory(
    model: Transformer,
    split: TokenSplit,
    config: MemoryConfig,
    *,
    seed: int,
    max_length: int,
    pad_id: int,
    precision: str,
) -> CorpusMemory:
    """The memory of a training text for `model`, which is in evaluation mode and never saw the reserved documents.

    Its gate is trained with an index of all other documents, on rows of `max_length` tokens as in training, which
    `pad_id` fills; the index of the result has the reserved documents, too.
    """
    reserved, vocabulary = reserved_documents(split, config, seed), model.config.vocabulary
    known = _held(other_documents(split, reserved), config, seed)
    memory = CorpusMemory(CorpusIndex.build(known, vocabulary, config.longest), max_length).to(model.device)
    rows = PackedBatches(DocumentView(split, reserved), max_length=max_length, pad_id=pad_id)
    train_gate(memory, observe(memory, model, rows, precision), seed)
    everything = _held(DocumentView(split, np.arange(split.num_documents)), config, seed)
    memory.index = CorpusIndex.build(everything, vocabulary, config.longest).to(model.device)
    return memory.eval()


def _held(documents: DocumentView, config: MemoryConfig, seed: int) -> Tensor:
    """The tokens (N,) of the documents that the memory holds."""
    if documents.num_tokens > config.max_tokens:
        room, chosen, lengths = config.max_tokens, list[int](), np.diff(documents.offsets)
        for number in numpy_generator(seed, "remembered documents").permutation(len(lengths)):
            if lengths[number] <= room:
                room -= int(lengths[number])
                chosen.append(int(number))
        documents = DocumentView(documents.split, np.sort(documents.documents[chosen]))
    return torch.from_numpy(documents.tokens(0, documents.num_tokens).astype(np.int32))


@torch.no_grad()
def observe(memory: CorpusMemory, model: Transformer, rows: PackedBatches, precision: str) -> Observed:
    """Reads all rows with the memory and the network."""
    found: list[Observed] = []
    for start in range(0, rows.num_samples, _ROWS):
        samples = rows.batch(np.arange(start, min(start + _ROWS, rows.num_samples)))
        batch = TensorBatch.from_numpy(samples, str(model.device))
        with autocast(str(model.device), precision):
            hidden_ND = model.hidden_states(**batch.inputs).flatten(0, 1)
        positions = torch.from_numpy(samples.positions).to(model.device)
        recalled = memory.recall(torch.from_numpy(samples.input_ids).to(model.device), positions + 1)
        labels = batch.labels.flatten()
        for places, logits_RV in model.lm_head.blocks_of_logits(hidden_ND):
            is_known = labels[places] != IGNORE_INDEX
            logprobs, own = logits_RV[is_known].log_softmax(-1), recalled.rows(places).rows(is_known)
            tokens = labels[places][is_known][:, None]
            is_token = (own.tokens == tokens) & (own.shares.sum(-1) > 0)
            found.append(Observed(own, Expected.of(logprobs, own), logprobs.gather(1, tokens)[:, 0], is_token))
    return Observed(
        Recalled(*map(torch.cat, zip(*(each.recalled for each in found), strict=True))),
        Expected(*map(torch.cat, zip(*(each.expected for each in found), strict=True))),
        torch.cat([each.logprobs for each in found]),
        torch.cat([each.is_token for each in found]),
    )


def train_gate(memory: CorpusMemory, observed: Observed, seed: int) -> None:
    """Trains the gate of a memory on N observed tokens with AdamW, at a rate that rises and then falls to 0."""
    _begin(memory.gate, seed)
    generator, count = torch_generator(seed, "memory gate batches"), len(observed.logprobs)
    steps = max(_LEAST_STEPS, math.ceil(_PASSES * count / _BATCH))
    optimizer = torch.optim.AdamW(memory.gate.parameters(), _RATE, weight_decay=_DECAY)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min((step + 1) / _WARMUP, 1 - step / steps)
        chosen = torch.randint(count, (_BATCH,), generator=generator).to(observed.logprobs.device)
        loss = observed.loss(memory, chosen)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(memory.gate.parameters(), 1.0)
        optimizer.step()


def _begin(gate: nn.Sequential, seed: int) -> None:
    """Initial weights of a gate that corrects nothing yet."""
    generator = torch_generator(seed, "memory gate")
    layers = [layer for layer in gate if isinstance(layer, nn.Linear)]
    for layer in layers:
        weight = torch.empty(layer.weight.shape).normal_(0, layer.in_features**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        with torch.no_grad():
            layer.weight.copy_(weight)
    nn.init.zeros_(layers[-1].weight)
