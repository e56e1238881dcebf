"""Files of every kind, made by the libraries that people make them with, and bad ones: all of them in one corpus."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sheepop.data import Corpus

from ..command_line import in_process

if sys.platform == "darwin":
    pytest.skip("macOS file systems refuse names that are not UTF-8", allow_module_level=True)
if shutil.which("git") is None:
    pytest.skip("git is not installed", allow_module_level=True)

STORY = "The shepherd leaves at dawn and the dog runs ahead of him over the wet grass of the common. " * 3 + " ".join(
    f"On day {day} they walk {day * day} paces along the {place}."
    for day, place in enumerate(("brook", "wall", "hedge", "road", "ridge", "ditch"), 1)
)
TEXTS = {
    ("good/barns.parquet", "row 1"): "A parquet row about the barn in the north.",
    ("good/barns.parquet", "row 2"): "A parquet row about the barn in the south.",
    ("good/caf\\xe9.txt", ""): "The name of this file is not UTF-8.\n",
    ("good/carriage\rreturn.txt", ""): "The name of this file returns to its beginning.\n",
    ("good/counting.ipynb", ""): (
        "# Counting\n\nThe number of sheep in the flock over the years, from the yearbook.\n\n"
        "```python\nflock = [41, 43]\nprint(sum(flock))\n```"
    ),
    ("good/diary.txt.gz", ""): "The diary is compressed, and says: Käse.\n",
    ("good/farm.sqlite", "table notes row 1"): "The first note in the database.",
    ("good/farm.sqlite", "table notes row 2"): "Schäfchen zählen.",
    ("good/farm.sqlite", "table prices"): "| item | price |\n| --- | --- |\n| wool | 2.5 |\n",
    ("good/lambs.xlsx", "sheet Lambs"): (
        "# Lambs\n\n| name | born | weight |\n| --- | --- | --- |\n| Ada | 2021 | 4.5 |\n| Bob | 2022 | 5 |"
    ),
    ("good/lambs.xlsx", "sheet Feed"): "# Feed\n\n| hay | TRUE |\n| --- | --- |",
    ("good/latin.txt", ""): "Où êtes-vous né ? À l'été, déjà, là où la forêt s'arrête !\n",
    ("good/letter.docx", ""): (
        "# About the fence\n\nThe fence at the brook is broken in two places.\n\n- Bring wire\n\n"
        "| post | state |\n| --- | --- |\n| north | rotten |"
    ),
    ("good/meadow.html", ""): "# The meadow\n\n"
    + "\n\n".join(f"Paragraph {number} says that the meadow is mown in the month of June." for number in range(1, 6)),
    ("good/papers.zip", "member notes/first.md"): "# First\n\nA note in an archive.\n",
    ("good/papers.zip", "member inner.zip, member deep.txt"): "A text that lies in an archive in an archive.",
    ("good/prices.csv", ""): "| item | price |\n| --- | --- |\n| wool | 2.50 |\n| cheese, old | 12 |\n",
    ("good/readme.md", ""): "# Farm\n\nWrite to <EMAIL> or not at all.\n",
    ("good/records.jsonl", "line 1"): "The first record of the lines.",
    ("good/records.jsonl", "line 2"): "The second\nrecord of them.",
    ("good/report.pdf", ""): (
        "The flock spends the winter in the valley.\nIt is counted every evening, and this is note A.\n\n"
        "In spring it climbs to the high pasture.\nIt is counted every evening, and this is note B."
    ),
    ("good/scan.pdf", ""): "The scanned letter has no text\n\nof its own, only a picture of it.",
    ("good/sign.png", ""): "Gate closed after sunset\n\nPlease ring the bell",
    ("good/source.tar.gz", "member shear.c"): "int shear(int n)\n{\n\treturn n - 1;\n}\n",
    ("good/source.tar.gz", "member read.txt"): "Read this text first.\n",
    ("good/story copy.txt", ""): STORY + "\n",
    ("good/table.pdf", ""): (
        "The animals of the farm are listed in this table.\n\n"
        "| animal | number |\n| --- | --- |\n| ewe | 41 |\n| ram | 3 |"
    ),
    ("good/tales.epub", ""): "The dog sleeps by the door.\n\nThe wolf waits behind the hill.",
    ("good/talk.pptx", ""): (
        "# Wool\n\nIt is shorn in May.\n\n# Milk\n\nIt becomes cheese.\n\nNotes:\nShow the cheese."
    ),
    ("good/tool.py", ""): ('"""A tool."""\n\n\ndef bleat(times):\n    if times:\n        print("baa")   \n\treturn\n'),
    ("good/two\nlines.txt", ""): "The name of this file has two lines.\n",
    **{
        ("bad/broken.jsonl", f"line {number}"): f"Record {number} of a file with one broken line in it."
        for number in (1, 2, 3, 5, 6, 7)
    },
    ("bad/half.json", "item \\ud83d"): "The key is half a sheep.",
    ("bad/half.json", "item b"): "The key is b.",
    ("bad/climbing.zip", "member inside.txt"): "The member beside the climbing one is read all the same.",
    ("repo/LICENSE", ""): "MIT License\n\nPermission is hereby granted, free of charge, to any person.\n",
    ("repo/flock.py", ""): "def count(sheep):\n\treturn sum(1 for _ in sheep)  # new\n",
}
KINDS = {
    **dict.fromkeys(("good/tool.py", "repo/flock.py"), ("code", "python")),
    **dict.fromkeys(("good/lambs.xlsx", "good/prices.csv"), ("table", "")),
    "good/latin.txt": ("prose", "fr"),
    "good/scan.pdf": ("prose", "en"),
}
QUARANTINE = {
    ("bad/bomb.zip", "extract", "bomb", ""),
    ("bad/broken.jsonl", "extract", "invalid", "line 4"),
    ("bad/caf\\xe9.bin", "extract", "binary", ""),
    ("bad/circle", "discover", "unreadable", ""),
    ("bad/climbing.zip", "extract", "unsafe", "member ../outside.txt"),
    ("bad/encrypted.pdf", "extract", "encrypted", ""),
    ("bad/loop/", "discover", "repeated", ""),
    ("bad/noise.bin", "extract", "binary", ""),
    ("bad/nothing.txt", "discover", "empty", ""),
    ("bad/truncated.pdf", "extract", "damaged", ""),
    ("bad/two\nlines.zip", "extract", "damaged", ""),
}
NOT_COMPARED = {"build.json", "report.html", "checksums.json"}  # they hold times, or the hashes of files that do


def documents(corpus: Path) -> Iterator[dict[str, Any]]:
    """The documents as they lie in the corpus."""
    for path in sorted((corpus / "documents").iterdir()):
        yield from map(json.loads, unpacked(path))


def unpacked(path: Path) -> list[str]:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as reader:
        return reader.read().decode("utf-8").splitlines()


def content(corpus: Path) -> dict[str, bytes]:
    files = (path for path in sorted(corpus.rglob("*")) if path.is_file())
    return {str(p.relative_to(corpus)): p.read_bytes() for p in files if p.name not in NOT_COMPARED}


def named(farm: Any, source: str) -> str:
    return source.replace(f"repo@{farm.revision[:12]}/", "repo/")


def test_the_text_of_every_file_is_there_and_nothing_else(farm: Any) -> None:
    found = [(named(farm, d["source"]), d.get("place", ""), d["text"]) for d in documents(farm.corpus)]
    texts = {(source, place): re.sub(r"<EMAIL_\w+>", "<EMAIL>", text) for source, place, text in found}
    assert texts == TEXTS
    assert len(found) == len(TEXTS)


def test_kinds_languages_and_facts_are_kept(farm: Any) -> None:
    by_source = {named(farm, d["source"]): d for d in documents(farm.corpus)}
    assert {source: (by_source[source]["kind"], by_source[source].get("language", "")) for source in KINDS} == KINDS
    assert by_source["repo/flock.py"]["facts"] == {"revision": farm.revision, "license_file": "LICENSE"}
    assert by_source["good/report.pdf"]["facts"]["title"] == "The flock in winter"
    assert by_source["good/tales.epub"]["facts"]["author"] == "A. Shepherd"
    assert by_source["good/scan.pdf"]["facts"]["recognised_pages"] == "1"
    assert [name for _, name in by_source["good/tales.epub"]["marks"]] == ["chapter 1: The dog", "chapter 2: The wolf"]
    assert [name for _, name in by_source["good/talk.pptx"]["marks"]] == ["slide 1", "slide 2"]


def test_each_bad_file_is_one_line_with_its_reason_and_nothing_is_written_outside(farm: Any) -> None:
    lines = [json.loads(line) for line in (farm.corpus / "quarantine.jsonl").read_bytes().splitlines()]
    assert Counter((e["file"], e["stage"], e["reason"], e.get("place", "")) for e in lines) == Counter(QUARANTINE)
    assert all(line["detail"] for line in lines)
    assert {path.name for path in farm.place.iterdir()} - {"other"} == {"good", "bad", "repo", "corpus"}
    assert not list(farm.place.rglob("outside.txt")) and not (farm.place.parent / "outside.txt").exists()


def test_the_copy_is_the_one_document_that_was_removed(farm: Any) -> None:
    (removed,) = map(json.loads, unpacked(farm.corpus / "removed.jsonl.zst"))
    assert (removed["file"], removed["stage"], removed["reason"]) == (
        "good/story.txt",
        "exact_duplicates",
        "exact copy",
    )
    assert removed["detail"] == "an equal document: good/story copy.txt"


def test_counts_reconcile_from_the_first_file_to_the_last_token(farm: Any) -> None:
    manifest = json.loads((farm.corpus / "manifest.json").read_text())
    report = json.loads((farm.corpus / "report.json").read_text())
    files, counts = manifest["files"], manifest["documents"]
    assert (report["files"], report["documents"]) == (files, counts)
    on_disk = [p for folder in ("good", "bad") for p in (farm.place / folder).iterdir() if not p.is_dir()]
    assert files["found"] == len(on_disk) + 2 == files["read"] + sum(files["skipped"].values())
    left_out = Counter(files["skipped"]) + Counter(files["folders_skipped"]) + Counter(files["refused_parts"])
    assert left_out == Counter(reason for _, _, reason, _ in QUARANTINE)
    assert counts["in"] == counts["kept"] + sum(counts["removed"].values()) + counts["empty"]
    assert (counts["empty"], counts["removed"]["exact_duplicates"]) == (1, 1)
    flow = {"documents": counts["in"] - counts["empty"], "bytes": report["stages"][0]["bytes_in"]}
    for stage in report["stages"]:
        assert flow == {name: stage[f"{name}_in"] for name in flow}
        removed = {"documents": sum(stage["removed"].values()), "bytes": sum(stage["removed_bytes"].values())}
        flow = {name: flow[name] - removed[name] for name in flow}
        flow["bytes"] += stage["added_bytes"]
        assert flow == {name: stage[f"{name}_out"] for name in flow}
        assert sum(stage["removed"].values()) == counts["removed"][stage["stage"]]
    written = [document["text"].encode() for document in documents(farm.corpus)]
    assert flow == {"documents": len(written), "bytes": sum(map(len, written))}
    assert (counts["kept"], counts["bytes"]) == (flow["documents"], flow["bytes"])
    assert len(unpacked(farm.corpus / "removed.jsonl.zst")) == sum(counts["removed"].values())
    corpus = Corpus.open(farm.corpus)
    encode = corpus.tokenizer().encode
    expected = sum(len(encode(text.decode())) + 1 for text in written)
    assert corpus.train.num_tokens + corpus.validation.num_tokens == expected
    assert sum(split["tokens"] for split in report["tokens"].values()) == expected
    assert report["reproducible"] is manifest["reproducible"] is True


@pytest.mark.parametrize(
    ("words", "pages"),
    [("spends the winter", ["page 1"]), ("In spring it climbs", ["page 2"]), ("note A.\n\nIn", ["page 1", "page 2"])],
)
def test_a_token_of_a_pdf_is_traced_to_its_page(farm: Any, words: str, pages: list[str]) -> None:
    corpus = Corpus.open(farm.corpus)
    for name, split in (("train", corpus.train), ("validation", corpus.validation)):
        for number in range(split.num_documents):
            text = corpus.tokenizer().decode(split.tokens(*split.offsets[number : number + 2]).tolist())
            if words not in text:
                continue
            # Every character here is a token.
            start = int(split.offsets[number]) + text.index(words)
            place = ("--tokens", f"{start}:{start + len(words)}", "--split", name)
            shown = in_process("data", "show", farm.corpus, *place, "--json")
            assert shown.code == 0, shown.err
            (origin,) = json.loads(shown.out)
            assert (origin["file"], origin["pages"], origin["text"]) == ("good/report.pdf", pages, words)
            assert (origin["start"], origin["stop"], origin["document"]) == (start, start + len(words), number)
            shown = in_process("data", "show", farm.corpus, *place)
            assert shown.code == 0 and f"good/report.pdf, {', '.join(pages)}" in shown.out
            return
    pytest.fail("the words are in no split")


def test_a_second_build_changes_nothing_and_says_so(farm: Any) -> None:
    before = {path: path.stat() for path in farm.corpus.rglob("*")}
    again = farm.build(farm.corpus, "--workers", "0")
    assert again.code == 0, again.err
    assert "is up to date: nothing in its input or settings has changed." in again.err
    after = {path: path.stat() for path in farm.corpus.rglob("*")}
    assert {p: (s.st_ino, s.st_mtime_ns) for p, s in after.items()} == {
        p: (s.st_ino, s.st_mtime_ns) for p, s in before.items()
    }


def test_a_build_by_other_settings_or_of_other_input_is_refused_with_a_remedy(farm: Any) -> None:
    before = content(farm.corpus)
    refusals = [farm.build(farm.corpus, "data.clean.language.keep=[en]")]
    added = farm.place / "good" / "added.txt"
    added.write_text("A file that was not there before.")
    try:
        refusals.append(farm.build(farm.corpus))
    finally:
        added.unlink()
    for refused in refusals:
        assert (refused.code, refused.out) != (0, "")
        assert "already exists, but was built from different input, with different settings" in refused.err
        assert "Replace it with --overwrite, or choose another output directory." in refused.err
        assert "Traceback" not in refused.err
    assert content(farm.corpus) == before


def test_two_workers_give_the_same_bytes(farm: Any) -> None:
    output = farm.place / "other" / "corpus"
    output.parent.mkdir()
    built = farm.build(output, "--workers", "2")
    assert built.code == 0, built.err
    assert content(output) == content(farm.corpus)
    assert [path.name for path in output.parent.iterdir()] == ["corpus"], "the workplace is gone"
