"""Speed and verdicts of the quality rules beside datatrove's own filters, on the same documents in the same run.

    python bench/quality_speed.py --json bench/results/quality_speed.json > bench/results/quality_speed.md
    python bench/quality_speed.py --text /data/wikitext-2 /data/shakespeare.txt --megabytes 0.3

Documents are docstrings of the standard library, the documentation of installed packages and of the system, web pages
without their tags, and what is below --text; and variants of them that rules for web pages like better (whole
sentences) or worse (lines broken, repeated, without punctuation), so that both verdicts are frequent. Times are
processor time on one core, medians of the rounds, in which the competitors alternate. Run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import ast
import html
import itertools
import json
import random
import re
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
BATCH_CHARACTERS = 2**18
HEADINGS = (
    *("corpus", "filter", "documents", "MB", "ours MB/s", "datatrove MB/s", "ratio", "kept by ours / datatrove"),
    "same verdict",
)
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
    chosen["paragraphs joined"] = [_joined(text) for some in list(chosen.values()) for text in some[::3]]
    chosen["articles"] = [_article(text) for text in dict.fromkeys(map(_joined, itertools.chain(*chosen.values())))]
    chosen["degraded articles"] = [_degraded(text, n) for n, text in enumerate(chosen["articles"])]
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
        runs = (
            removal
            for batch in _batches(left)
            for removal in gopher.repeated_runs(batch, tokens_of_all(batch), config.repetition)
        )
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


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= BATCH_CHARACTERS:
            yield batch
            batch = []
    yield batch


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

    each = zip(FILTERS, steps, strict=True)
    return {**{name: partial(alone, step) for name, step in each}, "all four": chain}


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


def compare(texts: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """For every filter and the chain: seconds that ours and theirs take, documents that each keeps and that both judge
    alike; counts that can be added over corpora.
    """
    ours, theirs = our_filters(texts), their_filters(texts)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    counts = {}
    for name in ours:
        seconds, results = medians({"ours": ours[name], "theirs": theirs[name]}, rounds)
        mine, other = (_kept(results[side], len(texts)) for side in ("ours", "theirs"))
        counts[name] = {
            "documents": len(texts),
            "megabytes": megabytes,
            **seconds,
            "kept_by_ours": sum(mine),
            "kept_by_theirs": sum(other),
            "agreed": sum(a == b for a, b in zip(mine, other, strict=True)),
        }
    return counts


def row(corpus: str, name: str, counts: Mapping[str, float]) -> dict[str, Any]:
    """One line of the table: MB/s of both, their ratio, and the share of documents with the same verdict."""
    return {
        "corpus": corpus,
        "filter": name,
        "documents": int(counts["documents"]),
        "megabytes": round(counts["megabytes"], 2),
        "ours_mb_per_s": round(counts["megabytes"] / counts["ours"], 2),
        "datatrove_mb_per_s": round(counts["megabytes"] / counts["theirs"], 3),
        "ratio": round(counts["theirs"] / counts["ours"], 1),
        "kept_by_ours": int(counts["kept_by_ours"]),
        "kept_by_datatrove": int(counts["kept_by_theirs"]),
        "same_verdict": round(counts["agreed"] / counts["documents"], 4),
    }


def compare_corpora(texts: Mapping[str, Sequence[str]], rounds: int) -> list[dict[str, Any]]:
    """The chain on every corpus, then every filter and the chain on all of them together."""
    rows: list[dict[str, Any]] = []
    total: dict[str, dict[str, float]] = {}
    for corpus, some in texts.items():
        for name, counts in compare(some, rounds).items():
            sums = total.setdefault(name, dict.fromkeys(counts, 0.0))
            total[name] = {key: sums[key] + value for key, value in counts.items()}
            if name == "all four":
                rows.append(row(corpus, name, counts))
    return rows + [row("all", name, counts) for name, counts in total.items()]


def compare_defaults(texts: Mapping[str, Sequence[str]], rounds: int) -> list[dict[str, Any]]:
    """MB/s of the stages that run by default, and of each alone, by kind of text."""
    rows = []
    for name, some in texts.items():
        kind = "code" if name == "code" else "prose"
        chains = (*((stage,) for stage in DEFAULT_STAGES), DEFAULT_STAGES)
        tasks: dict[str, Work] = {"+".join(names): partial(run_stages, names, some, "gentle", kind) for names in chains}
        for task in tasks.values():
            task()
        size = sum(len(text.encode()) for text in some) / 1e6
        speeds = {stage: round(size / seconds, 1) for stage, seconds in medians(tasks, rounds)[0].items()}
        rows.append({"texts": name, "documents": len(some), "megabytes": round(size, 2), **speeds})
    return rows


def medians(tasks: Mapping[str, Work], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of processor time for each task, and what it returned; the tasks alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    results = {}
    for _ in range(rounds):
        for name, work in tasks.items():
            started = time.process_time()
            results[name] = work()
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}, results


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
    for warm_up in (our_filters(["Not much."]), their_filters(["Not much."])):
        for work in warm_up.values():
            work()
    rows = compare_corpora(texts, options.rounds)
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for line in rows:
        print(
            f"| {line['corpus']} | {line['filter']} | {line['documents']:,} | {line['megabytes']:.1f} "
            f"| {line['ours_mb_per_s']:.1f} | {line['datatrove_mb_per_s']:.2f} | {line['ratio']:.0f} "
            f"| {line['kept_by_ours']:,} / {line['kept_by_datatrove']:,} | {line['same_verdict']:.2%} |"
        )
    defaults = compare_defaults({"code": code(), **texts, "all prose": everything}, options.rounds)
    columns = [key for key in defaults[0] if key not in ("documents", "megabytes")]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for line in defaults:
        print(f"| {' | '.join(str(line[column]) for column in columns)} |")
    if options.json is not None:
        record = {"machine": describe_machine().to_dict(), "filters": rows, "default_stages": defaults}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
