from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.extract.detection import FileType, detect
from sheepop.data.extract.interface import Content, Extracted, Refused
from sheepop.data.extract.xml_text import xml_paragraphs

ReadAs = Callable[..., list[Extracted | Refused]]

JATS = """<?xml version="1.0"?>
<!DOCTYPE article PUBLIC "-//NLM//DTD JATS//EN" "JATS.dtd">
<article><front><article-title>On <italic>sheep</italic> &amp; wool</article-title>
<abstract><p>We study   sheep&nbsp;here.</p></abstract></front>
<body><sec><title>Introduction</title><p>Sheep <bold>eat</bold> grass<xref>1</xref>. They
also sleep.</p><p><bold>Sheep</bold> <italic>and</italic> wool: <list><list-item><p>one item</p></list-item>
<list-item><p>two</p></list-item></list> after the list.</p><preformat>  keep
    this
</preformat><p>In JATS <code>x = 1
  y = 2</code> is a block.</p>
<p>Given <alternatives><tex-math>a^2</tex-math><math><mi>a</mi><mn>2</mn></math></alternatives>.</p></sec></body>
</article>"""


def text_of(items: list[Extracted | Refused]) -> str:
    (item,) = items
    assert isinstance(item, Extracted), item
    assert item.kind == "prose"
    return item.text


def refusal(items: list[Extracted | Refused]) -> str:
    (item,) = items
    assert isinstance(item, Refused), item
    return item.reason


def test_an_article_becomes_its_paragraphs_in_order(read_as: ReadAs) -> None:
    assert text_of(read_as("xml", JATS.encode())).split("\n\n") == [
        "On sheep & wool",
        "We study sheep here.",
        "Introduction",
        "Sheep eat grass1. They also sleep.",
        "Sheep and wool:",
        "one item",
        "two",
        "after the list.",
        "```\n  keep\n    this\n```",
        "In JATS",
        "```\nx = 1\n  y = 2\n```",
        "is a block.",
        "Given a^2.",
    ]


def test_a_feed_becomes_its_titles_and_the_text_of_its_html(read_as: ReadAs) -> None:
    feed = """<rss><channel><title>News of sheep</title><item><title>The first</title><link>http://a.example/1</link>
    <description>&lt;p&gt;Hello &lt;b&gt;bold&lt;/b&gt; world&lt;/p&gt;&lt;p&gt;More of it here.&lt;/p&gt;</description>
    </item><item><title>The second</title><description><![CDATA[Plain text, with a < sign]]></description></item>
    </channel></rss>"""
    expected = [
        "News of sheep",
        "The first",
        "http://a.example/1",
        "Hello bold world",
        "More of it here.",
        "The second",
    ]
    assert text_of(read_as("xml", feed.encode())).split("\n\n") == [*expected, "Plain text, with a < sign"]


def test_a_paper_of_pandoc_is_prose_whatever_its_suffix(read_as: ReadAs) -> None:
    paper = (Path(__file__).parent / "files" / "sheep.nxml").read_bytes()
    assert detect(Content("sheep.nxml", data=paper)) == FileType("xml")
    text = text_of(read_as("xml", paper, "sheep.nxml"))
    assert text.startswith("Sheep of the northern hills\n\nAda Gray\n\nAlan Weir")
    assert "Sheep eat grass in the hills, and they sleep when it rains all day." in text.split("\n\n")


def test_what_is_data_rather_than_text_is_code(read_as: ReadAs) -> None:
    source = '<project><id name="x">org.x</id>\n  <version>4.0</version>\n</project>\n'
    (item,) = read_as("xml", source.encode())
    assert isinstance(item, Extracted)
    assert (item.text, item.kind, item.language) == (source, "code", "xml")


def test_records_are_lines_with_a_gap_between_them(read_as: ReadAs) -> None:
    record = "<r><name>Sheep of the northern islands and their wool</name><year>{}</year></r>"
    text = text_of(read_as("xml", f"<all>{record.format(1)}{record.format(2)}</all>".encode()))
    line = "Sheep of the northern islands and their wool"
    assert text == f"{line}\n1\n\n{line}\n2"


def test_xhtml_is_a_web_page(read_as: ReadAs) -> None:
    page = '<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title>T</title></head><body>'
    (item,) = read_as("xml", f"{page}<h1>Sheep</h1><p>Eat grass.</p></body></html>".encode())
    assert isinstance(item, Extracted)
    assert (item.text, item.metadata["title"]) == ("# Sheep\n\nEat grass.", "T")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-1", "windows-1251"])
def test_the_declared_encoding_is_used(read_as: ReadAs, encoding: str) -> None:
    words = "паром утром" if encoding == "windows-1251" else "café d'été"
    data = f'<?xml version="1.0" encoding="{encoding}"?><doc><p>{words}</p></doc>'.encode(encoding)
    assert text_of(read_as("xml", data)) == words


# The words of any document, in the order in which another parser finds them

