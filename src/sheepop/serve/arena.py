"""The arena: two models, drawn at random, answer one prompt, and the reader votes before their names are shown."""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field

from sheepop.checkpoint.model_cache import CachedModel, cached_models
from sheepop.checkpoint.source_directory import CONFIG
from sheepop.core.errors import DataError, SheepOpError
from sheepop.evaluate.ranking import rank, read_votes
from sheepop.generate import GenerationConfig
from sheepop.serve.answers import DONE, Answer, event
from sheepop.serve.protocol import ApiError, RequestModel
from sheepop.serve.registry import Registry
from sheepop.serve.same_site import HEADERS, json_answer, same_site
from sheepop.serve.stock import Source
from sheepop.serve.votes import Message, Vote, VotesFile
from sheepop.serve.worker import SideWork

Choice = Literal["left", "right", "tie", "neither"]
T = TypeVar("T", bound=Hashable)
_TEMPERATURE, _TOP_P, _MOST_TOKENS = 0.8, 0.95, 256
# The number of rounds that are kept, the newest ones.
_KEPT = 256
_LONGEST_PROMPT = 2**16


class BeginRequest(RequestModel):
    """The prompt that two models answer; null draws one of the arena's prompts."""

    prompt: Annotated[str, Field(max_length=_LONGEST_PROMPT)] | None = None


class LoadRequest(RequestModel):
    """The name of a model in the cache."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]


class VoteRequest(RequestModel):
    """A vote for the left or the right answer, for a tie, or for neither."""

    vote: Choice


class Side:
    """One answer of a round, which is generated whether or not anybody reads it."""

    def __init__(self, model: str) -> None:
        self.model, self.text = model, ""
        self.is_over = self.is_cut = False
        self.problem: str | None = "it was interrupted."
        self._changed = asyncio.Event()

    def add(self, text: str = "") -> None:
        """Appends a piece, and wakes all readers."""
        self.text += text
        self._changed.set()
        self._changed = asyncio.Event()

    async def pieces(self) -> AsyncIterator[str]:
        """Yields the text from its beginning to its end, as it is generated."""
        sent = 0
        while True:
            changed = self._changed
            if sent < len(self.text):
                piece, sent = self.text[sent:], len(self.text)
                yield piece
            elif self.is_over:
                return
            else:
                await changed.wait()


class Round:
    """A prompt, its two answers, and the vote on them once it is saved."""

    def __init__(self, prompt: str, models: tuple[str, str], *, is_chat: bool) -> None:
        self.name, self.prompt, self.is_chat = secrets.token_urlsafe(12), prompt, is_chat
        self.sides = {"left": Side(models[0]), "right": Side(models[1])}
        self.vote: Choice | None = None
        self.voting = asyncio.Lock()
        self.work: list[asyncio.Task[None]] = []

    @property
    def models(self) -> list[str]:
        """The names of the two models, the left one first."""
        return [side.model for side in self.sides.values()]

    def shown(self) -> dict[str, Any]:
        """The round as the page gets it; the models' names are included only after the vote."""
        found = {"round": self.name, "prompt": self.prompt, "vote": self.vote}
        return found if self.vote is None else {**found, "models": self.models}

    def row(self, vote: Choice) -> dict[str, Any]:
        """The line of the round in the votes file: a preference, or both answers if no preference can be learned."""
        texts = [side.text for side in self.sides.values()]
        about = {"vote": vote, "models": self.models, "round": self.name}
        prompt = [Message(role="user", content=self.prompt)] if self.is_chat else self.prompt
        if vote in ("tie", "neither") or texts[0] == texts[1] or not all(map(str.strip, texts)):
            shown = prompt if isinstance(prompt, str) else [message.model_dump() for message in prompt]
            return {"prompt": shown, "answers": texts, **about}
        (chosen, chosen_model), (rejected, rejected_model) = zip(texts, self.models, strict=True)
        if vote == "right":
            chosen, rejected, chosen_model, rejected_model = rejected, chosen, rejected_model, chosen_model
        preference = Vote(
            prompt=prompt, chosen=chosen, rejected=rejected, chosen_model=chosen_model, rejected_model=rejected_model
        )
        return {**preference.row(), **about}


