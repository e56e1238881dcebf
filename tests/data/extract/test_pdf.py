from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pdfplumber
import pypdfium2
import pytest
from reportlab.lib import colors
from reportlab.lib.pagesizes import A4
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.styles import ParagraphStyle
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import BaseDocTemplate, Frame, PageTemplate, Paragraph, SimpleDocTemplate, Spacer, Table
from reportlab.platypus.flowables import Flowable

from sheepop.data.extract.interface import Extracted, ExtractionError, Refused

FILES = Path(__file__).parent / "files"
PARAGRAPHS = [
    "The shepherd counted the flock twice before the rain began, and both times one animal was missing from the count.",
    "In the valley below, the river had risen above the lower meadow; nobody had seen it so high since the winter of "
    "1947, when the old bridge was carried away and the village was cut off for nine days.",
    "What was to be done? The dog, a patient creature with one white ear, had already gone to look along the wall.",
    "By evening the missing ewe was found behind the chapel with two lambs that had not been there in the morning.",
]
CELLS = [["Breed", "Weight (kg)", "Wool"], ["Merino", "75", "very fine"], ["Texel", "95", "coarse | thick"]]
TABLE = """\
| Breed | Weight (kg) | Wool |
| --- | --- | --- |
| Merino | 75 | very fine |
| Texel | 95 | coarse \\| thick |"""

Extract = Callable[..., list[Extracted | Refused]]
Read = Callable[..., Extracted]
Drawn = Callable[..., bytes]


def typeset(paragraphs: Sequence[str | Flowable], columns: int = 1, **style: Any) -> bytes:
    """A PDF that reportlab sets as running text."""
    buffer = io.BytesIO()
    look = ParagraphStyle("body", fontName="Times-Roman", fontSize=10, leading=12, spaceAfter=8, **style)
    story = [Paragraph(item, look) if isinstance(item, str) else item for item in paragraphs]
    document = BaseDocTemplate(buffer, pagesize=A4)
    width = 451 / columns
    frames = [Frame(72 + number * width, 72, width - 14, 698, 0, 0, 0, 0) for number in range(columns)]
    document.addPageTemplates(PageTemplate(frames=frames))
    document.build(story)
    return buffer.getvalue()


def ruled_table(cells: Sequence[Sequence[str]] = CELLS) -> Table:
    return Table(cells, style=[("GRID", (0, 0), (-1, -1), 0.5, colors.black)])


@pytest.mark.parametrize("alignment", [0, 4], ids=["ragged", "justified"])
def test_running_text_comes_back_paragraph_by_paragraph(read_pdf: Read, alignment: int) -> None:
    document = read_pdf(typeset(PARAGRAPHS, alignment=alignment))

    assert document.text == "\n\n".join(PARAGRAPHS)
    assert document.kind == "prose"
    assert document.place == ""
    assert document.marks == ((0, "page 1"),)


def test_paragraphs_that_only_an_indent_parts_come_back_too(read_pdf: Read) -> None:
    text = typeset(PARAGRAPHS, alignment=4, firstLineIndent=14)
    style = ParagraphStyle("body", fontName="Times-Roman", fontSize=10, leading=12, alignment=4, firstLineIndent=14)
    buffer = io.BytesIO()
    SimpleDocTemplate(buffer).build([Paragraph(item, style) for item in PARAGRAPHS])

    assert read_pdf(text).text == read_pdf(buffer.getvalue()).text == "\n\n".join(PARAGRAPHS)


def test_two_columns_are_read_one_after_the_other(read_pdf: Read) -> None:
    paragraphs = PARAGRAPHS * 7

    text = read_pdf(typeset(paragraphs, columns=2, alignment=4)).text

    assert text.split() == " ".join(paragraphs).split()
    assert text == "\n\n".join(paragraphs)


def test_columns_are_read_in_order_when_the_file_holds_them_row_by_row(read_pdf: Read, drawn: Drawn) -> None:
    left = [f"Left line {number} speaks of sheep and of grass" for number in range(8)]
    right = [f"Right line {number} speaks of wool and of rain" for number in range(8)]

    def draw(canvas: Canvas) -> None:
        canvas.drawCentredString(297, 760, "A headline that stands across both of the columns of this page, as it may")
        for row in range(8):
            canvas.drawString(72, 700 - 14 * row, left[row])
            canvas.drawString(320, 700 - 14 * row, right[row])

    text = read_pdf(drawn(draw)).text

    assert text.startswith("A headline")
    assert [text.index(line) for line in left + right] == sorted(text.index(line) for line in left + right)


