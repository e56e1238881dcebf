"""The quickstart's choices, and a whole quickstart in seconds."""

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from sheepop.core.errors import ConfigError, TokenizerError
from sheepop.data import Corpus
from sheepop.data.discovery import FoundFile, discover
from sheepop.data.documents import Document
from sheepop.jobs.config import load_config
from sheepop.jobs.quickstart import quickstart, render_outcome
from sheepop.jobs.quickstart_recipe import SIZES, choose_size, choose_tokenizer, library_paths, recipe
from sheepop.jobs.training_samples import held_out_prompts


def test_the_library_is_read_without_its_tests_and_without_what_is_installed_beside_it() -> None:
    paths, ignore = library_paths()
    found = [
        Path(item.path).relative_to(sysconfig.get_path("stdlib")).as_posix()
        for item in discover(paths, max_file_bytes=2**30, ignore=ignore)
        if isinstance(item, FoundFile)
    ]
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(found)
    assert not [path for path in found if path.startswith(("test/", "site-packages/")) or "/tests/" in path]


def test_more_arithmetic_and_more_minutes_give_larger_models() -> None:
    sizes = [choose_size(speed, 5.0, 10**12) for speed in (1e9, 1e10, 1e11, 1e12, 1e13, 1e14)]
    assert [size.flops for size in sizes] == sorted(size.flops for size in sizes)
    assert sizes[0] == SIZES[0]
    assert sizes[-1] == SIZES[-1]
    assert choose_size(1e11, 50.0, 10**12) == choose_size(1e12, 5.0, 10**12)


def test_little_text_gets_a_small_model() -> None:
    assert choose_size(1e14, 5.0, 0) == SIZES[0]
    for num_bytes in (10**5, 10**6, 10**7, 10**8):
        size = choose_size(1e14, 5.0, num_bytes)
        assert size == SIZES[0] or size.weights <= num_bytes


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_a_valid_configuration(size: object) -> None:
    config = load_config(base=recipe(size, {"vocab_size": 4096}, paths=["x"], ignore=[], minutes=5))  # type: ignore[arg-type]
    assert config.training.max_minutes == 5
    assert config.model.head_size % 2 == 0


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, {"algorithm": "char"}),
        (100_000, {"vocab_size": 512}),
        (900_000, {"vocab_size": 2048}),
        (10**8, {"vocab_size": 4096}),
    ],
)
def test_the_vocabulary_fits_the_text(num_bytes: int, expected: dict[str, object]) -> None:
    size = next(size for size in SIZES if size.vocab_size == 4096)
    assert choose_tokenizer(size, num_bytes) == expected


def test_a_quickstart_on_own_files_leaves_a_model_samples_and_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    words = ("sheep", "wool", "fence", "meadow", "shepherd", "night", "moon", "star", "dream", "count", "lamb")
    for number in range(40):
        picked = [words[(number * 7 + place * place) % len(words)] for place in range(200)]
        (folder / f"{number}.md").write_text(f"# Note {number}\n\n" + " ".join(picked) + f" {number**3}\n")
    with pytest.raises(TokenizerError, match=r"Set tokenizer\.vocab_size"):
        quickstart(tmp_path / "run", minutes=0.05, paths=[folder], device="cpu")
    overrides = ["tokenizer.vocab_size=300"]
    outcome = quickstart(tmp_path / "run", minutes=0.05, paths=[folder], device="cpu", overrides=overrides)
    assert (tmp_path / "run" / "report.html").is_file()
    assert outcome.scores.bytes <= outcome.baselines.bytes
    assert outcome.completions[0].prompt.startswith("# Note")
    assert json.loads(json.dumps(outcome.to_dict()))["scores"]["bits_per_byte"] == outcome.scores.bits_per_byte
    text = render_outcome(outcome)
    assert f"{outcome.baselines.xz:.3f}" in text and f"{outcome.scores.bits_per_byte:.3f}" in text
    again = quickstart(tmp_path / "run", device="cpu", resume=True)  # knows whose text it was
    assert again.scores == outcome.scores
    assert [c.text for c in again.completions] == [c.text for c in outcome.completions]
    with pytest.raises(ConfigError, match=r"training\.max_minutes was 0\.05, now 0\.1"):
        quickstart(tmp_path / "run", minutes=0.1, device="cpu", resume=True)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a\nb\nc\nd\ne\nf\n"], ["a\nb\nc\nd\ne\nf\n", "c\nd\ne\nf\n", "e\nf\n"]),
        (["one line"], ["one line"]),
        (["\n  one\n", "two\n", "three\n", "four\n"], ["one\n", "two\n", "three\n"]),
    ],
)
def test_prompts_are_held_out_beginnings_or_lines_further_down(texts: list[str], expected: list[str]) -> None:
    class HeldOut:
        def documents(self, split: str) -> Iterator[Document]:
            assert split == "validation"
            return (Document.of(text, "file", 0) for text in texts)

    assert held_out_prompts(cast(Corpus, HeldOut())) == expected
