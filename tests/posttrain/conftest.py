"""Tokenizers and chat templates for examples."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.console import Console
from sheepop.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

TEXTS = [
    "What is two plus five? seven. The sheep jumps over the fence, Käse 🧀 and wool.\n" * 40,
    (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_text(encoding="utf-8"),
]

MARKED = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    """One that cuts bytes, and two that put a space of their own before every text."""
    special = ("<|im_start|>", "<|im_end|>")
    return {
        name: train_tokenizer(
            TokenizerConfig(algorithm=name, vocab_size=400),  # type: ignore[arg-type]
            TEXTS,
            special_tokens=special,
            console=Console.silent(),
        )
        for name in ("bpe", "unigram", "wordpiece")
    }


@pytest.fixture
def lines(tmp_path: Path) -> Callable[[Iterable[Any]], Path]:
    """``lines(values)``: a file of JSON lines; a text is written as it is."""

    def write(values: Iterable[Any], name: str = "examples.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
        return path

    return write


def chat(*texts: str) -> dict[str, Any]:
    """A line with a conversation, the user first."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]}
