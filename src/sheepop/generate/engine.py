"""The engine: requests in, tokens out. A step schedules what is read, runs the network on it, and samples tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from sheepop.core.errors import CheckpointError, SheepOpError, UsageError
from sheepop.generate.beam_search import Branch
from sheepop.generate.blocks import BlockManager, BlockTable
from sheepop.generate.paged_cache import reaches_of
from sheepop.generate.request import Candidate, Request
from sheepop.generate.runner import PagedRunner, RecomputingRunner, Runner
from sheepop.generate.sampler import Choice, Row, Sampler
from sheepop.generate.scheduler import Grant, Scheduler, Share
from sheepop.generate.speculation import Drafter, LookupDrafter, ModelDrafter
from sheepop.generate.split_model import is_led, paged_runner
from sheepop.model import Transformer

BLOCK_SIZE = 16
TOKENS_PER_STEP = 512


@dataclass(frozen=True)
class Update:
    """What a step brought: a piece of one of a request's texts, perhaps its last, or why the request failed."""

    candidate: Candidate
    text: str = ""
    error: SheepOpError | None = None

    @property
    def request(self) -> Request:
        """Whose text it is."""
        return self.candidate.request


class Engine:
    """Continues requests, any number at a time; see `Scheduler` for who comes first.

    A `drafter` guesses tokens, which changes no text. Raises `UsageError` where a step has no room for its guesses.
    """

    def __init__(self, runner: Runner, sampler: Sampler, scheduler: Scheduler, drafter: Drafter | None = None) -> None:
        self._runner, self._sampler, self.scheduler, self._drafter = runner, sampler, scheduler, drafter
        if drafter is not None and scheduler.max_tokens < scheduler.max_sequences * (1 + drafter.count):
            raise UsageError(
                f"max_tokens = {scheduler.max_tokens} has no room for {drafter.count} guesses of each of "
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
        max_tokens: int = TOKENS_PER_STEP,
        block_size: int = BLOCK_SIZE,
        use_cache: bool = True,
        cache_in_int8: bool = False,
        batch_invariant: bool = False,
        guesses: int = 0,
        draft: tuple[Transformer, Sampler] | None = None,
    ) -> Engine:
        """An engine whose cache has `num_blocks` of `block_size` tokens.

        With `guesses` it guesses so many tokens ahead, by the smaller model of `draft` or by lookup. Without a cache it
        runs the network on whole texts. `max_tokens` is raised to what `max_sequences` texts need in a step.
        """
        max_tokens = max(max_tokens, max_sequences * (1 + guesses))

        def prepared(network: Transformer) -> tuple[BlockManager, PagedRunner]:
            reaches = reaches_of(network)
            settings: dict[str, Any] = {
                "num_blocks": [num_blocks] * len(reaches),
                "block_size": block_size,
                "lookahead": guesses,
                "in_int8": cache_in_int8,
                "apart": batch_invariant,
            }
            return BlockManager(settings["num_blocks"], reaches, block_size), paged_runner(network, **settings)

        if not use_cache and is_led(model):
            raise UsageError("A model that is split over several processes is read with a cache. Leave --no-cache out.")
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
        """Whether there is nothing to do."""
        return not (self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> None:
        """Takes a request; raises `UsageError` for one that could never run, or when too many wait."""
        self.scheduler.require_room(request, request.longest)
        self.scheduler.add(request)

    def abort(self, request: Request) -> list[Update]:
        """Ends a request that is not over; its texts end where they are."""
        self.scheduler.remove(request)
        if request.beam is not None:
            return self._end_beam(request)
        if self._drafter is not None:
            for candidate in request.writing:
                self._drafter.forget(candidate)
        return [Update(candidate, candidate.finish("abort")) for candidate in request.writing]

    def step(self) -> list[Update]:
        """Reads what the scheduler grants, and chooses tokens for every text that was read to its end."""
        self._guess()
        shares = self.scheduler.schedule()
        if not shares:
            return []
        logits = self._runner.run(shares)
        for grant in (grant for share in shares for grant in share.grants):
            self._store(grant, min(grant.chunk.end, len(grant.reader.context)))
        places: list[_Place] = []
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
                places += self._places(request, share, first)
        return updates + self._sample(logits, places)

    def _guess(self) -> None:
        """Has tokens guessed for the texts whose newest token is read next."""
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

    def _store(self, grant: Grant, num_tokens: int) -> None:
        self.scheduler.manager.advance(grant.chunk.table, grant.reader.context, num_tokens)

    def _places(self, request: Request, share: Share, first: int) -> list[_Place]:
        """Where in the logits each of the request's texts is continued; several texts begin in one place."""
        places = []
        for reader, chunk in share.grants:
            candidate = cast(Candidate, reader)
            count = chunk.end - len(candidate.context) + 1
            places.append(_Place(candidate, chunk.end, first, count))
            first += count
        if len(request.candidates) < request.num_candidates:
            for twin in request.fork():
                twin.table = self.scheduler.manager.fork(places[0].table)
                places.append(replace(places[0], candidate=twin))
        return places

    def _sample(self, logits: Tensor, places: list[_Place]) -> list[Update]:
        """Chooses a token behind each text and each of its guesses; those behind a wrong guess are not used."""
        updates: list[Update] = []
        rows: list[Row] = []
        sampled: list[_Place] = []
        for place in places:
            try:
                rows += place.rows()
                sampled.append(place)
            except UsageError as error:
                updates += self._fail(place.candidate, error)
        if not rows:
            return updates
        where = [place.first + number for place in sampled for number in range(place.count)]
        if where != list(range(len(logits))):
            logits = logits[torch.tensor(where, device=logits.device)]
        choice = self._sampler.choose(logits, rows)
        begin = 0
        for place in sampled:
            chosen = range(begin, begin := begin + place.count)
            if place.candidate.finish_reason is not None:
                continue  # its request failed at another of its texts
            if not all(choice.usable[row] for row in chosen):
                updates += self._fail(place.candidate, _not_finite(place.candidate))
                continue
            updates.append(Update(place.candidate, self._accept(place, choice, chosen)))
            self._settle(place)
        return updates

    def _accept(self, place: _Place, choice: Choice, rows: range) -> str:
        """Adds tokens up to the first that was guessed wrong; the text to show."""
        candidate, drafts = place.candidate, place.candidate.drafts
        candidate.drafts = []
        shown = ""
        for number, row in enumerate(rows):
            token_id = choice.token_ids[row]
            candidate.near_ties += choice.near_ties[row] and not candidate.request.config.batch_invariant
            shown += candidate.accept(token_id, choice.logprobs[row], choice.likeliest(row, candidate.request.config))
            if candidate.finish_reason is not None or token_id != next(iter(drafts[number : number + 1]), None):
                break
        return shown

    def _settle(self, place: _Place) -> None:
        """Keeps what was stored of a text, or gives back the blocks of one that ended."""
        candidate, manager = place.candidate, self.scheduler.manager
        if candidate.finish_reason is not None or candidate.context_overflows:
            manager.close(place.table)
            candidate.table = None
            if candidate.finish_reason is None:
                candidate.slide()
        else:
            manager.advance(place.table, candidate.context, min(place.end, len(candidate.context) - 1))
        if candidate.finish_reason is not None and self._drafter is not None:
            self._drafter.forget(candidate)
        if not candidate.request.writing:
            self.scheduler.remove(candidate.request)

    def _fail(self, candidate: Candidate, error: SheepOpError) -> list[Update]:
        """Ends the request of a text that cannot be continued."""
        return [replace(update, error=error) for update in self.abort(candidate.request)]

    def _extend(self, request: Request, logits: Tensor) -> list[Update]:
        """Grows the branches of a beam search."""
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
        """The best text that the search has found."""
        assert request.beam is not None
        best, candidate = request.beam.best(), request.candidates[0]
        text = "".join(map(candidate.accept, best.token_ids, best.logprobs))
        return [Update(candidate, text if candidate.finish_reason else text + candidate.finish("abort"))]


def _not_finite(candidate: Candidate) -> CheckpointError:
    return CheckpointError(
        f"The network's logits for the token at position {candidate.position} of prompt {candidate.request.index} and "
        "its text are not finite (NaN or infinity), so the model is not usable: its weights are damaged or its "
        "training diverged. Use an earlier checkpoint."
    )


@dataclass(frozen=True)
class _Place:
    """A text that is continued: its tokens up to `end` were read, and `count` logits from row `first` on follow it."""

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
        """The text, and the text with each of its guesses that were read."""
        candidate = self.candidate
        request, guesses = candidate.request, candidate.drafts[: self.count - 1]
        allowed: list[Tensor | None] = [None] * self.count
        if candidate.matcher is not None:
            # Behind a guess that is not allowed nothing is used, so anything may stand there.
            found = candidate.matcher.allowed_behind(guesses)
            allowed = [*found, *[found[-1]] * (self.count - len(found))]
        for number in range(self.count):
            written = [*candidate.token_ids, *guesses[:number]]
            yield Row(request.config, request.prompt.token_ids, written, candidate.seed, allowed[number])
