"""Files of every kind, made by the libraries that people make them with, and bad ones: all of them in one corpus."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sheepop.cli.main import main
from sheepop.data import Corpus

if sys.platform == "darwin":
    pytest.skip("macOS file systems refuse names that are not UTF-8", allow_module_level=True)
if shutil.which("git") is None:
    pytest.skip("git is not installed", allow_module_level=True)

FONT_SIZE = 34


def make_files(root: Path) -> None:
    """Fills `root` with good files."""
    root.mkdir()
    _pdfs(root)
    _pictures(root)
    _office(root)
    _books_and_notebooks(root)
    _pages(root)
    _tables(root)
    _archives(root)
    _texts(root)


def make_bad_files(root: Path) -> None:
    """Fills `root` with files none of which can be used whole."""
    from reportlab.lib.pdfencrypt import StandardEncryption
    from reportlab.pdfgen.canvas import Canvas

    root.mkdir()
    canvas = Canvas(str(root / "encrypted.pdf"), encrypt=StandardEncryption("secret", ownerPassword="owner"))
    canvas.drawString(72, 700, "Nobody may read this.")
    canvas.save()
    whole = io.BytesIO()
    canvas = Canvas(whole)
    canvas.drawString(72, 700, "Nobody can read this.")
    canvas.save()
    (root / "truncated.pdf").write_bytes(whole.getvalue()[:300])
    with zipfile.ZipFile(root / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.txt", bytes(100_000_000))
    with zipfile.ZipFile(root / "climbing.zip", "w") as archive:
        archive.writestr("../outside.txt", "This wants to be written outside.")
        archive.writestr("inside.txt", "The member beside the climbing one is read all the same.")
    lines = [json.dumps({"text": f"Record {number} of a file with one broken line in it."}) for number in range(1, 8)]
    lines[3] = lines[3][:-9]
    (root / "broken.jsonl").write_text("\n".join(lines) + "\n")
    (root / "half.json").write_text('{"\\ud83d": {"text": "The key is half a sheep."}, "b": {"text": "The key is b."}}')
    (root / "noise.bin").write_bytes(bytes(range(256)) * 40)
    (root / "nothing.txt").write_bytes(b"")
    (root / "blank.txt").write_text(" \n\t\n")
    (root / "circle").symlink_to("circle")
    (root / "loop").symlink_to(".", target_is_directory=True)
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.bin")).write_bytes(b"\0\1\2 binary")
    (root / "two\nlines.zip").write_bytes(b"PK\x03\x04 and no more")


def make_repository(root: Path) -> str:
    """A git repository with two revisions and a file that is not tracked; returns the hash of the second."""
    root.mkdir()
    (root / "LICENSE").write_text("MIT License\n\nPermission is hereby granted, free of charge, to any person.\n")
    (root / "flock.py").write_text("def count(sheep):\n\treturn len(sheep)  # old\n")
    _git(root, "init", "--quiet", "--initial-branch=main")
    _git(root, "add", ".")
    _git(root, "commit", "--quiet", "-m", "first")
    (root / "flock.py").write_text("def count(sheep):\n\treturn sum(1 for _ in sheep)  # new\n")
    _git(root, "commit", "--quiet", "-a", "-m", "second")
    (root / "flock.py").write_text("def count(sheep):\n\treturn 0  # never committed\n")
    (root / "untracked.txt").write_text("This file is not in the repository.")
    return _git(root, "rev-parse", "HEAD").strip()


def _git(root: Path, *arguments: str) -> str:
    who = {"NAME": "Shepherd", "EMAIL": "shepherd@localhost", "DATE": "2024-01-01T00:00:00Z"}
    settings = {f"GIT_{role}_{name}": value for role in ("AUTHOR", "COMMITTER") for name, value in who.items()}
    environment = {**os.environ, **settings, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def _pdfs(root: Path) -> None:
    from PIL import Image
    from reportlab.lib import colors
    from reportlab.lib.pagesizes import A4
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.lib.utils import ImageReader
    from reportlab.pdfgen.canvas import Canvas
    from reportlab.platypus import Paragraph, SimpleDocTemplate, Table, TableStyle

    canvas = Canvas(str(root / "report.pdf"), pagesize=A4, invariant=True)
    canvas.setTitle("The flock in winter")
    for number, page in enumerate(
        ("The flock spends the winter in the valley.", "In spring it climbs to the high pasture.")
    ):
        canvas.setFont("Helvetica", 12)
        canvas.drawString(72, 720, page)
        canvas.drawString(72, 700, f"It is counted every evening, and this is note {'AB'[number]}.")
        canvas.showPage()
    canvas.save()
    table = Table([["animal", "number"], ["ewe", "41"], ["ram", "3"]])
    table.setStyle(TableStyle([("GRID", (0, 0), (-1, -1), 1, colors.black)]))
    words = Paragraph("The animals of the farm are listed in this table.", getSampleStyleSheet()["Normal"])
    SimpleDocTemplate(str(root / "table.pdf"), pagesize=A4, invariant=True).build([words, table])
    picture: Any = Image.new("RGB", (1240, 700), "white")
    _write(picture, ["The scanned letter has no text", "of its own, only a picture of it."])
    canvas = Canvas(str(root / "scan.pdf"), pagesize=(620, 350), invariant=True)
    canvas.drawImage(ImageReader(picture), 0, 0, 620, 350)
    canvas.save()


def _pictures(root: Path) -> None:
    from PIL import Image

    picture = Image.new("L", (1000, 260), 255)
    _write(picture, ["Gate closed after sunset", "Please ring the bell"])
    picture.save(root / "sign.png")


def _write(picture: Any, lines: list[str]) -> None:
    from PIL import ImageDraw, ImageFont

    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        draw.text((60, 50 + 80 * number), line, fill="black", font=ImageFont.load_default(size=FONT_SIZE))


def _office(root: Path) -> None:
    import openpyxl
    from docx import Document
    from pptx import Presentation

    letter = Document()
    letter.core_properties.title = "A letter"
    letter.add_heading("About the fence", level=1)
    letter.add_paragraph("The fence at the brook is broken in two places.")
    letter.add_paragraph("Bring wire", style="List Bullet")
    table = letter.add_table(rows=2, cols=2)
    for cell, text in zip(
        (c for row in table.rows for c in row.cells), ("post", "state", "north", "rotten"), strict=True
    ):
        cell.text = text
    letter.save(str(root / "letter.docx"))
    talk = Presentation()
    for title, body in (("Wool", "It is shorn in May."), ("Milk", "It becomes cheese.")):
        slide = talk.slides.add_slide(talk.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = body
    slide.notes_slide.notes_text_frame.text = "Show the cheese."
    talk.save(str(root / "talk.pptx"))
    book = openpyxl.Workbook()
    book.active.title = "Lambs"
    for row in (["name", "born", "weight"], ["Ada", 2021, 4.5], ["Bob", 2022, 5]):
        book.active.append(row)
    book.create_sheet("Feed").append(["hay", True])
    book.save(root / "lambs.xlsx")


def _books_and_notebooks(root: Path) -> None:
    import mkepub
    import nbformat
    from nbformat import v4

    book = mkepub.Book(title="Tales from the pasture", author="A. Shepherd")
    book.add_page(title="The dog", content="<p>The dog sleeps by the <em>door</em>.</p>")
    book.add_page(title="The wolf", content="<p>The wolf waits behind the hill.</p>")
    book.save(str(root / "tales.epub"))
    book.tempdir.cleanup()
    cells = [
        v4.new_markdown_cell("# Counting\n\nThe number of sheep in the flock over the years, from the yearbook."),
        v4.new_code_cell("flock = [41, 43]\nprint(sum(flock))", outputs=[v4.new_output("stream", text="84\n")]),
    ]
    notebook = v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})
    nbformat.write(notebook, root / "counting.ipynb")


def _pages(root: Path) -> None:
    sentences = [f"Paragraph {number} says that the meadow is mown in the month of June." for number in range(1, 6)]
    paragraphs = "".join(f"<p>{sentence}</p>" for sentence in sentences)
    menu = "<nav><ul><li><a href='/'>Home</a></li><li><a href='/buy'>Buy our cheese now</a></li></ul></nav>"
    (root / "meadow.html").write_text(
        f"<!DOCTYPE html><html><head><title>The meadow</title><script>track()</script></head><body>{menu}"
        f"<article><h1>The meadow</h1>{paragraphs}</article><footer>All rights reserved</footer></body></html>"
    )


def _tables(root: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    texts = ["A parquet row about the barn in the north.", "A parquet row about the barn in the south."]
    parquet.write_table(pa.table({"id": [1, 2], "text": texts}), root / "barns.parquet")
    connection = sqlite3.connect(root / "farm.sqlite")
    connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT)")
    connection.executemany(
        "INSERT INTO notes (text) VALUES (?)", [("The first note in the database.",), ("Schäfchen zählen.",)]
    )
    connection.execute("CREATE TABLE prices (item TEXT, price REAL)")
    connection.execute("INSERT INTO prices VALUES ('wool', 2.5)")
    connection.commit()
    connection.close()
    (root / "prices.csv").write_text('item,price\nwool,2.50\n"cheese, old",12\n')
    records = [{"title": "One", "text": "The first record of the lines."}, {"text": "The second\nrecord of them."}]
    (root / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _archives(root: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("deep.txt", "A text that lies in an archive in an archive.")
    with zipfile.ZipFile(root / "papers.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("notes/first.md", "# First\n\nA note in an archive.\n")
        archive.writestr("inner.zip", inner.getvalue())
    with tarfile.open(root / "source.tar.gz", "w:gz") as tar:
        for name, text in (
            ("shear.c", "int shear(int n)\n{\n\treturn n - 1;\n}\n"),
            ("read.txt", "Read this text first.\n"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    with gzip.open(root / "diary.txt.gz", "wt", encoding="utf-8") as file:
        file.write("The diary is compressed, and says: Käse.\n")


def _texts(root: Path) -> None:
    (root / "readme.md").write_text("# Farm\n\nWrite to shepherd@sheep-farm.org or not at all.\n")
    (root / "tool.py").write_text(
        '"""A tool."""\n\n\ndef bleat(times):\n    if times:\n        print("baa")   \n\treturn\n'
    )
    (root / "latin.txt").write_bytes("Où êtes-vous né ? À l'été, déjà, là où la forêt s'arrête !\n".encode("latin-1"))
    story = "The shepherd leaves at dawn and the dog runs ahead of him over the wet grass of the common. " * 3
    varied = " ".join(
        f"On day {n} they walk {n * n} paces along the {w}."
        for n, w in enumerate(("brook", "wall", "hedge", "road", "ridge", "ditch"), 1)
    )
    (root / "story.txt").write_text(story + varied + "\n")
    (root / "story copy.txt").write_text(story + varied + "\n")
    (root / "two\nlines.txt").write_text("The name of this file has two lines.\n")
    (root / "carriage\rreturn.txt").write_text("The name of this file returns to its beginning.\n")
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.txt")).write_text("The name of this file is not UTF-8.\n")


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


@dataclass(frozen=True)
class Farm:
    """Where the files are, which revision the repository is at, and the corpus that was made of all."""

    place: Path
    revision: str

    @property
    def corpus(self) -> Path:
        return self.place / "corpus"

    def build(self, output: Path, *more: str) -> tuple[int, str, str]:
        inputs = (str(self.place / "good"), str(self.place / "bad"), f"git+{self.place / 'repo'}@HEAD")
        settings = ("tokenizer.algorithm=char", "tokenizer.vocab_size=500", "data.validation_fraction=0.1")
        return sheepop("data", "build", *inputs, "--output", str(output), *settings, *more)


def sheepop(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the command."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["sheepop", *arguments])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    place = tmp_path_factory.mktemp("farm")
    make_files(place / "good")
    make_bad_files(place / "bad")
    farm = Farm(place, make_repository(place / "repo"))
    code, _, err = farm.build(farm.corpus, "--workers", "0")
    assert code == 0, err
    return farm


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


def named(farm: Farm, source: str) -> str:
    return source.replace(f"repo@{farm.revision[:12]}/", "repo/")


def test_the_text_of_every_file_is_there_and_nothing_else(farm: Farm) -> None:
    found = [(named(farm, d["source"]), d.get("place", ""), d["text"]) for d in documents(farm.corpus)]
    texts = {(source, place): re.sub(r"<EMAIL_\w+>", "<EMAIL>", text) for source, place, text in found}
    assert texts == TEXTS
    assert len(found) == len(TEXTS)


def test_kinds_languages_and_facts_are_kept(farm: Farm) -> None:
    by_source = {named(farm, d["source"]): d for d in documents(farm.corpus)}
    assert {source: (by_source[source]["kind"], by_source[source].get("language", "")) for source in KINDS} == KINDS
    assert by_source["repo/flock.py"]["facts"] == {"revision": farm.revision, "license_file": "LICENSE"}
    assert by_source["good/report.pdf"]["facts"]["title"] == "The flock in winter"
    assert by_source["good/tales.epub"]["facts"]["author"] == "A. Shepherd"
    assert by_source["good/scan.pdf"]["facts"]["recognised_pages"] == "1"
    assert [name for _, name in by_source["good/tales.epub"]["marks"]] == ["chapter 1: The dog", "chapter 2: The wolf"]
    assert [name for _, name in by_source["good/talk.pptx"]["marks"]] == ["slide 1", "slide 2"]


def test_each_bad_file_is_one_line_with_its_reason_and_nothing_is_written_outside(farm: Farm) -> None:
    lines = [json.loads(line) for line in (farm.corpus / "quarantine.jsonl").read_bytes().splitlines()]
    assert Counter((e["file"], e["stage"], e["reason"], e.get("place", "")) for e in lines) == Counter(QUARANTINE)
    assert all(line["detail"] for line in lines)
    assert {path.name for path in farm.place.iterdir()} - {"other"} == {"good", "bad", "repo", "corpus"}
    assert not list(farm.place.rglob("outside.txt")) and not (farm.place.parent / "outside.txt").exists()


def test_the_copy_is_the_one_document_that_was_removed(farm: Farm) -> None:
    (removed,) = map(json.loads, unpacked(farm.corpus / "removed.jsonl.zst"))
    assert (removed["file"], removed["stage"], removed["reason"]) == (
        "good/story.txt",
        "exact_duplicates",
        "exact copy",
    )
    assert removed["detail"] == "an equal document: good/story copy.txt"


def test_counts_reconcile_from_the_first_file_to_the_last_token(farm: Farm) -> None:
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
def test_a_token_of_a_pdf_is_traced_to_its_page(farm: Farm, words: str, pages: list[str]) -> None:
    corpus = Corpus.open(farm.corpus)
    for name, split in (("train", corpus.train), ("validation", corpus.validation)):
        for number in range(split.num_documents):
            text = corpus.tokenizer().decode(split.document(number).tolist())
            if words not in text:
                continue
            # Every character here is a token.
            start = int(split.offsets[number]) + text.index(words)
            place = ("--tokens", f"{start}:{start + len(words)}", "--split", name)
            code, out, err = sheepop("data", "show", str(farm.corpus), *place, "--json")
            assert code == 0, err
            (origin,) = json.loads(out)
            assert (origin["file"], origin["pages"], origin["text"]) == ("good/report.pdf", pages, words)
            assert (origin["start"], origin["stop"], origin["document"]) == (start, start + len(words), number)
            code, out, _ = sheepop("data", "show", str(farm.corpus), *place)
            assert code == 0 and f"good/report.pdf, {', '.join(pages)}" in out
            return
    pytest.fail("the words are in no split")


def test_a_second_build_changes_nothing_and_says_so(farm: Farm) -> None:
    before = {path: path.stat() for path in farm.corpus.rglob("*")}
    code, _, err = farm.build(farm.corpus, "--workers", "0")
    assert (code, "is up to date: nothing in its input or settings has changed." in err) == (0, True), err
    after = {path: path.stat() for path in farm.corpus.rglob("*")}
    assert {p: (s.st_ino, s.st_mtime_ns) for p, s in after.items()} == {
        p: (s.st_ino, s.st_mtime_ns) for p, s in before.items()
    }


def test_a_build_by_other_settings_or_of_other_input_is_refused_with_a_remedy(farm: Farm) -> None:
    before = content(farm.corpus)
    refusals = [farm.build(farm.corpus, "data.clean.language.keep=[en]")]
    added = farm.place / "good" / "added.txt"
    added.write_text("A file that was not there before.")
    try:
        refusals.append(farm.build(farm.corpus))
    finally:
        added.unlink()
    for code, out, err in refusals:
        assert (code, out) != (0, "")
        assert "already exists, and was built of other input, by other settings" in err
        assert "Replace it with --overwrite, or choose another output directory." in err
        assert "Traceback" not in err
    assert content(farm.corpus) == before


def test_two_workers_give_the_same_bytes(farm: Farm) -> None:
    output = farm.place / "other" / "corpus"
    output.parent.mkdir()
    code, _, err = farm.build(output, "--workers", "2")
    assert code == 0, err
    assert content(output) == content(farm.corpus)
    assert [path.name for path in output.parent.iterdir()] == ["corpus"], "the workplace is gone"
