"""Speed of a corpus build, stage by stage and whole, beside datatrove's own blocks on the same documents.

    python bench/data_speed.py --json bench/results/data_speed.json > bench/results/data_speed.md
    python bench/data_speed.py --text /data/wikitext-2 --quick

Code is the interpreter's standard library; prose comes from --text, or else from the documentation that installed
packages bring along. Stages run in this process and are timed by the processor time they take, so that other programs
count less; builds run in worker processes and are timed by the clock. Medians of the rounds; competitors alternate.
Run it with OMP_NUM_THREADS=1: each stage is to have one core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from duplicates_speed import measure_signatures
from quality_speed import compare_corpora
from record import add_json_option, write_record
from sheepop.core.console import Console
from sheepop.core.machine import describe_machine
from sheepop.data.build import build_corpus
from sheepop.data.clean.account import Account
from sheepop.data.clean.config import STAGES, CleanConfig
from sheepop.data.config import DataConfig
from sheepop.data.decoding import decode
from sheepop.data.documents import Document, Draft, batched_by_size
from sheepop.data.encoding import DocumentEncoder
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.extraction import Extraction
from sheepop.data.extract.interface import ExtractionError
from sheepop.data.mixing import Mixture
from sheepop.data.pipeline.engine import LocalEngine, make_part
from sheepop.data.pipeline.parts import finished_parts, write_part
from sheepop.data.pipeline.passes import clean_documents, local_stages
from sheepop.data.pipeline.shuffle import Gather, Scatter, decide_assignment
from sheepop.data.pipeline.workplace import find_inputs, take_inventory
from sheepop.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from texts import code_files, corpora, prose
from timing import Work, processor_seconds

CLEAN_STAGES = ("formatting", "language", "quality", "pii", "exact_duplicates")
NOT_FOR_CODE = frozenset({"formatting", "language", "toxicity"})
WORKERS = 2
SEED = 1


def write_input(directory: Path, code: Mapping[str, bytes], prose: Sequence[str], copies: int) -> float:
    """Writes all documents as files, `copies` times, each with a line that tells it from the others; returns MB."""
    size = 0
    for copy in range(copies):
        for name, data in code.items():
            size += _write(directory / f"code-{copy}" / name, f"# Copy {copy}.\n".encode() * bool(copy) + data)
        for number, text in enumerate(prose):
            begin = f"Copy {copy}.\n" if copy else ""
            size += _write(directory / f"prose-{copy}" / f"{number:05d}.txt", (begin + text).encode())
    return size / 1e6


def _write(path: Path, data: bytes) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(data)


def measure_stages(
    documents: Sequence[Document], files: Sequence[Path], work: Path, tokenizer: Tokenizer, rounds: int
) -> dict[str, float]:
    """MB/s on one core of everything that documents of one kind go through."""
    texts = [document.text for document in documents]
    size = sum(document.num_bytes for document in documents) / 1e6
    tasks: dict[str, Work] = {
        "read and decode": lambda: [decode(path.read_bytes(), path.name) for path in files],
        "extract (finds the type, reads, decodes)": lambda: _extract(files),
    }
    for name in ("formatting", "language", "quality", "quality, web", "toxicity", "secrets", "pii"):
        if documents[0].kind != "code" or name not in NOT_FOR_CODE:
            tasks[name] = partial(run_stage, name, documents)
    tasks["exact duplicates (ids)"] = lambda: [Document.of(text, "bench", 0) for text in texts]
    tasks["write a part (jsonl, zstd)"] = lambda: write_documents(documents, work)
    tasks["shuffle (scatter and gather)"] = lambda: shuffle(work)
    numbers = itertools.count()
    tasks["tokenize"] = lambda: encode(documents, tokenizer, work / f"tokenizer-{next(numbers)}")
    processor_seconds(tasks, 1)
    seconds, _ = processor_seconds(tasks, rounds)
    return {name: round(size / spent, 2) for name, spent in seconds.items()}


def _extract(files: Sequence[Path]) -> None:
    with closing(Extraction(ExtractConfig())) as extraction:
        for path in files:
            for _ in extraction.documents(path, str(path)):
                pass


def run_stage(name: str, documents: Iterable[Document]) -> list[Draft]:
    """What is left of the documents after one stage."""
    name, _, preset = name.partition(", ")
    (stage,) = local_stages(CleanConfig(preset=preset or "gentle"), [name], Account(SEED), SEED)
    return list(stage.run(document.draft() for document in documents))


def write_documents(documents: Iterable[Document], work: Path) -> None:
    """Writes the documents as the only part of a pass."""
    make_part(work / "written", lambda rank, staging: write_part(staging, documents, Mixture(())), 0)


def shuffle(work: Path) -> None:
    """Puts the part that `write_documents` left in a random order."""
    parts = finished_parts(work / "written", 1)
    assignment = decide_assignment(parts, DataConfig(), SEED)
    buckets = sum(assignment.buckets)
    make_part(work / "scattered", Scatter(work / "written", assignment), 0)
    for rank in range(buckets):
        make_part(work / "gathered", Gather(work / "scattered", 1, buckets, SEED), rank)


def encode(documents: Iterable[Document], tokenizer: Tokenizer, directory: Path) -> None:
    """Encodes with a tokenizer that is loaded afresh and remembers nothing."""
    tokenizer.save(directory)
    encoder = DocumentEncoder(str(directory))
    for batch in batched_by_size((document.stored() for document in documents), 2**20):
        encoder(batch)


def compare(corpora: Mapping[str, Sequence[str]], given: Sequence[Document], work: Path, rounds: int) -> dict[str, Any]:
    """Ours and datatrove's blocks in turn on the same prose, and on how many documents the verdicts agree.

    The rules of quality judge `corpora`, in which good and bad are frequent; the other blocks get `given`.
    """
    quality = compare_corpora(corpora, rounds)[-1]
    size = sum(document.num_bytes for document in given) / 1e6
    writers: dict[str, Work] = {
        "ours": lambda: write_documents(given, work),
        "datatrove": lambda: write_jsonl(given, work / "theirs"),
    }
    seconds, _ = processor_seconds(writers, rounds)
    long = [document.text for document in given if len(document.text) >= 500]
    signatures = measure_signatures(long)
    rows = [
        ("Gopher + repetition + C4 + FineWeb", quality["ours_mb_per_s"], quality["datatrove_mb_per_s"]),
        ("near-duplicate signatures", signatures["prose, the same documents as datatrove"], signatures["datatrove"]),
        ("writer (jsonl, zstd)", size / seconds["ours"], size / seconds["datatrove"]),
    ]
    names = ("block, MB/s", "ours", "datatrove", "ratio")
    verdicts = ("documents", "kept_by_ours", "kept_by_datatrove", "same_verdict")
    return {
        "rows": [dict(zip(names, (*row, row[1] / row[2]), strict=True)) for row in rows],
        **{name: quality[name] for name in verdicts},
    }


def write_jsonl(documents: Iterable[Document], directory: Path) -> None:
    """Writes the documents with datatrove's writer, compressed as ours are."""
    from datatrove.data import Document as TheirDocument
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    with JsonlWriter(str(directory), output_filename="${rank}.jsonl.zst", compression="zstd") as writer:
        for document in documents:
            about = {"source": document.source, "kind": document.kind, "facts": document.facts}
            writer.write(TheirDocument(document.text, document.id, metadata=about), rank=0)


