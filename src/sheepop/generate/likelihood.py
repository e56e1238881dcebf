"""How likely a model finds given continuations of given contexts: many in a pass, each shared beginning read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.generate.blocks import BlockManager, BlockTable, Chunk, Copy
from sheepop.generate.engine import BLOCK_SIZE, TOKENS_PER_STEP
from sheepop.generate.generator import Generator
from sheepop.generate.paged_cache import reaches_of
from sheepop.generate.scheduler import Grant, Share
from sheepop.generate.split_model import paged_runner
from sheepop.model import EncoderDecoder, Transformer

# A context that begins like one of the same pass waits for it, where so many tokens need not be read again.
_WORTH_WAITING = 2 * BLOCK_SIZE
_FORKS_PER_PASS = 64
_Judged = tuple[float, bool, float]  # logprob, is_likeliest, best_logprob


class Continuation(NamedTuple):
    """What a model gives to one, token by token: `logprobs` are natural logarithms of probabilities.

    `is_likeliest` says whether no token is likelier in its place; `best_logprobs` belong to the likeliest ones.
    """

    logprobs: list[float]
    is_likeliest: list[bool]
    best_logprobs: list[float]

    @property
    def is_greedy(self) -> bool:
        """Whether the model would write it when it always takes the likeliest token."""
        return all(self.is_likeliest)

    @property
    def total(self) -> float:
        """The logarithm of its probability."""
        return math.fsum(self.logprobs)


@dataclass
class _Text:
    """A text that is read: the runner predicts what follows `context` and each of `drafts`. It is its own request."""

    context: list[int]
    drafts: list[int] = field(default_factory=list)
    table: BlockTable | None = None
    salt: str = ""
    width: int = 1
    source_ids: list[int] | None = None
    order: tuple[int, int] = (0, 0)

    @property
    def readers(self) -> list[_Text]:
        """Itself."""
        return [self]


@dataclass
class _Group:
    """The continuations of one context, with the numbers of the texts that have them."""

    context: list[int]
    continuations: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class LikelihoodScorer:
    """Scores continuations with the network of `generator`, whose ranks share the contexts.

    A pass of the network reads the contexts of several texts side by side without padding, the next ones their
    continuations; what was read of a context serves all texts that begin with it, as far as the cache still holds it.
    Raises `UsageError` for an encoder-decoder.
    """

    def __init__(self, generator: Generator, *, tokens_per_pass: int = TOKENS_PER_STEP) -> None:
        if isinstance(generator.model, EncoderDecoder):
            raise UsageError("An encoder-decoder predicts targets from sources, so a text alone has no likelihood.")
        self._model, self._ranks, self._tokens_per_pass = generator.model, generator.ranks, tokens_per_pass

    def score(
        self,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Continuation]:
        """The likelihood of every continuation, a list of token ids, behind its context, another.

        A context that does not fit loses its first tokens. Equal texts are read once. `on_done` hears how many more
        texts are finished, those of other ranks all at once. Raises `UsageError` for a text without a context or a
        continuation, and for a continuation that is longer than the model's context.
        """
        groups, num_done = self._groups(texts), 0

        def read(numbers: range) -> list[list[Continuation]]:
            nonlocal num_done
            found = []
            if here := [groups[number] for number in numbers]:
                reading = _Reading(self._model, here, self._tokens_per_pass)
                with torch.inference_mode(), torch.autocast(self._model.device.type, enabled=False):
                    for group, scored in reading.run():
                        found.append([scored[continuation] for continuation in group.continuations])
                        num_done += (count := sum(map(len, group.continuations.values())))
                        if on_done is not None:
                            on_done(count)
            return found

        found: dict[int, Continuation] = {}
        for group, scored in zip(groups, self._ranks.shared(len(groups), read), strict=True):
            for numbers, given in zip(group.continuations.values(), scored, strict=True):
                found.update(dict.fromkeys(numbers, Continuation(*given)))
        if on_done is not None and num_done < len(texts):
            on_done(len(texts) - num_done)
        return [found[number] for number in range(len(texts))]

    def _groups(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[_Group]:
        """The different contexts with their continuations, those that begin alike beside each other."""
        longest = self._model.config.max_seq_len
        groups: dict[tuple[int, ...], _Group] = {}
        for number, (context, continuation) in enumerate(texts):
            if not context or not continuation:
                raise UsageError(f"Text {number + 1} to score needs a context and a continuation of a token at least.")
            if len(continuation) > longest:
                raise UsageError(
                    f"A continuation of {len(continuation)} tokens does not fit the model's context of {longest}."
                )
            # The last token is predicted and not read.
            kept = tuple(context[max(0, len(context) + len(continuation) - 1 - longest) :])
            group = groups.setdefault(kept, _Group(list(kept)))
            group.continuations.setdefault(tuple(continuation), []).append(number)
        return [groups[context] for context in sorted(groups)]


class _Reading:
    """Reads the contexts of sorted groups, as many in a pass as it has tokens for, and then what follows them."""

    def __init__(self, model: Transformer, groups: Sequence[_Group], tokens_per_pass: int) -> None:
        self._groups, self._tokens_per_pass, self._device = groups, tokens_per_pass, model.device
        reaches = reaches_of(model)
        longest = max(len(group.context) + max(map(len, group.continuations)) for group in groups)
        # One text beside a pass of others, and for every fork a block that it begins and one that it copies.
        texts = -(-longest // BLOCK_SIZE) + -(-tokens_per_pass // BLOCK_SIZE)
        counts = [2 * texts + 2 * _FORKS_PER_PASS] * len(reaches)
        self._manager = BlockManager(counts, reaches, BLOCK_SIZE)
        self._runner = paged_runner(model, num_blocks=counts, block_size=BLOCK_SIZE)

    def run(self) -> Iterator[tuple[_Group, dict[tuple[int, ...], Continuation]]]:
        """Every group with what its continuations were given."""
        begin = 0
        while begin < len(self._groups):
            texts, shares = self._contexts(begin)
            logits_RV = self._runner.run(shares)
            for text in texts:
                assert text.table is not None
                self._manager.advance(text.table, text.context, len(text.context))
            yield from self._continue(self._groups[begin : begin + len(texts)], texts, logits_RV)
            for text in texts:
                assert text.table is not None
                self._manager.close(text.table)
            begin += len(texts)

    def _contexts(self, begin: int) -> tuple[list[_Text], list[Share]]:
        """The next contexts that one pass reads."""
        texts: list[_Text] = []
        shares: list[Share] = []
        budget = self._tokens_per_pass
        for group in self._groups[begin:]:
            text = _Text(group.context)
            text.table = self._manager.open(text.context)
            count = len(text.context) - text.table.num_tokens
            waits = bool(texts) and _shared(texts[-1].context, text.context) - text.table.num_tokens >= _WORTH_WAITING
            copies = None if waits or (texts and count > budget) else self._manager.reserve(text.table, count)
            if copies is None:
                self._manager.close(text.table)
                break
            texts.append(text)
            shares.append(_share(text, count, copies))
            budget -= count
        return texts, shares

    def _continue(
        self, groups: Sequence[_Group], texts: Sequence[_Text], logits_RV: Tensor
    ) -> Iterator[tuple[_Group, dict[tuple[int, ...], Continuation]]]:
        """Reads what follows contexts, whose next tokens have the logits of a row each."""
        pairs = [(row, found) for row, group in enumerate(groups) for found in group.continuations]
        firsts = self._judge(logits_RV, [row for row, _ in pairs], [found[0] for _, found in pairs])
        judged = {pair: [first] for pair, first in zip(pairs, firsts, strict=True)}
        waiting = [(row, found) for row, found in pairs if len(found) > 1]
        while waiting:
            forks, shares = self._forks(waiting, texts)
            tokens = [token for _, found in waiting[: len(forks)] for token in found[1:]]
            rest = iter(self._judge(self._runner.run(shares), range(len(tokens)), tokens))
            for pair, fork in zip(waiting, forks, strict=False):
                judged[pair] += [next(rest) for _ in pair[1][1:]]
                assert fork.table is not None
                self._manager.close(fork.table)
            waiting = waiting[len(forks) :]
        for row, group in enumerate(groups):
            yield group, {found: _continuation(judged[row, found]) for found in group.continuations}

    def _forks(
        self, waiting: Sequence[tuple[int, tuple[int, ...]]], texts: Sequence[_Text]
    ) -> tuple[list[_Text], list[Share]]:
        """As many of the continuations that wait as one pass reads, each behind its context: all but the last token."""
        forks: list[_Text] = []
        shares: list[Share] = []
        budget = self._tokens_per_pass
        for row, found in waiting[:_FORKS_PER_PASS]:
            count = len(found) - 1
            if forks and count > budget:
                break
            origin = texts[row]
            assert origin.table is not None
            fork = _Text(origin.context, list(found[:-1]), self._manager.fork(origin.table))
            assert fork.table is not None
            copies = self._manager.reserve(fork.table, count)
            if copies is None:
                self._manager.close(fork.table)
                break
            forks.append(fork)
            shares.append(_share(fork, count, copies))
            budget -= count
        return forks, shares

    def _judge(self, logits_RV: Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> list[_Judged]:
        """What each token is given behind its row."""
        values = logits_RV.float()
        normal, best = values.logsumexp(-1), values.max(-1)
        where = torch.tensor(list(rows), device=self._device)
        tokens = torch.tensor(token_ids, device=self._device)
        logprobs, bests = values[where, tokens] - normal[where], best.values[where] - normal[where]
        is_likeliest = best.indices[where] == tokens
        return list(zip(logprobs.tolist(), is_likeliest.tolist(), bests.tolist(), strict=True))


def _share(text: _Text, count: int, copies: list[Copy]) -> Share:
    assert text.table is not None
    return Share(text, [Grant(text, Chunk(text.table, text.table.num_tokens, count))], copies)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    same = (i for i, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(same, min(len(one), len(other)))


def _continuation(judged: Sequence[_Judged]) -> Continuation:
    logprobs, is_likeliest, best_logprobs = (list(values) for values in zip(*judged, strict=True))
    return Continuation(logprobs, is_likeliest, best_logprobs)
