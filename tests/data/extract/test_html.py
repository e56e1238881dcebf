from __future__ import annotations

import html
import inspect
import pydoc
import random
import re
import shutil
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import trafilatura
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.extract.html import main_blocks
from sheepop.data.extract.interface import Extracted, Refused
from sheepop.data.extract.page import parse_page
from sheepop.data.extract.page_blocks import page_blocks, page_text

ReadAs = Callable[..., list[Extracted | Refused]]

SENTENCE = "The ferry leaves the island every morning at seven, and comes back with the mail before noon."
AROUND = """<html lang="en"><head><title>Ferries</title></head><body>
<div id="top"><ul><li><a href="/">Home</a></li><li><a href="/n">News of the day before</a></li></ul></div>
<div class="page">{}</div>
<div class="sidebar"><h3>Most read</h3><ul><li><a href="/1">Ten things that nobody ever told you about ferries</a></li>
<li><a href="/2">The captain says that he has seen enough</a></li></ul></div>
<div id="footer"><p>Copyright 2021 The Paper. <a href="/t">Terms of use apply</a></p></div></body></html>"""


def rendered(page: str) -> str:
    return page_text(page_blocks(parse_page(page)))


def text_of(items: list[Extracted | Refused]) -> str:
    (item,) = items
    assert isinstance(item, Extracted), item
    assert item.kind == "prose"
    return item.text


# Pages made by other programs


def test_a_page_of_pydoc_keeps_every_line_of_documentation(read_as: ReadAs) -> None:
    page = pydoc.HTMLDoc().page("textwrap", pydoc.HTMLDoc().document(textwrap))
    lines = text_of(read_as("html", page.encode())).split("\n")
    documented = [textwrap.TextWrapper, textwrap.dedent, textwrap.fill, textwrap.indent, textwrap.wrap]
    for thing in documented:
        for line in (inspect.getdoc(thing) or "").splitlines():
            assert line.rstrip() in lines, thing
    assert re.search(r"TextWrapper\(\s*width=70,\s*initial_indent=''", "\n".join(lines))


def test_a_page_of_the_markdown_package_becomes_the_markdown_it_was_made_of(read_as: ReadAs) -> None:
    markdown = pytest.importorskip("markdown")
    source = f"""# The ferry

{SENTENCE}

## Times & prices

- leaves at *seven*
- comes back at `noon`
  - not on Sunday

There are two classes:

1. first class
2. second class

```python
def price(island):
    if island:

        return  12   # in the season
```

| Day | Price |
| --- | --- |
| Sunday | 12 |
| Monday | 7 |

> {SENTENCE}"""
    made = markdown.markdown(source, extensions=["tables", "fenced_code"], tab_length=2)
    page = f"<html><body><nav><a href='/'>Home</a></nav><main>{made}</main><footer>Imprint</footer></body></html>"
    assert text_of(read_as("html", page.encode())) == source.replace("*seven*", "seven")


def test_a_page_of_pandoc_is_read_whole(read_as: ReadAs) -> None:
    pandoc = shutil.which("pandoc")
    if pandoc is None:
        pytest.skip("pandoc is not installed")
    source = f"# Ferry\n\n{SENTENCE}\n\n1. one\n2. two\n\n``` python\nx = 1\n```\n"
    done = subprocess.run([pandoc, "-s", "--metadata", "title=Ferry"], input=source.encode(), capture_output=True)
    text = text_of(read_as("html", done.stdout))
    assert text.endswith(f"# Ferry\n\n{SENTENCE}\n\n1. one\n2. two\n\n```python\nx = 1\n```")


# The main text