def test_rows_of_a_table_without_lines_are_read_across(read_pdf: Read, drawn: Drawn) -> None:
    rows = [("Merino", "75", "fine"), ("Texel", "95", "coarse"), ("Soay", "30", "brown"), ("Herdwick", "60", "grey")]

    def draw(canvas: Canvas) -> None:
        for column in range(3):
            for row, cells in enumerate(rows):
                canvas.drawString(72 + 120 * column, 700 - 15 * row, cells[column])

    assert [line.split() for line in read_pdf(drawn(draw)).text.splitlines() if line] == [list(row) for row in rows]


def test_a_divided_word_is_made_whole_and_a_compound_keeps_its_hyphen(read_pdf: Read, drawn: Drawn) -> None:
    def draw(canvas: Canvas) -> None:
        text = canvas.beginText(72, 700)
        for line in (
            "The hardworking shepherd looked for the miss-",
            "ing ewe in the rain-soaked meadow, which is rain-",
            "soaked for half of every year since the Anglo-",
            "Saxon age, and found it beside two- and three-",
            "year-old rams that had come here from the val-",
            "ley.",
        ):
            text.textLine(line)
        canvas.drawText(text)

    expected = (
        "The hardworking shepherd looked for the missing ewe in the rain-soaked meadow, which is rain-soaked for half "
        "of every year since the Anglo-Saxon age, and found it beside two- and three-year-old rams that had come here "
        "from the valley."
    )
    words = read_pdf(drawn(draw)).text
    # "three-" before "year-old" cannot be told from a divided word.
    assert words.replace("threeyear-old", "three-year-old") == expected


def test_code_keeps_its_lines(read_pdf: Read, drawn: Drawn) -> None:
    code = ["def count(flock):", "total = 0", "for sheep in flock:", "total += 1", "return total"]

    def draw(canvas: Canvas) -> None:
        canvas.setFont("Courier", 10)
        for row, line in enumerate(code):
            canvas.drawString(72, 700 - 12 * row, line)

    assert read_pdf(drawn(draw)).text.splitlines() == code


