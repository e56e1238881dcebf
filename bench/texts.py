"""What the benchmarks of data read: code, prose cut into documents, and prose of which good and bad are frequent."""

from __future__ import annotations

import ast
import html
import itertools
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sheepop.data.decoding import decode
from sheepop.data.extract.interface import ExtractionError

SYSTEM_DOCUMENTATION = Path("/usr/share/doc")
PIECE_CHARACTERS = (300, 1000, 3000, 10_000, 30_000)
SEED = 1

_TAG = re.compile(r"<(script|style)\b.*?</\1>|<[^>]+>", re.DOTALL | re.IGNORECASE)
_WRAPPED = re.compile(r"(?<=[^\n:])\n(?=[^\W\d_])")


def code_files() -> Iterator[tuple[str, bytes]]:
    """The sources of the standard library, by their names in it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield str(path.relative_to(library)), path.read_bytes()


def prose(paths: Sequence[Path]) -> Iterator[str]:
    """Prose in pieces of whole lines and of many lengths; what is below `paths`, or the packages' documentation."""
    found = [_files(path, {".txt"}) for path in paths]
    if not found:
        found = [_files(Path(sysconfig.get_paths()["purelib"]), {".md", ".rst", ".txt"})]
    for text in itertools.chain.from_iterable(found):
        yield from pieces(text)


def pieces(text: str) -> Iterator[str]:
    """The text cut after lines, into pieces whose lengths go round `PIECE_CHARACTERS`."""
    lengths = itertools.cycle(PIECE_CHARACTERS)
    piece, size, wanted = [], 0, next(lengths)
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= wanted:
            yield "".join(piece)
            piece, size, wanted = [], 0, next(lengths)
    if piece:
        yield "".join(piece)


def corpora(texts: Sequence[Path], megabytes: float) -> dict[str, list[str]]:
    """Prose by where it comes from, at most so many MB of each, chosen at random and the same in every run.

    To it come variants that rules for web pages like better (whole sentences) or worse (lines broken, repeated,
    without punctuation), so that both verdicts are frequent.
    """
    library, packages = Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["purelib"])
    found: dict[str, Iterable[str]] = {
        "docstrings": _docstrings(library),
        "package documentation": _files(packages, {".md", ".rst", ".txt"}),
        "system documentation": _files(SYSTEM_DOCUMENTATION, {"", ".txt", ".md", ".rst"}),
        "web pages without tags": map(_without_tags, _files(SYSTEM_DOCUMENTATION, {".html"})),
    }
    for path in texts:
        found[path.stem] = (piece for text in _files(path, {".txt"}) for piece in pieces(text))
    chosen = {name: _sample(documents, megabytes) for name, documents in found.items()}
    chosen["paragraphs joined"] = [_joined(text) for some in list(chosen.values()) for text in some[::3]]
    chosen["articles"] = [_article(text) for text in dict.fromkeys(map(_joined, itertools.chain(*chosen.values())))]
    chosen["degraded articles"] = [_degraded(text, n) for n, text in enumerate(chosen["articles"])]
    return {name: _sample(documents, megabytes) for name, documents in chosen.items() if documents}


def _files(path: Path, suffixes: set[str]) -> Iterator[str]:
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file() and file.suffix in suffixes and file.stat().st_size < 2_000_000:
            try:
                yield decode(file.read_bytes(), file.name).text
            except (ExtractionError, OSError):
                continue


def _docstrings(library: Path) -> Iterator[str]:
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests"}.isdisjoint(path.parts):
            try:
                nodes = ast.walk(ast.parse(path.read_bytes()))
            except SyntaxError:
                continue
            kinds = ast.Module | ast.ClassDef | ast.FunctionDef
            yield from (text for node in nodes if isinstance(node, kinds) and (text := ast.get_docstring(node)))


def _sample(documents: Iterable[str], megabytes: float) -> list[str]:
    distinct = list(dict.fromkeys(text for text in documents if 100 <= len(text) <= 200_000))
    random.Random(SEED).shuffle(distinct)
    chosen, size = [], 0
    for text in distinct:
        if size >= megabytes * 1e6:
            break
        chosen.append(text)
        size += len(text)
    return chosen


def _without_tags(page: str) -> str:
    return re.sub(r"\n\s*\n\s*", "\n\n", html.unescape(_TAG.sub("", page))).strip()


def _joined(text: str) -> str:
    """Paragraphs as lines, punctuation where it belongs: closer to the prose for which the rules were made."""
    text = re.sub(r" @(.)@ ", r"\1", text).replace(" n't", "n't")
    return _WRAPPED.sub(" ", re.sub(r" ([,.;:!?'])", r"\1", text))


def _article(text: str) -> str:
    """The paragraphs that are sentences, which makes of most documentation what a web page would show."""
    return "\n".join(line for line in text.split("\n") if line.endswith((".", "!", "?")) and len(line.split()) >= 12)


def _degraded(text: str, number: int) -> str:
    """The text spoiled in one of several ways."""
    choose = random.Random(f"{SEED} {number}")
    lines = text.split("\n")
    ways: tuple[Callable[[], str], ...] = (
        lambda: text + "\n" + "\n".join(lines[: 1 + len(lines) // choose.randint(1, 6)]),
        lambda: re.sub(r"[.!?]", "", text),
        lambda: re.sub(r"(\S+\s+\S+\s+\S+)\s+", r"\1\n", text),
        lambda: "\n".join(line + choose.choice(("", "", "...", " #", " { }", " 12 34 56 |")) for line in lines),
        lambda: text.replace(" the ", f" {choose.choice(('the the', 'x1', '...'))} "),
        lambda: "\n".join(f"- {line}" for line in lines),
        lambda: text[: choose.randint(150, 600)],
    )
    return ways[number % len(ways)]()
