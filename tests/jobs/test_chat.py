"""Conversations: what is kept of them, what a model reads of them, and what a file holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sheepop
from sheepop.checkpoint import save_model
from sheepop.core.errors import DataError, TokenizerError, UsageError
from sheepop.generate import GenerationConfig
from sheepop.jobs.chat import Conversation, Message, ModelSpeaker
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer, tokenizer_from_json

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


class WithTemplate(CharTokenizer):
    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "chat_template": TEMPLATE}


class Scripted:
    """Says what it is told to say, and remembers what it was asked."""

    name, note, takes_turns = "scripted", "", True

    def __init__(self, *answers: list[str | Exception]) -> None:
        self._answers = iter(answers)
        self.asked: list[list[Message]] = []
        self.seeds: list[int | None] = []

    def answer(self, messages: list[Message], config: GenerationConfig) -> Iterator[str]:
        self.asked.append(messages)
        self.seeds.append(config.seed)
        for piece in next(self._answers):
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def close(self) -> None: ...


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def test_a_conversation_is_what_was_said(tmp_path: Path) -> None:
    speaker = Scripted(["Hel", "lo"], ["Hi"], [], [DataError("gone")], ["half", DataError("gone")])
    conversation = Conversation(speaker, GenerationConfig(seed=5), system="Be kind.")
    system, first = message("system", "Be kind."), message("user", "One")
    assert list(conversation.say("One")) == ["Hel", "lo"]
    assert list(conversation.regenerate()) == ["Hi"]
    assert speaker.asked == [[system, first], [system, first]]
    assert speaker.seeds == [5, 6]
    assert list(conversation.say("Two")) == []  # an answer may be empty
    said = [first, message("assistant", "Hi"), message("user", "Two"), message("assistant", "")]
    assert conversation.messages == said
    with pytest.raises(DataError):
        list(conversation.say("Three"))
    assert conversation.messages == said  # what got no word of an answer was not said
    with pytest.raises(DataError):
        list(conversation.say("Four"))
    assert conversation.messages == [*said, message("user", "Four"), message("assistant", "half")]
    conversation.save(tmp_path / "talk.json")
    other = Conversation(Scripted(), GenerationConfig())
    other.load(tmp_path / "talk.json")
    assert (other.system, other.messages) == ("Be kind.", conversation.messages)
    conversation.clear()
    with pytest.raises(UsageError, match="no message to answer"):
        conversation.regenerate()


def test_a_file_is_not_written_over(tmp_path: Path) -> None:
    conversation = Conversation(Scripted(), GenerationConfig())
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"notes\.txt exists"):
        conversation.save(tmp_path / "notes.txt")
    with pytest.raises(UsageError, match="cannot be written"):
        conversation.save(tmp_path / "nowhere" / "talk.json")
    conversation.save(tmp_path / "talk.json")
    conversation.save(tmp_path / "talk.json")
    assert (tmp_path / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize(
    "content",
    [[], {"messages": "Hello"}, {"messages": [{"role": "user"}]}, {"messages": [message("robot", "Hello")]},
     {"messages": [message("user", "Hello"), message("system", "Too late.")]}],
)  # fmt: skip
def test_a_file_that_holds_no_conversation(tmp_path: Path, content: object) -> None:
    (tmp_path / "talk.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="does not hold a conversation"):
        Conversation(Scripted(), GenerationConfig()).load(tmp_path / "talk.json")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same network with and without a chat template."""
    place = tmp_path_factory.mktemp("models")
    model = build_model(ModelConfig(vocab_size=128, d_model=16, num_layers=1, num_heads=2, max_seq_len=96), 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    found = {}
    for name, tokenizer in (("chat", WithTemplate()), ("plain", CharTokenizer())):
        found[name] = place / name
        save_model(found[name], model, tokenizer, {})
    return found


def test_a_model_with_a_template_answers_as_in_python(models: dict[str, Path]) -> None:
    speaker = ModelSpeaker(models["chat"], device="cpu")
    messages = [message("system", "Be kind."), message("user", "One")]
    config = GenerationConfig(max_new_tokens=12, seed=3)
    lm = sheepop.load(models["chat"], device="cpu")
    expected = lm.chat(messages, max_new_tokens=12, seed=3).text
    assert "".join(speaker.answer(messages, config)) == expected
    # The oldest messages are left out where they do not fit, the system prompt stays.
    older = [message("user", "long " * 9), message("assistant", "words " * 5)]
    assert "".join(speaker.answer([messages[0], *older, messages[1]], config)) == expected
    assert "no longer reads the first 2 messages" in speaker.note
    with pytest.raises(UsageError, match="the model's context holds 96"):
        list(speaker.answer([message("user", "x" * 100)], config))
    speaker.close()


NAMED = [
    {"name": "default", "template": TEMPLATE + "{{ mood }}"},
    {"name": "tool_use", "template": "{{ tools[0].name }}: {{ messages[0].content }}"},
    {"name": "rag", "template": "{{ documents[0].text }}: {{ messages[0].content }}"},
]


def test_what_a_template_reads_is_given_in_python_and_in_the_terminal(models: dict[str, Path], tmp_path: Path) -> None:
    lm = sheepop.load(models["plain"], device="cpu")
    settings = {**lm.tokenizer.settings(), "chat_template": NAMED}
    lm = dataclasses.replace(lm, tokenizer=tokenizer_from_json(lm.tokenizer.to_json(), settings))

    def after(prompt: str) -> str:
        return lm.generate(prompt, max_new_tokens=12, seed=3).text

    def answer(**given: Any) -> str:
        return lm.chat([message("user", "One")], max_new_tokens=12, seed=3, **given).text

    assert answer(chat_template_kwargs={"mood": "so "}) == after("[user] One\n[assistant] so ")
    assert answer(tools=[{"name": "f"}]) == after("f: One")
    assert answer(documents=[{"text": "D"}], chat_template="rag") == after("D: One")
    assert answer(continue_final_message=True) == after("[user] One")

    save_model(tmp_path / "saved", lm.model, lm.tokenizer, {})
    speaker = ModelSpeaker(tmp_path / "saved", device="cpu", chat_template_kwargs={"mood": "so "})
    config = GenerationConfig(max_new_tokens=12, seed=3)
    assert "".join(speaker.answer([message("user", "One")], config)) == after("[user] One\n[assistant] so ")
    speaker.close()
    for given in ({"chat_template": "default"}, {"chat_template_kwargs": {"mood": "so "}}):
        with pytest.raises(TokenizerError, match="This model has no chat template"):
            ModelSpeaker(models["plain"], device="cpu", **given)


def test_a_model_without_a_template_continues_what_the_screen_shows(models: dict[str, Path]) -> None:
    speaker = ModelSpeaker(models["plain"], device="cpu")
    assert "no chat template" in speaker.note
    messages = [message("user", "One"), message("assistant", " and"), message("user", "Two")]
    expected = sheepop.load(models["plain"], device="cpu").generate("One and\nTwo", max_new_tokens=12, seed=3)
    assert "".join(speaker.answer(messages, GenerationConfig(max_new_tokens=12, seed=3))) == expected.text
