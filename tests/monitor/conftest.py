"""A log of a server, written record by record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sheepop.serve.conversation_log import ConversationLog

ABOUT = {
    "kind": "answer", "time": "2026-01-01T00:00:00+00:00", "path": "/v1/chat/completions", "model": "m", "settings": {},
    "prompt_tokens": 5, "queue_seconds": 0.0, "first_token_seconds": 0.1, "seconds": 0.4, "ended": "whole",
}  # fmt: skip
Say = Callable[..., None]


@pytest.fixture
def say(tmp_path: Path) -> Any:
    """Records an answer to a prompt with the votes on it."""
    log = ConversationLog(tmp_path / "log", max_bytes=2**30, max_days=90)
    numbers = iter(range(1000))

    def say(prompt: str, *texts: str, votes: tuple[int, ...] = (), chat: bool = True, **more: Any) -> None:
        name = f"{next(numbers):024x}"
        reason, comment = more.pop("reason", "stop"), more.pop("comment", None)
        logprob = more.pop("mean_logprob", -1.0)
        about = {**ABOUT, **{key: more[key] for key in more if key in ABOUT}}
        common = {"finish_reason": reason, "tokens": 7, "mean_logprob": logprob}
        if chat:
            answers = [
                {"choice": n, "message": {"role": "assistant", "content": t}, **common} for n, t in enumerate(texts)
            ]
            rest = {"messages": [{"role": "user", "content": prompt}], "answers": answers}
        else:
            rest = {"prompt": prompt, "answers": [{"choice": n, "text": t, **common} for n, t in enumerate(texts)]}
        log.append({**about, "id": name}, **rest)
        for choice, vote in enumerate(votes):
            if vote:
                about = {"kind": "vote", "id": name, "choice": choice, "vote": vote, "time": ABOUT["time"]}
                log.append(about, **({"comment": comment} if comment else {}))

    yield say
    log.close()