class Lots:
    """Draws at random, but evenly: each draw of a choice halves its weight.

    So all choices are drawn about equally often, but nobody can predict the next one.
    """

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def draw(self, choices: Sequence[T]) -> T:
        """Draws one of `choices`."""
        least = min(self._counts[choice] for choice in choices)
        weights = [2.0 ** (least - self._counts[choice]) for choice in choices]
        (drawn,) = secrets.SystemRandom().choices(choices, weights)
        self._counts[drawn] += 1
        return drawn


class Arena:
    """Rounds between the models of `registry`, on `prompts` or the voters' own; votes go to a file."""

    def __init__(self, registry: Registry, votes: VotesFile, prompts: Sequence[str], seconds: float) -> None:
        self._registry, self._votes, self._prompts, self._seconds = registry, votes, tuple(prompts), seconds
        self._rounds: OrderedDict[str, Round] = OrderedDict()
        self._lots = Lots()
        self._work = SideWork("arena", threads=2, most=64)

    def routes(self) -> APIRouter:
        """The endpoints of the arena."""
        router = APIRouter(prefix="/ui/arena", dependencies=[Depends(same_site)])
        endpoints: dict[str, tuple[str, Callable[..., Any]]] = {
            "": ("GET", self.show), "/standings": ("GET", self.standings), "/rounds": ("POST", self.begin),
            "/models": ("POST", self.load),
            "/rounds/{name}": ("GET", self.show_round), "/rounds/{name}/vote": ("POST", self.vote),
            "/rounds/{name}/{side}": ("POST", self.answer),
        }  # fmt: skip
        for path, (method, endpoint) in endpoints.items():
            router.add_api_route(path, endpoint, methods=[method], response_model=None)
        return router

    async def show(self) -> JSONResponse:
        """The numbers of models and prompts, whether prompts are sent as chats, and the path of the votes file.

        An arena without two models also names those that it can load, and the command that begins it with another one.
        """
        cards = [card for card in self._registry.cards() if card.name == card.root]
        about = {"prompts": len(self._prompts), "chats": self._is_chat(), "votes": str(self._votes.path)}
        found = {"models": len(cards), **about}
        if len(cards) < 2:
            places = [shlex.quote(str(card.path)) for card in cards]
            found["command"] = " ".join(["sheepop eval arena", *places, *["MODEL"] * (2 - len(cards))])
            found["loadable"] = sorted(await self._work.do(self._loadable))
        return json_answer(found)

    def _loadable(self) -> dict[str, CachedModel]:
        served = {card.path.resolve() for card in self._registry.cards()}
        whole = [model for model in cached_models() if model.is_finished and model.has_weights]
        # Clients of other machines see the name of a model, and need not see where a file of another program lies.
        return {
            Path(model.name).name if Path(model.name).is_absolute() else model.name: model
            for model in whole
            if (model.directory / CONFIG).is_file() and model.directory.resolve() not in served
        }

    async def load(self, requested: LoadRequest) -> Response:
        """Loads a model of the cache beside the others, within the memory budget of the server."""
        found = (await self._work.do(self._loadable)).get(requested.name)
        if found is None:
            message = f"The cache has no model {requested.name!r} that could be loaded: see sheepop models."
            raise ApiError(404, message, param="name", code="model_not_found")
        await self._registry.add(requested.name, Source(found.use()))
        return await self.show()

    async def begin(self, requested: BeginRequest) -> JSONResponse:
        """Starts a new round and the generation of its answers."""
        names = [card.name for card in self._registry.cards() if card.name == card.root]
        if len(names) < 2:
            raise ApiError(409, f"An arena needs two models, but this server has {', '.join(names) or 'none yet'}.")
        if requested.prompt is None and not self._prompts:
            raise ApiError(400, "prompt: is missing, and this arena has no prompts to draw from.", param="prompt")
        prompt = self._lots.draw(self._prompts) if requested.prompt is None else requested.prompt
        if not prompt.strip():
            raise ApiError(400, "prompt: is empty.", param="prompt")
        begun = Round(prompt, self._lots.draw(list(permutations(names, 2))), is_chat=self._is_chat())
        begun.work = [asyncio.create_task(self._write(begun, side)) for side in begun.sides.values()]
        self._rounds[begun.name] = begun
        while len(self._rounds) > _KEPT:
            _, oldest = self._rounds.popitem(last=False)
            _end(oldest)
        return json_answer(begun.shown())

    async def show_round(self, name: str) -> JSONResponse:
        """Shows a round again, for a page that was reloaded."""
        return json_answer(self._round(name).shown())

    async def answer(self, name: str, side: Literal["left", "right"]) -> Response:
        """Streams one answer of a round from its beginning, as events."""
        found = self._round(name).sides[side]

        async def events() -> AsyncIterator[str]:
            async for piece in found.pieces():
                yield event({"text": piece})
            if found.problem is not None:
                # The name cannot influence a vote any more: a failed round has none.
                yield event({"error": {"message": f"{found.model} did not answer: {found.problem}"}})
            else:
                yield event({"text": "", "is_cut": found.is_cut})
            yield DONE

        return StreamingResponse(events(), media_type="text/event-stream", headers=HEADERS)

    async def vote(self, name: str, requested: VoteRequest) -> JSONResponse:
        """Saves the vote on a round, once, and shows the names of its models."""
        found = self._round(name)
        async with found.voting:
            if found.vote is not None:
                raise ApiError(409, "This round is over: its vote is already saved.", code="round_over")
            if any(not side.is_over or side.problem for side in found.sides.values()):
                raise ApiError(409, "You can vote when both answers are complete.", code="round_not_whole")
            try:
                await self._work.do(self._votes.append, found.row(requested.vote))
            except SheepOpError as error:
                raise ApiError(500, str(error), code="not_kept") from None
            found.vote = requested.vote
        return json_answer(found.shown())

    async def standings(self) -> JSONResponse:
        """Ranks the models by the votes in the file; `problem` is the reason if the votes do not suffice."""
        names = [card.name for card in self._registry.cards() if card.name == card.root]

        def read() -> dict[str, Any]:
            try:
                rated = rank(read_votes(self._votes.path)) if self._votes.path.exists() else []
            except DataError as error:
                return {"rated": [], "waiting": names, "problem": str(error)}
            known = {each.name for each in rated}
            waiting = [name for name in names if name not in known]
            return {"rated": [asdict(each) for each in rated], "waiting": waiting, "problem": None}

        return json_answer(await self._work.do(read))

    async def _write(self, of: Round, side: Side) -> None:
        config = GenerationConfig(
            max_new_tokens=_MOST_TOKENS, temperature=_TEMPERATURE, top_p=_TOP_P, seed=secrets.randbits(62)
        )
        try:
            async with self._registry.using(side.model) as model:
                turns = [{"role": "user", "content": of.prompt}]
                prompt = await model.prepare(model.read_chat, turns) if of.is_chat else of.prompt
                requests = await model.requests([prompt], config, priority=0, tenant="")
                async with aclosing(Answer("arena", model, requests).write(self._seconds)) as written:
                    async for updates in written:
                        side.add("".join(update.text for update in updates))
                        side.is_cut = any(update.finish_reason == "length" for update in updates)
            side.problem = None
        except (SheepOpError, ApiError) as error:
            side.problem = error.detail if isinstance(error, ApiError) else str(error)
        finally:
            side.is_over = True
            side.add()

    def _is_chat(self) -> bool:
        """Whether prompts are sent as chats: only if all models have a chat template, so that the form is the same."""
        return all(card.about.chats for card in self._registry.cards())

    def _round(self, name: str) -> Round:
        if name not in self._rounds:
            raise ApiError(404, "This round no longer exists. Start another one.", code="not_found")
        return self._rounds[name]

    def close(self) -> None:
        """Cancels all answers."""
        for each in self._rounds.values():
            _end(each)
        self._work.close()


def _end(of: Round) -> None:
    for task in of.work:
        task.cancel()