def clean(paths: tuple[str, ...], work: Path, stages: tuple[str, ...]) -> float:
    """Seconds from files to clean documents."""
    config = DataConfig(paths=paths, clean=CleanConfig(stages=stages))
    started = time.perf_counter()
    inventory, _ = take_inventory(work, find_inputs(config, None), {})
    engine = LocalEngine(WORKERS)
    clean_documents(inventory, config, None, SEED, engine, Console.silent())
    engine.release()
    return time.perf_counter() - started


def build(paths: tuple[str, ...], work: Path, tokenizer: str) -> float:
    """Seconds from files to a finished corpus, with a tokenizer that there is already."""
    config = DataConfig(paths=paths, num_workers=WORKERS)
    started = time.perf_counter()
    build_corpus(config, TokenizerConfig(path=tokenizer), work / "corpus", seed=SEED)
    return time.perf_counter() - started


def measure_apart(work: Path, rounds: int, task: Callable[..., float], *arguments: Any) -> tuple[float, float]:
    """Median seconds of a task in a process of its own, and the most MB that one of its workers had."""
    results = []
    for _ in range(rounds):
        place = Path(tempfile.mkdtemp(dir=work))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            results.append(apart.submit(_with_memory, task, arguments[0], place, *arguments[1:]).result())
        shutil.rmtree(place)
    return statistics.median(seconds for seconds, _ in results), max(memory for _, memory in results)


def _with_memory(task: Callable[..., float], *arguments: Any) -> tuple[float, float]:
    seconds = task(*arguments)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return seconds, peak * (1 if sys.platform == "darwin" else 1024) / 1e6


