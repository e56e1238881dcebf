"""A farm's files of every kind, made by the libraries that people make them with, and bad ones; and their corpus."""

from __future__ import annotations

import gzip
import io
import json
import os
import sqlite3
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..command_line import Ended, in_process

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


@dataclass(frozen=True)
class Farm:
    """Where the files are, which revision the repository is at, and the corpus that was made of all."""

    place: Path
    revision: str

    @property
    def corpus(self) -> Path:
        return self.place / "corpus"

    def build(self, output: Path, *more: str) -> Ended:
        inputs = (str(self.place / "good"), str(self.place / "bad"), f"git+{self.place / 'repo'}@HEAD")
        settings = ("tokenizer.algorithm=char", "tokenizer.vocab_size=500", "data.validation_fraction=0.1")
        return in_process("data", "build", *inputs, "--output", str(output), *settings, *more)


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    place = tmp_path_factory.mktemp("farm")
    make_files(place / "good")
    make_bad_files(place / "bad")
    farm = Farm(place, make_repository(place / "repo"))
    built = farm.build(farm.corpus, "--workers", "0")
    assert built.code == 0, built.err
    return farm
