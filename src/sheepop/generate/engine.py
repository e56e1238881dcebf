"""The engine: requests in, tokens out. A step schedules tokens, runs the network on them, and samples the next ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from sheepop.adapt.row_adapters import Adapter
from sheepop.core.errors import CheckpointError, SheepOpError, UsageError
from sheepop.generate.beam_search import Branch
from sheepop.generate.blocks import BlockManager, BlockTable
from sheepop.generate.paged_cache import block_manager
from sheepop.generate.request import Candidate, Completion, FinishReason, Request
from sheepop.generate.runner import PagedRunner, RecomputingRunner, Runner, is_led, paged_runner
from sheepop.generate.sampler import Choice, Likeliest, Row, Sampler
from sheepop.generate.scheduler import Scheduler, Share
from sheepop.generate.speculation import Drafter, LookupDrafter, ModelDrafter
from sheepop.model import Transformer

BLOCK_SIZE = 16


def tokens_per_step(device: torch.device) -> int:
    """The number of tokens in a pass that keeps the processor busy; each costs memory for its activations."""
    return 8192 if device.type == "cuda" else 512


@dataclass(frozen=True, slots=True)
class Update:
    """The result of a step for one text, `index` of its request; a snapshot, which stays as it is while the text grows.

    It has the new tokens and the text that can be shown now. `finish_reason` is set in the last update of a text,
    `stop` to the stop string that ended it, and `error` if its request failed.
    """

    request: Request
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    likeliest: tuple[Likeliest, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    error: SheepOpError | None = None

    @classmethod
    def of(cls, candidate: Candidate, text: str, first: int = 0) -> Update:
        """The update with `text` and the tokens of `candidate` from index `first` on."""
        return cls(
            candidate.request,
            candidate.index,
            text,
            tuple(candidate.token_ids[first:]),
            tuple(candidate.logprobs[first:]),
            tuple(candidate.likeliest[first:]),
            candidate.finish_reason,
            candidate.stop,
        )


class Engine:
    """Generates the texts of any number of requests at a time, in the order that `Scheduler` decides.

    A `drafter` guesses tokens, which changes no text. Raises `UsageError` if a step has no room for its guesses.
    """

    def __init__(self, runner: Runner, sampler: Sampler, scheduler: Scheduler, drafter: Drafter | None = None) -> None:
        self._runner, self._sampler, self.scheduler, self._drafter = runner, sampler, scheduler, drafter
        if drafter is not None and scheduler.max_tokens < scheduler.max_sequences * (1 + drafter.count):
            raise UsageError(
                f"max_tokens = {scheduler.max_tokens} has no room for {drafter.count} guesses for each of "
                f"max_sequences = {scheduler.max_sequences} texts. Raise the first, or lower one of the others."
            )

    @classmethod
    def build(
        cls,
        model: Transformer,
        sampler: Sampler,
        *,
        num_blocks: int,
        max_sequences: int,
        max_waiting: int,
        max_tokens: int | None = None,
        block_size: int = BLOCK_SIZE,
        use_cache: bool = True,
        cache_in_int8: bool = False,
        batch_invariant: bool = False,
        guesses: int = 0,
        draft: tuple[Transformer, Sampler] | None = None,
    ) -> Engine:
        """Builds an engine whose cache has `num_blocks` blocks of `block_size` tokens.

        It guesses `guesses` tokens ahead, with the smaller model in `draft` or by lookup. Without `use_cache` it runs
        the network on whole texts. `max_tokens` per step, by default those of `tokens_per_step`, is raised to the
        minimum that `max_sequences` texts need.
        """
        max_tokens = max(max_tokens or tokens_per_step(model.device), max_sequences * (1 + guesses))

        def prepared(network: Transformer) -> tuple[BlockManager, PagedRunner]:
            manager = block_manager(network, num_blocks, block_size, max_sequences=max_sequences, lookahead=guesses)
            settings: dict[str, Any] = {
                "num_blocks": list(manager.num_blocks),
                "block_size": block_size,
                "lookahead": guesses,
                "in_int8": cache_in_int8,
                "batch_invariant": batch_invariant,
            }
            return manager, paged_runner(network, **settings)

        if not use_cache and is_led(model):
            raise UsageError("A model that is split over several processes needs the cache. Leave --no-cache out.")
        runner: Runner
        if use_cache:
            manager, runner = prepared(model)
        else:
            manager, runner = BlockManager([num_blocks], [None], block_size), RecomputingRunner(model)
        drafter: Drafter | None = LookupDrafter(guesses) if guesses else None
        if guesses and draft is not None:
            blocks, small = prepared(draft[0])
            drafter = ModelDrafter(small, draft[1], blocks, guesses)
        scheduler = Scheduler(manager, max_tokens=max_tokens, max_sequences=max_sequences, max_waiting=max_waiting)
        return cls(runner, sampler, scheduler, drafter)

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting."""
        return not (self.scheduler.running or self.scheduler.waiting)

    def require(self, adapter: Adapter) -> None:
        """Raises `UsageError` if requests with this adapter cannot run."""
        self._runner.require(adapter)

    def add(self, request: Request) -> None:
        """Adds a request; raises `UsageError` if it can never run or too many are waiting."""
        self.scheduler.require_room(request, request.longest)
        self.scheduler.add(request)

    def abort(self, request: Request) -> list[Update]:
        """Ends an unfinished request; its texts stay as they are."""
        self.scheduler.remove(request)
        if request.beam is not None:
            return self._end_beam(request)
        if self._drafter is not None:
            for candidate in request.writing:
                self._drafter.forget(candidate)
        return [
            Update.of(candidate, candidate.finish("abort"), len(candidate.token_ids)) for candidate in request.writing
        ]

    def abort_all(self) -> list[Update]:
        """Ends all unfinished requests; see `abort`."""
        unfinished = [cast(Request, request) for request in (*self.scheduler.running, *self.scheduler.waiting)]
        return [update for request in unfinished for update in self.abort(request)]

    def step(self) -> list[Update]:
        """Runs the network on the scheduled tokens, and samples a token for every text that was read to its end."""
        self._guess()
        shares = self.scheduler.schedule()
        if not shares:
            return []
        for share in shares:
            cast(Request, share.request).begin(share)
        logits = self._runner.run(shares)
        for grant in (grant for share in shares for grant in share.grants):
            context = grant.reader.context
            self.scheduler.manager.advance(grant.chunk.table, context, min(grant.chunk.end, len(context)))
        spans: list[_LogitSpan] = []
        updates: list[Update] = []
        row = 0
        for share in shares:
            first, row = row, row + sum(grant.num_predictions for grant in share.grants)
            if row == first:
                continue
            request = cast(Request, share.request)
            if request.beam is not None:
                updates += self._extend(request, logits[first:row])
            else:
                spans += self._spans(request, share, first)
        return updates + self._sample(logits, spans)

    def _guess(self) -> None:
        """Drafts tokens for the texts whose only unread token is the newest."""
        if self._drafter is None:
            return
        ready = [
            candidate
            for request in self.scheduler.running
            for candidate in cast(Request, request).writing
            if candidate.table is not None and len(candidate.context) - candidate.table.num_tokens == 1
        ]
        for candidate, drafts in zip(ready, self._drafter.propose(ready), strict=True):
            candidate.drafts = drafts

    def _spans(self, request: Request, share: Share, first: int) -> list[_LogitSpan]:
        """The spans of logits of the request's texts, from row `first` on; new candidates share the first span."""
        spans = []
        for reader, chunk in share.grants:
            candidate = cast(Candidate, reader)
            count = chunk.end - len(candidate.context) + 1
            spans.append(_LogitSpan(candidate, chunk.end, first, count))
            first += count
        if len(request.candidates) < request.num_candidates:
            for other in request.fork():
                other.table = self.scheduler.manager.fork(spans[0].table)
                spans.append(replace(spans[0], candidate=other))
        return spans

    def _sample(self, logits: Tensor, spans: list[_LogitSpan]) -> list[Update]:
        """Samples a token after each text and each of its guesses; tokens after a wrong guess are dropped."""
        updates: list[Update] = []
        rows: list[Row] = []
        sampled: list[_LogitSpan] = []
        for span in spans:
            try:
                rows += span.rows()
                sampled.append(span)
            except UsageError as error:
                updates += self._fail(span.candidate, error)
        if not rows:
            return updates
        used = [span.first + number for span in sampled for number in range(span.count)]
        if used != list(range(len(logits))):
            logits = logits[torch.tensor(used, device=logits.device)]
        choice = self._sampler.choose(logits, rows)
        begin = 0
        for span in sampled:
            chosen = range(begin, begin := begin + span.count)
            if span.candidate.finish_reason is not None:
                continue  # another text of its request has failed
            if not all(choice.usable[row] for row in chosen):
                updates += self._fail(span.candidate, _not_finite(span.candidate))
                continue
            written = len(span.candidate.token_ids)
            updates.append(Update.of(span.candidate, self._accept(span, choice, chosen), written))
            self._settle(span)
        return updates

    def _accept(self, span: _LogitSpan, choice: Choice, rows: range) -> str:
        """Adds the sampled tokens up to the first that differs from its guess; returns the text to show."""
        candidate, drafts = span.candidate, span.candidate.drafts
        candidate.drafts = []
        shown = ""
        for number, row in enumerate(rows):
            token_id = choice.token_ids[row]
            candidate.near_ties += choice.near_ties[row] and not candidate.request.config.batch_invariant
            shown += candidate.accept(token_id, choice.logprobs[row], choice.likeliest(row, candidate.request.config))
            if candidate.finish_reason is not None or token_id != next(iter(drafts[number : number + 1]), None):
                break
        return shown

    def _settle(self, span: _LogitSpan) -> None:
        """Records which tokens of a text are stored, or frees the blocks of a text that ended or must slide."""
        candidate, manager = span.candidate, self.scheduler.manager
        if candidate.finish_reason is not None or len(candidate.context) > candidate.request.max_seq_len:
            manager.close(span.table)
            candidate.table = None
            if candidate.finish_reason is None:
                candidate.slide()
        else:
            stored = min(span.end, len(candidate.context) - 1)
            if stored != span.table.num_tokens:
                manager.advance(span.table, candidate.context, stored)
        if candidate.finish_reason is not None and self._drafter is not None:
            self._drafter.forget(candidate)
        if not candidate.request.writing:
            self.scheduler.remove(candidate.request)

    def _fail(self, candidate: Candidate, error: SheepOpError) -> list[Update]:
        """Ends the request of a text that cannot be continued, with `error`."""
        return [replace(update, error=error) for update in self.abort(candidate.request)]

    def _extend(self, request: Request, logits: Tensor) -> list[Update]:
        """Extends the branches of a beam search by one token."""
        beam, manager = request.beam, self.scheduler.manager
        assert beam is not None
        if not self._sampler.are_usable(logits).all():
            return self._fail(request.candidates[0], _not_finite(request.candidates[0]))
        before, prompt = request.branches, request.candidates[0].context
        parents = beam.extend(self._sampler.log_probabilities(logits))
        request.branches = []
        for parent, hypothesis in zip(parents, beam.live, strict=True):
            table = before[parent].table
            assert table is not None
            context = [*prompt, *hypothesis.token_ids]
            request.branches.append(Branch(context, request.salt, manager.fork(table), adapter=request.adapter))
        for branch in before:
            assert branch.table is not None
            manager.close(branch.table)
        if request.branches:
            return []
        self.scheduler.remove(request)
        return self._end_beam(request)

    def _end_beam(self, request: Request) -> list[Update]:
        """Ends a beam search with the best text that it has found."""
        assert request.beam is not None
        best, candidate = request.beam.best(), request.candidates[0]
        text = "".join(map(candidate.accept, best.token_ids, best.logprobs))
        return [Update.of(candidate, text if candidate.finish_reason else text + candidate.finish("abort"))]


