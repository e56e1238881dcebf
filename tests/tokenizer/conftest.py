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
def trained(source_texts: list[str]) -> dict[str, Tokenizer]:
    """A tokenizer of every algorithm, trained on the same text."""
    configs = {
        name: TokenizerConfig(algorithm=name, vocab_size=700) for name in ("bpe", "wordpiece", "unigram", "char")
    }
    return {name: train_tokenizer(config, source_texts, console=Console.silent()) for name, config in configs.items()}


@pytest.fixture(scope="session")
def bpe(trained: dict[str, Tokenizer]) -> Tokenizer:
    return trained["bpe"]
