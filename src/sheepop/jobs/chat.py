"""Conversations with a model, of this machine or of a server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from sheepop.checkpoint import load_model
from sheepop.checkpoint.exchange import dtype_named
from sheepop.core.device import resolve_device
from sheepop.core.errors import DataError, TokenizerError, UsageError
from sheepop.core.files import read_json, write_json
from sheepop.generate import GenerationConfig, Generator
from sheepop.tokenizer import ChatTemplate

Message = dict[str, str]
_SECONDS = 600.0


class Speaker(Protocol):
    """Who answers."""

    note: str
    """What the user should know of it before the first word, perhaps nothing."""

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        """The answer to a conversation, piece by piece."""

    def close(self) -> None:
        """Ends what was started."""


class ModelSpeaker:
    """A model directory or run. Without a chat template it continues the words of the conversation as a text."""

    def __init__(self, model: str | Path, *, device: str = "auto", dtype: str | None = None) -> None:
        loaded = load_model(model, resolve_device(device), dtype_named(dtype))
        self._generator = Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids)
        if not self._generator.continues_prompts:
            raise UsageError("An encoder-decoder writes targets of sources and does not chat. Use sheepop generate.")
        self._template: ChatTemplate | None = None
        self.note = ""
        try:
            self._template = ChatTemplate.of(loaded.tokenizer)
        except TokenizerError:
            self.note = "This model has no chat template: it was not trained on conversations and continues your text."

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        """Writes on behind the conversation."""
        prompt: str | list[int] = "".join(message["content"] for message in messages)
        if self._template is not None:
            text = self._template.render(messages, add_generation_prompt=True)
            prompt = self._generator.tokenizer.encode(text, allow_special=True)
        return iter(self._generator.stream(prompt, config))

    def close(self) -> None:
        """Ends the process that renders the template."""
        if self._template is not None:
            self._template.close()


class ServerSpeaker:
    """A server with ``/v1/chat/completions`` below `url`; `model` is its first one when None."""

    note = ""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        base = url.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._model = model or self._first_model()

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        """Streams the answer as server-sent events."""
        asked = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "max_completion_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
        }
        if config.seed is not None:
            asked["seed"] = config.seed
        if config.stop:
            asked["stop"] = list(config.stop)
        with self._open("/chat/completions", asked) as lines:
            for line in lines:
                data = line.decode("utf-8", errors="replace").strip().removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise DataError(f"{self._url} answered with an error: {event['error'].get('message', event)}")
                for choice in event.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        yield piece

    def close(self) -> None:
        """Nothing is open between answers."""

    def _first_model(self) -> str:
        with self._open("/models", None) as answer:
            models = json.loads(answer.read()).get("data", [])
        if not models:
            raise DataError(f"{self._url} serves no model.")
        return str(models[0]["id"])

    def _open(self, place: str, asked: dict[str, Any] | None) -> Any:
        data = None if asked is None else json.dumps(asked).encode()
        request = urllib.request.Request(self._url + place, data=data, headers=self._headers)
        try:
            return urllib.request.urlopen(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            words = error.read(10_000).decode("utf-8", errors="replace")
            raise DataError(f"{self._url}{place} answered {error.code}: {words}") from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise DataError(f"{self._url} cannot be reached: {error}.") from None


class Conversation:
    """The messages so far, with an optional system prompt in front."""

    def __init__(self, speaker: Speaker, config: GenerationConfig, *, system: str | None = None) -> None:
        self._speaker, self._config = speaker, config
        self.system = system
        self.messages: list[Message] = []
        self._num_answers = 0

    def say(self, text: str) -> Iterator[str]:
        """The answer to a new message, which is kept once it is whole or was interrupted."""
        self.messages.append({"role": "user", "content": text})
        return self._answer()

    def regenerate(self) -> Iterator[str]:
        """Another answer to the last message."""
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise UsageError("There is no message to answer yet.")
        return self._answer()

    def clear(self) -> None:
        """Forgets all messages; the system prompt stays."""
        self.messages = []

    def save(self, path: Path) -> None:
        """Writes the conversation as JSON, in the form that fine-tuning reads."""
        write_json(path, {"messages": self._with_system()})

    def load(self, path: Path) -> None:
        """Takes up a conversation that `save` wrote; raises `DataError` for a file that holds none."""
        found = read_json(path, DataError)
        messages = found.get("messages") if isinstance(found, dict) else None
        if not isinstance(messages, list) or not all(
            isinstance(message, dict)
            and isinstance(message.get("content"), str)
            and isinstance(message.get("role"), str)
            for message in messages
        ):
            raise DataError(f"{path} does not hold a conversation: it needs a list of messages with role and content.")
        self.system = next((message["content"] for message in messages if message["role"] == "system"), None)
        self.messages = [message for message in messages if message["role"] != "system"]

    def _with_system(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def _answer(self) -> Iterator[str]:
        config, pieces = self._config, list[str]()
        if config.seed is not None:  # another answer to the same message is another text
            config = config.replace(seed=config.seed + self._num_answers)
        self._num_answers += 1
        try:
            for piece in self._speaker.answer(self._with_system(), config):
                pieces.append(piece)
                yield piece
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
