"""How fast the GPT-2 124M shape writes, beside every peer that is installed, on the same weights and in the same run.

python bench/generate_speed.py --json bench/results/generate_speed.json
python bench/generate_speed.py --precisions int8 --peers ../peers
python bench/generate_speed.py --device cuda --precisions bf16

Peers are transformers, ctranslate2 and llama-cpp-python; --peers adds a directory that `pip install --target` filled.
Weights are drawn; prompts have 64 tokens and 128 are written, greedily. Each program runs in a process of its own, and
they take turns. A ratio above 1 says that SheepOp is faster than the fastest peer in that precision. "memory" is the
share of the machine's read bandwidth, with a byte of every weight read once a token. The exit code is 1 when the tokens
of two programs differ in float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from record import add_json_option, write_record
from writers import PRECISIONS, VOCABULARY

BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5625}
MODULES = {"transformers": "transformers", "ctranslate2": "ctranslate2", "llama.cpp": "llama_cpp"}
END = "<|endoftext|>"
PROMPT, WRITTEN, LONG_PROMPT, MIXED = 64, 128, 1000, 32


@dataclass(frozen=True)
class Work:
    """Prompts by their lengths, and how many tokens to write for each."""

    name: str
    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    def request(self) -> dict[str, Any]:
        """The same prompts for everyone."""
        drawn = np.random.default_rng(len(self.lengths))
        prompts = [drawn.integers(0, VOCABULARY - 1, length).tolist() for length in self.lengths]
        return {"prompts": prompts, "counts": list(self.counts)}


def works(batches: list[int], written: int) -> list[Work]:
    """Batches of equal prompts, one long prompt, and requests of mixed lengths that arrive together."""
    drawn = np.random.default_rng(0)
    mixed = tuple(int(length) for length in drawn.integers(16, 513, MIXED))
    counts = tuple(int(count) for count in drawn.integers(16, 257, MIXED))
    return [
        *(Work(f"batch {size}", (PROMPT,) * size, (written,) * size) for size in batches),
        Work("prefill", (LONG_PROMPT,), (1,)),
        Work("mixed", mixed, counts),
    ]


class Contestant:
    """A program in its process."""

    def __init__(self, name: str, files: Path, precision: str, options: argparse.Namespace) -> None:
        threads, peers = str(options.threads), options.peers
        paths = [str(Path(__file__).parents[1] / "src"), *([str(peers)] if peers else []), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("writers.py"), name, files, precision, threads, options.device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": threads},
        )
        self._answer()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds and tokens for a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            sys.exit(f"a contestant ended with exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def prepare(files: Path, contestants: list[str], precisions: list[str], peers: Path | None) -> None:
    """The same weights in every program's format."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from sheepop.jobs.exchange import export_model, import_model

    torch.manual_seed(0)
    source = files / "transformers"
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY)).save_pretrained(source)
    tokenizer = _tokenizer()
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    names = {**tokenizer["model"]["vocab"], END: VOCABULARY - 1}
    (files / "names.json").write_text(json.dumps(sorted(names, key=names.__getitem__)))
    import_model(source, files / "sheepop")
    if "llama.cpp" in contestants:
        kinds = {"fp32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}, "int8": {"quantize": "q8_0"}}
        for precision, file in (("fp32", "f32"), ("bf16", "bf16"), ("int8", "q8_0")):
            if precision in precisions:
                export_model(files / "sheepop", files / f"{file}.gguf", format="gguf", **kinds[precision])
    if "ctranslate2" in contestants:
        sys.path[:0] = [str(peers)] if peers else []
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(source)).convert(str(files / "ctranslate2"))


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE with GPT-2's number of tokens: every byte, and the first pairs of bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    pairs = [(a, b) for a in alphabet for b in alphabet][: VOCABULARY - 1 - len(alphabet)]
    tokens = [*alphabet, *(a + b for a, b in pairs)]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": VOCABULARY - 1,
                "content": END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [f"{a} {b}" for a, b in pairs],
        },
    }


