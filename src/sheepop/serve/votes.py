"""Votes between answers, and the file that stores them for `sheepop tune` and for rankings."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from sheepop.core.files import storage_errors, sync_directory
from sheepop.serve.protocol import RequestModel

LONGEST_TEXT = 2**20
_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]


class Message(RequestModel):
    """A message of a conversation, in the format of `sheepop tune`."""

    role: Literal["system", "user", "assistant"]
    content: _Text


class Vote(RequestModel):
    """A preference between two answers to a prompt, with the models that wrote them."""

    prompt: _Text | Annotated[list[Message], Field(min_length=1)]
    chosen: _Text
    rejected: _Text
    chosen_model: _Text
    rejected_model: _Text

    def row(self) -> dict[str, Any]:
        """The vote as a row of data for ``sheepop tune dpo`` and ``reward``."""
        about = {"chosen_model": self.chosen_model, "rejected_model": self.rejected_model}
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected, **about}
        answers = {
            name: [{"role": "assistant", "content": text}]
            for name, text in (("chosen", self.chosen), ("rejected", self.rejected))
        }
        return {"prompt": [message.model_dump() for message in self.prompt], **answers, **about}


class VotesFile:
    """A file with a vote per line; any number of threads may append."""

    def __init__(self, path: Path) -> None:
        self.path, self._writing = path, threading.Lock()

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a vote and flushes it to disk; the file is unchanged if this raises."""
        line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
        with self._writing, storage_errors(self.path), self.path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                # An editor may have left the last line without a newline.
                line = line if file.read(1) == b"\n" else b"\n" + line
            try:
                left = memoryview(line)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
            if not size:
                sync_directory(self.path.parent)