class TextStream:
    """Iterates over the pieces of a text as it is generated; then `completion` has the result."""

    def __init__(self, request: Request, updates: Iterator[Update]) -> None:
        self._request, self._updates = request, updates

    def __iter__(self) -> Iterator[str]:
        return (update.text for update in self._updates if update.text)

    @property
    def completion(self) -> Completion:
        """The completion; raises `UsageError` before the text has ended."""
        if self._request.writing:
            raise UsageError("The text is still being written: read the stream to its end first.")
        return self._request.completions()[0]


def _not_finite(candidate: Candidate) -> CheckpointError:
    return CheckpointError(
        f"The network's logits for the token at position {candidate.position} of prompt {candidate.request.index} and "
        "its text are not finite (NaN or infinity), so the model is not usable: its weights are damaged or its "
        "training diverged. Use an earlier checkpoint."
    )


@dataclass(slots=True)
class _LogitSpan:
    """The `count` rows of the logits from `first` on that continue a text whose first `end` tokens were read."""

    candidate: Candidate
    end: int
    first: int
    count: int

    @property
    def table(self) -> BlockTable:
        """The blocks of the text."""
        assert self.candidate.table is not None
        return self.candidate.table

    def rows(self) -> Iterator[Row]:
        """The sampler's rows: the text, and the text followed by each of its guesses that was read."""
        candidate = self.candidate
        guesses = candidate.drafts[: self.count - 1]
        allowed: list[Tensor | None] = [None] * self.count
        if candidate.matcher is not None:
            # Tokens after a guess that is not allowed are dropped, so any mask will do for them.
            found = candidate.matcher.allowed_after(guesses)
            allowed = [*found, *[found[-1]] * (self.count - len(found))]
        for number in range(self.count):
            yield candidate.row(guesses[:number], allowed[number])
