from __future__ import annotations

import io
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import docx
import pytest
from docx.document import Document

from sheepop.data.extract.interface import Extracted, Refused

ReadAs = Callable[..., list[Extracted | Refused]]

OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
NAMESPACES = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    ' xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    ' xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    ' xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape"'
    ' xmlns:v="urn:schemas-microsoft-com:vml"'
    f' xmlns:r="{OFFICE}"'
)


def saved(document: Document) -> bytes:
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def by_hand(body: str, parts: Mapping[str, str] | None = None, content_type: str = "document") -> bytes:
    """The smallest package that Word opens, written without any library; `parts` are by kind, such as ``footnotes``."""
    parts = parts or {}
    names = {kind: f"{kind}.{'html' if kind == 'aFChunk' else 'xml'}" for kind in parts}
    main = f"application/vnd.openxmlformats-officedocument.wordprocessingml.{content_type}.main+xml"
    relationships = "".join(
        f'<Relationship Id="r{number}" Type="{OFFICE}/{kind}" Target="{names[kind]}"/>'
        for number, kind in enumerate(parts)
    )
    package = "http://schemas.openxmlformats.org/package/2006"
    files = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="xml"'
        f' ContentType="application/xml"/><Override PartName="/word/document.xml" ContentType="{main}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1"'
        f' Type="{OFFICE}/officeDocument" Target="/word/document.xml"/></Relationships>',
        "word/document.xml": f"<w:document {NAMESPACES}><w:body>{body}</w:body></w:document>",
        "word/_rels/document.xml.rels": f'<Relationships xmlns="{package}/relationships">{relationships}'
        f'<Relationship Id="rN" Type="{OFFICE}/image" Target="NULL"/></Relationships>',
        **{f"word/{names[kind]}": text for kind, text in parts.items()},
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as package_file:
        for name, text in files.items():
            package_file.writestr(name, text)
    return buffer.getvalue()


