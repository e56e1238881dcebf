from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sheepop.data.documents import Draft


@pytest.fixture
def document() -> Callable[..., Draft]:
    """A document as it comes from reading."""

    def make(text: str, kind: str = "prose", *, source: str = "a.txt", part: int = 0, **about: Any) -> Draft:
        return Draft(text, source, part, kind, **about)

    return make


@pytest.fixture(scope="session")
def prose() -> list[str]:
    """Documentation of the standard library: docstrings, whole paragraphs of many together, and both spoiled."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = (
        "argparse",
        "asyncio/base_events",
        "bdb",
        "calendar",
        "codecs",
        "datetime",
        "decimal",
        "difflib",
        "doctest",
    )
    names += ("email/message", "fractions", "heapq", "imaplib", "inspect", "logging/__init__", "optparse", "pathlib")
    names += ("pickle", "random", "smtplib", "statistics", "subprocess", "tarfile", "turtle", "typing", "unittest/mock")
    # Modules became packages in later versions of Python.
    files = [library / f"{name}.py" for name in names]
    groups = [_docstrings(file if file.is_file() else file.with_suffix("") / "__init__.py") for file in files]
    articles = [_paragraphs(group) for group in groups]
    texts = [text for group in groups for text in group[:40:5]] + [text for text in articles if text]
    chosen = random.Random(4)
    return [*texts, *(_spoiled(text, chosen) for text in texts[::2] + articles)]


def _docstrings(path: Path) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds))
    return [text for node in nodes if len(text := ast.get_docstring(node) or "") > 150]


def _paragraphs(texts: list[str]) -> str:
    """Paragraphs on one line each, of which rules for web pages think more than of short lines."""
    joined = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    return "\n".join(dict.fromkeys(part for part in joined if part.endswith(".") and len(part) > 80))[:2500]


def _spoiled(text: str, chosen: random.Random) -> str:
    ways = (
        lambda: f"{text}\n{text[: len(text) // chosen.randint(2, 6)]}",
        lambda: re.sub("[.!?]", "", text),
        lambda: re.sub(r"(\S+\s+\S+\s+\S+)\s+", r"\1\n", text),
        lambda: text.replace(" the ", " 12 , "),
        lambda: "\n".join(f"- {line}" for line in text.split("\n")),
        lambda: text.replace(".", "...\n"),
    )
    return chosen.choice(ways)()
