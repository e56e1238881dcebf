"""The page's endpoints for runs (metrics while they train, samples, traces, data, reports) and for votes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

from sheepop.core.errors import DataError, SheepOpError
from sheepop.interpret.store import StoredTrace
from sheepop.report.glossary import GLOSSARY
from sheepop.serve.protocol import ApiError
from sheepop.serve.same_site import HEADERS, floats, json_answer, same_site
from sheepop.serve.votes import Vote, VotesFile
from sheepop.serve.worker import SideWork

T = TypeVar("T")
# A report has its own scripts, so it is sandboxed: it can reach neither the server nor the page.
_REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'; sandbox allow-scripts"
)


class Runs(Protocol):
    """The runs that the page shows, by name; methods raise `SheepOpError` for an unknown name or missing data."""

    def names(self) -> list[str]:
        """The names of all runs."""

    def summary(self, name: str) -> dict[str, Any]:
        """State, size, steps and scores of a run."""

    def metrics(self, name: str, offset: int) -> dict[str, Any]:
        """The rows after the first `offset` bytes of the metrics, up to the size of one answer, and the next offset."""

    def samples(self, name: str) -> list[dict[str, Any]]:
        """The texts that the model generated during training."""

    def prompt(self, name: str) -> str:
        """The beginning of the text that was held out of a run's training."""

    def differences(self) -> dict[str, Any]:
        """The settings in which the runs differ, and caveats for comparing their scores."""

    def traces(self, name: str) -> list[int]:
        """The steps at which a prompt was traced."""

    def trace(self, name: str, step: int) -> StoredTrace:
        """The trace of a step."""

    def journeys(self, name: str) -> dict[str, Any]:
        """The steps at which the network can be drawn, and where their numbers come from."""

    def journey(self, name: str, step: int, channels: str = "") -> dict[str, Any]:
        """The picture of the network at a step."""

    def origins(self, name: str, step: int) -> list[dict[str, Any]]:
        """The texts that a step reads, and the documents that they come from."""

    def advice(self, name: str) -> dict[str, Any]:
        """What the analysis of a run measured, and its advice."""

    def corpus(self, name: str) -> dict[str, Any]:
        """The report of a run's corpus, in numbers."""

    def lost(self, name: str, start: int = 0, search: str = "") -> dict[str, Any]:
        """Some of what the corpus left out and removed, from the number `start` of what has `search` in it."""

    def report(self, name: str, kind: str) -> bytes:
        """The HTML page of the run: its report, its plan, or the report of its corpus."""


class RunsPage:
    """The page's endpoints for runs and votes; worker threads read the runs, so that they block no other request."""

    def __init__(self, runs: Runs, votes: VotesFile) -> None:
        self._runs, self._votes = runs, votes
        self._work = SideWork("runs", threads=2, most=64)

    def routes(self) -> APIRouter:
        """The endpoints for runs and votes."""
        router = APIRouter(prefix="/ui", dependencies=[Depends(same_site)])
        runs, show = self._runs, self._shown
        reading: dict[str, Callable[..., Any]] = {
            "/runs": show(runs.names), "/glossary": self.glossary, "/differences": show(runs.differences),
            "/votes": self.votes, "/runs/{name}": show(runs.summary), "/runs/{name}/metrics": self.metrics,
            "/runs/{name}/samples": show(runs.samples), "/runs/{name}/prompt": show(runs.prompt),
            "/runs/{name}/steps/{step}": show(runs.origins), "/runs/{name}/advice": show(runs.advice),
            "/runs/{name}/corpus": show(runs.corpus), "/runs/{name}/lost": show(runs.lost),
            "/runs/{name}/traces": show(runs.traces), "/runs/{name}/traces/{step}": self.trace,
            "/runs/{name}/traces/{step}/tensor": self.tensor, "/runs/{name}/journeys": show(runs.journeys),
            "/runs/{name}/journeys/{step}": show(runs.journey), "/runs/{name}/pages/{kind}": self.report,
        }  # fmt: skip
        for path, endpoint in reading.items():
            router.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        router.add_api_route("/votes", self.vote, methods=["POST"], response_model=None)
        return router

    async def glossary(self) -> JSONResponse:
        """The definitions of the terms on the page."""
        return json_answer(GLOSSARY)

    async def metrics(self, name: str, offset: int = 0) -> JSONResponse:
        """The rows of the metrics after byte `offset`."""
        return await self._answer(lambda: self._runs.metrics(name, max(0, offset)))

    async def trace(self, name: str, step: int) -> JSONResponse:
        """A trace without its tensors."""

        def read() -> dict[str, Any]:
            found = self._runs.trace(name, step)
            return {**found.manifest, "tensors": {each: found.shape(each) for each in found.names}}

        return await self._answer(read)

    async def tensor(self, step: int, name: str, tensor: str, head: int | None = None) -> Response:
        """A tensor of a trace, or one head of it, as float32."""

        def read() -> Response:
            found = self._runs.trace(name, step)
            try:
                return floats(found.read(tensor) if head is None else found.read(tensor, head))
            except (KeyError, IndexError):
                raise DataError(f"The trace has no tensor {tensor!r}, or no head {head} of it.") from None

        return await self._do(read)

    async def report(self, name: str, kind: str) -> Response:
        """The report of the run, its plan, or the report of its corpus."""
        content = await self._do(lambda: self._runs.report(name, kind))
        return Response(content, media_type="text/html", headers={**HEADERS, "Content-Security-Policy": _REPORT_POLICY})

    async def votes(self) -> JSONResponse:
        """The path of the votes file."""
        return json_answer(str(self._votes.path))

    async def vote(self, vote: Vote) -> JSONResponse:
        """Appends a vote to the file and flushes it to disk before answering."""
        await self._do(lambda: self._votes.append(vote.row()), status=500)
        return json_answer(str(self._votes.path))

    def _shown(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """The endpoint, with the parameters of `read`, that answers with what it returns."""

        @wraps(read)
        async def answer(**given: Any) -> JSONResponse:
            return await self._answer(lambda: read(**given))

        return answer

    async def _answer(self, read: Callable[[], Mapping[str, Any] | Sequence[Any] | str]) -> JSONResponse:
        return json_answer(await self._do(read))

    async def _do(self, work: Callable[[], T], *, status: int = 404) -> T:
        """Runs `work` in a worker thread; turns its errors into `ApiError` for the page."""
        try:
            return await self._work.do(work)
        except SheepOpError as error:
            raise ApiError(status, str(error), code="not_found" if status == 404 else "not_kept") from None

    def close(self) -> None:
        """Stops the worker threads."""
        self._work.close()
