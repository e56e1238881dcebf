"""The page's side of runs: their curves while they train, what they write, their traces, their data; and votes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

from sheepop.core.errors import DataError, SheepOpError
from sheepop.interpret.store import StoredTrace
from sheepop.report.glossary import GLOSSARY
from sheepop.serve.protocol import ApiError
from sheepop.serve.same_site import HEADERS, floats, json_answer, same_site
from sheepop.serve.side_work import SideWork
from sheepop.serve.votes import Vote, VotesFile

T = TypeVar("T")
# A report brings its own scripts; it gets a place of its own, from which it reaches neither the server nor the page.
_REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'; sandbox allow-scripts"
)


class Runs(Protocol):
    """The runs that the page shows, by name; an unknown name, and what a run does not have, raise `SheepOpError`."""

    def names(self) -> list[str]:
        """Of all runs."""

    def summary(self, name: str) -> dict[str, Any]:
        """State, size, steps and scores."""

    def metrics(self, name: str, offset: int) -> dict[str, Any]:
        """The rows behind the first `offset` bytes of the metrics, as many as one answer takes, and the next offset."""

    def samples(self, name: str) -> list[dict[str, Any]]:
        """What the model wrote while it was trained."""

    def differences(self) -> dict[str, Any]:
        """The settings in which the runs differ, and what to know before their scores are compared."""

    def traces(self, name: str) -> list[int]:
        """The steps at which a prompt was traced."""

    def trace(self, name: str, step: int) -> StoredTrace:
        """One of these traces."""

    def origins(self, name: str, step: int) -> list[dict[str, Any]]:
        """The texts that a step reads, and the documents that they come from."""

    def report(self, name: str, kind: str) -> bytes:
        """The page about the run, or about its corpus."""


class RunsPage:
    """Answers what the page asks about runs; reading them holds nobody else up."""

    def __init__(self, runs: Runs, votes: VotesFile) -> None:
        self._runs, self._votes = runs, votes
        self._work = SideWork("runs", threads=2, most=64)

    def routes(self) -> APIRouter:
        """What the page asks for."""
        router = APIRouter(prefix="/ui", dependencies=[Depends(same_site)])
        reading: dict[str, Callable[..., Any]] = {
            "/runs": self.list, "/glossary": self.glossary, "/differences": self.differences, "/votes": self.votes,
            "/runs/{name}": self.summary, "/runs/{name}/metrics": self.metrics, "/runs/{name}/samples": self.samples,
            "/runs/{name}/steps/{step}": self.origins, "/runs/{name}/traces": self.traces,
            "/runs/{name}/traces/{step}": self.trace, "/runs/{name}/traces/{step}/tensor": self.tensor,
            "/runs/{name}/pages/{kind}": self.report,
        }  # fmt: skip
        for path, endpoint in reading.items():
            router.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        router.add_api_route("/votes", self.vote, methods=["POST"], response_model=None)
        return router

    async def list(self) -> JSONResponse:
        """The names of the runs."""
        return json_answer(self._runs.names())

    async def glossary(self) -> JSONResponse:
        """What the words on the page mean."""
        return json_answer(GLOSSARY)

    async def summary(self, name: str) -> JSONResponse:
        """A run at a glance."""
        return await self._answer(lambda: self._runs.summary(name))

    async def metrics(self, name: str, offset: int = 0) -> JSONResponse:
        """The rows of its metrics that are new since `offset`."""
        return await self._answer(lambda: self._runs.metrics(name, max(0, offset)))

    async def samples(self, name: str) -> JSONResponse:
        """What it wrote."""
        return await self._answer(lambda: self._runs.samples(name))

    async def differences(self) -> JSONResponse:
        """The settings in which the runs differ."""
        return await self._answer(self._runs.differences)

    async def origins(self, name: str, step: int) -> JSONResponse:
        """The documents behind a step."""
        return await self._answer(lambda: self._runs.origins(name, step))

    async def traces(self, name: str) -> JSONResponse:
        """The steps with a trace."""
        return await self._answer(lambda: self._runs.traces(name))

    async def trace(self, name: str, step: int) -> JSONResponse:
        """A trace without its tensors."""

        def read() -> dict[str, Any]:
            found = self._runs.trace(name, step)
            return {**found.manifest, "tensors": {each: found.shape(each) for each in found.names}}

        return await self._answer(read)

    async def tensor(self, step: int, name: str, tensor: str, head: int | None = None) -> Response:
        """A tensor of it, or one head, as floats."""

        def read() -> Response:
            found = self._runs.trace(name, step)
            try:
                return floats(found.read(tensor) if head is None else found.read(tensor, head))
            except (KeyError, IndexError):
                raise DataError(f"The trace has no tensor {tensor!r}, or no head {head} of it.") from None

        return await self._do(read)

    async def report(self, name: str, kind: str) -> Response:
        """The report of the run, or of its corpus."""
        content = await self._do(lambda: self._runs.report(name, kind))
        return Response(content, media_type="text/html", headers={**HEADERS, "Content-Security-Policy": _REPORT_POLICY})

    async def votes(self) -> JSONResponse:
        """Where votes are kept."""
        return json_answer(str(self._votes.path))

    async def vote(self, vote: Vote) -> JSONResponse:
        """Keeps a vote as a line of the file, on the disk before it answers."""
        await self._do(lambda: self._votes.append(vote.row()), status=500)
        return json_answer(str(self._votes.path))

    async def _answer(self, read: Callable[[], Mapping[str, Any] | Sequence[Any] | str]) -> JSONResponse:
        return json_answer(await self._do(read))

    async def _do(self, work: Callable[[], T], *, status: int = 404) -> T:
        """What `work` returns; what it says is wrong, it says to the page."""
        try:
            return await self._work.do(work)
        except SheepOpError as error:
            raise ApiError(status, str(error), code="not_found" if status == 404 else "not_kept") from None

    def close(self) -> None:
        """Ends the reading."""
        self._work.close()
