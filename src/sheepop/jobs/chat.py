"""Conversations with a model, of this machine or of a server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

from sheepop.core.errors import DataError, TokenizerError, UsageError
from sheepop.core.files import read_json, write_json
from sheepop.generate import GenerationConfig
from sheepop.jobs.generate import load_generator
from sheepop.tokenizer import ChatTemplate

Message = dict[str, str]
_SECONDS = 600.0
_CUT_OFF = "The answer is cut off. --max-new-tokens N allows more, as far as the model's context goes."
# What a server is asked for, by the settings that were given here; the others are as it has them.
_ASKED = {"max_new_tokens": "max_completion_tokens", "temperature": "temperature", "top_p": "top_p", "seed": "seed"}


class Speaker(Protocol):
    """Who answers."""

    name: str
    note: str
    """What the user should know of it, perhaps nothing; an answer may change it."""
    takes_turns: bool
    """Whether it answers; else it writes on where the user's text ends."""

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        """The answer to a conversation, piece by piece."""

    def close(self) -> None:
        """Ends what was started."""


class ModelSpeaker:
    """A model directory or run. Without a chat template it continues the conversation as one text."""

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str | None = None,
        adapters: Sequence[str | Path] = (),
    ) -> None:
        self._generator = load_generator(model, device=device, dtype=dtype, adapters=adapters)
        if not self._generator.continues_prompts:
            raise UsageError("An encoder-decoder writes targets of sources and does not chat. Use sheepop generate.")
        self.name = Path(model).resolve().name
        self._template: ChatTemplate | None = None
        self.note, self.takes_turns = "", True
        try:
            self._template = ChatTemplate.of(self._generator.tokenizer)
        except TokenizerError:
            self.takes_turns = False
            self.note = "This model has no chat template: it was not trained on conversations and continues your text."

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        """Writes on behind the conversation, or behind as much of its end as the context holds."""
        self.note = ""
        if self._template is None:
            yield from self._generator.stream(_as_text(messages), config.replace(on_overflow="window"))
            return
        prompt = self._fitting(self._template, messages, config)
        stream = self._generator.stream(prompt, config.replace(on_overflow="refuse"))
        yield from stream
        if stream.completion.finish_reason == "length":
            self.note = self.note or _CUT_OFF

    def close(self) -> None:
        """Ends the process that renders the template."""
        if self._template is not None:
            self._template.close()

    def _fitting(self, template: ChatTemplate, messages: list[Message], config: GenerationConfig) -> list[int]:
        """The prompt, without the oldest messages where the context has no room for them and an answer."""
        longest = self._generator.model.config.max_seq_len
        room = longest - min(config.max_new_tokens, longest // 4)
        first = 1 if messages[0]["role"] == "system" else 0
        left_out = 0
        while True:
            text = template.render([*messages[:first], *messages[first + left_out :]], add_generation_prompt=True)
            prompt = self._generator.tokenizer.encode(text, allow_special=True)
            if len(prompt) <= room or first + left_out + 2 >= len(messages):
                break
            left_out += 2
        if len(prompt) >= longest:
            raise UsageError(
                f"With your message there are {len(prompt)} tokens to read, but the model's context holds {longest}. "
                "Shorten the message, or the system prompt."
            )
        if left_out:
            self.note = f"The model's context is full: it does not read the first {left_out} messages any more."
        return prompt


def _as_text(messages: list[Message]) -> str:
    """A conversation as a screen shows it: each answer goes on where its message ends, and ends its line."""
    return "".join(message["content"] + ("" if message["role"] == "user" else "\n") for message in messages)


class ServerSpeaker:
    """A server with ``/v1/chat/completions`` below `url`; `model` is its first one when None."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        self.note, self.takes_turns = "", True
        base = url.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = model or self._first_model()

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        """Streams the answer as server-sent events."""
        self.note = ""
        asked = {_ASKED[name]: getattr(config, name) for name in _ASKED.keys() & config.model_fields_set}
        with self._open(
            "/chat/completions", {"model": self.name, "messages": messages, "stream": True, **asked}
        ) as lines:
            try:
                for line in lines:
                    yield from self._pieces(line)
            except (OSError, HTTPException) as error:
                raise DataError(f"{self._url} broke off its answer: {error}.") from None

    def close(self) -> None:
        """Nothing is open between answers."""

    def _pieces(self, line: bytes) -> Iterator[str]:
        """What a line of the stream says."""
        data = line.decode("utf-8", errors="replace").strip().removeprefix("data:").strip()
        if not line.startswith(b"data:") or data == "[DONE]":
            return
        event = self._read(data)
        if "error" in event:
            raise DataError(f"{self._url} answered with an error: {_reason(data)}")
        for choice in event.get("choices", ()):
            if choice.get("finish_reason") == "length":
                self.note = _CUT_OFF
            if piece := choice.get("delta", {}).get("content"):
                yield piece

    def _first_model(self) -> str:
        with self._open("/models", None) as answer:
            models = self._read(answer.read().decode("utf-8", errors="replace")).get("data", [])
        if not models:
            raise DataError(f"{self._url} serves no model.")
        return str(models[0]["id"])

    def _read(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise DataError(f"{self._url} does not speak OpenAI's protocol. Give the address of a server that does.")
        return found

    def _open(self, place: str, asked: dict[str, Any] | None) -> Any:
        data = None if asked is None else json.dumps(asked).encode()
        try:
            request = urllib.request.Request(self._url + place, data=data, headers=self._headers)
            return urllib.request.urlopen(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            words = _reason(error.read(10_000).decode("utf-8", errors="replace"))
            remedy = " Give a key with --api-key, or in OPENAI_API_KEY." if error.code == 401 else ""
            raise DataError(f"{self._url} answered {error.code}: {words}{remedy}") from None
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise DataError(f"{self._url} cannot be reached: {getattr(reason, 'strerror', None) or reason}.") from None


def _reason(answer: str) -> str:
    """What an answer in the shape of OpenAI's errors says; the answer itself where it has another shape."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.strip() or "nothing"


class Conversation:
    """The messages so far, with an optional system prompt in front."""

    def __init__(self, speaker: Speaker, config: GenerationConfig, *, system: str | None = None) -> None:
        self.speaker, self._config = speaker, config
        self.system = system
        self.messages: list[Message] = []
        self._num_answers = 0
        self._file: Path | None = None

    def say(self, text: str) -> Iterator[str]:
        """The answer to a new message. Both are kept, unless the answer ends before its first word."""
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Iterator[str]:
        """Another answer to the last message, in the place of the one before."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise UsageError("There is no message to answer yet.")
        return self._answer(messages)

    def clear(self) -> None:
        """Forgets all messages; the system prompt stays."""
        self.messages = []

    def save(self, path: Path) -> None:
        """Writes the conversation as JSON, in the form that fine-tuning reads.

        Raises `UsageError` for a file that cannot be written, or exists and is not where this conversation was saved or
        loaded from.
        """
        if path.exists() and path.resolve() != self._file:
            raise UsageError(f"{path} exists. Choose another name.")
        try:
            write_json(path, {"messages": self._with_system(self.messages)})
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
        self._file = path.resolve()

    def load(self, path: Path) -> None:
        """Takes up a conversation that `save` wrote; raises `DataError` for a file that holds none."""
        found = read_json(path, DataError)
        messages = found.get("messages") if isinstance(found, dict) else None
        if not isinstance(messages, list) or not all(
            isinstance(message, dict)
            and isinstance(message.get("content"), str)
            and message.get("role") in (("user", "assistant") if number else ("system", "user", "assistant"))
            for number, message in enumerate(messages)
        ):
            raise DataError(
                f'{path} does not hold a conversation. It needs {{"messages": [...]}}, each with a content and '
                "the role user or assistant, or system for the first."
            )
        self.system = next((message["content"] for message in messages if message["role"] == "system"), None)
        self.messages = [message for message in messages if message["role"] != "system"]
        self._file = path.resolve()

    def _with_system(self, messages: list[Message]) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *messages]

    def _answer(self, messages: list[Message]) -> Iterator[str]:
        config, pieces, whole = self._config, list[str](), False
        if config.seed is not None:  # another answer to the same message is another text
            config = config.model_copy(update={"seed": config.seed + self._num_answers})
        self._num_answers += 1
        try:
            for piece in self.speaker.answer(self._with_system(messages), config):
                pieces.append(piece)
                yield piece
            whole = True
        finally:
            if pieces or whole:
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
