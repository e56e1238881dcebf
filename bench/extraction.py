"""Text out of files, by SheepOp and by others: the share of a reference's words and runs of five words, and seconds.

Every file of a folder is read by SheepOp, by pdftotext if there are PDFs, and by MarkItDown and Kreuzberg in the Python
that --peers names, one reader after the other, each in one process. The reference of ``NAME`` is ``NAME.txt`` beside
it, such as the source that it was typeset from, or the words of pandoc's tree in the file of the same name that ends in
``.native``, as in its tests, without formulas; a PDF with neither is compared with what pdftotext reads. Both sides are
compared as lists of words in lower case, in which words divided at a line's end are whole and every ideograph is a
word; a file whose reference has fewer than five words is left out.

A folder with subfolders that each have ``source.html`` and ``expected.html``, as in the tests of Mozilla's readability,
is read as web pages: by SheepOp, and by trafilatura in the Python that --peers names. The precision, the share of a
text's words that are in the reference, and F1 are given too.

python bench/extraction.py papers/ --peers peers/bin/python --json bench/results/extraction.json
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from record import add_json_option, write_record

RUN = 5
SECONDS_A_READER = 3600
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")
_INLINE = "a abbr b bdi cite code em i ins kbd mark q s samp small span strong sub sup time u var".split()  # noqa: SIM905
_INLINES = frozenset("Emph Strong Underline Strikeout Superscript Subscript SmallCaps Quoted Link Image Span".split())  # noqa: SIM905
_DIVIDED = re.compile(r"(?<=\w)[-\u2010\u00ad]\n\s*(?=[a-z])")

# Reads the paths on its input with the reader that its argument names; answers each with one line of JSON.
_PEERS = """
import json, sys, time
if sys.argv[1] == "markitdown":
    from markitdown import MarkItDown
    read = lambda path, reader=MarkItDown(): reader.convert(path).text_content
elif sys.argv[1] == "trafilatura":
    import trafilatura
    read = lambda path: trafilatura.extract(open(path, "rb").read().decode("utf-8", "replace")) or ""
else:
    import kreuzberg
    read = lambda path: kreuzberg.extract_file_sync(path).content
answers, sys.stdout = sys.stdout, sys.stderr
for path in map(str.strip, sys.stdin):
    started = time.perf_counter()
    try:
        text = read(path)
    except Exception as error:
        text = ""
    print(json.dumps([text, time.perf_counter() - started]), file=answers, flush=True)
"""


class Read(NamedTuple):
    """What a reader made of a file, and in how many seconds."""

    text: str
    seconds: float


class Found(NamedTuple):
    """Shares of the words, and of the runs of five, of a reference that are in a text as often as there.

    `precision` is the share of the text's words that are in the reference.
    """

    words: float
    runs: float
    precision: float


class Pages(NamedTuple):
    """Means over pages of the recall and precision of words, and of F1."""

    recall: float
    precision: float
    f1: float


Reader = Callable[[Sequence[Path]], list[Read]]


def by_sheepop(paths: Sequence[Path]) -> list[Read]:
    """The text of all documents of each file, without recognition in pictures."""
    from sheepop.data.extract.config import ExtractConfig
    from sheepop.data.extract.dispatch import Dispatcher
    from sheepop.data.extract.interface import Content, Extracted

    def text(path: Path, scratch: str) -> str:
        items = Dispatcher(ExtractConfig(ocr=False), Path(scratch)).documents(Content(path.name, path=path))
        return "\n\n".join(item.text for item in items if isinstance(item, Extracted))

    with tempfile.TemporaryDirectory() as scratch:
        return [_timed(partial(text, path, scratch)) for path in paths]


def by_pdftotext(paths: Sequence[Path]) -> list[Read]:
    """What Poppler's program writes in reading order."""
    command = ["pdftotext", "-enc", "UTF-8", "-nopgbrk"]

    def text(path: Path) -> str:
        return subprocess.run([*command, str(path), "-"], capture_output=True).stdout.decode("utf-8", "replace")

    return [_timed(partial(text, path)) for path in paths]


def by_peer(python: Path, name: str) -> Reader:
    """A reader of another project, in a process of its own."""

    def read(paths: Sequence[Path]) -> list[Read]:
        given = "".join(f"{path.resolve()}\n" for path in paths)
        run = subprocess.run(
            [str(python), "-c", _PEERS, name], input=given, capture_output=True, text=True, timeout=SECONDS_A_READER
        )
        answers = [Read(*json.loads(line)) for line in run.stdout.splitlines()]
        if len(answers) != len(paths):
            sys.exit(f"{name} does not run in {python}: {run.stderr.strip().rpartition(chr(10))[2]}")
        return answers

    return read


def found_in(text: str, reference: str) -> Found:
    """How much of a reference a text holds."""
    ours, theirs = _words(text), _words(reference)
    return Found(_share(ours, theirs), _share(list(_runs(ours)), list(_runs(theirs))), _share(theirs, ours))


def compare_pages(folder: Path, peers: Path | None) -> tuple[dict[str, Pages], dict[str, dict[str, list[float]]]]:
    """The means of each reader over the pages in subfolders, and recall and precision of every page."""
    sources = sorted(path / "source.html" for path in folder.iterdir() if (path / "expected.html").is_file())
    readers: dict[str, Reader] = {"sheepop": by_sheepop}
    if peers is not None:
        readers["trafilatura"] = by_peer(peers, "trafilatura")
    references = [_words(_text_of_page(path.with_name("expected.html").read_bytes())) for path in sources]
    results, files = {}, dict[str, dict[str, list[float]]]()
    for name, reader in readers.items():
        shares = []
        for path, read, theirs in zip(sources, reader(sources), references, strict=True):
            if len(theirs) < RUN:
                continue
            ours = _words(read.text)
            recall, precision = _share(ours, theirs), _share(theirs, ours)
            shares.append(Pages(recall, precision, 2 * recall * precision / max(recall + precision, 1e-9)))
            files.setdefault(path.parent.name, {})[name] = [round(recall, 4), round(precision, 4)]
        results[name] = Pages(*map(mean, zip(*shares, strict=True)))
    return results, files


