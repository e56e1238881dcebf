"""The record of answers and of votes on them; `sheepop.serve.conversation_log` has the format."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import Field

from sheepop.core.errors import StorageError
from sheepop.generate.updates import Update
from sheepop.serve.access import Doorkeeper
from sheepop.serve.answers import Answer
from sheepop.serve.chat_request import ChatRequest
from sheepop.serve.config import ServerConfig
from sheepop.serve.conversation_log import ConversationLog
from sheepop.serve.metrics import Metrics
from sheepop.serve.pieces import ChatPieces, TextPieces, number_of
from sheepop.serve.protocol import ApiError, CompletionRequest, RequestModel, SamplingRequest

HEADERS = {"x-sheepop-recorded": "yes"}
"""The header that tells a client that its conversation is recorded."""
_LOG = logging.getLogger("sheepop.server")
_MOST_WAITING = 1024
# The number of answers that can still be voted on, the newest ones.
_MOST_KNOWN = 10_000
_SETTINGS = set(SamplingRequest.model_fields) & {
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens", "min_tokens", "seed", "stop",
}  # fmt: skip


class VoteOnAnswer(RequestModel):
    """``POST /v1/votes``: whether an answer is good (1) or bad (-1), and why."""

    id: Annotated[str, Field(max_length=100)]
    vote: Literal[1, -1]
    choice: Annotated[int, Field(ge=0)] = 0
    comment: Annotated[str, Field(max_length=10_000)] | None = None


class Transcript:
    """What is recorded of an answer: for each of its texts the log-probabilities and the end, and the times."""

    def __init__(self, answer: Answer, requested: CompletionRequest | ChatRequest, path: str) -> None:
        self.answer, self.requested, self.path = answer, requested, path
        self._began, self.first_token = time.monotonic(), 0.0
        self.seconds = 0.0
        self.texts: dict[int, list[str]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.reasons: dict[int, str | None] = {}
        self.ended = "left"

    def add(self, updates: list[Update]) -> None:
        """Takes the updates of a step."""
        if updates and not self.first_token:
            self.first_token = time.monotonic() - self._began
        for update in updates:
            number = number_of(update)
            self.texts.setdefault(number, []).append(update.text)
            self.logprobs.setdefault(number, []).extend(update.logprobs)
            self.reasons[number] = update.finish_reason

    def end(self, error: BaseException | None = None) -> None:
        """Records how long the answer took and how it ended: it is whole, its client left, or the code of an error."""
        self.seconds = time.monotonic() - self._began
        if error is None:
            self.ended = "whole"
            if not self.requested.stream:
                self._choose(self.answer.whole())
        elif isinstance(error, ApiError):
            self.ended = str(error.body["error"]["code"])

    def _choose(self, chosen: list[Update]) -> None:
        """Takes the texts that were chosen among those of a request, each as one update."""
        self.texts = {number: [update.text] for number, update in enumerate(chosen)}
        self.logprobs = {number: list(update.logprobs) for number, update in enumerate(chosen)}
        self.reasons = {number: update.finish_reason for number, update in enumerate(chosen)}

    def records(self, pieces: TextPieces | ChatPieces) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns for each prompt what is known of the answer, and its texts."""
        answer, requested, found = self.answer, self.requested, []
        per_request = len(self.texts) // len(answer.requests) or 1
        for number, request in enumerate(answer.requests):
            about = {
                "kind": "answer",
                "id": answer.id,
                "time": datetime.fromtimestamp(answer.created, UTC).isoformat(),
                "path": self.path,
                "model": answer.model.name,
                "settings": requested.model_dump(include=_SETTINGS, exclude_unset=True),
                "prompt_tokens": request.prompt.num_tokens,
                "queue_seconds": round(request.seconds_waited, 4),
                "first_token_seconds": round(self.first_token, 4),
                "seconds": round(self.seconds, 4),
                "ended": self.ended,
            }
            numbers = range(number * per_request, (number + 1) * per_request)
            texts: dict[str, Any] = {"answers": [self._answer(each, pieces) for each in numbers if each in self.texts]}
            if isinstance(requested, ChatRequest):
                texts["messages"] = [message.model_dump(exclude_none=True) for message in requested.messages]
                if requested.tools:
                    texts["tools"] = [tool.given for tool in requested.tools]
            else:
                texts["prompt"] = request.prompt.text
            found.append((about, texts))
        return found

    def _answer(self, number: int, pieces: TextPieces | ChatPieces) -> dict[str, Any]:
        logprobs = self.logprobs[number]
        content: dict[str, Any] = {"text": "".join(self.texts[number])}
        if isinstance(pieces, ChatPieces):
            content = {"message": pieces.message(number)}
        return {
            "choice": number,
            **content,
            "finish_reason": self.reasons[number],
            "tokens": len(logprobs),
            "mean_logprob": round(sum(logprobs) / len(logprobs), 4) if logprobs else None,
        }