def test_menus_sidebars_and_feet_are_left_out_of_a_page_that_marks_nothing(read_as: ReadAs) -> None:
    paragraphs = [f"{SENTENCE} Day {number} was no exception to this." for number in range(4)]
    share = "<ul><li><a href='f'>Share this with your friends</a></li><li><a href='t'>Tweet it</a></li></ul>"
    table = "<table><tr><th>Year</th><th>Cost</th></tr><tr><td>2019</td><td>3</td></tr></table>"
    inner = f"<h1>A new ferry</h1><p>{'</p><p>'.join(paragraphs[:2])}</p>{share}<p>{'</p><p>'.join(paragraphs[2:])}</p>"
    text = text_of(read_as("html", AROUND.format(inner + table).encode()))
    assert text == "\n\n".join(["# A new ferry", *paragraphs, "| Year | Cost |\n| --- | --- |\n| 2019 | 3 |"])


def test_what_stands_twice_in_the_main_text_stays_twice(read_as: ReadAs) -> None:
    inner = f"<h1>Steps</h1><p>{SENTENCE}</p><pre>pip install x</pre><p>{SENTENCE}</p><pre>pip install x</pre>"
    text = text_of(read_as("html", AROUND.format(inner * 2).encode()))
    assert text.count(SENTENCE) == 4
    assert text.count("```\npip install x\n```") == 4


def test_signatures_and_definitions_of_a_marked_main_part_are_kept_though_they_are_links(read_as: ReadAs) -> None:
    signature = "<h4 class='code-header'>fn <a href='c'>clone</a>(&amp;self) -&gt; <a href='v'>Vec</a></h4>"
    page = f"<body><main><h1>Vec</h1><p>{SENTENCE}</p>{signature}<dl><dt>len</dt><dd>how long</dd></dl></main></body>"
    assert text_of(read_as("html", page.encode())) == (
        f"# Vec\n\n{SENTENCE}\n\n#### fn clone(&self) -> Vec\n\nlen\n\nhow long"
    )


def test_a_page_of_short_blocks_round_a_long_one_keeps_them_all(read_as: ReadAs) -> None:
    chosen = random.Random(3)
    lines = [" ".join(chosen.choices(SENTENCE.split(), k=2 + number % 5)) for number in range(120)]
    bare = "".join(f"<div>{line}.</div>" for line in lines[:60])
    boxed = "".join(f"<div><div>{line}.</div><div>At noon</div></div>" for line in lines[60:])
    page = AROUND.format(f"<h1>Said at sea</h1>{bare}<p>{SENTENCE}</p><p>{SENTENCE}</p>{boxed}")
    found = (trafilatura.extract(page, include_comments=True) or "").split()
    text = text_of(read_as("html", page.encode()))
    assert len(found) > 450 and not Counter(found) - Counter(text.split())
    assert "Home" not in text and "nobody" not in text


def test_a_short_page_without_any_main_text_is_given_whole(read_as: ReadAs) -> None:
    assert text_of(read_as("html", b"<p>Hello</p><p>you</p>")) == "Hello\n\nyou"


def test_a_page_that_is_a_list_of_links_is_not_empty(read_as: ReadAs) -> None:
    links = "".join(f"<li><a href='{n}'>Chapter number {n}</a></li>" for n in range(5))
    text = text_of(read_as("html", f"<h1>Contents</h1><ul>{links}</ul>".encode()))
    assert text == "# Contents\n\n" + "\n".join(f"- Chapter number {n}" for n in range(5))


@pytest.mark.parametrize("page", ["", "<html><body></body></html>", "<nav>Home</nav>", "<script>x = 1</script>"])
def test_a_page_that_shows_nothing_is_refused(read_as: ReadAs, page: str) -> None:
    (refused,) = read_as("html", page.encode())
    assert isinstance(refused, Refused)
    assert refused.reason == "empty"


def test_the_page_says_what_it_is(read_as: ReadAs) -> None:
    page = f"""<html lang="en-GB"><head><title> The
    ferry | Paper</title><link rel="canonical" href="https://paper.example/ferry">
    <meta property="article:published_time" content="2021-03-04T10:00:00Z"><meta name="author" content="A. Writer">
    </head><body><main><p>{SENTENCE * 2}</p></main></body></html>"""
    (item,) = read_as("html", page.encode())
    assert isinstance(item, Extracted)
    assert dict(item.metadata) == {
        "title": "The ferry | Paper",
        "language": "en-GB",
        "url": "https://paper.example/ferry",
        "date": "2021-03-04",
        "author": "A. Writer",
        "encoding": "utf_8",
    }


