from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.console import Console
from sheepop.data import Corpus, DataConfig, build_corpus
from sheepop.tokenizer import TokenizerConfig

from ..command_line import Launcher

Growth = Callable[..., tuple[Any, int]]
# Calls a function of a module of tests with something small, then with something large.
MEASURED = """
import json, resource, sys
from importlib import import_module
module, name, small, large = sys.argv[1:]
work = getattr(import_module(module), name)
def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
work(small)
before = most()
print(json.dumps([work(large), most() - before]))
"""


@pytest.fixture
def growth(launcher: Launcher) -> Growth:
    """Returns what ``work(large)`` returns, as JSON, and how many bytes of memory it needs beside ``work(small)``.

    The largest memory of a process of `Launcher` begins with what it has at its start. That of a test process is the
    largest of all its tests, and a new program begins with that of the process that starts it.
    """

    def measured(work: Callable[[str], object], small: object, large: object) -> tuple[Any, int]:
        done = launcher.run(work.__module__, work.__name__, small, large, program=MEASURED)
        assert (done.code, done.err) == (0, ""), done
        found, grown = json.loads(done.out)
        return found, grown

    return measured


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