def bandwidth(threads: int, device: str) -> float:
    """Bytes a second that are read from memory: the best of several sums over a gigabyte."""
    torch.set_num_threads(threads)
    content = torch.ones(2**28, device=device)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        content.sum().item()
        best = max(best, content.nbytes / (time.perf_counter() - begin))
    return best


def measure(files: Path, options: argparse.Namespace, precision: str) -> list[dict[str, Any]]:
    """The figures of everyone who has this precision, taking turns."""
    names = [name for name in options.contestants if precision in PRECISIONS[name]]
    contestants = {name: Contestant(name, files, precision, options) for name in names}
    rows = []
    try:
        for work in works(options.batches, options.written):
            rows.append(_race(work, contestants, options.rounds, precision))
            show(rows[-1], options.bandwidth)
    finally:
        for contestant in contestants.values():
            contestant.close()
    return rows


def _race(work: Work, contestants: dict[str, Contestant], rounds: int, precision: str) -> dict[str, Any]:
    request = work.request()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for name, contestant in contestants.items():
            if work.name == "mixed" and name not in ("SheepOp", "transformers"):
                continue
            found = contestant.ask(request)
            tokens[name] = found["tokens"]
            if number or work.name == "mixed":  # the first round warms up, but for the one that takes minutes
                seconds[name].append(found["seconds"])
        if work.name == "mixed" and number == max(0, rounds // 2 - 1):
            break
    amount = sum(work.lengths) if work.name == "prefill" else sum(work.counts)
    speeds = {name: amount / statistics.median(taken) for name, taken in seconds.items() if taken}
    peers = [speed for name, speed in speeds.items() if name != "SheepOp"]
    same = {name: _same(found, tokens["SheepOp"]) for name, found in tokens.items() if name != "SheepOp"}
    return {
        "work": work.name,
        "precision": precision,
        "tokens_per_second": speeds,
        "ratio": speeds["SheepOp"] / max(peers) if peers else None,
        "same_tokens": same,
    }


def _same(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of texts that are equal."""
    return statistics.mean(a == b for a, b in zip(one, other, strict=True))


def show(row: dict[str, Any], read: float) -> None:
    """One line of the table."""
    speeds = "  ".join(f"{name} {speed:,.1f}" for name, speed in row["tokens_per_second"].items())
    ratio = "" if row["ratio"] is None else f"  ratio {row['ratio']:.2f}"
    share = ""
    if row["work"].startswith("batch"):
        passes = row["tokens_per_second"]["SheepOp"] / int(row["work"].split()[1])
        row["memory"] = passes * NUM_WEIGHTS * BYTES[row["precision"]] / read
        share = f"  memory {row['memory']:.0%}"
    same = "  ".join(f"{name} {share:.0%}" for name, share in row["same_tokens"].items())
    print(f"{row['precision']:>5} {row['work']:<9} {speeds}{ratio}{share}" + (f"  same texts: {same}" if same else ""))


# Every weight that a token reads: all but the positions and the rows of the embedding that are not its own.
NUM_WEIGHTS = 12 * 12 * 768**2 + VOCABULARY * 768


def main() -> int:
    """Runs the races, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", choices=tuple(BYTES), default=["fp32", "int8"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens to write for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, after one to warm up")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peers", type=Path, help="where other programs are installed")
    add_json_option(parser)
    options = parser.parse_args()
    if options.peers:
        sys.path.insert(0, str(options.peers))
    modules = MODULES if options.device == "cpu" else {"transformers": "transformers"}
    options.contestants = ["SheepOp", *(name for name, module in modules.items() if importlib.util.find_spec(module))]
    options.bandwidth = bandwidth(options.threads, options.device)
    read = f"memory read at {options.bandwidth / 1e9:.1f} GB/s"
    print(f"{', '.join(options.contestants)}; {options.threads} threads; {read}")
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        prepare(files, options.contestants, options.precisions, options.peers)
        rows = [row for precision in options.precisions for row in measure(files, options, precision)]
    settings = {name: getattr(options, name) for name in ("bandwidth", "threads", "written", "rounds")}
    write_record(options.json, {**settings, "results": rows})
    return int(any(row["precision"] == "fp32" and min(row["same_tokens"].values(), default=1.0) < 1 for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
