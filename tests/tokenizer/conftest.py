import sysconfig
from pathlib import Path

import pytest

from sheepop.core.console import Console
from sheepop.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

_MODULES = ("argparse.py", "textwrap.py", "json/decoder.py", "heapq.py")


@pytest.fixture(scope="session")
def source_texts() -> list[str]:
    """A few source files of the standard library: real text that every machine has."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [(folder / name).read_text(encoding="utf-8") for name in _MODULES]


@pytest.fixture(scope="session")
def bpe(source_texts: list[str]) -> Tokenizer:
    return train_tokenizer(TokenizerConfig(vocab_size=700), source_texts, console=Console.silent())