def test_ligatures_and_bullets_are_spelt_out_and_no_control_character_is_left(read_pdf: Read, drawn: Drawn) -> None:
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont

    pdfmetrics.registerFont(TTFont("DejaVu", str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"))))

    def draw(canvas: Canvas) -> None:
        canvas.setFont("DejaVu", 12)
        canvas.drawString(72, 700, "The o\ufb03ce of the \ufb01rst \ufb02ock, 25 \u20ac, \u0394x \u2264 \u03c0")
        canvas.drawString(72, 670, "soft\u00adhyphen zero\u200bwidth")

    text = read_pdf(drawn(draw)).text

    assert text.startswith("The office of the first flock, 25 \u20ac, \u0394x \u2264 \u03c0")
    assert "zerowidth" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_ruled_table_is_markdown_in_its_place_and_not_repeated(read_pdf: Read) -> None:
    document = read_pdf(typeset([PARAGRAPHS[0], ruled_table(), Spacer(1, 12), PARAGRAPHS[1]]))

    assert document.text == f"{PARAGRAPHS[0]}\n\n{TABLE}\n\n{PARAGRAPHS[1]}"
    assert document.metadata["tables"] == "1"


def test_tables_can_be_left_as_text(read_pdf: Read) -> None:
    document = read_pdf(typeset([PARAGRAPHS[0], ruled_table()]), pdf_tables=False)

    assert "| --- |" not in document.text
    assert document.text.split() == " ".join([PARAGRAPHS[0], *(cell for row in CELLS for cell in row)]).split()


def test_cells_are_those_that_pdfplumber_finds(read_pdf: Read) -> None:
    cells = [[f"cell {row} {column}" for column in range(5)] for row in range(30)]
    data = typeset([ruled_table(cells)])

    with pdfplumber.open(io.BytesIO(data)) as file:
        expected = file.pages[0].extract_table()
    lines = read_pdf(data).text.splitlines()

    assert expected == cells
    assert [line.strip("| ").split(" | ") for line in [lines[0], *lines[2:]]] == expected


ROWS = [
    "Breed   Weight   Wool   Grazing",
    "Merino   75   very fine dry plains",
    "Texel   95   coarse   lowland pasture",
    "Herdwick   45   grey   high fells",
    "Swaledale   50   white   moors and hills",
]


@pytest.mark.parametrize("name", ["inner-rules", "few-rules"])
def test_a_table_whose_rules_part_only_some_of_it_is_read_by_rows(read_pdf: Read, name: str) -> None:
    document = read_pdf((FILES / f"{name}.pdf").read_bytes())
    assert "\n".join(ROWS) in document.text
    assert "|" not in document.text and "tables" not in document.metadata


def test_cells_of_wrapped_text_stay_cells(read_pdf: Read) -> None:
    lines = read_pdf((FILES / "wrapped-cells.pdf").read_bytes()).text.splitlines()
    assert lines[-1].startswith(
        "| Merino came from the south with a trader who had seen them on the hills | Its wool is"
    )


def test_letters_printed_twice_to_look_bold_are_read_once(read_pdf: Read) -> None:
    text = read_pdf((FILES / "overprinted.pdf").read_bytes()).text
    assert text == "羊の品種羊毛の種類牧草と水冬の小屋春の市場秋の祭り羊の病気犬の仕事"


def test_columns_from_top_to_bottom_are_read_from_the_right(read_pdf: Read) -> None:
    text = read_pdf((FILES / "vertical.pdf").read_bytes()).text
    assert text.startswith(
        "吾輩は猫である。名前はまだ無い。どこで生れたか頓と見当がつかぬ。何でも薄暗いじめじめした所で"
    )
    assert text.endswith("しかもあとで聞くとそれは書生という人間中で一番獰悪な種族であったそうだ。")


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_a_turned_page_is_read_as_if_upright(read_pdf: Read, turn: int) -> None:
    data = typeset([PARAGRAPHS[0], ruled_table(), Spacer(1, 12), PARAGRAPHS[2]])
    document = pypdfium2.PdfDocument(data)
    document[0].set_rotation(turn)
    document[0].set_cropbox(30, 40, 560, 800)
    buffer = io.BytesIO()
    document.save(buffer)
    document.close()

    assert read_pdf(buffer.getvalue()).text == f"{PARAGRAPHS[0]}\n\n{TABLE}\n\n{PARAGRAPHS[2]}"


@pytest.mark.parametrize("turned", ["page", "text"])
def test_words_that_were_placed_one_by_one_are_read_in_order_if_they_are_upside_down(
    read_pdf: Read, drawn: Drawn, turned: str
) -> None:
    # As programs that recognise scans place them, with the page or the text turned.
    lines = ["The shepherd walks every morning with", "his dog to the hill where the river", "begins and sheep graze."]

    def draw(canvas: Canvas) -> None:
        if turned == "page":
            canvas.setPageRotation(180)
        for row, line in enumerate(lines):
            left = 72.0
            for word in line.split():
                text = canvas.beginText()
                text.setTextRenderMode(3)
                if turned == "page":
                    text.setTextTransform(1, 0, 0, 1, left, 700 - 14 * row)
                else:
                    text.setTextTransform(-1, 0, 0, -1, 520 - left, 100 + 14 * row)
                text.textOut(word)
                canvas.drawText(text)
                left += canvas.stringWidth(f"{word} ")

    assert read_pdf(drawn(draw)).text.split() == " ".join(lines).split()


def test_a_stamp_along_the_margin_follows_the_text(read_pdf: Read, drawn: Drawn) -> None:
    def draw(canvas: Canvas) -> None:
        for row, line in enumerate(PARAGRAPHS[0].split(",")):
            canvas.drawString(100, 700 - 40 * row, line.strip())
        canvas.translate(30, 300)
        canvas.rotate(90)
        canvas.drawString(0, 0, "stamp:2401.00001v1 12 Jan 2024")

    assert read_pdf(drawn(draw)).text.endswith(
        "one animal was missing from the count.\n\nstamp:2401.00001v1 12 Jan 2024"
    )


def test_metadata_is_kept(read_pdf: Read, drawn: Drawn) -> None:
    def draw(canvas: Canvas) -> None:
        canvas.setTitle("On Sheep\n and Goats")
        canvas.setAuthor("Ærø Ødegård")
        canvas.drawString(72, 700, "Text.")
        canvas.showPage()
        canvas.drawString(72, 700, "More.")

    metadata = read_pdf(drawn(draw)).metadata

    assert metadata == {"title": "On Sheep and Goats", "author": "Ærø Ødegård", "pages": "2"}


def test_every_page_with_text_has_a_mark_where_its_text_begins(read_pdf: Read, pages_of: Drawn) -> None:
    document = read_pdf(pages_of("The first page.", "", "The third page.", "The fourth page."))

    assert document.text == "The first page.\n\nThe third page.\n\nThe fourth page."
    assert [(document.text[offset:][:9], name) for offset, name in document.marks] == [
        ("The first", "page 1"),
        ("The third", "page 3"),
        ("The fourt", "page 4"),
    ]


def test_running_heads_are_said_once_and_page_numbers_not_at_all(read_pdf: Read, drawn: Drawn) -> None:
    def draw(canvas: Canvas) -> None:
        for number in range(1, 8):
            canvas.drawString(72, 800, "Annual report of the wool board")
            canvas.drawString(72, 780, f"{number * number + 17} bales")
            canvas.drawString(72, 500, f"This is what page {number} has to say.")
            canvas.drawString(290, 40, f"{number + 4}")
            canvas.showPage()

    data = drawn(draw)
    document = read_pdf(data)
    whole = read_pdf(data, strip_running_lines=False)

    assert document.text.count("Annual report") == 1
    # Figures that do not count with the pages are no page numbers.
    assert [f"{n * n + 17} bales" in document.text for n in range(1, 8)] == [True] * 7
    assert document.metadata["running_lines"] == "13"
    assert whole.text.count("Annual report") == 7
    assert len(whole.text.split()) == len(document.text.split()) + 6 * 6 + 7


def test_a_password_is_needed(extract_pdf: Extract, drawn: Drawn) -> None:
    data = drawn(lambda canvas: canvas.drawString(72, 700, "secret"), encrypt=StandardEncryption("user", "owner"))

    with pytest.raises(ExtractionError) as raised:
        extract_pdf(data)

    assert raised.value.reason == "encrypted"


def test_a_file_that_opens_without_its_password_is_read(read_pdf: Read, drawn: Drawn) -> None:
    data = drawn(
        lambda canvas: canvas.drawString(72, 700, "open to all"), encrypt=StandardEncryption("", "owner", strength=128)
    )

    assert read_pdf(data).text == "open to all"


@pytest.mark.parametrize("fonttype", [3, 42])
def test_the_text_of_a_figure_is_read(read_pdf: Read, fonttype: int) -> None:
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({"pdf.fonttype": fonttype}):
        figure = Figure()
        axes = figure.subplots()
        axes.plot([0, 1], [3, 5])
        axes.set_title("Wool by year")
        axes.set_xlabel("years since 1900")
        axes.set_ylabel("bales")
        figure.savefig(buffer, format="pdf")

    text = read_pdf(buffer.getvalue()).text

    assert "Wool by year" in text
    assert "years since 1900" in text
    assert text.endswith("bales")  # it runs upwards along the axis


@pytest.mark.system
@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="needs pdftotext of poppler-utils")
@pytest.mark.parametrize("columns", [1, 2])
def test_words_come_in_the_order_of_pdftotext(tmp_path: Path, read_pdf: Read, columns: int) -> None:
    data = typeset([f"{number}. {text}" for number, text in enumerate(PARAGRAPHS * 25)], columns=columns, alignment=4)
    path = tmp_path / "a.pdf"
    path.write_bytes(data)

    other = subprocess.run(["pdftotext", str(path), "-"], capture_output=True, text=True, check=True).stdout

    assert read_pdf(data).text.split() == other.split()


@pytest.mark.system
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_page_that_a_browser_printed_is_read(tmp_path: Path, read_pdf: Read) -> None:
    hebrew = "הכבשה הלבנה אכלה 42 תפוחים בשנת 2024, ואז הלכה הביתה לישון עם Dolly Parton."
    arabic = "السلام عليكم ورحمة الله، هذه جملة قصيرة فيها الرقم 125 ثم كلمة Linux وبعدها نهاية الكلام."
    mixed = "The word שלום means peace, and سلام does too, in 3 languages \N{GRINNING FACE}."
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in CELLS)
    page = tmp_path / "page.html"
    page.write_text(
        f"<meta charset=utf-8><style>body{{font-family:'DejaVu Sans'}} td{{border:1px solid black}}</style>"
        f"<h1>On the flock</h1><p>{PARAGRAPHS[1]}<p dir=rtl>{hebrew}<p dir=rtl>{arabic}<p>{mixed}<table>{rows}</table>"
    )
    printed = tmp_path / "page.pdf"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    subprocess.run([*command, f"--print-to-pdf={printed}", str(page)], capture_output=True, check=True, timeout=120)

    document = read_pdf(printed.read_bytes())

    assert document.text == "\n\n".join(["On the flock", PARAGRAPHS[1], hebrew, arabic, mixed, TABLE])
