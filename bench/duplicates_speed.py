"""Near deduplication: signatures beside datatrove's on the same documents, and the search for pairs among many.

python bench/duplicates_speed.py --documents 1000000 --json bench/results/duplicates_speed.json
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from record import add_json_option, write_record
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.search import Ranking, later_copies, similar_pairs
from sheepop.data.duplicates.signatures import (
    PartSignatures,
    Signature,
    SignatureWriter,
    compared_shingles,
    document_signature,
    minima,
)

MEMORY_BYTES = 2**29 // 3
ROUNDS = 3


def documents_of_the_standard_library(megabytes: float) -> list[str]:
    """Sources of the interpreter's own library, which every machine has."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        # Datatrove gives no signature to a text of fewer than five words.
        if len(text) < 500:
            continue
        texts.append(text)
        size += len(text.encode())
        if size >= megabytes * 1e6:
            break
    return texts


def measure_signatures(texts: Sequence[str], num_for_datatrove: int = 40) -> dict[str, float]:
    """MB/s on one core: ours as prose and as code, and datatrove's MinhashDedupSignature on a few of the documents.

    The rounds alternate; medians. Raises RuntimeError unless both estimate similarities alike.
    """
    config = NearDuplicatesConfig()
    their_signature = _datatrove_signature()
    few = texts[:: max(1, len(texts) // num_for_datatrove)]
    _require_equal_estimates(few, their_signature)
    tasks: dict[str, tuple[Sequence[str], Callable[[str], Any]]] = {
        "prose": (texts, lambda text: document_signature(text, "prose", config)),
        "code": (texts, lambda text: document_signature(text, "code", config)),
        "prose, the same documents as datatrove": (few, lambda text: document_signature(text, "prose", config)),
        "datatrove": (few, their_signature),
    }
    speeds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(ROUNDS):
        for name, (given, sign) in tasks.items():
            started = time.process_time()
            for text in given:
                sign(text)
            speeds[name].append(_megabytes(given) / (time.process_time() - started))
    return {name: statistics.median(values) for name, values in speeds.items()}


def measure_decision(num_documents: int, *, duplicates: float = 0.2) -> dict[str, float]:
    """Seconds of each step that looks at all documents, with random signatures.

    A share of `duplicates` of the documents is nearly equal to one before: it has half of its bands.
    """
    config = NearDuplicatesConfig()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        path = work / "signatures"
        _write_random(path, num_documents, config, duplicates)
        parts = [PartSignatures.open(path, config)]
        started = time.perf_counter()
        with later_copies(parts, work, memory_bytes=MEMORY_BYTES) as copies:
            seconds["exact copies"] = time.perf_counter() - started
            started = time.perf_counter()
            ranking = Ranking(parts, copies, work, memory_bytes=MEMORY_BYTES)
            seconds["ranking"] = time.perf_counter() - started
            started = time.perf_counter()
            with similar_pairs(parts, ranking, config.threshold, work, memory_bytes=MEMORY_BYTES) as pairs:
                found = sum(map(len, pairs.blocks()))
                seconds["similar pairs"] = time.perf_counter() - started
    return {**seconds, "pairs": found, "peak memory, MB": _peak_megabytes()}


def _write_random(path: Path, num_documents: int, config: NearDuplicatesConfig, duplicates: float) -> None:
    random = np.random.default_rng(0)
    before = random.integers(0, 2**63, config.bands, dtype=np.uint64)
    copies = random.random(num_documents) < duplicates
    sizes = random.integers(500, 20_000, num_documents)
    with SignatureWriter(path, config) as writer:
        for number in range(num_documents):
            bands = random.integers(0, 2**63, config.bands, dtype=np.uint64)
            if copies[number]:
                bands[: config.bands // 2] = before[: config.bands // 2]
            before = bands
            writer.add_signature(f"{number:032x}", int(sizes[number]), Signature(bands, 500))


def _datatrove_signature() -> Callable[[str], Any]:
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig

    config = MinhashConfig(num_buckets=16, hashes_per_bucket=7, hash_config=HashConfig(precision=64))
    step = MinhashDedupSignature(tempfile.gettempdir(), config)
    return lambda text: step.get_signature(step.get_shingles(text))


def _require_equal_estimates(texts: Sequence[str], their_signature: Callable[[str], Any]) -> None:
    config = NearDuplicatesConfig()
    differences = []
    for text in texts[:8]:
        other = text[: len(text) * 4 // 5] + "something else " * 20
        ours = [minima(compared_shingles(version, "prose", config), 112) for version in (text, other)]
        theirs = [np.concatenate(their_signature(version)) for version in (text, other)]
        differences.append(float(np.mean(ours[0] == ours[1]) - np.mean(theirs[0] == theirs[1])))
    if max(map(abs, differences)) > 0.25:
        raise RuntimeError(f"the estimates of both differ by {max(map(abs, differences)):.2f}")


def _megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) / 1e6


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Prints both tables and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000, help="random documents to decide about")
    parser.add_argument("--megabytes", type=float, default=10.0, help="text to compute signatures of")
    add_json_option(parser)
    options = parser.parse_args()
    decision = measure_decision(options.documents)
    print(f"{options.documents:,} documents: " + ", ".join(f"{name} {value:,.1f}" for name, value in decision.items()))
    texts = documents_of_the_standard_library(options.megabytes)
    signatures = measure_signatures(texts)
    print(f"{len(texts):,} documents of {_megabytes(texts) * 1e3 / len(texts):.1f} kB, MB/s on one core:")
    for name, speed in signatures.items():
        print(f"  {name:40} {speed:8.1f}")
    write_record(options.json, {"decision": decision, "signatures": signatures})


if __name__ == "__main__":
    main()
