"""The quickstart's choices, and a whole quickstart in seconds."""

import io
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

import sheepop
from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, TokenizerError
from sheepop.data import Corpus
from sheepop.data.discovery import Entry, discover
from sheepop.data.documents import Document
from sheepop.jobs.quickstart import library_paths, quickstart, render_outcome
from sheepop.jobs.task.samples import held_out_prompts


def test_the_library_is_read_without_its_tests_and_without_what_is_installed_beside_it() -> None:
    paths, ignore = library_paths()
    found = [
        Path(item.path).relative_to(sysconfig.get_path("stdlib")).as_posix()
        for item in discover(paths, max_file_bytes=2**30, ignore=ignore)
        if isinstance(item, Entry)
    ]
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(found)
    assert not [path for path in found if path.startswith(("test/", "site-packages/")) or "/tests/" in path]


def test_a_quickstart_on_own_files_leaves_a_model_samples_and_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    words = ("sheep", "wool", "fence", "meadow", "shepherd", "night", "moon", "star", "dream", "count", "lamb")
    for number in range(40):
        picked = [words[(number * 7 + place * place) % len(words)] for place in range(200)]
        (folder / f"{number}.md").write_text(f"# Note {number}\n\n" + " ".join(picked) + f" {number**3}\n")
    with pytest.raises(TokenizerError, match=r"Set tokenizer\.vocab_size"):
        quickstart(tmp_path / "run", minutes=0.05, paths=[folder], overrides=["tokenizer.vocab_size=9999"])
    said = io.StringIO()
    outcome = quickstart(
        tmp_path / "run", minutes=0.05, paths=[folder], device="cpu", exportable=True, console=Console(file=said)
    )
    assert "tokens instead of the usual 512, because there is little text" in said.getvalue()
    assert "--exportable" not in said.getvalue()
    lm = sheepop.load(tmp_path / "run")
    model = lm.config
    assert (model.ngrams, model.short_convolution) == (None, None)
    checkpoints = RunDirectory(tmp_path / "run")
    assert set(checkpoints.steps()) == {checkpoints.pointer("latest"), checkpoints.pointer("best")}
    told = re.search(r"([\d,]+) s were used .* training has ([\d,]+) s, .* about ([\d,]+) s", said.getvalue())
    assert told is not None and "Comparison" in list(outcome.seconds)[:2]  # it is paid for before training
    report = (tmp_path / "run" / "report.html").read_text()
    (found,) = re.findall(r'<div class="journey"></div><script type="application/json">(.*?)</script>', report)
    journey, trace = json.loads(found), lm.trace(outcome.completions[0].prompt)
    assert [token["id"] for token in journey["tokens"]] == trace.token_ids[-24:]
    assert journey["next"][0]["id"] == int(trace.logits_behind(-1).argmax())
    assert outcome.scores.bytes <= outcome.baselines.bytes
    assert outcome.completions[0].prompt.startswith("# Note")
    assert json.loads(json.dumps(outcome.to_dict()))["scores"]["bits_per_byte"] == outcome.scores.bits_per_byte
    pieces = render_outcome(outcome)
    assert [style for piece, style in pieces if piece == outcome.completions[0].prompt] == ["dim"]
    assert [style for piece, style in pieces if piece == f"{outcome.completions[0].text}\n"] == ["bold"]
    text = "".join(piece for piece, _ in pieces)
    assert f"sheepop score {tmp_path / 'run'} '{outcome.completions[0].prompt.splitlines()[0]}'" in text
    assert text.count("sheepop generate ") == text.count("sheepop score ") == text.count("sheepop ui ") == 1
    assert f"{outcome.baselines.xz:.3f}" in text and f"{outcome.scores.bits_per_byte:.3f}" in text
    rows = text.partition(f"on the same {outcome.baselines.bytes:,} bytes:\n")[2].partition("\n\n")[0].splitlines()
    shown = {name.strip(): float(bits) for name, bits in (row.rsplit(maxsplit=1) for row in rows)}
    expected = {**outcome.baselines.named, "> this model": outcome.scores.bits_per_byte}
    assert shown == {name: round(bits, 3) for name, bits in expected.items()}
    assert list(shown.values()) == sorted(shown.values(), reverse=True)
    assert "> this model" in shown and "xz -9 that has read the training text" in shown
    again = quickstart(tmp_path / "run", device="cpu", resume=True)  # knows whose text it was
    assert again.scores == outcome.scores
    assert [c.text for c in again.completions] == [c.text for c in outcome.completions]
    with pytest.raises(ConfigError, match=r"training\.max_minutes was 0\.05 and is now 0\.1"):
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
