"""Speed and verdicts of the quality rules beside datatrove's own filters, on the same documents in the same run.

    python bench/quality_speed.py --json bench/results/quality_speed.json > bench/results/quality_speed.md
    python bench/quality_speed.py --text /data/wikitext-2 /data/shakespeare.txt --megabytes 0.3

Documents are docstrings of the standard library, the documentation of installed packages and of the system, web pages
without their tags, and what is below --text; and variants of them that rules for web pages like better (lines joined)
or worse (lines broken, repeated, without punctuation), so that both verdicts are frequent. Times are processor time
on one core, medians of the rounds, in which the competitors alternate. Run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import ast
import html
import json
import random
import re
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datatrove.data as datatrove

from sheepop.core.machine import describe_machine
from sheepop.data.clean import c4, fineweb, gopher
from sheepop.data.clean.config import CleanConfig
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.quality_config import QualityConfig
from sheepop.data.clean.stage import Removal
from sheepop.data.clean.stages import local_stages
from sheepop.data.clean.words import tokens_of_all
from sheepop.data.decoding import UndecodableError, decode

FILTERS = ("GopherQualityFilter", "GopherRepetitionFilter", "C4QualityFilter", "FineWebQualityFilter")
DEFAULT_STAGES = ("formatting", "language", "quality")
SYSTEM_DOCUMENTATION = Path("/usr/share/doc")
LENGTHS = (500, 1500, 4000, 10_000, 30_000)
SEED = 1
Work = Callable[[], object]

_TAG = re.compile(r"<(script|style)\b.*?</\1>|<[^>]+>", re.DOTALL | re.IGNORECASE)
_WRAPPED = re.compile(r"(?<=[^\n:])\n(?=[^\W\d_])")


def corpora(texts: Sequence[Path], megabytes: float) -> dict[str, list[str]]:
    """Prose by where it comes from, at most so many MB of each, chosen at random and the same in every run."""
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
    chosen["lines joined"] = [_joined(text) for texts_of in list(chosen.values()) for text in texts_of[::3]]
    chosen["degraded"] = [_degraded(text, n) for n, text in enumerate(chosen["lines joined"])]
    return {name: _sample(documents, megabytes) for name, documents in chosen.items() if documents}


def _files(path: Path, suffixes: set[str]) -> Iterator[str]:
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file() and file.suffix in suffixes and file.stat().st_size < 2_000_000:
            try:
                yield decode(file.read_bytes(), file.name).text
            except (UndecodableError, OSError):
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


def pieces(text: str) -> Iterator[str]:
    """The text cut after lines into pieces of many lengths."""
    piece: list[str] = []
    number = size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= LENGTHS[number % len(LENGTHS)]:
            yield "".join(piece)
            piece, number, size = [], number + 1, 0
    yield "".join(piece)


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


def documents_of(texts: Iterable[str], kind: str = "prose") -> list[datatrove.Document]:
    """Fresh documents, because filters may change what they are given."""
    about = {"kind": kind, "source": "bench", "part": 0, "language": ""}
    return [datatrove.Document(text, str(number), metadata=dict(about)) for number, text in enumerate(texts)]


def our_filters(texts: Sequence[str]) -> dict[str, Work]:
    """Each of our four sets of rules alone on the texts, and all of them as the stage `quality` of the preset."""
    config = QualityConfig(preset="web")

    def repetition() -> list[Removal | None]:
        lines = [gopher.repeated_lines(text, config.repetition) for text in texts]
        left = [text for text, removal in zip(texts, lines, strict=True) if removal is None]
        runs = iter(gopher.repeated_runs(left, tokens_of_all(left), config.repetition))
        return [removal or next(runs) for removal in lines]

    def sentences() -> list[Removal | None]:
        kept = [c4.kept_lines(text, config.c4) for text in texts]
        return [found if isinstance(found, Removal) else None for found in kept]

    return {
        "GopherQualityFilter": lambda: [
            gopher.quality(text, tokens, config.gopher)
            for text, tokens in zip(texts, tokens_of_all(texts), strict=True)
        ],
        "GopherRepetitionFilter": repetition,
        "C4QualityFilter": sentences,
        "FineWebQualityFilter": lambda: [fineweb.quality(text, config.fineweb) for text in texts],
        "all four": lambda: run_stages(("quality",), texts, "web"),
    }


def their_filters(texts: Sequence[str]) -> dict[str, Work]:
    """Datatrove's filters with their default words, each alone on the texts, and as a chain of steps."""
    from datatrove.pipeline import filters
    from datatrove.utils.text import split_into_parts

    steps = [getattr(filters, name)() for name in FILTERS]

    def alone(step: Any) -> list[bool]:
        split_into_parts.cache_clear()
        verdicts = [step.filter(document) for document in documents_of(texts)]
        return [verdict[0] if isinstance(verdict, tuple) else verdict for verdict in verdicts]

    def chain() -> list[datatrove.Document]:
        stream: Iterable[datatrove.Document] = documents_of(texts)
        for step in steps:
            stream = step.run(stream)
        return list(stream)

    return {
        **{name: lambda step=step: alone(step) for name, step in zip(FILTERS, steps, strict=True)},
        "all four": chain,
    }