# Markdown


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=20), min_size=1))
def test_lines_of_code_stay_exact(lines: list[str]) -> None:
    code = "\n".join(line.replace("\xa0", " ") for line in lines)
    text = rendered(f"<body>a<pre>\n{html.escape(code)}</pre></body>")
    found = re.fullmatch(r"a\n\n(`{3,})\n(.*)\n\1", text, re.DOTALL)
    if code.strip():
        assert found is not None
        assert found[2] == code.rstrip()


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<pre>a<br>b</pre>", "```\na\nb\n```"),
        ("<pre><div>a = 1</div><div>  b</div></pre>", "```\na = 1\n  b\n```"),
        ('<pre><code class="language-c++">int x;\n</code></pre>', "```c++\nint x;\n```"),
        ('<div class="highlight-python3 notranslate"><pre>x</pre></div>', "```python3\nx\n```"),
        ('<pre><span class="linenos">1</span>x = 1\n<span class="linenos">2</span>y</pre>', "```\nx = 1\ny\n```"),
        ("<pre>a ``` b</pre>", "````\na ``` b\n````"),
        ("<p>Use <code>a_b</code> and <kbd>``</kbd></p>", "Use `a_b` and ` `` `"),
        ("<p>2<sup>10</sup> H<sub>2</sub>O word<a href='#'><sup>3</sup></a></p>", "2^10 H2O word[3]"),
        ("<p>a <a href='x'>link</a>,<b> bold</b>\n text</p>", "a link, bold text"),
        ("<p>one<br>two<br/>three</p>", "one\ntwo\nthree"),
        ("<h2>Part <a class='headerlink' href='#p'>¶</a></h2>", "## Part"),
        ("<h3><div>fn f()</div><div>where T</div></h3>", "### fn f() where T"),
        ("<ol start=9><li>a<li>b<ol><li>c</ol></ol>", "9. a\n10. b\n    1. c"),
        ("<ul><li><p>a</p><p>b</p></li><li>c</li></ul>", "- a\n\n  b\n\n- c"),
        ("<ul><li><ul><li>deep</li></ul></li><li>c</li></ul>", "  - deep\n- c"),
        ("<blockquote><p>a</p><blockquote>b</blockquote></blockquote>", "> a\n\n> > b"),
        ("<p>x<span style='display: none'>y</span><i aria-hidden=true>z</i></p>", "x"),
        ("<math alttext='a^2'><mi>a</mi></math>", "$a^2$"),
        ("<script type='math/tex'>e = mc^2</script>", "$e = mc^2$"),
        ("<p>a&nbsp;&nbsp;b&amp;c &#x1F411;</p>", "a  b&c 🐑"),
    ],
)
def test_markup_becomes_markdown(page: str, expected: str) -> None:
    assert rendered(f"<body>{page}</body>") == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            "<tr><th>A<th>B<tr><td>x|y<td> <p>two</p><p>lines</p>",
            "| A | B |\n| --- | --- |\n| x\\|y | two lines |",
        ),
        (
            "<tr><td colspan=2>wide<td>c<tr><td rowspan=2>tall<td>1<td>2<tr><td>3<td>4",
            "| wide |  | c |\n| --- | --- | --- |\n| tall | 1 | 2 |\n|  | 3 | 4 |",
        ),
        ("<caption>Prices</caption><tr><td>a<td>b<tr><td>c<td>d", "Prices\n\n| a | b |\n| --- | --- |\n| c | d |"),
        ("<tr><td>menu<td><h1>Title</h1>text<tr><td>x<td>y", "menu\n\n# Title\n\ntext\n\nx\n\ny"),
        ("<tr><td class='linenos'><pre>1\n2</pre><td><pre>a\nb</pre><tr><td>x<td>y", "```\na\nb\n```\n\nx\n\ny"),
    ],
)
def test_tables_become_markdown_unless_they_are_layout(table: str, expected: str) -> None:
    assert rendered(f"<body><table>{table}</table></body>") == expected


