"""Text that was once lost or spoiled without a word, in small files of each kind, with what it is."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.interface import Content, Extracted, Refused

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
OFFICE = " ".join(
    f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"' for name in ("office", "text", "style")
)
ODT = "application/vnd.oasis.opendocument.text"
Read = Callable[[str, bytes], list[Extracted | Refused]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """What is read from a file of this name."""

    def run(name: str, data: bytes) -> list[Extracted | Refused]:
        return list(Dispatcher(ExtractConfig(ocr=False), tmp_path).documents(Content(name, data=data)))

    return run


def text_of(items: list[Extracted | Refused]) -> str:
    (item,) = items
    assert isinstance(item, Extracted)
    return item.text


def packed(parts: dict[str, str], *, compressed: bool = True) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return data.getvalue()


def docx(body: str, styles: str = "") -> bytes:
    kinds = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006/relationships"
    return packed(
        {
            "[Content_Types].xml": "<Types/>",
            "_rels/.rels": f'<Relationships xmlns="{package}"><Relationship Id="a" Type="{kinds}/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
            "word/_rels/document.xml.rels": f'<Relationships xmlns="{package}"><Relationship Id="s" '
            f'Type="{kinds}/styles" Target="styles.xml"/></Relationships>',
            "word/document.xml": f'<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>',
            "word/styles.xml": f'<w:styles xmlns:w="{W}">{styles}</w:styles>',
        }
    )


def run_of(text: str, properties: str = "") -> str:
    return f"<w:r><w:rPr>{properties}</w:rPr><w:t xml:space='preserve'>{text}</w:t></w:r>"


def test_hidden_text_of_word_is_left_out_and_counted(read: Read) -> None:
    styles = (
        '<w:style w:type="character" w:styleId="Base"><w:rPr><w:vanish/></w:rPr></w:style>'
        '<w:style w:type="character" w:styleId="Own"><w:basedOn w:val="Base"/></w:style>'
    )
    own, shown = '<w:rStyle w:val="Own"/>', '<w:vanish w:val="0"/>'
    body = (
        f"<w:p>{run_of('Shown, ')}{run_of('hidden, ', '<w:vanish/>')}"
        f"{run_of('by style, ', own)}{run_of('shown again', own + shown)}</w:p>"
    )
    (item,) = read("a.docx", docx(body, styles))
    assert isinstance(item, Extracted)
    assert item.text == "Shown, shown again"
    assert item.metadata["hidden_characters"] == str(len("hidden, by style, "))


def test_symbols_become_what_their_font_shows(read: Read) -> None:
    symbol = '<w:r><w:sym w:font="{}" w:char="{}"/></w:r>'
    fonts = '<w:rFonts w:ascii="Symbol"/>'
    body = "".join(symbol.format(*pair) for pair in (("Symbol", "F0B0"), ("Wingdings", "F0FC"), ("Symbol", "61")))
    body += run_of("abg", fonts) + run_of("\uf0a3") + symbol.format("Symbol", "F07F")
    (item,) = read("a.docx", docx(f"<w:p>{body}</w:p>"))
    assert isinstance(item, Extracted)
    assert (item.text, item.metadata["unknown_characters"]) == ("°✔ααβγ≤", "1")


def test_a_large_initial_is_the_first_letter_of_its_paragraph(read: Read) -> None:
    def framed(letter: str, kind: str) -> str:
        return f'<w:p><w:pPr><w:framePr w:dropCap="{kind}" w:lines="3"/></w:pPr>{run_of(letter)}</w:p>'

    body = (
        f"{framed('T', 'drop')}<w:p>{run_of('he sheep')}</w:p>{framed('A', 'none')}<w:p>{run_of('frame')}</w:p>"
        f"{framed('Z', 'margin')}"
    )
    assert text_of(read("a.docx", docx(body))) == "The sheep\n\nA\n\nframe\n\nZ"


def test_what_a_picture_shows_is_text_if_the_document_says_it(read: Read) -> None:
    drawing = "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing"
    described, other = (
        f'<w:r><w:drawing><wp:inline xmlns:wp="{drawing}"><wp:docPr id="1" name="Picture 1"{words}/></wp:inline>'
        "</w:drawing></w:r>"
        for words in (' descr="Sheep on \n a hill."', "")
    )
    body = f"<w:p>{run_of('See ')}{described}{run_of(' and')}{other}{run_of(' this.')}</w:p>"
    assert text_of(read("a.docx", docx(body))) == "See [Sheep on a hill.] and this."


def test_a_small_table_in_a_cell_keeps_the_rows_around_it(read: Read) -> None:
    def row(*cells: str) -> str:
        return f"<w:tr>{''.join(f'<w:tc>{cell}</w:tc>' for cell in cells)}</w:tr>"

    def words(text: str) -> str:
        return f"<w:p>{run_of(text)}</w:p>"

    inner = f"<w:tbl>{row(words('S'), words('2'))}{row(words('M'), words('5'))}</w:tbl><w:p/>"
    rows = [(words("article"), words("stock")), (words("shirt"), inner), (words("scarf"), words("8"))]
    body = f"<w:tbl>{''.join(row(*cells) for cells in rows)}</w:tbl>"
    assert text_of(read("a.docx", docx(body))) == (
        "| article | stock |\n| --- | --- |\n| shirt | S 2; M 5 |\n| scarf | 8 |"
    )


def test_readings_above_characters_are_left_out_everywhere(read: Read) -> None:
    ruby = (
        f"<w:r><w:ruby><w:rubyPr/><w:rt>{run_of('とう')}</w:rt><w:rubyBase>{run_of('東')}</w:rubyBase></w:ruby></w:r>"
    )
    assert text_of(read("a.docx", docx(f"<w:p>{ruby}{run_of('京')}</w:p>"))) == "東京"
    page = "<p><ruby>東<rp>(</rp><rt>とう</rt><rp>)</rp>京<rt>きょう</rt></ruby>に行きました。</p>"
    assert text_of(read("a.html", f"<html><body>{page}</body></html>".encode())) == "東京に行きました。"
    base = "<text:ruby><text:ruby-base>東京</text:ruby-base><text:ruby-text>とう</text:ruby-text></text:ruby>"
    assert text_of(read("a.odt", odt(f"<text:p>{base}に</text:p>"))) == "東京に"


def odt(body: str, styles: str = "", *, mimetype_first: bool = True) -> bytes:
    content = (
        f"<office:document-content {OFFICE}><office:automatic-styles>{styles}</office:automatic-styles>"
        f"<office:body><office:text>{body}</office:text></office:body></office:document-content>"
    )
    parts = {"mimetype": ODT, "content.xml": content}
    return packed(parts if mimetype_first else dict(reversed(parts.items())), compressed=not mimetype_first)


def test_an_opendocument_file_that_was_packed_again_is_one(read: Read) -> None:
    body = "<text:h text:outline-level='1'>Garden</text:h><text:p>It rained.</text:p>"
    assert text_of(read("a.odt", odt(body, mimetype_first=False))) == "# Garden\n\nIt rained."


def test_hidden_text_of_opendocument_is_left_out_and_counted(read: Read) -> None:
    style = '<style:style style:name="T1"><style:text-properties text:display="none"/></style:style>'
    body = (
        "<text:p>Shown<text:span text:style-name='T1'>, not</text:span>.</text:p>"
        "<text:section text:display='none'><text:p>Draft.</text:p></text:section>"
    )
    for name, data in (
        ("a.odt", odt(body, style)),
        (
            "a.fodt",
            f'<?xml version="1.0"?><office:document {OFFICE}><office:automatic-styles>{style}</office:automatic-styles>'
            f"<office:body><office:text>{body}<text:p>End."
            "<office:binary-data>QUJD</office:binary-data></text:p></office:text></office:body></office:document>".encode(),
        ),
    ):
        (item,) = read(name, data)
        assert isinstance(item, Extracted)
        assert item.text.startswith("Shown.") and "Draft" not in item.text
        assert item.metadata["hidden_characters"] == str(len(", notDraft."))


def test_escaped_characters_of_workbooks_are_no_text(read: Read) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book, data = openpyxl.Workbook(), io.BytesIO()
    book.active.append(["one_x000D_\ntwo", "see _x0041_"])
    book.active.append([1, 2])
    book.save(data)
    assert "| one two | see _x0041_ |" in text_of(read("a.xlsx", data.getvalue()))


def test_notes_and_hidden_text_of_rich_text(read: Read) -> None:
    note = r"{\cs16\super \chftn {\footnote \pard\plain {\cs16\super \chftn } Measured in spring.}}"
    (item,) = read(
        "a.rtf", rf"{{\rtf1\ansi The river is long.{note} It is deep.{{\v  A secret.}} End.\v x\v0 }}".encode()
    )
    assert isinstance(item, Extracted)
    assert " ".join(item.text.split()) == "The river is long. Measured in spring. It is deep. End."
    assert item.metadata == {"hidden_characters": str(len(" A secret.x"))}


def test_files_inside_a_fictionbook_are_no_text_and_its_notes_are(read: Read) -> None:
    book = (
        '<FictionBook xmlns="http://www.gribuser.ru/xml/fictionbook/2.0"><description><genre>prose</genre></description>'
        "<body><title><p>The Garden</p></title><section><p>It rained.</p></section></body>"
        '<body name="notes"><section><p>In May.</p></section></body><binary id="a.png">QUJDREVG</binary></FictionBook>'
    )
    assert text_of(read("a.fb2", book.encode())) == "The Garden\n\nIt rained.\n\nIn May."


def test_outlines_are_lists(read: Read) -> None:
    outline = (
        '<opml version="2.0"><head><title>Notes</title><dateCreated>Mon</dateCreated></head><body>'
        '<outline text="Spring">'
        '<outline text="Sow." _note="Early."/></outline><outline text="Autumn"/></body></opml>'
    )
    assert text_of(read("a.opml", outline.encode())) == "Notes\n- Spring\n  - Sow.\n    Early.\n- Autumn"


def test_a_chapter_with_a_fallback_is_read(read: Read) -> None:
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
        '<item id="a" href="a.json" media-type="application/json" fallback="b"/>'
        '<item id="b" href="b.xhtml" media-type="application/xhtml+xml"/></manifest>'
        '<spine><itemref idref="a"/></spine></package>'
    )
    parts = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": "<container><rootfiles><rootfile full-path='p.opf'/></rootfiles></container>",
        "p.opf": package,
        "a.json": "{}",
        "b.xhtml": "<html><body><p>It rained.</p></body></html>",
    }
    assert text_of(read("a.epub", packed(parts, compressed=False))) == "It rained."


@pytest.mark.parametrize(
    ("member", "detail"),
    [("visio/document.xml", "it is a Visio drawing"), ("FixedDocumentSequence.fdseq", "it is an XPS document")],
)
def test_formats_in_a_zip_that_are_not_read_are_named(member: str, detail: str, read: Read) -> None:
    assert read("a.zip", packed({"[Content_Types].xml": "<Types/>", member: "<a/>"})) == [
        Refused("", "unsupported", detail)
    ]


def test_raw_headers_are_utf8_or_in_the_charset_of_the_text(read: Read) -> None:
    def mail(subject: bytes, charset: bytes, text: bytes) -> bytes:
        return (
            b"From: a@b.org\nDate: x\nSubject: "
            + subject
            + b"\nContent-Type: text/plain; charset="
            + charset
            + b"\n\n"
            + text
        )

    subject = "Größe – 日本語"
    assert f"Subject: {subject}\n" in text_of(read("a.eml", mail(subject.encode(), b"utf-8", b"Text.")))
    polish = "Zażółć gęślą jaźń"
    data = mail(polish.encode("iso-8859-2"), b"iso-8859-2", polish.encode("iso-8859-2"))
    assert text_of(read("a.eml", data)) == f"From: a@b.org\nDate: x\nSubject: {polish}\n\n{polish}"
    word = b"=?iso-8859-8-i?B?5PTi6fnkIPDj5/rk?="
    assert "Subject: הפגישה נדחתה\n" in text_of(read("a.eml", mail(word, b"us-ascii", b"Text.")))


def test_what_is_filled_into_a_form_is_text(read: Read) -> None:
    canvas = pytest.importorskip("reportlab.pdfgen.canvas")
    data = io.BytesIO()
    page = canvas.Canvas(data)
    for y, label, name, value in ((700, "Name:", "n", "Ada Example"), (660, "Town:", "t", "Rutland")):
        page.drawString(72, y + 6, label)
        page.acroForm.textfield(name=name, value=value, x=160, y=y, width=200, height=20)
    page.drawString(72, 626, "Member:")
    page.acroForm.checkbox(name="m", checked=True, x=160, y=620, size=20)
    page.acroForm.textfield(name="p", value="secret", fieldFlags="password", x=160, y=580, width=200, height=20)
    page.save()
    text = " ".join(text_of(read("a.pdf", data.getvalue())).split())
    assert text == "Name: Ada Example Town: Rutland Member: [x]"


def test_lists_of_references_stay_and_named_boxes_go(read: Read) -> None:
    links = "".join(f'<li><a href="/{n}">Report {n} on the keeping of sheep in the hills</a></li>' for n in range(3))
    menu = '<ul><li><a href="/">Home</a></li><li><a href="/about">About us</a></li></ul>'
    form = (
        "<form><label>Your comment</label><textarea></textarea><p>Comments are checked before they appear.</p></form>"
    )
    page = (
        f"<html><body><main><h1>Sheep</h1><p>{'The sheep graze on the hill all day. ' * 6}</p><h2>Further reading</h2>"
        f"<ul>{links}</ul>{menu}<div class='share-buttons'><p>Tell your friends about it</p></div>"
        f"<p>{'In the evening they come home. ' * 4}</p>{form}</main></body></html>"
    )
    text = text_of(read("a.html", page.encode()))
    assert [f"- Report {n} on the keeping of sheep in the hills" in text for n in range(3)] == [True] * 3
    assert not any(words in text for words in ("Home", "About us", "Tell your friends", "Your comment", "checked"))
    assert "In the evening" in text


def test_a_page_in_a_script_without_spaces_is_judged_by_its_characters(read: Read) -> None:
    body = "".join(
        f"<p>{line}</p>"
        for line in ("村里的花园里下了一整夜的雨", "孩子们在小路上奔跑着唱歌", "老人坐在门前的木椅子上喝茶") * 8
    )
    side = "".join(f"<li>热门, 文章, 第{n}, 篇, 旅行, 美食, 露营, 照片, 推荐</li>" for n in range(8))
    page = f"<html><body><div>{body}</div><div class='sidebar'><ul>{side}</ul></div></body></html>"
    text = text_of(read("a.html", page.encode()))
    assert text.startswith("村里的花园里下了一整夜的雨") and text.count("喝茶") == 8 and "热门" not in text


def test_a_bad_byte_in_a_page_is_left_out_and_named(read: Read) -> None:
    data = f"<html><body><p>{'Größe und Süße. ' * 20}</p></body></html>".encode()
    at = data.index(b"und", 150)
    item, refused = read("a.html", data[:at] + b"\x81" + data[at:])
    assert isinstance(item, Extracted) and item.text == ("Größe und Süße. " * 20).strip()
    assert isinstance(refused, Refused) and (refused.place, refused.reason) == (f"byte {at}", "undecodable")