NAMES = st.sampled_from(["p", "sec", "title", "b", "i", "row", "code", "pre", "x", "list", "item"])
TEXTS = st.lists(st.sampled_from(["sheep", "wool &", "a < b", " ", "\n", "Schäfer", "]]>"])).map(" ".join)
TREES = st.recursive(
    TEXTS.map(escape),
    lambda inner: st.tuples(NAMES, st.lists(inner, max_size=4), TEXTS).map(
        lambda made: f"<{made[0]}>{''.join(made[1])}</{made[0]}>{escape(made[2])}"
    ),
    max_leaves=20,
)


@given(TREES)
def test_all_words_come_in_the_order_of_the_file(tree: str) -> None:
    source = f"<doc>{tree}</doc>".encode()
    paragraphs = list(xml_paragraphs(Content("a.xml", data=source)))
    found = " ".join(paragraph.text for paragraph in paragraphs).replace("```", " ")
    expected = "".join(ET.fromstring(source).itertext())
    assert "".join(found.split()) == "".join(expected.split())


def test_a_long_file_comes_in_parts_that_hold_everything(read_as: ReadAs) -> None:
    paragraphs = [f"Paragraph {number} tells of the sheep on the island." for number in range(400)]
    source = f"<book>{''.join(f'<p>{text}</p>' for text in paragraphs)}</book>"
    items = read_as("xml", source.encode(), max_document_bytes=2048)
    assert len(items) > 5
    assert all(isinstance(item, Extracted) and len(item.text) <= 2048 for item in items)
    assert [item.place for item in items] == [f"part {number}" for number in range(1, len(items) + 1)]
    assert "\n\n".join(item.text for item in items if isinstance(item, Extracted)) == "\n\n".join(paragraphs)


# Hostile files

LAUGHS = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))


@pytest.mark.parametrize(
    "source",
    [
        f'<!DOCTYPE l [<!ENTITY a0 "lol">{LAUGHS}]><l>&a11;</l>',
        f'<!DOCTYPE l [<!ENTITY a0 "lol">{LAUGHS}]><l a="&a11;"/>',
        f'<!DOCTYPE l [<!ENTITY a "{"A" * 100_000}">]><l>{"&a;" * 100_000}</l>',
        '<!DOCTYPE l [<!ENTITY a "&b;"><!ENTITY b "&a;">]><l>&a;</l>',
        f'<!DOCTYPE l SYSTEM "x.dtd" [<!ENTITY a0 "lol">{LAUGHS}]><l>&a11;</l>',
    ],
    ids=["laughs", "in an attribute", "quadratic", "loop", "beside an outer subset"],
)
def test_entities_that_multiply_are_a_bomb(read_as: ReadAs, source: str) -> None:
    assert refusal(read_as("xml", source.encode())) == "bomb"


def test_no_other_file_is_ever_read(read_as: ReadAs, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    (tmp_path / "outer.dtd").write_text('<!ENTITY word "the secret">')
    for doctype, reference in (
        (f'<!DOCTYPE l [<!ENTITY a SYSTEM "{secret.as_uri()}">]>', "&a;"),
        (f'<!DOCTYPE l SYSTEM "{(tmp_path / "outer.dtd").as_uri()}">', "&word;"),
        (f'<!DOCTYPE l [<!ENTITY % p SYSTEM "{(tmp_path / "outer.dtd").as_uri()}"> %p;]>', "&word;"),
    ):
        text = text_of(read_as("xml", f"{doctype}<l><p>before {reference} after</p></l>".encode()))
        assert text == f"before {reference} after"
    include = f'<l xmlns:xi="http://www.w3.org/2001/XInclude"><p>a<xi:include href="{secret.as_uri()}"/></p></l>'
    assert text_of(read_as("xml", include.encode())) == "a"


def test_entities_of_the_files_own_are_expanded(read_as: ReadAs) -> None:
    source = '<!DOCTYPE l [<!ENTITY v "1.2"><!ENTITY w "<b>in &v;</b>">]><l><p>x &v; &w; y</p></l>'
    assert text_of(read_as("xml", source.encode())) == "x 1.2 in 1.2 y"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("<a><b></a>", "damaged"),
        ("<a>&nbsp;</a>", "damaged"),
        ("<a>x", "damaged"),
        ("no markup", "damaged"),
        ("<a>" * 300 + "x" + "</a>" * 300, "oversized"),
        (f"<p>{'x ' * 6_000_000}</p>", "oversized"),
    ],
)
def test_what_is_not_well_formed_or_too_large_for_the_parser_is_refused(
    read_as: ReadAs, source: str, reason: str
) -> None:
    items = read_as("xml", source.encode())
    assert isinstance(items[-1], Refused)
    assert items[-1].reason == reason


def test_damaged_files_are_read_or_refused(read_as: ReadAs, damaged: Callable[..., Iterator[bytes]]) -> None:
    for copy in damaged(JATS.encode()):
        assert all(
            isinstance(item, Extracted) or item.reason in ("damaged", "oversized") for item in read_as("xml", copy)
        )