# Encodings


@pytest.mark.parametrize(
    ("encoding", "declared", "words"),
    [
        ("utf-8", "iso-8859-1", "prix d’été"),
        ("cp1252", "iso-8859-1", "prix d’été café"),
        ("shift_jis", "Shift_JIS", "羊は島にいる。船は毎朝出る。"),
        ("koi8-r", "koi8-r", "паром уходит утром"),
        ("iso2022_jp", "iso-2022-jp", "羊は島にいる"),
        ("utf-16", "utf-16", "паром уходит утром"),
        ("cp1251", "no-such-encoding", "паром уходит с острова каждое утро в семь и возвращается"),
    ],
)
def test_the_encoding_is_found(read_as: ReadAs, encoding: str, declared: str, words: str) -> None:
    page = f'<html><head><meta charset="{declared}"></head><body><p>{words}</p></body></html>'
    assert text_of(read_as("html", page.encode(encoding))) == words


def test_a_page_in_no_encoding_is_refused(read_as: ReadAs) -> None:
    (refused,) = read_as("html", b"<html><body>\x00\x01\x02</body></html>")
    assert isinstance(refused, Refused)
    assert refused.reason == "binary"


# Hostile pages


def test_entities_of_a_page_are_not_expanded(read_as: ReadAs) -> None:
    entities = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
    page = f'<!DOCTYPE html [<!ENTITY a0 "lol">{entities}]><html><body><p>x &a11; y</p></body></html>'
    assert len(text_of(read_as("html", page.encode()))) < len(page)


@pytest.mark.parametrize(
    "page", ["<div>" * 300 + "x" + "</div>" * 300, f"<p>before</p><pre>{'x ' * 6_000_000}</pre>"], ids=["deep", "long"]
)
def test_a_page_that_the_parser_would_cut_short_is_refused(read_as: ReadAs, page: str) -> None:
    (refused,) = read_as("html", page.encode())
    assert isinstance(refused, Refused)
    assert refused.reason == "oversized"


def test_a_page_as_deep_as_the_parser_goes_is_read(read_as: ReadAs) -> None:
    assert text_of(read_as("html", ("<div>" * 240 + SENTENCE + "</div>" * 240).encode())) == SENTENCE


def test_spans_of_millions_of_columns_do_not_fill_memory() -> None:
    table = "<table><tr><td colspan=99999999>a<td>b<tr><td rowspan=99999999>c<td>d</table>"
    assert rendered(f"<body>{table}</body>").count("\n") == 2


def test_a_page_of_very_many_parts_is_read_whole(read_as: ReadAs) -> None:
    page = "".join(f"<li>Name <a href='{number}'>of number</a> {number}" for number in range(25_000))
    text = text_of(read_as("html", f"<ol>{page}</ol>".encode()))
    assert text.splitlines()[-1] == "25000. Name of number 24999"
    assert text.count("\n") == 24_999


def test_damaged_pages_are_read_or_refused(read_as: ReadAs, damaged: Callable[..., Iterator[bytes]]) -> None:
    page = pydoc.HTMLDoc().page("shlex", pydoc.HTMLDoc().document(pydoc.locate("shlex"))).encode()
    for copy in damaged(page):
        for item in read_as("html", copy):
            if isinstance(item, Refused):
                assert item.reason in ("binary", "undecodable", "empty", "oversized")
            else:
                assert item.text.strip()


def test_the_choice_of_main_text_does_not_depend_on_what_was_read_before() -> None:
    page = AROUND.format(f"<h1>A new ferry</h1><p>{SENTENCE}</p><p>{SENTENCE}</p>")

    def chosen() -> str:
        tree = parse_page(page)
        return page_text(main_blocks(page_blocks(tree), tree))

    assert {chosen() for _ in range(5)} == {chosen()}
