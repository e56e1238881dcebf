"""The marks beside a model's score are what gzip and xz really make of the same bytes."""

import gzip
import lzma
from pathlib import Path

import pytest

from sheepop.core.console import Console
from sheepop.data import DataConfig, build_corpus
from sheepop.jobs.baselines import compress_validation
from sheepop.tokenizer import TokenizerConfig


def test_sizes_equal_those_of_the_standard_library(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"Número {number}: " + "sheep jump over fences. " * (number % 7 + 1))
    data = DataConfig(paths=(str(folder),), validation_fraction=0.3)
    corpus = build_corpus(data, TokenizerConfig(algorithm="char"), tmp_path / "corpus", seed=0)
    text = b"".join(document.text.encode("utf-8") for document in corpus.documents("validation"))
    found = compress_validation(corpus, Console.silent())
    assert found.bytes == len(text) == corpus.validation.num_bytes
    assert found.gzip == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text))
    assert found.xz == pytest.approx(8 * len(lzma.compress(text, preset=9)) / len(text))
