"""The engine: requests in, tokens out. A step schedules tokens, runs the network on them, and samples the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sheepop.core.errors import CheckpointError, SheepOpError, UsageError
from sheepop.generate.beam_search import Branch
from sheepop.generate.blocks import BlockManager
from sheepop.generate.paged_cache import block_manager
from sheepop.generate.request import Candidate, Completion, FinishReason, Request
from sheepop.generate.runner import PagedRunner, RecomputingRunner, Runner, is_led, paged_runner
from sheepop.generate.sampler import Choice, Likeliest, Row, Sampled, Sampler
from sheepop.generate.scheduler import Scheduler, Share
from sheepop.generate.speculation import Drafter, LookupDrafter, ModelDrafter
from sheepop.generate.transfers import upload
from sheepop.model import Transformer

BLOCK_SIZE = 16


def tokens_per_step(device: torch.device) -> int:
    """The number of tokens in a pass that keeps the processor busy; each costs memory for its activations."""
    return 8192 if device.type == "cuda" else 512


class Update(NamedTuple):
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

    A `drafter` guesses tokens, which changes no text. Neither does it that `steps_ahead` steps, 0 or 1, are started
    before the results of the one before are read, so that a GPU never waits for the host. A text that ends, then, may
    have been read once too often: what was sampled there is dropped. Raises `UsageError` if a step has no room for the
    guesses.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        scheduler: Scheduler,
        drafter: Drafter | None = None,
        *,
        steps_ahead: int = 0,
    ) -> None:
        self._runner, self._sampler, self.scheduler, self._drafter = runner, sampler, scheduler, drafter
        self._steps_ahead = steps_ahead
        self._started: deque[tuple[Sampled | None, list[_Span]]] = deque()  # with results that were not read yet
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
        steps_ahead: int | None = None,
    ) -> Engine:
        """Builds an engine whose cache has `num_blocks` blocks of `block_size` tokens.

        It guesses `guesses` tokens ahead, with the smaller model in `draft` or by lookup. Without `use_cache` it runs
        the network on whole texts. `max_tokens` per step, by default those of `tokens_per_step`, is raised to the
        minimum that `max_sequences` texts need. `steps_ahead` is 1 on a GPU, by default, and 0 elsewhere.
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
        if steps_ahead is None:
            steps_ahead = int(model.device.type == "cuda")
        return cls(runner, sampler, scheduler, drafter, steps_ahead=steps_ahead)

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting."""
        return not (self.scheduler.running or self.scheduler.waiting)

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
        """Starts a step, and returns the updates of the steps whose results are due.

        A step reads the scheduled tokens and samples one for every text that was read to its end. The results of the
        newest `steps_ahead` steps are not waited for: the next step reads their tokens on the device.
        """
        self._guess()
        shares = self.scheduler.schedule()
        updates, num_ahead = self._start(shares) if shares else [], self._num_ahead(shares)
        while len(self._started) > num_ahead:
            updates += self._finish(*self._started.popleft())
        return updates

    def _num_ahead(self, shares: Sequence[Share]) -> int:
        """How many results are not waited for: none if nothing was started, or if something needs them to go on."""
        if not shares or self._drafter is not None:
            return 0
        return self._steps_ahead if all(cast(Request, share.request).can_run_ahead for share in shares) else 0

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

    def _start(self, shares: Sequence[Share]) -> list[Update]:
        """Runs the network and the sampler; returns the updates of what needs no sampling, or fails before."""
        latest = self._started[-1][0] if self._started else None
        for share in shares:
            cast(Request, share.request).begin(share)
        logits = self._runner.run(shares, None if latest is None else latest.token_ids)
        updates: list[Update] = []
        spans: list[_Span] = []
        rows: list[Row] = []
        used: list[int] = []
        for share, (first, last) in zip(shares, self._advance(shares), strict=True):
            request = cast(Request, share.request)
            if first == last:
                continue
            if request.beam is not None:
                updates += self._extend(request, logits[first:last])
                continue
            for candidate, end, places in self._read(request, share, first):
                try:
                    found = _rows(candidate, len(places))
                except UsageError as error:
                    updates += self._fail(candidate, error)
                    break
                spans.append(_Span(candidate, end, range(len(rows), len(rows) + len(places))))
                candidate.expect(len(rows))
                rows += found
                used += places
        sampled = None
        if rows:
            if used != list(range(len(logits))):
                logits = logits[upload(torch.tensor(used), logits.device)]
            sampled = self._sampler.sample(logits, rows)
        self._started.append((sampled, spans))
        return updates

    def _advance(self, shares: Sequence[Share]) -> Iterator[tuple[int, int]]:
        """Records what a pass has stored; yields which of its logits, from one row to another, belong to each share."""
        advance, last = self.scheduler.manager.advance, 0
        for share in shares:
            first = last
            for reader, (table, start, count), num_predictions in share.grants:
                advance(table, reader.context, min(start + count, len(reader.context)))
                last += num_predictions
            yield first, last

    def _read(self, request: Request, share: Share, first: int) -> Iterator[tuple[Candidate, int, range]]:
        """Yields the texts to continue, how many of their tokens are stored, and their logits, from row `first` on.

        New candidates share those of the first.
        """
        others = request.fork() if len(request.candidates) < request.num_candidates else []
        for reader, chunk, num_predictions in share.grants:
            candidate = cast(Candidate, reader)
            end, places = chunk.table.num_tokens, range(first, first + num_predictions)
            first += num_predictions
            for other in others:
                other.table = self.scheduler.manager.fork(chunk.table)
            for each in (candidate, *others):
                yield each, end, places

    def _finish(self, sampled: Sampled | None, spans: Sequence[_Span]) -> list[Update]:
        """Adds the sampled tokens to their texts; those of a text that has ended meanwhile are dropped."""
        updates: list[Update] = []
        choice = None if sampled is None else sampled.choice()
        for span in spans:
            candidate, _, rows = span
            if candidate.finish_reason is not None or choice is None:
                continue
            candidate.num_expected -= 1
            if not all(choice.usable[row] for row in rows):
                updates += self._fail(candidate, _not_finite(candidate))
                continue
            written = len(candidate.token_ids)
            updates.append(Update.of(candidate, self._accept(span, choice), written))
            self._settle(span, len(candidate.token_ids) - written)
        return updates

    def _accept(self, span: _Span, choice: Choice) -> str:
        """Adds the sampled tokens up to the first that differs from its guess; returns the text to show."""
        candidate, drafts = span.candidate, span.candidate.drafts
        candidate.drafts = []
        config = candidate.request.config
        shown = ""
        for number, row in enumerate(span.rows):
            token_id = choice.token_ids[row]
            candidate.near_ties += choice.near_ties[row] and not config.batch_invariant
            shown += candidate.accept(token_id, choice.logprobs[row], choice.likeliest(row, config))
            if candidate.finish_reason is not None or number >= len(drafts) or token_id != drafts[number]:
                break
        return shown

    def _settle(self, span: _Span, num_new: int) -> None:
        """Records which tokens of a text are stored, or frees the blocks of a text that ended or must slide."""
        candidate, manager = span.candidate, self.scheduler.manager
        table, has_ended = candidate.table, candidate.finish_reason is not None
        if has_ended or len(candidate.context) > candidate.request.max_seq_len:
            if table is not None:
                # What a later step has stored meanwhile is not shared.
                manager.advance(table, candidate.context, span.end)
                manager.close(table)
                candidate.table = None
            if not has_ended:
                candidate.slide()
        elif num_new > 1:
            assert table is not None
            manager.advance(table, candidate.context, span.end + num_new - 1)
        if has_ended:
            if self._drafter is not None:
                self._drafter.forget(candidate)
            if not candidate.request.writing:
                self.scheduler.remove(candidate.request)

    def _fail(self, candidate: Candidate, error: SheepOpError) -> list[Update]:
        """Ends the request of a text that cannot be continued, with `error`."""
        return [update._replace(error=error) for update in self.abort(candidate.request)]

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
            request.branches.append(Branch([*prompt, *hypothesis.token_ids], request.salt, manager.fork(table)))
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


class _Span(NamedTuple):
    """The `rows` of a step's sampled tokens that continue a text, of which `end` tokens were stored before."""

    candidate: Candidate
    end: int
    rows: range


def _rows(candidate: Candidate, count: int) -> list[Row]:
    """The sampler's rows: the text, and the text followed by each of its guesses that was read, `count` in all."""
    guesses = candidate.drafts[: count - 1]
    allowed: list[Tensor | None] = [None] * count
    if candidate.matcher is not None:
        # Tokens after a guess that is not allowed are dropped, so any mask will do for them.
        found = candidate.matcher.allowed_after(guesses)
        allowed = [*found, *[found[-1]] * (count - len(found))]
    return [candidate.row(guesses[:number], allowed[number]) for number in range(count)]