def run(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(*runs: str, properties: str = "") -> str:
    inner = "".join(one if one.startswith("<") else run(one) for one in runs)
    return f"<w:p><w:pPr>{properties}</w:pPr>{inner}</w:p>"


def text_of(items: list[Extracted | Refused]) -> str:
    (item,) = items
    assert isinstance(item, Extracted), item
    assert item.kind == "prose"
    return item.text


def sample() -> Document:
    document = docx.Document()
    document.add_heading("The island", 0)
    document.add_heading("Sheep", 1)
    document.add_paragraph("They eat\tgrass\nand sleep.")
    for text in ("rams", "ewes"):
        document.add_paragraph(text, style="List Bullet")
    document.add_paragraph("Two steps:")
    for text in ("shear", "spin"):
        document.add_paragraph(text, style="List Number")
    table = document.add_table(3, 3)
    for row in range(3):
        for column in range(3):
            table.cell(row, column).text = f"{row}{column}"
    table.cell(1, 0).merge(table.cell(1, 1)).text = "wide"
    table.cell(1, 2).merge(table.cell(2, 2)).text = "tall"
    document.add_heading("Wool", 2)
    document.add_paragraph("It is warm.")
    document.sections[0].header.paragraphs[0].text = "a header"
    document.sections[0].footer.paragraphs[0].text = "a footer"
    document.core_properties.title, document.core_properties.author = "Islands", "A. Writer"
    return document


SAMPLE = """# The island

# Sheep

They eat\tgrass
and sleep.

- rams
- ewes

Two steps:

1. shear
2. spin

| 00 | 01 | 02 |
| --- | --- | --- |
| wide |  | tall |
| 20 | 21 |  |

## Wool

It is warm."""


def test_a_document_of_python_docx_becomes_markdown(read_as: ReadAs) -> None:
    (item,) = read_as("docx", saved(sample()))
    assert isinstance(item, Extracted)
    assert item.text == SAMPLE
    assert (item.metadata["title"], item.metadata["author"]) == ("Islands", "A. Writer")


def test_a_document_of_pandoc_becomes_the_markdown_it_was_made_of(read_as: ReadAs, tmp_path: Path) -> None:
    pandoc = shutil.which("pandoc")
    if pandoc is None:
        pytest.skip("pandoc is not installed")
    source = (
        "# Sheep\n\nThey eat grass.[^1]\n\n1. one\n2. two\n\n- a\n  - b\n\n| A | B |\n| --- | --- |\n| 1 | 2 |\n\n"
        "```\ndef f():\n    return 1\n```\n\n## Wool\n\nIt is $a^2$ warm.\n\n[^1]: And clover.\n"
    )
    made = tmp_path / "made.docx"
    subprocess.run([pandoc, "-f", "markdown", "-o", made], input=source.encode(), check=True)
    expected = source.strip().replace("$a^2$", "a^2").replace("2. two\n\n- a", "2. two\n- a")
    assert text_of(read_as("docx", made.read_bytes())) == expected


def test_a_document_of_libreoffice_becomes_markdown(read_as: ReadAs, tmp_path: Path) -> None:
    soffice = shutil.which("soffice")
    if soffice is None:
        pytest.skip("LibreOffice is not installed")
    page = "<html><body><h1>Sheep</h1><p>They eat grass.</p><ul><li>rams</li><li>ewes</li></ul></body></html>"
    (tmp_path / "a.html").write_text(page)
    home = f"-env:UserInstallation={(tmp_path / 'home').as_uri()}"
    command = [soffice, home, "--headless", "--writer", "--convert-to", "docx:MS Word 2007 XML", "a.html"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    text = text_of(read_as("docx", (tmp_path / "a.docx").read_bytes()))
    assert text == "# Sheep\n\nThey eat grass.\n\n- rams\n- ewes"


# What python-docx cannot make


def test_changes_and_comments_are_read_as_accepted(read_as: ReadAs) -> None:
    body = paragraph(
        "kept ",
        "<w:ins>" + run("inserted ") + "</w:ins>",
        '<w:del><w:r><w:delText>deleted </w:delText></w:r></w:del><w:commentRangeStart w:id="0"/>',
        "<w:moveFrom>" + run("old place ") + "</w:moveFrom><w:moveTo>" + run("new place") + "</w:moveTo>",
        '<w:r><w:commentReference w:id="0"/></w:r>',
    )
    row = "<w:tr>{}<w:tc>" + paragraph("a") + "</w:tc><w:tc>" + paragraph("b") + "</w:tc></w:tr>"
    table = f"<w:tbl>{row.format('')}{row.format('<w:trPr><w:del/></w:trPr>')}</w:tbl>"
    comments = f'<w:comments {NAMESPACES}><w:comment w:id="0">{paragraph("a comment")}</w:comment></w:comments>'
    text = text_of(read_as("docx", by_hand(body + table, {"comments": comments})))
    assert text == "kept inserted new place\n\n| a | b |\n| --- | --- |"


def test_notes_come_at_the_end_in_the_order_of_their_references(read_as: ReadAs) -> None:
    def note(kind: str, number: int, text: str) -> str:
        return f'<w:{kind} w:id="{number}">{paragraph(text)}{paragraph("more")}</w:{kind}>'

    footnotes = note("footnote", 7, "foot") + note("footnote", 9, "never referred to")
    separator = f'<w:footnote w:type="separator" w:id="0">{paragraph("line")}</w:footnote>'
    parts = {
        "footnotes": f"<w:footnotes {NAMESPACES}>{separator}{footnotes}</w:footnotes>",
        "endnotes": f"<w:endnotes {NAMESPACES}>{note('endnote', 7, 'end')}</w:endnotes>",
    }
    body = paragraph("a", '<w:r><w:endnoteReference w:id="7"/></w:r>', " b")
    body += paragraph("c", '<w:r><w:footnoteReference w:id="7"/></w:r>', " d")
    body += paragraph("e", '<w:r><w:footnoteReference w:id="7"/></w:r>')
    assert text_of(read_as("docx", by_hand(body, parts))) == (
        "a[^1] b\n\nc[^2] d\n\ne[^2]\n\n[^1]: end\n\nmore\n[^2]: foot\n\nmore"
    )


def test_a_note_that_refers_to_itself_is_read_once(read_as: ReadAs) -> None:
    reference = '<w:r><w:footnoteReference w:id="1"/></w:r>'
    note = f'<w:footnote w:id="1">{paragraph("see", reference)}</w:footnote>'
    parts = {"footnotes": f"<w:footnotes {NAMESPACES}>{note}</w:footnotes>"}
    assert text_of(read_as("docx", by_hand(paragraph("a", reference), parts))) == "a[^1]\n\n[^1]: see[^1]"


def test_a_text_box_is_read_once_behind_its_paragraph(read_as: ReadAs) -> None:
    inside = f"<w:txbxContent>{paragraph('in the box')}</w:txbxContent>"
    choice = f'<mc:Choice Requires="wps"><w:drawing><wps:txbx>{inside}</wps:txbx></w:drawing></mc:Choice>'
    fallback = f"<mc:Fallback><w:pict><v:textbox>{inside}</v:textbox></w:pict></mc:Fallback>"
    box = f"<w:r><mc:AlternateContent>{choice}{fallback}</mc:AlternateContent></w:r>"
    assert text_of(read_as("docx", by_hand(paragraph("around ", box, "it") + paragraph("after")))) == (
        "around it\n\nin the box\n\nafter"
    )


def test_numbers_are_given_as_the_lists_define_them(read_as: ReadAs) -> None:
    levels = [("upperRoman", "%1."), ("lowerLetter", "%2)"), ("decimal", "%1.%2.%3"), ("bullet", "·")]
    defined = "".join(
        f'<w:lvl w:ilvl="{at}"><w:start w:val="{3 if at == 1 else 1}"/><w:numFmt w:val="{style}"/>'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
        for at, (style, text) in enumerate(levels)
    )
    override = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="9"/></w:lvlOverride>'
    numbering = (
        f'<w:numbering {NAMESPACES}><w:abstractNum w:abstractNumId="5">{defined}</w:abstractNum>'
        '<w:num w:numId="1"><w:abstractNumId w:val="5"/></w:num>'
        f'<w:num w:numId="2"><w:abstractNumId w:val="5"/>{override}</w:num></w:numbering>'
    )

    def item(number: int, level: int, text: str) -> str:
        return paragraph(text, properties=f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>')

    body = "".join(
        item(*one)
        for one in [(1, 0, "a"), (1, 1, "b"), (1, 1, "c"), (1, 2, "d"), (1, 3, "e"), (1, 0, "f"), (1, 1, "g")]
    )
    body += item(2, 0, "h") + item(2, 0, "i") + item(0, 0, "j") + item(99, 0, "k")
    assert text_of(read_as("docx", by_hand(body, {"numbering": numbering}))).split("\n") == [
        *("I. a", "  c) b", "  d) c", "    I.d.1 d", "      - e", "II. f", "  c) g", "IX. h", "X. i", "", "j", "", "k"),
    ]


def test_headings_are_found_through_the_styles_they_are_based_on(read_as: ReadAs) -> None:
    def style(identifier: str, name: str, inner: str = "") -> str:
        return f'<w:style w:type="paragraph" w:styleId="{identifier}"><w:name w:val="{name}"/>{inner}</w:style>'

    styles = f"<w:styles {NAMESPACES}>" + style("berschrift2", "heading 2")
    styles += style("Own", "My heading", '<w:basedOn w:val="berschrift2"/>')
    styles += style("Level", "Level", '<w:pPr><w:outlineLvl w:val="8"/></w:pPr>')
    styles += style("Loop", "Loop", '<w:basedOn w:val="Loop"/>') + style("Src", "Source Code") + "</w:styles>"

    def styled(identifier: str, text: str) -> str:
        return paragraph(text, properties=f'<w:pStyle w:val="{identifier}"/>')

    body = styled("Own", "own") + styled("Level", "deep") + styled("Loop", "loop") + styled("None", "unknown")
    body += styled("Src", "def f():") + styled("Src", "    return 1") + paragraph("text")
    body += paragraph("given", properties='<w:outlineLvl w:val="0"/>')
    assert text_of(read_as("docx", by_hand(body, {"styles": styles}))) == (
        "## own\n\n###### deep\n\nloop\n\nunknown\n\n```\ndef f():\n    return 1\n```\n\ntext\n\n# given"
    )


def test_controls_links_fields_and_formulas_are_read_as_their_text(read_as: ReadAs) -> None:
    control = f"<w:sdt><w:sdtPr><w:alias/></w:sdtPr><w:sdtContent>{paragraph('controlled')}</w:sdtContent></w:sdt>"
    fraction = "<m:f><m:num><m:r><m:t>a+1</m:t></m:r></m:num><m:den><m:r><m:t>b</m:t></m:r></m:den></m:f>"
    power = "<m:sSup><m:e><m:r><m:t>x</m:t></m:r></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup>"
    body = control + paragraph(
        f'<w:hyperlink r:id="r1">{run("a link")}</w:hyperlink>',
        '<w:r><w:fldChar w:fldCharType="begin"/><w:instrText>PAGE</w:instrText></w:r>',
        " 7 ",
        f"<m:oMath>{fraction}<m:r><m:t>=</m:t></m:r>{power}</m:oMath>",
        "<w:r><w:noBreakHyphen/><w:tab/><w:softHyphen/><w:br/><w:br w:type='page'/><w:t>end</w:t></w:r>",
    )
    assert text_of(read_as("docx", by_hand(body))) == "controlled\n\na link 7 (a+1)/b=x^2-\t\nend"


def test_a_table_that_only_frames_text_is_read_as_text(read_as: ReadAs) -> None:
    inner = f"<w:tbl><w:tr><w:tc>{paragraph('a')}</w:tc><w:tc>{paragraph('b')}</w:tc></w:tr></w:tbl>"
    outer = f"<w:tbl><w:tr><w:tc>{paragraph('left')}</w:tc><w:tc>{inner}{paragraph('')}</w:tc></w:tr></w:tbl>"
    frame = f"<w:tbl><w:tr><w:tc>{paragraph('one')}{paragraph('two')}</w:tc></w:tr></w:tbl>"
    text = text_of(read_as("docx", by_hand(outer + frame)))
    assert text == "left\n\n| a | b |\n| --- | --- |\n\none\n\ntwo"


def test_a_document_with_macros_and_a_reference_to_nothing_is_read(read_as: ReadAs) -> None:
    # python-docx itself refuses both.
    data = by_hand(paragraph("text"), content_type="document.macroEnabled")
    with pytest.raises((ValueError, KeyError)):
        docx.Document(io.BytesIO(data))
    assert text_of(read_as("docx", data)) == "text"


def test_embedded_documents_are_read_by_their_own_type(read_as: ReadAs) -> None:
    body = paragraph("around") + '<w:altChunk r:id="r0"/>'
    data = by_hand(body, {"aFChunk": "<html><body><h1>Sheep</h1><p>eat grass</p></body></html>"})
    first, second = read_as("docx", data)
    assert isinstance(first, Extracted)
    assert isinstance(second, Extracted)
    assert (first.text, first.place) == ("around", "")
    assert (second.text, second.place) == ("# Sheep\n\neat grass", "embedded document 1")


def test_a_document_without_text_is_empty(read_as: ReadAs) -> None:
    (refused,) = read_as("docx", saved(docx.Document()))
    assert isinstance(refused, Refused)
    assert refused.reason == "empty"


def test_damaged_documents_are_read_or_refused(read_as: ReadAs, damaged: Callable[..., Iterator[bytes]]) -> None:
    for copy in damaged(saved(sample())):
        items = read_as("docx", copy)
        assert items
        for item in items:
            assert isinstance(item, Refused) or item.text.strip()


def test_damaged_parts_are_read_or_refused(read_as: ReadAs, damaged_parts: Callable[..., Iterator[bytes]]) -> None:
    for copy in damaged_parts(saved(sample())):
        assert read_as("docx", copy)


def test_parts_that_are_no_xml_or_miss_what_they_need_are_damaged(read_as: ReadAs) -> None:
    whole = by_hand(paragraph("text"), {"styles": f"<w:styles {NAMESPACES}/>"})
    for part in ("word/document.xml", "word/styles.xml", "_rels/.rels"):
        for content in ("", "<a", "<a/>", "<?xml?>"):
            buffer = io.BytesIO()
            with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(buffer, "w") as new:
                for name in old.namelist():
                    new.writestr(name, content if name == part else old.read(name))
            (item,) = read_as("docx", buffer.getvalue())
            assert isinstance(item, Extracted) or item.reason in ("damaged", "bomb")
