"""Answers are what the generator writes behind the prompt, in the model's chat template where it has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from sheepop.core.errors import TokenizerError
from sheepop.evaluate.answers import answers_of
from sheepop.generate import GenerationConfig, Generator
from sheepop.tokenizer import load_tokenizer

CONFIG = GenerationConfig(max_new_tokens=6, temperature=0)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_a_model_without_a_template_continues_texts(generator: Generator) -> None:
    told: list[int] = []
    expected = [found.text for found in generator.generate(["Hi", "Yes?"], CONFIG)]
    assert answers_of(generator, ["Hi", "Yes?"], CONFIG, on_done=told.append) == expected
    assert sum(told) == 2
    with pytest.raises(TokenizerError):
        answers_of(generator, [[{"role": "user", "content": "Hi"}]], CONFIG)


def test_a_model_with_a_template_is_asked_in_it(generator: Generator, tmp_path: Path) -> None:
    generator.tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    chatting = Generator(generator.model, load_tokenizer(tmp_path))
    talk = [{"role": "user", "content": "Hi"}, {"role": "bot", "content": "Yes"}, {"role": "user", "content": "?"}]
    expected = [found.text for found in generator.generate(["<user>Hi<a>", "<user>Hi<bot>Yes<user>?<a>"], CONFIG)]
    assert answers_of(chatting, ["Hi", talk], CONFIG) == expected


def test_the_template_sees_the_variables_and_without_one_they_are_refused(generator: Generator, tmp_path: Path) -> None:
    generator.tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(f"{TEMPLATE}{{{{ mood }}}}")
    chatting = Generator(generator.model, load_tokenizer(tmp_path))
    expected = [found.text for found in generator.generate(["<user>Hi<a>so "], CONFIG)]
    assert answers_of(chatting, ["Hi"], CONFIG, {"mood": "so "}) == expected
    with pytest.raises(TokenizerError, match="has no chat template"):
        answers_of(generator, ["Hi"], CONFIG, {"mood": "so "})
