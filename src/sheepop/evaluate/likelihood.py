"""Log-probabilities of given texts: of many continuations with shared prefixes, or of one text, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.generate.blocks import BlockTable
from sheepop.generate.engine import BLOCK_SIZE, tokens_per_step
from sheepop.generate.generator import Generator, free_memory
from sheepop.generate.paged_cache import block_manager, bytes_per_block, state_bytes
from sheepop.generate.recall import contexts, correction
from sheepop.generate.runner import Reading, paged_runner
from sheepop.generate.scheduler import Grant, Reader
from sheepop.model import EncoderDecoder, Transformer
from sheepop.model.accounting.cost import pass_bytes
from sheepop.model.attention.choose import choose_kernel
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.model.logits import logits_bytes
from sheepop.tokenizer import Tokenizer

# A context waits for the next pass if waiting saves it from reading at least this many tokens again.
_WORTH_WAITING = 2 * BLOCK_SIZE
_FORKS_PER_PASS = 64
_TEXTS_WITH_STATES = 8  # of a pass; as many states are left for the forks
_WINDOW = 2048  # tokens of a window, unless the model's context is shorter
_Texts = Sequence[tuple[Sequence[int], Sequence[int]]]  # contexts and continuations


class Continuation(NamedTuple):
    """The score of a continuation, per token: `logprobs` are natural logarithms of probabilities.

    `is_likeliest` is True if no other token is likelier; `best_logprobs` are those of the likeliest tokens.
    """

    logprobs: list[float]
    is_likeliest: list[bool]
    best_logprobs: list[float]

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would write this continuation."""
        return all(self.is_likeliest)

    @property
    def total(self) -> float:
        """The logarithm of the continuation's probability."""
        return math.fsum(self.logprobs)


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