def measure_builds(
    code: Mapping[str, bytes], prose: Sequence[str], work: Path, tokenizer: Tokenizer, copies: int, rounds: int
) -> list[dict[str, Any]]:
    """MB/s of whole passes on `WORKERS` processes, from files on."""
    large, small, saved = work / "large", work / "small", work / "tokenizer"
    sizes = {large: write_input(large, code, prose, copies), small: write_input(small, code, prose, 1)}
    tokenizer.save(saved)
    # The last is the sum of much that is measured above: once is enough.
    tasks: list[tuple[str, int, Path, Callable[..., float], tuple[Any, ...]]] = [
        (f"clean documents: {', '.join(CLEAN_STAGES)}", rounds, large, clean, (CLEAN_STAGES,)),
        ("clean documents: all default stages", rounds, small, clean, (STAGES,)),
        ("finished corpus: all default stages, shuffled, as tokens", 1, small, build, (str(saved),)),
    ]
    rows = []
    for name, times, source, task, arguments in tasks:
        seconds, memory = measure_apart(work, times, task, (str(source),), *arguments)
        rows.append({"build": name, "MB": sizes[source], "seconds": seconds, "MB/s": sizes[source] / seconds})
        rows[-1]["peak memory of a worker, MB"] = memory
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table in Markdown; columns are those of all rows, in the order in which they come."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *[[_shown(row.get(name)) for name in names] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as the record that is written."""
    rounds, megabytes = options.rounds, 1.0 if options.quick else options.megabytes
    code, texts = dict(code_files()), list(prose(options.text))
    if options.quick:
        code, texts = dict(list(code.items())[::8]), texts[::4]
    record: dict[str, Any] = {"load before": os.getloadavg()}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_input(work / "files", code, texts, 1)
        files = {kind: sorted(f for f in (work / f"files/{kind}-0").rglob("*") if f.is_file()) for kind in KINDS}
        given = {kind: list(documents_of(files[kind], kind, megabytes)) for kind in KINDS}
        sample = [document.text for kind in KINDS for document in given[kind]][::3]
        tokenizer = train_tokenizer(TokenizerConfig(vocab_size=8192), sample, console=Console.silent())
        speeds: dict[str, dict[str, float]] = {}
        for kind in KINDS:
            chosen = [Path(document.source) for document in given[kind]]
            speeds[kind] = measure_stages(given[kind], chosen, work, tokenizer, rounds)
            long = [document.text for document in given[kind] if len(document.text) >= 500]
            speeds[kind]["near-duplicate signatures"] = measure_signatures(long)[kind]
        names = dict.fromkeys(name for kind in KINDS for name in speeds[kind])
        record["stages"] = [{"stage, MB/s": n, **{k: speeds[k].get(n) for k in KINDS}} for n in names]
        print(table(record["stages"]), end="\n\n", flush=True)
        record["beside datatrove"] = beside = compare(
            corpora(options.text, megabytes / 16), given["prose"], work, rounds
        )
        print(table(beside["rows"]), end="\n\n")
        print(f"Same verdict on {beside['same_verdict']:.2%} of {beside['documents']:,} documents of prose;", end=" ")
        print(f"ours keeps {beside['kept_by_ours']:,}, datatrove {beside['kept_by_datatrove']:,}.\n", flush=True)
        copies = 1 if options.quick else options.copies
        record["builds"] = measure_builds(code, texts, work, tokenizer, copies, rounds)
        print(table(record["builds"]), end="\n\n")
    return {**record, "load after": os.getloadavg()}


KINDS = ("prose", "code")


def documents_of(files: Sequence[Path], kind: str, megabytes: float) -> Iterator[Document]:
    """Documents of a kind, taken evenly from the files, up to about so many MB."""
    total = sum(path.stat().st_size for path in files)
    for path in files[:: max(1, round(total / megabytes / 1e6))]:
        try:
            text = decode(path.read_bytes(), path.name).text
        except ExtractionError:
            continue
        if text.strip():
            yield Document.of(text, str(path), 0, kind=kind)


def main() -> None:
    """Prints the tables and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="PATH", help="prose, files or folders")
    parser.add_argument("--megabytes", type=float, default=8.0, help="text of each kind for the stages alone")
    parser.add_argument("--copies", type=int, default=4, help="how often the input of the first build is repeated")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of which the median counts")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    add_json_option(parser)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "machine": describe_machine().to_dict(),
        "datatrove": importlib.metadata.version("datatrove"),
    }
    record |= measure(options)
    machine, loads = record["machine"], [round(record[f"load {when}"][0], 1) for when in ("before", "after")]
    print(f"{machine['processor']}, {machine['cores']:g} cores, {machine['python']}, datatrove {record['datatrove']};")
    print(f"load average {loads[0]} before and {loads[1]} after.")
    write_record(options.json, record)


if __name__ == "__main__":
    main()
