from __future__ import annotations

import io
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pptx
import pytest
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.presentation import Presentation
from pptx.util import Inches

from sheepop.data.extract.interface import Extracted, Refused

ReadAs = Callable[..., list[Extracted | Refused]]

SLIDES = [
    "# Sheep\n\na talk",
    "# Points\n\n- One\n  - under one\n- Two\n\nNotes:\nSay this\nand that.",
    "# Numbers\n\n| a | b |\n| --- | --- |\n| wide |  |\n\nSales\n\n|  | Q1 | Q2 |\n| --- | --- | --- |\n"
    "| East | 1.5 | 3 |\n| West | 2 | 4 |\n\nin a\ngroup",
]


def saved(presentation: Presentation) -> bytes:
    buffer = io.BytesIO()
    presentation.save(buffer)
    return buffer.getvalue()


def sample() -> Presentation:
    made = pptx.Presentation()
    slide = made.slides.add_slide(made.slide_layouts[0])
    slide.shapes.title.text, slide.placeholders[1].text = "Sheep", "a talk"
    slide = made.slides.add_slide(made.slide_layouts[1])
    slide.shapes.title.text = "Points"
    frame = slide.placeholders[1].text_frame
    frame.text = "One"
    for text, level in (("under one", 1), ("Two", 0)):
        paragraph = frame.add_paragraph()
        paragraph.text, paragraph.level = text, level
    slide.notes_slide.notes_text_frame.text = "Say this\nand that."
    slide = made.slides.add_slide(made.slide_layouts[5])
    slide.shapes.title.text = "Numbers"
    table = slide.shapes.add_table(2, 2, 0, 0, Inches(3), Inches(1)).table
    table.cell(0, 0).text, table.cell(0, 1).text, table.cell(1, 0).text = "a", "b", "wide"
    table.cell(1, 0).merge(table.cell(1, 1))
    figures = CategoryChartData()
    figures.categories = ["East", "West"]
    figures.add_series("Q1", (1.5, 2))
    figures.add_series("Q2", (3, 4))
    chart = slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, Inches(3), Inches(2), figures).chart
    chart.has_title = True
    chart.chart_title.text_frame.text = "Sales"
    box = slide.shapes.add_group_shape().shapes.add_textbox(0, 0, Inches(1), Inches(1))
    box.text_frame.text = "in a\vgroup"
    made.core_properties.title = "Talks"
    return made


def document(items: list[Extracted | Refused]) -> Extracted:
    (item,) = items
    assert isinstance(item, Extracted), item
    assert item.kind == "prose"
    return item


