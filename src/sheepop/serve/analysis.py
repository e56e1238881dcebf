"""The page's endpoint for analyses of models as control systems, for users of this machine only."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse
from pydantic import Field

from sheepop.core.errors import SheepOpError, UsageError
from sheepop.core.files import finite
from sheepop.generate import GenerationConfig
from sheepop.interpret.control.analyses import Analyses
from sheepop.serve.answers import DONE, event
from sheepop.serve.protocol import ApiError, RequestModel
from sheepop.serve.registry import Registry
from sheepop.serve.same_site import HEADERS, same_site
from sheepop.serve.served_model import ServedModel
from sheepop.serve.worker import SideWork

_LOG = logging.getLogger("sheepop.server")
# The most tokens of a prompt, since the cost of influences grows with the square, and the most open analyses.
MOST_TOKENS, _MOST_OPEN = 128, 3


class _LeftError(Exception):
    """The reader has left, so the analysis ends."""


class AnalysisRequest(RequestModel):
    """An analysis of a model at a prompt: a text, or token ids. `other` is the second model of a comparison.

    `layer` is the block that diagrams show from inside; `temperature` and `length` are those of a written text.
    """

    analysis: Literal["gains", "influence", "writing", "decode", "blocks", "compare"]
    model: str
    prompt: str | list[int]
    other: str | None = None
    layer: int = Field(default=0, ge=0)
    temperature: float = Field(default=0.8, ge=0, le=10)
    length: int = Field(default=32, ge=2, le=256)
    seed: int = Field(default=0, ge=0)


class Analysis:
    """Analyses of the models of a registry, one at a time in a thread of its own.

    The numbers are those of `lm.analyze`. A model stays open until its analysis has ended, also if the reader leaves:
    then it ends at the next pass or product.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._closing = threading.Event()
        self._tasks: set[asyncio.Task[str | None]] = set()
        self._work = SideWork("analyses", threads=1, most=_MOST_OPEN)

    def routes(self) -> APIRouter:
        """The endpoint."""
        router = APIRouter(prefix="/ui", dependencies=[Depends(same_site)])
        router.add_api_route("/analyses", self.analyse, methods=["POST"], response_model=None)
        return router

    async def analyse(self, requested: AnalysisRequest) -> StreamingResponse:
        """Streams the results of an analysis as events: one, or one for each written token."""
        names = [requested.model, *([requested.other or requested.model] if requested.analysis == "compare" else [])]
        return StreamingResponse(self._events(requested, names), media_type="text/event-stream", headers=HEADERS)

    async def _events(self, requested: AnalysisRequest, names: Sequence[str]) -> AsyncIterator[str]:
        loop, found = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()
        has_left = threading.Event()

        def proceed() -> None:
            if has_left.is_set() or self._closing.is_set():
                raise _LeftError

        def work(models: Sequence[ServedModel]) -> None:
            proceed()
            analyses = [Analyses(each.generator.model, each.tokenizer, proceed=proceed) for each in models]
            for result in _results(requested, analyses):
                loop.call_soon_threadsafe(found.put_nowait, result)

        task = asyncio.ensure_future(self._done(names, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: found.put_nowait(None))
        try:
            while (result := await found.get()) is not None:
                yield event({"result": finite(result)})  # a result may have a field named error
            if (words := task.result()) is not None:
                yield event({"error": {"message": words}})
            yield DONE
        finally:
            has_left.set()

    async def _done(self, names: Sequence[str], work: Callable[[Sequence[ServedModel]], None]) -> str | None:
        """Runs `work` with the models open until it has ended; returns in words why it failed, if it did."""
        try:
            async with AsyncExitStack() as opened:
                models = [await opened.enter_async_context(self._registry.using(name)) for name in names]
                await self._work.do(work, models)
        except (SheepOpError, ApiError) as error:
            return error.detail if isinstance(error, ApiError) else str(error)
        except _LeftError:
            pass
        except Exception as error:  # a fault of this program, which the reader should see, too
            _LOG.error("an analysis failed", exc_info=error)
            return f"The analysis failed: {type(error).__name__}: {error}"
        return None

    def close(self) -> None:
        """Ends the running analysis, and stops the thread."""
        self._closing.set()
        self._work.close()


def _results(requested: AnalysisRequest, analyses: Sequence[Analyses]) -> Iterator[dict[str, Any]]:
    first, prompt, seed = analyses[0], requested.prompt, requested.seed
    settings = GenerationConfig(temperature=requested.temperature)
    count = len(prompt if isinstance(prompt, list) else first.tokenizer.encode(prompt))
    if count > MOST_TOKENS:
        raise UsageError(
            f"The prompt has {count} tokens, and this room reads {MOST_TOKENS}. Shorten it, or use "
            f"`sheepop analyze {requested.analysis.replace('writing', 'decode')}`."
        )
    if requested.analysis == "writing":
        for token in first.writing(prompt, settings, length=requested.length, seed=seed):
            yield asdict(token)
    elif requested.analysis == "decode":
        yield first.decode(prompt, settings, length=requested.length, pairs=4, seed=seed).to_dict()
    elif requested.analysis == "compare":
        yield first.compare(analyses[1], prompt, seed=seed).to_dict()
    elif requested.analysis == "blocks":
        yield first.blocks(prompt, layer=requested.layer, seed=seed).to_dict()
    else:
        yield getattr(first, requested.analysis)(prompt, seed=seed).to_dict()
