"""The marks beside a model's score are what gzip and xz really make of the same bytes."""

import gzip
import lzma
from pathlib import Path

import pytest

from sheepop.core.console import Console
from sheepop.data import Corpus, DataConfig, build_corpus
from sheepop.evaluate import baselines
from sheepop.tokenizer import TokenizerConfig


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"Número {number}: " + "sheep jump over fences. " * (number % 7 + 1))
    data = DataConfig(paths=(str(folder),), validation_fraction=0.3)
    return build_corpus(data, TokenizerConfig(algorithm="char"), tmp_path / "corpus", seed=0)


def test_sizes_equal_those_of_the_standard_library(corpus: Corpus) -> None:
    text = b"".join(document.text.encode("utf-8") for document in corpus.documents("validation"))
    found = baselines.compress_validation(corpus, Console.silent())
    assert found.bytes == len(text) == corpus.validation.num_bytes
    assert found.gzip == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text))
    assert found.xz == pytest.approx(8 * len(lzma.compress(text, preset=9)) / len(text))
    training = b"".join(document.text.encode("utf-8") for document in corpus.documents("train"))
    both, alone = (len(lzma.compress(read, preset=9)) for read in (training + text, training))
    assert found.training_bytes == len(training)
    assert found.warm_xz == pytest.approx(8 * (both - alone) / len(text))
    assert found.warm_xz < found.xz


def test_of_a_long_training_text_the_end_is_read(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "_XZ_WINDOW", 100)
    text, training = (
        b"".join(document.text.encode("utf-8") for document in corpus.documents(split))
        for split in ("validation", "train")
    )
    found = baselines.compress_validation(corpus, Console.silent())
    both, alone = (len(lzma.compress(read, preset=9)) for read in (training[-100:] + text, training[-100:]))
    assert found.training_bytes == 100
    assert found.warm_xz == pytest.approx(8 * (both - alone) / len(text))
