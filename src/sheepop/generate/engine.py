"""The engine: requests in, tokens out. A step schedules tokens, runs the network on them, and samples the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from sheepop.adapt.row_adapters import Adapter
from sheepop.core.errors import SheepOpError, UsageError
from sheepop.generate.blocks import BlockManager
from sheepop.generate.config import CacheDtype
from sheepop.generate.paged_cache import block_manager
from sheepop.generate.recall import contexts, corrected, numbers_written
from sheepop.generate.request import Candidate, Request
from sheepop.generate.runner import PagedRunner, paged_runner
from sheepop.generate.sampler import Choice, Row, Sampled, Sampler
from sheepop.generate.scheduler import Scheduler, Share
from sheepop.generate.speculation import Drafter, LookupDrafter, ModelDrafter
from sheepop.generate.transfers import synchronize, upload
from sheepop.generate.updates import NotFiniteError, Update
from sheepop.model import Transformer
from sheepop.model.corpus_memory import CorpusMemory

BLOCK_SIZE = 16


def tokens_per_step(device: torch.device) -> int:
    """The number of tokens in a pass that keeps the processor busy; each costs memory for its activations."""
    return 8192 if device.type == "cuda" else 512


class Engine:
    """Generates the texts of any number of requests at a time, in the order that `Scheduler` decides.

    A `drafter` guesses tokens, which changes no text. With `steps_ahead` = 1 a step starts before the results of the
    last one are read, so that a GPU never waits for the host; that changes no text either. A text that ends may then
    have been read once too often: what was sampled there is dropped.
    """

    def __init__(
        self,
        runner: PagedRunner,
        sampler: Sampler,
        scheduler: Scheduler[Request],
        drafter: Drafter | None,
        steps_ahead: int,
        memory: CorpusMemory | None,
    ) -> None:
        self._runner, self._sampler, self.scheduler, self._drafter = runner, sampler, scheduler, drafter
        self._steps_ahead, self._memory = steps_ahead, memory
        self._started: deque[_Step] = deque()  # whose results were not read yet

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
        cache_dtype: CacheDtype = "auto",
        batch_invariant: bool = False,
        guesses: int = 0,
        draft: tuple[Transformer, Sampler] | None = None,
        steps_ahead: int | None = None,
        memory: CorpusMemory | None = None,
    ) -> Engine:
        """Builds an engine whose cache has `num_blocks` blocks of `block_size` tokens.

        It guesses `guesses` tokens ahead, with the smaller model in `draft` or by lookup. `max_tokens` per step, by
        default those of `tokens_per_step`, is raised to the minimum that `max_sequences` texts need. `steps_ahead` is 1
        on a GPU, by default, and 0 elsewhere. A `memory` corrects the logits of requests that use it.
        """
        max_tokens = max(max_tokens or tokens_per_step(model.device), max_sequences * (1 + guesses))

        def prepared(network: Transformer) -> tuple[BlockManager, PagedRunner]:
            manager = block_manager(network, num_blocks, block_size, max_sequences=max_sequences, lookahead=guesses)
            return manager, paged_runner(
                network, manager, lookahead=guesses, cache_dtype=cache_dtype, batch_invariant=batch_invariant
            )

        manager, runner = prepared(model)
        drafter: Drafter | None = LookupDrafter(guesses) if guesses else None
        if guesses and draft is not None:
            blocks, small = prepared(draft[0])
            drafter = ModelDrafter(small, draft[1], blocks, guesses)
        scheduler = Scheduler[Request](
            manager, max_tokens=max_tokens, max_sequences=max_sequences, max_waiting=max_waiting
        )
        if steps_ahead is None:
            steps_ahead = int(model.device.type == "cuda")
        return cls(runner, sampler, scheduler, drafter, steps_ahead, memory)

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting."""
        return not (self.scheduler.running or self.scheduler.waiting)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Prepares passes of as many texts as may run, which may take seconds, so that no request waits for that."""
        self._runner.prepare(self.scheduler.max_sequences)

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
        unfinished = (*self.scheduler.running, *self.scheduler.waiting)
        return [update for request in unfinished for update in self.abort(request)]

    def recover(self) -> list[Request]:
        """Makes the engine ready again after a step that failed, in which the state of requests and cache was lost.

        Only requests of which nothing was read are kept, and returned; none if no other was there to be at fault. The
        others are dropped, and nothing is found in the cache. Raises an error if the device has failed.
        """
        synchronize(self._sampler.forbidden.device)
        self._started.clear()
        kept = [request for request in self.scheduler.waiting if request.is_new]
        if not self.scheduler.running and len(kept) == len(self.scheduler.waiting):
            kept = []
        self.scheduler.reset(kept)
        if self._drafter is not None:
            self._drafter.reset()
        return kept

    def step(self) -> list[Update]:
        """Starts a step, and returns the updates of the steps whose results are due.

        A step reads the scheduled tokens and samples one for every text that was read to its end. The results of the
        newest `steps_ahead` steps are not waited for: the next step reads their tokens on the device.
        """
        self._guess()
        shares = self.scheduler.schedule()
        updates, num_ahead = self._start(shares) if shares else [], self._num_ahead(shares)
        while len(self._started) > num_ahead:
            updates += self._finish(self._started.popleft())
        return updates

    def _num_ahead(self, shares: Sequence[Share[Request]]) -> int:
        """Returns how many results are not waited for: none if nothing was started, or if something needs them now."""
        if not shares or self._drafter is not None or self._memory is not None:  # which need the tokens on the host
            return 0
        return self._steps_ahead if all(share.request.can_run_ahead for share in shares) else 0

    def _guess(self) -> None:
        """Drafts tokens for the texts whose only unread token is the newest."""
        if self._drafter is None:
            return
        ready = [
            candidate
            for request in self.scheduler.running
            for candidate in request.writing
            if candidate.table is not None and len(candidate.context) - candidate.table.num_tokens == 1
        ]
        for candidate, drafts in zip(ready, self._drafter.propose(ready), strict=True):
            candidate.drafts = drafts

    def _start(self, shares: Sequence[Share[Request]]) -> list[Update]:
        """Runs the network and the sampler; returns the updates of what needs no sampling, or fails before."""
        latest = self._started[-1].sampled if self._started else None
        for share in shares:
            if share.request.is_new:
                share.request.begin(share.grants)
        sampled = None if latest is None else latest.token_ids
        grants = [grant for share in shares for grant in share.grants]
        logits = self._recalled(self._runner.run(grants, sampled), shares)
        updates: list[Update] = []
        step, used, row = _Step(), list[int](), 0
        advance = self.scheduler.manager.advance
        for share in shares:
            request, first = share.request, row
            for reader, (table, start, count), num_predictions, _ in share.grants:
                advance(table, reader.context, min(start + count, len(reader.context)))
                row += num_predictions
            if row == first:
                continue
            if request.beam is not None:
                updates += self._extend(request, logits[first:row])
                continue
            try:
                self._add(step, used, share, first)
            except UsageError as error:
                updates += self._fail(request, error)
        if step.rows:
            if used != list(range(len(logits))):
                logits = logits[upload(torch.tensor(used), logits.device)]
            step.sampled = self._sampler.sample(logits, step.rows, sampled)
        self._started.append(step)
        return updates

    def _recalled(self, logits: Tensor, shares: Sequence[Share[Request]]) -> Tensor:
        """The logits, corrected by the memory in the rows of requests that use it."""
        if self._memory is None:
            return logits
        pairs = [(grant, share.request.uses_memory) for share in shares for grant in share.grants]
        uses = [is_using for grant, is_using in pairs for _ in range(grant.num_predictions)]
        if not any(uses):
            return logits
        rows, using = upload(torch.tensor(uses), logits.device), [grant for grant, is_using in pairs if is_using]
        before, written = list(contexts(using, self._memory.window)), list(numbers_written(using))
        changed = corrected(self._memory, logits[rows], before, written)
        return logits.to(changed.dtype).masked_scatter(rows[:, None], changed)

    def _add(self, step: _Step, used: list[int], share: Share[Request], first: int) -> None:
        """Adds the request's texts to a step, and their rows of logits, from row `first` on, to those that are `used`.

        New candidates share those of the first.
        """
        request = share.request
        others = request.fork() if len(request.candidates) < request.num_candidates else []
        for reader, chunk, count, _ in share.grants:
            for other in others:
                other.table = self.scheduler.manager.fork(chunk.table)
            places = range(first, first + count)
            for candidate in (cast(Candidate, reader), *others) if count else ():
                rows = _rows(candidate, count)
                begin = len(step.rows)
                step.spans.append((candidate, chunk.table.num_tokens, begin, begin + count))
                candidate.expect(begin)
                step.rows += rows
                used += places
            first += count

    def _finish(self, step: _Step) -> list[Update]:
        """Adds the sampled tokens to their texts; those of a text that has ended meanwhile are dropped."""
        updates: list[Update] = []
        if step.sampled is None:
            return updates
        choice = step.sampled.choice()
        for candidate, end, begin, stop in step.spans:
            if candidate.finish_reason is not None:
                continue
            candidate.num_expected -= 1
            if not all(choice.usable[begin:stop]):
                updates += self._fail(candidate.request, _not_finite(candidate))
                continue
            written = len(candidate.token_ids)
            updates.append(Update.of(candidate, _accept(candidate, choice, begin, stop), written))
            num_new = len(candidate.token_ids) - written
            if num_new > 1 or candidate.finish_reason is not None or candidate.is_full:
                self._settle(candidate, end, num_new)
        return updates

    def _settle(self, candidate: Candidate, end: int, num_new: int) -> None:
        """Records that the new tokens behind the first `end` are stored, or frees the blocks of a text.

        A text that has ended needs none, and one that slides is read again.
        """
        manager, table, has_ended = self.scheduler.manager, candidate.table, candidate.finish_reason is not None
        if has_ended or candidate.is_full:
            if table is not None:
                # What a later step has stored meanwhile is not shared.
                manager.advance(table, candidate.context, end)
                manager.close(table)
                candidate.table = None
            if not has_ended:
                candidate.slide()
        else:
            assert table is not None
            manager.advance(table, candidate.context, end + num_new - 1)
        if has_ended:
            if self._drafter is not None:
                self._drafter.forget(candidate)
            if not candidate.request.writing:
                self.scheduler.remove(candidate.request)

    def _fail(self, request: Request, error: SheepOpError) -> list[Update]:
        """Ends a request whose texts cannot be continued, with `error`."""
        return [update._replace(error=error) for update in self.abort(request)]

    def _extend(self, request: Request, logits: Tensor) -> list[Update]:
        """Extends the branches of a beam search by one token."""
        beam, manager = request.beam, self.scheduler.manager
        assert beam is not None
        if not self._sampler.are_usable(logits).all():
            return self._fail(request, _not_finite(request.candidates[0]))
        before, prompt = request.branches, request.candidates[0].context
        parents = beam.extend(self._sampler.log_probabilities(logits))
        request.branches = []
        for parent, hypothesis in zip(parents, beam.live, strict=True):
            table = before[parent].table
            assert table is not None
            written = list(hypothesis.token_ids)
            branch = replace(before[parent], context=[*prompt, *written], token_ids=written, table=manager.fork(table))
            request.branches.append(branch)
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


def _not_finite(candidate: Candidate) -> NotFiniteError:
    return NotFiniteError([f"{candidate.request.name} (position {candidate.position} of prompt and text)"])


@dataclass(slots=True)
class _Step:
    """A step whose results have not been read yet.

    `spans` has for each text that it continues: the text, how many of its tokens are stored, and the first and the end
    of its `rows`, for which tokens were `sampled`.
    """

    spans: list[tuple[Candidate, int, int, int]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    sampled: Sampled | None = None


def _accept(candidate: Candidate, choice: Choice, begin: int, end: int) -> str:
    """Adds the tokens of these rows up to the first that differs from its guess; returns the text to show."""
    drafts, candidate.drafts = candidate.drafts, []
    config, shown = candidate.request.config, ""
    for number, row in enumerate(range(begin, end)):
        token_id = choice.token_ids[row]
        candidate.near_ties += choice.near_ties[row] and not config.batch_invariant
        shown += candidate.accept(token_id, choice.logprobs[row], choice.likeliest(row, config))
        if candidate.finish_reason is not None or number >= len(drafts) or token_id != drafts[number]:
            break
    return shown


def _rows(candidate: Candidate, count: int) -> list[Row]:
    """The sampler's rows: the text, and the text followed by each of its guesses that was read, `count` in all."""
    if count == 1 and candidate.matcher is None:
        return [candidate.row()]
    guesses = candidate.drafts[: count - 1]
    allowed: list[Tensor | None] = [None] * count
    if candidate.matcher is not None:
        # Tokens after a guess that is not allowed are dropped, so any mask will do for them.
        found = candidate.matcher.allowed_after(guesses)
        allowed = [*found, *[found[-1]] * (count - len(found))]
    return [candidate.row(guesses[:number], allowed[number]) for number in range(count)]
