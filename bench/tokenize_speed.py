"""Speed of byte-level BPE over a corpus, beside the `tokenizers` library on the same text and with the same ids.

    python bench/tokenize_speed.py --json bench/results/tokenize_speed.json
    python bench/tokenize_speed.py --texts wikitext=/data/wikitext-2 --tokenizer gpt2=/models/gpt2

Every measurement uses one thread per process. Without --texts the text is the interpreter's standard library. The ids
of all texts are compared before anything is timed; a difference ends the benchmark.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from record import add_json_option, write_record
from sheepop.core.console import Console
from sheepop.data.documents import Document, StoredDocument, batched_by_size
from sheepop.data.encoding import DocumentEncoder
from sheepop.tokenizer import ByteLevelBPE, Tokenizer, TokenizerConfig, load_tokenizer, train_tokenizer
from sheepop.tokenizer.backend import BackendTokenizer

_BATCH_BYTES = 2**20


def read_texts(path: Path) -> list[str]:
    """Every UTF-8 text file below `path`, in the order of their names; third-party packages are left out."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in {".py", ".txt"})
    texts = []
    for file in files:
        if "site-packages" not in file.parts:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    return texts


def library_ids(tokenizer: ByteLevelBPE, texts: Sequence[str]) -> list[list[int]]:
    """The ids as the `tokenizers` library gives them by itself."""
    return BackendTokenizer.encode_batch(tokenizer, texts)


def verify(tokenizer: ByteLevelBPE, texts: Sequence[str]) -> int:
    """The number of tokens in `texts`; raises SystemExit when a text has other ids than the library gives it."""
    total = 0
    for index, text in enumerate(texts):
        ids = tokenizer.encode(text)
        if ids != library_ids(tokenizer, [text])[0]:
            raise SystemExit(f"text {index} has other ids than the library gives it")
        total += len(ids)
    return total


def measure(texts: Sequence[str], tokenizer: ByteLevelBPE, repeats: int = 3) -> dict[str, float]:
    """MB/s of UTF-8, medians: the library alone, ours with nothing remembered yet, and ours that goes on."""
    megabytes = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    seconds: dict[str, list[float]] = {"library": [], "cold": [], "warm": []}
    warm = load_copy(tokenizer)
    warm.encode_batch(texts)
    for _ in range(repeats):
        seconds["library"].append(timed(library_ids, tokenizer, texts))
        seconds["cold"].append(timed(load_copy(tokenizer).encode_batch, texts))
        seconds["warm"].append(timed(warm.encode_batch, texts))
    return {name: megabytes / statistics.median(values) for name, values in seconds.items()}


def measure_workers(texts: Sequence[str], tokenizer: Tokenizer, num_workers: int = 2) -> float:
    """MB/s of the corpus encoder, from stored documents to arrays of ids, in processes that are already started."""
    documents = [Document.of(text, "bench", part).stored() for part, text in enumerate(texts)]
    megabytes = sum(document.num_bytes for document in documents) / 1e6
    tasks = list(batched_by_size(documents, _BATCH_BYTES))
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save(directory)
        encoder = DocumentEncoder(directory)
        start: list[StoredDocument] = [Document.of("start", "bench", 0).stored()]
        with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as workers:
            list(workers.map(encoder, [start] * (4 * num_workers)))
            began = time.perf_counter()
            for _ in workers.map(encoder, tasks):
                pass
            return megabytes / (time.perf_counter() - began)


def load_copy(tokenizer: ByteLevelBPE) -> ByteLevelBPE:
    """The same tokenizer with nothing remembered."""
    return ByteLevelBPE(tokenizer.to_json(), tokenizer.settings())


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Seconds that ``work(*arguments)`` takes."""
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def compare(name: str, texts: Sequence[str], label: str, tokenizer: ByteLevelBPE) -> dict[str, Any]:
    """One row of the table: sizes, speeds, and how many times faster than the library."""
    tokens = verify(tokenizer, texts)
    speeds = measure(texts, tokenizer)
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return {
        "texts": name,
        "tokenizer": label,
        "bytes": num_bytes,
        "tokens": tokens,
        **{f"{key}_mb_per_s": round(value, 2) for key, value in speeds.items()},
        "two_workers_mb_per_s": round(measure_workers(texts, tokenizer), 2),
        "ratio": round(speeds["cold"] / speeds["library"], 2),
    }


def main() -> None:
    """Prints one row for every pair of text and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", default=[], metavar="NAME=PATH", help="text to encode")
    parser.add_argument("--tokenizer", nargs="+", default=[], metavar="NAME=PATH", help="tokenizers besides our own")
    parser.add_argument("--vocab-size", type=int, default=8192)
    add_json_option(parser)
    options = parser.parse_args()
    named = [pair.partition("=") for pair in options.texts] or [("stdlib", "=", sysconfig.get_paths()["stdlib"])]
    texts = {name: read_texts(Path(path)) for name, _, path in named}
    config = TokenizerConfig(vocab_size=options.vocab_size)
    sample = [text for group in texts.values() for text in group[::3]]
    tokenizers = {"ours": train_tokenizer(config, sample, console=Console.silent())}
    tokenizers |= {name: load_tokenizer(path) for name, _, path in (p.partition("=") for p in options.tokenizer)}
    rows = []
    print(f"{'text':<12}{'tokenizer':<12}{'MB':>8}{'library':>9}{'cold':>8}{'warm':>8}{'2 workers':>11}{'ratio':>7}")
    for name, group in texts.items():
        for label, tokenizer in tokenizers.items():
            assert isinstance(tokenizer, ByteLevelBPE)
            row = compare(name, group, label, tokenizer)
            rows.append(row)
            print(
                f"{name:<12}{label:<12}{row['bytes'] / 1e6:>8.1f}{row['library_mb_per_s']:>9.1f}"
                f"{row['cold_mb_per_s']:>8.1f}{row['warm_mb_per_s']:>8.1f}{row['two_workers_mb_per_s']:>11.1f}"
                f"{row['ratio']:>7.1f}",
                flush=True,
            )
    write_record(options.json, {"unit": "MB of UTF-8 per second", "rows": rows})


if __name__ == "__main__":
    main()