class Recorder:
    """Writes transcripts and votes to the log of a server, in a thread of its own.

    Answers never wait for the log: what cannot be written, since the disk is full or too much waits, is counted in
    `sheepop_unrecorded` and said once.
    """

    def __init__(self, config: ServerConfig, doorkeeper: Doorkeeper, metrics: Metrics) -> None:
        assert config.log is not None
        self._log = ConversationLog(
            Path(config.log).absolute(), max_bytes=int(config.log_memory * 2**30), max_days=config.log_days
        )
        self._doorkeeper, self._metrics = doorkeeper, metrics
        self._known: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._queue: queue.Queue[tuple[Transcript, TextPieces | ChatPieces] | dict[str, Any] | None]
        self._queue = queue.Queue(_MOST_WAITING)
        self._fails = False
        self._thread = threading.Thread(target=self._run, name="log of conversations", daemon=True)
        self._thread.start()

    @staticmethod
    def wants(requested: CompletionRequest | ChatRequest) -> bool:
        """Whether an answer is recorded: unless its client sent ``"store": false``."""
        return requested.store or "store" not in requested.model_fields_set

    def record(self, transcript: Transcript, pieces: TextPieces | ChatPieces, tenant: str) -> None:
        """Records an answer that has ended."""
        self._known[transcript.answer.id] = (tenant, len(transcript.texts))
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        self._put((transcript, pieces))

    async def vote(self, given: VoteOnAnswer, request: Request) -> JSONResponse:
        """Records a vote on an answer that the same client got; raises `ApiError` 404 for any other."""
        # The APIs put different words before the same id.
        name = given.id.rpartition("-")[2].rpartition("_")[2]
        tenant = self._doorkeeper.client(request.headers).settings.name
        owner, count = self._known.get(name, (None, 0))
        if owner != tenant:
            message = f"id: {given.id!r} is not one of your last answers, so it cannot be voted on."
            raise ApiError(404, message, param="id", code="answer_not_found")
        if given.choice >= count:
            raise ApiError(400, f"choice: the answer has {count}, numbered from 0.", param="choice")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._put({"kind": "vote", "id": name, "time": now, **given.model_dump(exclude={"id"})})
        return JSONResponse({"id": given.id, "recorded": True}, headers=HEADERS)

    def close(self) -> None:
        """Writes what waits, and ends the log."""
        self._queue.put(None)
        self._thread.join()

    def _put(self, item: tuple[Transcript, TextPieces | ChatPieces] | dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._unrecorded("too many conversations wait to be recorded")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._append(item)
                self._fails = False
            except StorageError as error:
                self._unrecorded(str(error))
            except Exception as error:  # the log goes on with what others say
                self._unrecorded(f"{type(error).__name__}: {error}")
        try:
            self._log.close()
        except StorageError as error:
            _LOG.error("%s", error)

    def _append(self, item: tuple[Transcript, TextPieces | ChatPieces] | dict[str, Any]) -> None:
        if isinstance(item, dict):
            comment = item.pop("comment")
            self._log.append(item, **({} if comment is None else {"comment": comment}))
            return
        transcript, pieces = item
        for about, texts in transcript.records(pieces):
            self._log.append(about, **texts)

    def _unrecorded(self, reason: str) -> None:
        self._metrics.unrecorded.inc()
        if not self._fails:
            self._fails = True
            _LOG.error("Conversations are not recorded for now: %s", reason)