def with_part(data: bytes, name: str, change: Callable[[str], str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.namelist():
            content = old.read(member)
            new.writestr(member, change(content.decode()).encode() if member == name else content)
    return buffer.getvalue()


def test_a_presentation_of_python_pptx_becomes_markdown_slide_by_slide(read_as: ReadAs) -> None:
    item = document(read_as("pptx", saved(sample())))
    assert item.text == "\n\n".join(SLIDES)
    names = [name for _, name in item.marks]
    starts = [offset for offset, _ in item.marks]
    assert names == ["slide 1", "slide 2", "slide 3"]
    assert [item.text[begin:].startswith(slide) for begin, slide in zip(starts, SLIDES, strict=True)] == [True] * 3
    assert item.metadata["title"] == "Talks"


def test_a_presentation_of_pandoc_becomes_the_markdown_it_was_made_of(read_as: ReadAs, tmp_path: Path) -> None:
    pandoc = shutil.which("pandoc")
    if pandoc is None:
        pytest.skip("pandoc is not installed")
    source = "# Sheep\n\nThey eat grass.\n\n1. one\n2. two\n\n# Wool\n\n- a\n  - b\n\n::: notes\nSay so.\n:::\n"
    made = tmp_path / "made.pptx"
    subprocess.run([pandoc, "-f", "markdown", "-o", made], input=source.encode(), check=True)
    item = document(read_as("pptx", made.read_bytes()))
    assert item.text == source.strip().replace("::: notes", "Notes:").replace("\n:::", "")


def test_a_presentation_of_libreoffice_becomes_markdown(read_as: ReadAs, tmp_path: Path) -> None:
    soffice = shutil.which("soffice")
    if soffice is None:
        pytest.skip("LibreOffice is not installed")
    (tmp_path / "a.pptx").write_bytes(saved(sample()))
    home = f"-env:UserInstallation={(tmp_path / 'home').as_uri()}"
    command = [soffice, home, "--headless", "--convert-to", "pptx", "--outdir", "out", "a.pptx"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    item = document(read_as("pptx", (tmp_path / "out" / "a.pptx").read_bytes()))
    for line in ("# Sheep", "a talk", "# Points", "| wide |  |", "Say this"):
        assert line in item.text.split("\n")


def test_hidden_slides_are_included_and_named(read_as: ReadAs) -> None:
    made = sample()
    made.slides[1].element.set("show", "0")
    item = document(read_as("pptx", saved(made)))
    assert item.text == "\n\n".join(SLIDES)
    assert item.metadata["hidden_slides"] == "2"


def test_the_order_is_that_of_the_presentation_not_of_the_names(read_as: ReadAs) -> None:
    made = sample()
    order = made.slides._sldIdLst
    order.insert(0, order[2])
    assert document(read_as("pptx", saved(made))).text == "\n\n".join([SLIDES[2], *SLIDES[:2]])


def test_numbers_dates_and_feet_of_slides_are_left_out(read_as: ReadAs) -> None:
    def with_footer(xml: str) -> str:
        shapes = "".join(
            f'<p:sp><p:nvSpPr><p:cNvPr id="9{at}" name="x"/><p:cNvSpPr/><p:nvPr><p:ph type="{kind}"/></p:nvPr>'
            f"</p:nvSpPr><p:spPr/><p:txBody><a:bodyPr/><a:p><a:r><a:t>{kind}</a:t></a:r></a:p></p:txBody></p:sp>"
            for at, kind in enumerate(("sldNum", "ftr", "dt"))
        )
        return xml.replace("</p:spTree>", f"{shapes}</p:spTree>")

    data = with_part(saved(sample()), "ppt/slides/slide1.xml", with_footer)
    assert document(read_as("pptx", data)).text == "\n\n".join(SLIDES)


def test_numbered_paragraphs_and_newer_shapes_are_read(read_as: ReadAs) -> None:
    def paragraph(text: str, bullet: str, level: int = 0) -> str:
        return f'<a:p><a:pPr lvl="{level}">{bullet}</a:pPr><a:r><a:t>{text}</a:t></a:r></a:p>'

    number, letter = '<a:buAutoNum type="arabicPeriod"/>', '<a:buAutoNum type="alphaLcParenR" startAt="3"/>'
    paragraphs = [("a", number), ("b", letter, 1), ("c", letter, 1), ("d", number), ("e", "<a:buNone/>"), ("f", number)]
    body = "".join(paragraph(*one) for one in paragraphs)

    def with_shapes(xml: str) -> str:
        shape = '<p:sp><p:nvSpPr><p:cNvPr id="91" name="x"/><p:cNvSpPr/><p:nvPr/></p:nvSpPr><p:spPr/>'
        shape += f"<p:txBody><a:bodyPr/>{body}</p:txBody></p:sp>"
        math = "http://schemas.openxmlformats.org/officeDocument/2006/math"
        formula = f'<m:oMath xmlns:m="{math}"><m:r><m:t>x+y</m:t></m:r></m:oMath>'
        newer = '<mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006">'
        newer += '<mc:Choice xmlns:a14="http://schemas.microsoft.com/office/drawing/2010/main" Requires="a14">'
        newer += '<p:sp><p:nvSpPr><p:cNvPr id="92" name="y"/><p:cNvSpPr/><p:nvPr/></p:nvSpPr><p:spPr/><p:txBody>'
        newer += f"<a:bodyPr/><a:p><a:r><a:t>so </a:t></a:r><a14:m>{formula}</a14:m></a:p></p:txBody></p:sp>"
        newer += "</mc:Choice><mc:Fallback/></mc:AlternateContent>"
        return xml.replace("</p:spTree>", f"{shape}{newer}</p:spTree>")

    text = document(read_as("pptx", with_part(saved(sample()), "ppt/slides/slide1.xml", with_shapes))).text
    assert text.startswith("# Sheep\n\na talk\n\n1. a\n  c) b\n  d) c\n2. d\n\ne\n\n1. f\n\nso x+y\n\n# Points")


def test_a_diagram_is_a_list_of_its_points(read_as: ReadAs) -> None:
    diagram = "http://schemas.openxmlformats.org/drawingml/2006/diagram"
    drawing = "http://schemas.openxmlformats.org/drawingml/2006/main"
    relations = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    frame = '<p:graphicFrame><p:nvGraphicFramePr><p:cNvPr id="93" name="d"/><p:cNvGraphicFramePr/><p:nvPr/>'
    frame += "</p:nvGraphicFramePr><p:xfrm/><a:graphic><a:graphicData>"
    frame += f'<dgm:relIds xmlns:dgm="{diagram}" xmlns:r="{relations}" r:dm="rD"/></a:graphicData></a:graphic>'
    frame += "</p:graphicFrame>"
    points = "".join(f"<dgm:pt><dgm:t><a:p><a:r><a:t>{t}</a:t></a:r></a:p></dgm:t></dgm:pt>" for t in ("eat", "sleep"))
    data = with_part(
        saved(sample()), "ppt/slides/slide1.xml", lambda xml: xml.replace("</p:spTree>", f"{frame}</p:spTree>")
    )
    data = with_part(
        data,
        "ppt/slides/_rels/slide1.xml.rels",
        lambda xml: xml.replace(
            "</Relationships>",
            f'<Relationship Id="rD" Type="{relations}/diagramData" Target="../data1.xml"/></Relationships>',
        ),
    )
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr(
            "ppt/data1.xml", f'<dgm:dataModel xmlns:dgm="{diagram}" xmlns:a="{drawing}">{points}</dgm:dataModel>'
        )
    assert document(read_as("pptx", buffer.getvalue())).text.startswith(
        "# Sheep\n\na talk\n\n- eat\n- sleep\n\n# Points"
    )


def test_a_slide_that_is_missing_is_damage_not_silence(read_as: ReadAs) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(sample()))) as old, zipfile.ZipFile(buffer, "w") as new:
        for member in old.namelist():
            if member != "ppt/slides/slide2.xml":
                new.writestr(member, old.read(member))
    (refused,) = read_as("pptx", buffer.getvalue())
    assert refused == Refused("", "damaged", "slide 2 is not in the package")


def test_a_presentation_without_text_is_empty(read_as: ReadAs) -> None:
    (refused,) = read_as("pptx", saved(pptx.Presentation()))
    assert isinstance(refused, Refused)
    assert refused.reason == "empty"


def test_damaged_presentations_are_read_or_refused(read_as: ReadAs, damaged: Callable[..., Iterator[bytes]]) -> None:
    for copy in damaged(saved(sample())):
        items = read_as("pptx", copy)
        assert items
        assert all(isinstance(item, Refused) or item.text.strip() for item in items)


def test_damaged_parts_are_read_or_refused(read_as: ReadAs, damaged_parts: Callable[..., Iterator[bytes]]) -> None:
    for copy in damaged_parts(saved(sample())):
        assert read_as("pptx", copy)