def _text_of_page(data: bytes) -> str:
    """The text of a page without markup, each block on its own line."""
    from lxml import html

    page = html.fromstring(data.decode("utf-8", "replace"))
    for element in page.iter():
        if element.tag in ("script", "style", "svg", "noscript"):
            element.clear()
        elif isinstance(element.tag, str) and element.tag not in _INLINE:
            element.text, element.tail = f"\n{element.text or ''}", f"\n{element.tail or ''}"
    return page.text_content()


def _share(ours: Sequence[object], theirs: Sequence[object]) -> float:
    wanted = Counter(theirs)
    return (wanted & Counter(ours)).total() / max(1, wanted.total())


def _words(text: str) -> list[str]:
    return _WORD.findall(_DIVIDED.sub("", unicodedata.normalize("NFKC", text)).lower())


def _runs(words: Sequence[str]) -> zip[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(RUN)), strict=False)


def _timed(read: Callable[[], str]) -> Read:
    started = time.perf_counter()
    text = read()
    return Read(text, time.perf_counter() - started)


def _references(paths: Sequence[Path], reads: Mapping[str, list[Read]]) -> list[tuple[str, str]]:
    """For each file what its reference is, ``source`` or ``pdftotext``, and its text."""
    found = []
    for at, path in enumerate(paths):
        beside, native = path.with_name(f"{path.name}.txt"), path.with_suffix(".native")
        if native.is_file():
            command = ["pandoc", "-f", "native", "-t", "json", str(native)]
            tree = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            found.append(("source", "".join(_words_of_tree(tree["blocks"]))))
        elif beside.is_file():
            found.append(("source", beside.read_text(errors="replace")))
        else:
            found.append(("pdftotext", reads["pdftotext"][at].text))
    return found


def _words_of_tree(node: Any) -> Iterator[str]:
    """Yields the words of a tree of pandoc, with white space between blocks."""
    if isinstance(node, list):
        for inner in node:
            yield from _words_of_tree(inner)
    elif isinstance(node, dict):
        kind, content = node.get("t"), node.get("c")
        if kind == "Str":
            yield content
        elif kind in ("Code", "CodeBlock"):
            yield f"{content[1]}\n" if kind == "CodeBlock" else content[1]
        elif kind not in ("Math", "RawInline", "RawBlock"):
            space = "" if kind in _INLINES else "\n"
            yield space
            yield from _words_of_tree(content)
            yield space


def main() -> None:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="PDFs and other files, with NAME.txt as references beside them")
    parser.add_argument("--peers", type=Path, help="a Python that has the other readers")
    names = ["markitdown", "kreuzberg"]
    parser.add_argument("--readers", nargs="+", default=names, choices=names, help="the other readers of files")
    add_json_option(parser)
    given = parser.parse_args()
    if next(given.folder.glob("*/expected.html"), None):
        pages, shares = compare_pages(given.folder, given.peers)
        print(f"{len(shares)} pages\n{'':<12}{'recall':>10}{'precision':>10}{'F1':>10}")
        for name, means in pages.items():
            print(f"{name:<12}" + "".join(f"{value:>10.3f}" for value in means))
        write_record(given.json, {"pages": {name: means._asdict() for name, means in pages.items()}, "files": shares})
        return
    paths = sorted(path for path in given.folder.iterdir() if path.is_file() and path.suffix not in (".txt", ".native"))
    readers: dict[str, Reader] = {"sheepop": by_sheepop}
    if any(path.suffix == ".pdf" for path in paths):
        if shutil.which("pdftotext") is None:
            parser.error("pdftotext is missing: install poppler-utils")
        readers["pdftotext"] = by_pdftotext
    if given.peers is not None:
        readers |= {name: by_peer(given.peers, name) for name in given.readers}
    reads = {name: reader(paths) for name, reader in readers.items()}
    references = _references(paths, reads)
    results: dict[str, dict[str, float | None]] = {}
    files: dict[str, dict[str, list[float]]] = {path.name: {} for path in paths}
    for name, texts in reads.items():
        shares: dict[str, list[Found]] = {"source": [], "pdftotext": []}
        for path, read, (origin, reference) in zip(paths, texts, references, strict=True):
            if len(_words(reference)) < RUN:
                continue
            found = found_in(read.text, reference)
            shares[origin].append(found)
            files[path.name][name] = [*(round(share, 4) for share in found), round(read.seconds, 3)]
        if name == "pdftotext":
            shares["pdftotext"] = []
        results[name] = {
            f"{part}_of_{origin}": mean(getattr(share, part) for share in found) if found else None
            for origin, found in shares.items()
            for part in Found._fields
        }
        results[name]["seconds"] = sum(read.seconds for read in texts)
    print(f"{len(paths)} files, {sum(origin == 'source' for origin, _ in references)} of them with their source")
    columns = [f"{part} of {origin}" for origin in ("source", "pdftotext") for part in Found._fields]
    print(f"{'':<12}" + "".join(f"{column:>23}" for column in (*columns, "seconds")))
    for name, numbers in results.items():
        print(f"{name:<12}" + "".join(f"{'' if value is None else f'{value:.3f}':>23}" for value in numbers.values()))
    write_record(given.json, {"results": results, "files": files})


if __name__ == "__main__":
    main()
