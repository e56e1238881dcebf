"""The page on which a person keeps, mends or drops the answers of a log, one after the other, with the keyboard."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from sheepop.core.errors import SheepOpError
from sheepop.monitor.answered import Answered
from sheepop.monitor.decisions import FILE, Decision, Decisions
from sheepop.monitor.figures import declines, good_chances, is_repetitive
from sheepop.serve.protocol import ApiError, error_body, refusal_of
from sheepop.serve.same_site import HEADERS, json_answer, same_site
from sheepop.serve.votes import VotesFile
from sheepop.serve.worker import SideWork
from sheepop.tokenizer.messages import Message, message_text

_PAGE = {
    "": ("review.html", "text/html"),
    "review.js": ("review.js", "text/javascript"),
    "review.css": ("review.css", "text/css"),
    "review.svg": ("review.svg", "image/svg+xml"),
}


def to_review(answers: Sequence[Answered]) -> list[tuple[str, Answered]]:
    """The answers with the reason to look at each, those first of which there is most to learn.

    Answers with bad votes come first, then those that decline, repeat themselves or are cut, then those without votes
    by their chance of a good one or, where that is not known, by their mean log-probability, then the liked ones.
    """
    chances = good_chances(answers)
    ranked = []
    for number, each in enumerate(answers):
        reasons = {
            "bad vote": each.votes < 0,
            "declines": declines(each.text),
            "repeats itself": is_repetitive(each.text),
            "cut at the length limit": each.reason == "length",
        }
        why = next((reason for reason, holds in reasons.items() if holds), "good vote" if each.votes > 0 else "")
        rank = (*reasons, "", "good vote").index(why)
        sure = each.mean_logprob if each.mean_logprob is not None else 0.0
        chance = sure if chances is None or each.mean_logprob is None else float(chances[number])
        if not why and chances is not None and chance < 0.5:
            why = "low confidence"
        ranked.append((rank, chance, number, why, each))
    return [(why, each) for *_, why, each in sorted(ranked, key=lambda entry: entry[:3])]


class Review:
    """The endpoints of the page; only who has the `token` sees answers and decides.

    It is also the service of the server: it never drains, and has nothing to reload.
    """

    def __init__(self, answers: Sequence[Answered], decisions: Decisions, directory: Path) -> None:
        self.token = secrets.token_urlsafe(24)
        self.is_draining, self.num_open = False, 0
        self._queue, self._decisions = to_review(answers), dict(decisions)
        self._names = {each.name for _, each in self._queue}
        self._file = VotesFile(directory / FILE)
        self._work = SideWork("decisions", threads=1, most=64)

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(same_site)])
        app.add_exception_handler(HTTPException, _refuse)
        app.add_exception_handler(RequestValidationError, _refuse)
        for path in _PAGE:
            app.add_api_route(f"/{path}", self.file, methods=["GET"], response_model=None)
        owner = [Depends(self.check_token)]
        app.add_api_route("/answers", self.list, methods=["GET"], response_model=None, dependencies=owner)
        app.add_api_route("/answers/{number}", self.show, methods=["GET"], response_model=None, dependencies=owner)
        app.add_api_route("/decisions", self.decide, methods=["POST"], response_model=None, dependencies=owner)
        return app

    async def check_token(self, request: Request) -> None:
        """Refuses a request without the token."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise ApiError(401, "The token is missing or wrong. Open the address that the command printed.")

    async def file(self, request: Request) -> Response:
        """A file of the page."""
        name, kind = _PAGE[request.url.path.removeprefix("/")]
        content = files("sheepop.monitor").joinpath("page", name).read_bytes()
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    async def list(self) -> JSONResponse:
        """The decision on each answer, in the order in which they are shown, and the path of the file."""
        decided = [found and found.decision for found in (self._decisions.get(each.name) for _, each in self._queue)]
        return json_answer({"decisions": decided, "file": str(self._file.path)})

    async def show(self, number: int) -> JSONResponse:
        """An answer with its conversation."""
        if not 0 <= number < len(self._queue):
            raise ApiError(404, f"There is no answer {number}; there are {len(self._queue)}.")
        why, each = self._queue[number]
        asked = [{"role": "prompt", "content": each.prompt}] if isinstance(each.prompt, str) else each.prompt
        answer = {"role": "assistant", "content": each.answer} if isinstance(each.answer, str) else each.answer
        decided = self._decisions.get(each.name)
        about = {key: getattr(each, key) for key in ("id", "choice", "place", "model", "time", "votes", "comments")}
        return json_answer(
            {
                **about,
                "why": why,
                "asked": [_shown(message) for message in asked],
                "answer": _shown(answer),
                "decision": decided and decided.model_dump(exclude_none=True),
            }
        )

    async def decide(self, decision: Decision) -> JSONResponse:
        """Appends a decision to the file and flushes it to disk before answering."""
        if (decision.id, decision.choice) not in self._names:
            raise ApiError(404, "The log has no such answer.", param="id")
        decision = decision.model_copy(update={"time": datetime.now(UTC).isoformat(timespec="seconds")})
        try:
            await self._work.do(self._file.append, decision.model_dump(exclude_none=True))
        except SheepOpError as error:
            raise ApiError(500, str(error), code="not_kept") from None
        self._decisions[decision.id, decision.choice] = decision
        return json_answer({"decision": decision.decision})

    def reload(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Ends the thread that writes decisions."""
        self._work.close()


def _shown(message: Message) -> dict[str, str]:
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role", "")),
        "text": message_text(message),
        "calls": json.dumps(calls, indent=1, ensure_ascii=False) if calls else "",
    }


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        error = refusal_of(error.errors())
    assert isinstance(error, HTTPException)
    refusal = error if isinstance(error, ApiError) else ApiError(error.status_code, str(error.detail))
    return JSONResponse(error_body(refusal, request.url.path), status_code=refusal.status_code, headers=HEADERS)