@dataclass
class _Group:
    """The continuations of one context, each with the numbers of the texts that have it."""

    context: list[int]
    continuations: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class LikelihoodScorer:
    """Scores continuations with the network of `generator`, whose ranks share the contexts.

    A pass reads the contexts of several texts without padding, the next passes their continuations; a prefix that texts
    share is read once while it stays in the cache. A text has at most `context` tokens, by default as many as the model
    can read. A `memory` corrects the predictions. Raises `UsageError` for an encoder-decoder, and for a longer context.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        tokens_per_pass: int | None = None,
        context: int | None = None,
        memory: CorpusMemory | None = None,
    ) -> None:
        if isinstance(generator.model, EncoderDecoder):
            raise UsageError("An encoder-decoder predicts targets from sources, so a text alone has no likelihood.")
        self._model, self._ranks, self._memory = generator.model, generator.ranks, memory
        self._tokens_per_pass = tokens_per_pass or tokens_per_step(self._model.device)
        self.longest = window_length(self._model, self._model.config.max_seq_len if context is None else context)

    def score(self, texts: _Texts, *, on_done: Callable[[int], None] | None = None) -> list[Continuation]:
        """Scores every text, a pair of the token ids of a context and of its continuation.

        A context that does not fit loses its first tokens. Equal texts are read once. `on_done` is called with the
        number of newly finished texts, for those of other ranks once at the end. Raises `UsageError` for a text without
        a context or a continuation, and for a continuation that is longer than the model may read.
        """
        groups, num_done = self._groups(texts), 0

        def read(numbers: range) -> list[list[Continuation]]:
            nonlocal num_done
            found = []
            if here := [groups[number] for number in numbers]:
                reading = _Reading(self._model, here, self._tokens_per_pass, self._memory)
                with torch.inference_mode(), torch.autocast(self._model.device.type, enabled=False):
                    for group, scored in zip(here, reading.run(), strict=True):
                        found.append(scored)
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

    def _groups(self, texts: _Texts) -> list[_Group]:
        """Groups the texts by context, sorted so that shared prefixes are adjacent."""
        groups: dict[tuple[int, ...], _Group] = {}
        for number, (context, continuation) in enumerate(texts):
            if not context or not continuation:
                raise UsageError(
                    f"Text {number + 1} to score needs a context and a continuation of at least one token."
                )
            if len(continuation) > self.longest:
                raise UsageError(
                    f"A continuation of {len(continuation)} tokens does not fit the model's context of {self.longest}."
                )
            # The last token is predicted but not read.
            kept = tuple(context[max(0, len(context) + len(continuation) - 1 - self.longest) :])
            group = groups.setdefault(kept, _Group(list(kept)))
            group.continuations.setdefault(tuple(continuation), []).append(number)
        return [groups[context] for context in sorted(groups)]


class _Reading:
    """Reads the contexts of sorted groups, as many per pass as fit its tokens, and then their continuations."""

    def __init__(
        self, model: Transformer, groups: Sequence[_Group], tokens_per_pass: int, memory: CorpusMemory | None
    ) -> None:
        self._groups, self._tokens_per_pass, self._head, self._memory = groups, tokens_per_pass, model.lm_head, memory
        longest = max(len(group.context) + max(map(len, group.continuations)) for group in groups)
        # Room for one longest text and a pass of others, and for every fork a block that it begins and one it copies.
        texts = -(-longest // BLOCK_SIZE) + -(-tokens_per_pass // BLOCK_SIZE)
        count = 2 * texts + 2 * _FORKS_PER_PASS
        of_states = state_bytes(model, 2 * _TEXTS_WITH_STATES, BLOCK_SIZE)
        require_memory(model, tokens_per_pass, longest, count * bytes_per_block(model, BLOCK_SIZE) + of_states)
        self._manager = block_manager(model, count, BLOCK_SIZE, max_sequences=2 * _TEXTS_WITH_STATES)
        self._runner = paged_runner(model, self._manager)
        # States are found again only where a text ended, so that waiting for the prefix of another saves nothing.
        self._has_states = model.config.gated_delta_net is not None
        self._most_texts = _TEXTS_WITH_STATES if self._has_states else _FORKS_PER_PASS

    def run(self) -> Iterator[list[Continuation]]:
        """Yields the scores of the continuations of every group."""
        begin = 0
        while begin < len(self._groups):
            grants = self._contexts(begin)
            tables = [grant.chunk.table for grant in grants]
            groups, begin = self._groups[begin : begin + len(grants)], begin + len(grants)
            # Sorted contexts share the most with the next one; blocks of anything else are used again at once.
            following = self._groups[begin].context if begin < len(self._groups) else []
            states_RD = self._states(grants, following)
            for group, table in zip(groups, tables, strict=True):
                shared = _shared(group.context, following)
                self._manager.advance(table, group.context, len(group.context), findable=shared)
            yield from self._continue(groups, tables, states_RD)
            for table in tables:
                self._manager.close(table)

    def _contexts(self, begin: int) -> list[Grant]:
        """Prepares the contexts of the next pass, from group `begin` on."""
        grants: list[Grant] = []
        budget, previous = self._tokens_per_pass, list[int]()
        for group in self._groups[begin:]:
            table = self._manager.open(group.context)
            count = len(group.context) - table.num_tokens
            waits = not self._has_states and _shared(previous, group.context) - table.num_tokens >= _WORTH_WAITING
            fits = not waits and len(grants) < self._most_texts and (not grants or count <= budget)
            grant = self._grant(Reader(group.context), table, count) if fits else None
            if grant is None:
                self._manager.close(table)
                break
            grants.append(grant)
            budget, previous = budget - count, group.context
        return grants

    def _grant(self, text: Reader, table: BlockTable, count: int) -> Grant | None:
        """The next `count` tokens of a text, with blocks for as many as a pass reads; None if blocks are missing."""
        copies = self._manager.reserve(table, min(count, self._tokens_per_pass))
        return None if copies is None else Grant.of(text, table, count, copies)

    def _continue(
        self, groups: Sequence[_Group], tables: Sequence[BlockTable], states_RD: Tensor
    ) -> Iterator[list[Continuation]]:
        """Scores the continuations of contexts that were read; `states_RD` has a row for each context."""
        pairs = [(row, found) for row, group in enumerate(groups) for found in group.continuations]
        before: Sequence[Sequence[int]] = [group.context for group in groups]
        firsts = self._judge(states_RD, before, [found[0] for _, found in pairs], [row for row, _ in pairs])
        judged = {pair: [first] for pair, first in zip(pairs, firsts, strict=True)}
        waiting = [(row, found) for row, found in pairs if len(found) > 1]
        while waiting:
            grants = self._forks(waiting, groups, tables)
            tokens = [token for _, found in waiting[: len(grants)] for token in found[1:]]
            before = [] if self._memory is None else list(contexts(grants, self._memory.window))
            rest = iter(self._judge(self._states(grants), before, tokens))
            for pair, grant in zip(waiting, grants, strict=False):
                judged[pair] += [next(rest) for _ in pair[1][1:]]
                self._manager.close(grant.chunk.table)
            waiting = waiting[len(grants) :]
        for row, group in enumerate(groups):
            columns = (map(list, zip(*judged[row, found], strict=True)) for found in group.continuations)
            yield [Continuation(*lists) for lists in columns]

    def _forks(
        self, waiting: Sequence[tuple[int, tuple[int, ...]]], groups: Sequence[_Group], tables: Sequence[BlockTable]
    ) -> list[Grant]:
        """Prepares as many waiting continuations as one pass reads: each after its context, without its last token."""
        grants: list[Grant] = []
        budget = self._tokens_per_pass
        for row, found in waiting[:_FORKS_PER_PASS]:
            count = len(found) - 1
            if grants and count > budget:
                break
            fork = self._manager.fork(tables[row])
            grant = self._grant(Reader(groups[row].context, drafts=list(found[:-1])), fork, count)
            if grant is None:
                self._manager.close(fork)
                break
            grants.append(grant)
            budget -= count
        return grants

    def _states(self, grants: Sequence[Grant], following: Sequence[int] = ()) -> Tensor:
        """The hidden states (R, D) that predict; a text longer than a pass, which is alone, is read in several.

        What it shares with the text `following` stays findable.
        """
        if len(grants) > 1:
            return self._runner.states(Reading.of(grants))
        ((text, (table, start, count), _, copies),) = grants
        tokens, end, found = [*text.context, *text.drafts], start + count, []
        while start < end:
            size = min(self._tokens_per_pass, end - start)
            found.append(self._runner.states(Reading.of([Grant.of(text, table, size, copies)])))
            start += size
            if start < end:
                self._manager.advance(table, tokens, start, findable=_shared(tokens, following))
                reserved = self._manager.reserve(table, min(self._tokens_per_pass, end - start))
                assert reserved is not None, "the cache has room for one longest text"
                copies = reserved
        return torch.cat(found)

    def _judge(
        self,
        states_RD: Tensor,
        before: Sequence[Sequence[int]],
        token_ids: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> list[tuple[float, bool, float]]:
        """Scores each of `token_ids` as the next token after the state in its row, by default one for each state.

        The memory looks at the tokens `before` each state's prediction. The fields are those of `Continuation`.
        """
        places = None if rows is None else torch.tensor(list(rows))
        found = self._head.judge(states_RD, torch.tensor(token_ids), places, correction(self._memory, before))
        return list(
            zip(found.logprobs.tolist(), found.is_likeliest.tolist(), found.best_logprobs.tolist(), strict=True)
        )


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix."""
    same = (i for i, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(same, min(len(one), len(other)))


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
    logprobs, ranks = list[float](), list[int]()
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


def window_length(model: Transformer, context: int | None = None) -> int:
    """Returns the tokens of the windows in which texts are scored: `context`, by default at most 2,048.

    Raises `UsageError` if that is longer than the model's context.
    """
    longest = model.config.max_seq_len
    if context is None:
        return min(_WINDOW, longest)
    if not 1 <= context <= longest:
        raise UsageError(f"context = {context} must be at least 1 and at most the model's context of {longest} tokens.")
    return context


def require_memory(model: Transformer, num_tokens: int, num_keys: int, cache_bytes: int = 0) -> None:
    """Raises `UsageError` if scoring `num_tokens` tokens that see `num_keys` does not fit the free memory.

    The cache has `cache_bytes`; the weights are in memory already.
    """
    device, config = model.device, model.config

    def needed(tokens: int, keys: int) -> int:
        kinds = [model.attention_kind(window) for window in dict.fromkeys(model.windows)]
        scores = any(choose_kernel(kind, kind.sight(tokens, keys)).kernel.name == "stepwise" for kind in kinds)
        logits = logits_bytes(tokens, config.vocabulary, model.dtype, device.type)
        activations = pass_bytes(config, tokens, keys, model.dtype.itemsize, scores=scores)
        return int(activations + cache_bytes * keys / num_keys + logits)

    free, most = free_memory(device), needed(num_tokens, num_keys)
    if most <= free:
        return
    shorter = 1 << max(0, num_keys - 1).bit_length() - 1
    while shorter > 1 and needed(min(num_tokens, shorter), shorter) > free:
        shorter //= 2
    raise UsageError(
        f"Scoring {num_keys:,} tokens at a time needs {most / 1e9:.1f} GB beside the weights, and {free / 1e9:.1f} GB "
        f"are free. Score shorter texts or windows: --context {shorter}"
    )