def run_stages(names: Sequence[str], texts: Sequence[str], preset: str, kind: str = "prose") -> list[Any]:
    """What the stages keep of the texts."""
    stream: Iterable[datatrove.Document] = documents_of(texts, kind)
    for stage in local_stages(CleanConfig.model_validate({"preset": preset}), names, Ledger(SEED), SEED):
        stream = stage.run(stream)
    return list(stream)


def _kept(results: Sequence[Any], count: int) -> list[bool]:
    """Whether each document stays, from verdicts, from reasons for removal, or from the documents that are left."""
    if results and isinstance(results[0], datatrove.Document):
        numbers = {int(document.id) for document in results}
        return [number in numbers for number in range(count)]
    if not results:
        return [False] * count
    return [result is None if not isinstance(result, bool) else result for result in results]


def compare(texts: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """For every filter and the chain: MB/s of both, their ratio, and the share of documents with the same verdict."""
    ours, theirs = our_filters(texts), their_filters(texts)
    size = sum(len(text.encode()) for text in texts) / 1e6
    rows = []
    for name in ours:
        mine, other = _kept(ours[name](), len(texts)), _kept(theirs[name](), len(texts))
        speeds = medians({"ours": ours[name], "theirs": theirs[name]}, size, rounds)
        rows.append(
            {
                "filter": name,
                "documents": len(texts),
                "megabytes": round(size, 2),
                "ours_mb_per_s": round(speeds["ours"], 2),
                "datatrove_mb_per_s": round(speeds["theirs"], 3),
                "ratio": round(speeds["ours"] / speeds["theirs"], 1),
                "kept_by_ours": sum(mine),
                "kept_by_datatrove": sum(other),
                "same_verdict": round(sum(a == b for a, b in zip(mine, other, strict=True)) / len(texts), 4),
            }
        )
    return rows


def compare_defaults(texts: Mapping[str, Sequence[str]], rounds: int) -> list[dict[str, Any]]:
    """MB/s of the stages that run by default, and of each alone, by kind of text."""
    rows = []
    for name, some in texts.items():
        kind = "code" if name == "code" else "prose"
        tasks: dict[str, Work] = {
            "+".join(names): lambda names=names: run_stages(names, some, "gentle", kind)  # noqa: B023 - called at once
            for names in (*((stage,) for stage in DEFAULT_STAGES), DEFAULT_STAGES)
        }
        for task in tasks.values():
            task()
        size = sum(len(text.encode()) for text in some) / 1e6
        speeds = {stage: round(speed, 1) for stage, speed in medians(tasks, size, rounds).items()}
        rows.append({"texts": name, "documents": len(some), "megabytes": round(size, 2), **speeds})
    return rows


def medians(tasks: Mapping[str, Work], size: float, rounds: int) -> dict[str, float]:
    """MB/s of processor time for tasks over the same `size` MB; the tasks alternate."""
    speeds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, work in tasks.items():
            started = time.process_time()
            work()
            speeds[name].append(size / (time.process_time() - started))
    return {name: statistics.median(values) for name, values in speeds.items()}


def code() -> list[str]:
    """The sources of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [decode(path.read_bytes(), path.name).text for path in sorted(library.glob("*.py"))]


def main() -> None:
    """Prints the tables and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", type=Path, default=[], help="folders and files with more prose")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of each corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    texts = corpora(options.text, options.megabytes)
    everything = [text for some in texts.values() for text in some]
    rows = [{"corpus": name, **row} for name, some in texts.items() for row in compare(some, 1)[-1:]]
    rows += [{"corpus": "all", **row} for row in compare(everything, options.rounds)]
    print(
        "| corpus | filter | documents | MB | ours MB/s | datatrove MB/s | ratio | kept, ours / theirs | same verdict |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['corpus']} | {row['filter']} | {row['documents']:,} | {row['megabytes']:.1f} "
            f"| {row['ours_mb_per_s']:.1f} | {row['datatrove_mb_per_s']:.2f} | {row['ratio']:.0f} "
            f"| {row['kept_by_ours']:,} / {row['kept_by_datatrove']:,} | {row['same_verdict']:.2%} |",
            flush=True,
        )
    defaults = compare_defaults({"code": code(), **texts, "all prose": everything}, options.rounds)
    columns = [key for key in defaults[0] if key not in ("documents", "megabytes")]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in defaults:
        print(f"| {' | '.join(str(row[column]) for column in columns)} |")
    if options.json is not None:
        record = {"machine": describe_machine().to_dict(), "filters": rows, "default_stages": defaults}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
