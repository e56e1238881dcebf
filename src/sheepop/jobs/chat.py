"""Conversations with a local model or with a server that has OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sheepop.core.errors import DataError, TokenizerError, UsageError
from sheepop.core.files import read_json, write_json
from sheepop.evaluate.endpoint import Endpoint
from sheepop.generate import GenerationConfig
from sheepop.jobs.generate import load_generator
from sheepop.tokenizer import ChatTemplate
from sheepop.tokenizer.messages import MessageError, plain_messages

Message = dict[str, str]
_CUT_OFF = "The answer is cut off. --max-new-tokens N allows longer answers, up to the model's context."
# Our settings by their names in OpenAI's API; only those that the user gave are sent.
_API_NAMES = {"max_new_tokens": "max_completion_tokens", "temperature": "temperature", "top_p": "top_p", "seed": "seed"}


class Reasoning(str):
    """A piece of reasoning, which is shown but is no part of the conversation."""


class Speaker(Protocol):
    """A chat partner: a local model or a server."""

    name: str
    note: str
    """A message for the user, or empty; an answer may change it."""
    defaults: Mapping[str, Any]
    """The model's own settings, which hold where the user gives none; those of a server are its own."""
    takes_turns: bool
    """Whether it answers messages; otherwise it continues the user's text."""

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        """Yields the answer to a conversation, piece by piece, and `Reasoning` that the model does before."""

    def close(self) -> None:
        """Releases resources."""


class ModelSpeaker:
    """A model from disk. Without a chat template it continues the conversation as one text."""

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str | None = None,
        adapters: Sequence[str | Path] = (),
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._generator = load_generator(model, device=device, dtype=dtype, adapters=adapters)
        if not self._generator.continues_prompts:
            raise UsageError("An encoder-decoder model cannot chat. Use sheepop generate.")
        self.name = Path(model).resolve().name
        self.defaults: Mapping[str, Any] = self._generator.defaults
        self._template: ChatTemplate | None = None
        self.note, self.takes_turns = "", True
        try:
            self._template = ChatTemplate.of(self._generator.tokenizer, chat_template, chat_template_kwargs)
        except TokenizerError:
            if chat_template is not None or chat_template_kwargs:
                raise
            self.takes_turns = False
            self.note = "This model has no chat template: it was not trained on conversations and continues your text."

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        """Yields the answer; the model reads only the end of a conversation that exceeds its context."""
        self.note, config = "", config.over(self._generator.defaults)
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
        """The tokens of the prompt; the oldest messages are left out if they and an answer do not fit the context."""
        longest = self._generator.model.config.max_seq_len
        room = longest - min(config.max_new_tokens, longest // 4)
        first = 1 if messages[0]["role"] == "system" else 0
        left_out = 0
        while True:
            kept = [*messages[:first], *messages[first + left_out :]]
            prompt = template.encode(self._generator.tokenizer, kept, add_generation_prompt=True)
            if len(prompt) <= room or first + left_out + 2 >= len(messages):
                break
            left_out += 2
        if len(prompt) >= longest:
            raise UsageError(
                f"With your message, the prompt has {len(prompt)} tokens, but the model's context holds {longest}. "
                "Shorten the message or the system prompt."
            )
        if left_out:
            self.note = f"The model's context is full, so it no longer reads the first {left_out} messages."
        return prompt


def _as_text(messages: list[Message]) -> str:
    """The conversation as one text: an answer directly continues its message, and ends with a line break."""
    return "".join(message["content"] + ("" if message["role"] == "user" else "\n") for message in messages)


class ServerSpeaker:
    """A server with ``/v1/chat/completions`` below `url`; if `model` is None, the server's first model answers."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.note, self.takes_turns = "", True
        variables = {"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {}
        self.defaults: Mapping[str, Any] = {}
        # No retries: the user sees a failure at once and decides whether to try again.
        self._endpoint = Endpoint(url, model=model, api_key=api_key, settings=variables, attempts=1)
        self.name = self._endpoint.model

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        """Streams the answer as server-sent events."""
        self.note = ""
        settings = {_API_NAMES[name]: getattr(config, name) for name in _API_NAMES.keys() & config.model_fields_set}
        for piece in self._endpoint.stream(messages, **settings):
            if piece.finish_reason == "length":
                self.note = _CUT_OFF
            if piece.reasoning:
                yield Reasoning(piece.reasoning)
            if piece.text:
                yield piece.text

    def close(self) -> None:
        """Does nothing: no connection is open between answers."""


class Conversation:
    """The messages so far, and an optional system prompt."""

    def __init__(self, speaker: Speaker, config: GenerationConfig, *, system: str | None = None) -> None:
        self.speaker, self._config = speaker, config
        self.system = system
        self.messages: list[Message] = []
        self._num_answers = 0
        self._file: Path | None = None

    def say(self, text: str) -> Iterator[str]:
        """Yields the answer to a new message. Keeps both, unless the answer stops before its first piece."""
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Iterator[str]:
        """Yields another answer to the last message, which replaces the previous one."""
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
        """Writes the conversation as JSON that `sheepop tune sft` can read.

        Raises `UsageError` if the file cannot be written, or exists and this conversation was neither saved to it nor
        loaded from it.
        """
        if path.exists() and path.resolve() != self._file:
            raise UsageError(f"{path} exists. Choose another name.")
        try:
            write_json(path, {"messages": self._with_system(self.messages)})
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
        self._file = path.resolve()

    def load(self, path: Path) -> None:
        """Loads a conversation that `save` wrote; raises `DataError` for any other file."""
        found = read_json(path, DataError)
        try:
            messages = plain_messages(found.get("messages") if isinstance(found, dict) else None, "messages")
            if any(message["role"] == "system" for message in messages[1:]):
                raise MessageError("messages: only the first may be the system's")
        except MessageError as error:
            raise DataError(f"{path} does not hold a conversation. {error}.") from None
        self.system = next((message["content"] for message in messages if message["role"] == "system"), None)
        self.messages = [message for message in messages if message["role"] != "system"]
        self._file = path.resolve()

    def _with_system(self, messages: list[Message]) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *messages]

    def _answer(self, messages: list[Message]) -> Iterator[str]:
        config, pieces, whole = self._config, list[str](), False
        if config.seed is not None:  # so that `regenerate` gives a different answer
            config = config.model_copy(update={"seed": config.seed + self._num_answers})
        self._num_answers += 1
        try:
            for piece in self.speaker.answer(self._with_system(messages), config):
                if not isinstance(piece, Reasoning):
                    pieces.append(piece)
                yield piece
            whole = True
        finally:
            if pieces or whole:
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
