from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sheepop.core.console import Console
from sheepop.data import Corpus, DataConfig, build_corpus
from sheepop.tokenizer import TokenizerConfig


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[Mapping[str, str | bytes]], Path]:
    """Writes files into a new folder and returns it."""

    def write(files: Mapping[str, str | bytes], name: str = "input") -> Path:
        root = tmp_path / name
        root.mkdir()
        for relative, content in files.items():
            path = root / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return root

    return write


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Corpus]:
    """Builds a corpus of characters, the fastest tokenizer to train."""

    def run(*paths: Path, output: str = "corpus", seed: int = 1, overwrite: bool = False, **settings: object) -> Corpus:
        # Nothing but equal documents is removed, and the order is that of the input, unless a test says otherwise.
        plain = {"clean": {"preset": "none", "stages": ["exact_duplicates"], "shuffle": False}}
        config = DataConfig.model_validate({"paths": [str(path) for path in paths], **plain, **settings})
        return build_corpus(
            config,
            TokenizerConfig(algorithm="char", vocab_size=1000),
            tmp_path / output,
            seed=seed,
            console=Console.silent(),
            overwrite=overwrite,
        )

    return run
