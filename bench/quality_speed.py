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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datatrove.data as datatrove

from record import add_json_option, write_record
from sheepop.data.clean.account import Account
from sheepop.data.clean.config import CleanConfig, QualityConfig
from sheepop.data.clean.quality import fineweb_quality, gopher_quality, kept_lines, repeated_lines, repeated_runs
from sheepop.data.clean.stage import Removal
from sheepop.data.clean.words import tokens_of_all
from sheepop.data.decoding import decode
from sheepop.data.documents import Draft
from sheepop.data.pipeline.passes import local_stages
from texts import code_files, corpora
from timing import Work, processor_seconds

FILTERS = ("GopherQualityFilter", "GopherRepetitionFilter", "C4QualityFilter", "FineWebQualityFilter")
DEFAULT_STAGES = ("formatting", "language", "quality")
HEADINGS = (
    *("corpus", "filter", "documents", "MB", "ours MB/s", "datatrove MB/s", "ratio", "kept by ours / datatrove"),
    "same verdict",
)
SEED = 1
BATCH_CHARACTERS = 2**18


def documents_of(texts: Iterable[str]) -> list[datatrove.Document]:
    """Fresh documents, because filters may change what they are given."""
    return [datatrove.Document(text, str(number)) for number, text in enumerate(texts)]


def our_filters(texts: Sequence[str]) -> dict[str, Work]:
    """Each of our four sets of rules alone on the texts, and all of them as the stage `quality` of the preset."""
    config = QualityConfig(preset="web")

    def repetition() -> list[Removal | None]:
        lines = [repeated_lines(text, config.repetition) for text in texts]
        left = [text for text, removal in zip(texts, lines, strict=True) if removal is None]
        runs = (
            removal
            for batch in _batches(left)
            for removal in repeated_runs(batch, tokens_of_all(batch), config.repetition)
        )
        return [removal or next(runs) for removal in lines]

    def sentences() -> list[Removal | None]:
        kept = [kept_lines(text, config.c4) for text in texts]
        return [found if isinstance(found, Removal) else None for found in kept]

    return {
        "GopherQualityFilter": lambda: [
            gopher_quality(text, tokens, config.gopher)
            for text, tokens in zip(texts, tokens_of_all(texts), strict=True)
        ],
        "GopherRepetitionFilter": repetition,
        "C4QualityFilter": sentences,
        "FineWebQualityFilter": lambda: [fineweb_quality(text, config.fineweb) for text in texts],
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
    stream: Iterable[Draft] = [Draft(text, "bench", number, kind) for number, text in enumerate(texts)]
    for stage in local_stages(CleanConfig.model_validate({"preset": preset}), names, Account(SEED), SEED):
        stream = stage.run(stream)
    return list(stream)


def _kept(results: Sequence[Any], count: int) -> list[bool]:
    """Whether each document stays, from verdicts, from reasons for removal, or from the documents that are left."""
    if results and isinstance(results[0], datatrove.Document | Draft):
        numbers = {each.part if isinstance(each, Draft) else int(each.id) for each in results}
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
        seconds, results = processor_seconds({"ours": ours[name], "theirs": theirs[name]}, rounds)
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
        speeds = {stage: round(size / seconds, 1) for stage, seconds in processor_seconds(tasks, rounds)[0].items()}
        rows.append({"texts": name, "documents": len(some), "megabytes": round(size, 2), **speeds})
    return rows


def code() -> list[str]:
    """The modules at the top of the standard library."""
    return [decode(data, name).text for name, data in code_files() if "/" not in name]


def main() -> None:
    """Prints the tables and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", type=Path, default=[], help="folders and files with more prose")
    parser.add_argument("--megabytes", type=float, default=1.0, help="of each corpus")
    parser.add_argument("--rounds", type=int, default=3)
    add_json_option(parser)
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
    write_record(options.json, {"filters": rows, "default_stages": defaults})


if __name__ == "__main__":
    main()
