"""How fast three shapes write, beside every peer that is installed, on the same weights and in the same run.

python bench/generate_speed.py --json bench/results/generate_speed.json
python bench/generate_speed.py --shape wide --precisions int8 int4 --peers ../peers --busy 1
python bench/generate_speed.py --shape mixture --precisions fp32 int8 --batches 1 8 --threads 1
python bench/generate_speed.py --device cuda --precisions bf16

The shapes are GPT-2 124M, a Llama with 12 layers of 640 and a vocabulary of 262,144, and a Qwen3 MoE with 8 layers of
512, of whose 32 experts a token has 4. Peers are transformers, ctranslate2, llama-cpp-python and openvino-genai, which
reads Llama's GGUF file alone; the mixture has only transformers and llama-cpp-python. --peers adds a directory that
`pip install --target` filled. Weights are drawn; prompts have 64 tokens and 128 are written, greedily and sampled. Each
program runs in a process of its own, and they take turns, beside --busy processes that compute without end. Ratios
above 1 say that SheepOp is faster than the fastest peer in that precision, by the clock and by processor time, which is
what counts on a busy machine. "memory" is the share of the machine's read bandwidth, if SheepOp's weights are read
once a pass. "second turn" is a prompt of up to 2,000 tokens with 20 more, after the prompt itself. The exit code is 1
when the greedy tokens of two programs differ in float32.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from record import add_json_option, write_record
from writers import GGUF, PRECISIONS

MODULES = {
    "transformers": "transformers",
    "ctranslate2": "ctranslate2",
    "llama.cpp": "llama_cpp",
    "openvino-genai": "openvino_genai",
}
END = "<|endoftext|>"
RECORDED = ("shape", "bandwidth", "threads", "busy", "prompt", "written", "rounds", "activations")
PROMPT, WRITTEN, LONG_PROMPT, MIXED, CHAT, NEW = 64, 128, 1000, 32, 2000, 20


@dataclass(frozen=True)
class Shape:
    """A network: its vocabulary, its context, and the programs that cannot read it."""

    vocabulary: int
    context: int
    without: tuple[str, ...] = ()


SHAPES = {
    "gpt2": Shape(50257, 1024, ("openvino-genai",)),  # which does not read GPT-2's GGUF files
    "wide": Shape(262144, 4096),
    "mixture": Shape(32768, 4096, ("ctranslate2", "openvino-genai")),
}


@dataclass(frozen=True)
class Work:
    """Prompts by their lengths, and how many tokens to write for each."""

    name: str
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    sampled: bool = False
    contestants: tuple[str, ...] = tuple(PRECISIONS)

    def requests(self, vocabulary: int, turn: int) -> list[dict[str, Any]]:
        """The same prompts for everyone, new ones in each turn; all but the last request are not measured."""
        drawn = np.random.default_rng((len(self.lengths), turn))
        prompts = [drawn.integers(0, vocabulary - 1, length).tolist() for length in self.lengths]
        first = (
            [{"prompts": [prompts[0][:-NEW]], "counts": [1], "sampled": False}] if self.name == "second turn" else []
        )
        return [*first, {"prompts": prompts, "counts": list(self.counts), "sampled": self.sampled}]


def works(batches: list[int], prompt: int, written: int, shape: Shape) -> list[Work]:
    """Batches of equal prompts, one long prompt, its second turn, and mixed requests that arrive together."""
    drawn = np.random.default_rng(0)
    mixed = tuple(int(length) for length in drawn.integers(16, 513, MIXED))
    counts = tuple(int(count) for count in drawn.integers(16, 257, MIXED))
    return [
        *(Work(f"batch {size}", (prompt,) * size, (written,) * size) for size in batches),
        *(Work(f"batch {size} sampled", (prompt,) * size, (written,) * size, True) for size in batches),
        Work("prefill", (LONG_PROMPT,), (1,)),
        Work("second turn", (min(CHAT, shape.context - NEW) + NEW - 1,), (1,), False, ("SheepOp",)),
        *([Work("mixed", mixed, counts, False, ("SheepOp", "transformers"))] if written == WRITTEN else []),
    ]


class Contestant:
    """A program in its process."""

    def __init__(self, name: str, files: Path, precision: str, options: argparse.Namespace) -> None:
        threads, peers = str(options.threads), options.peers
        paths = [str(Path(__file__).parents[1] / "src"), *([str(peers)] if peers else []), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        self._process = subprocess.Popen(
            [
                *(sys.executable, Path(__file__).with_name("writers.py"), name, files, precision, threads),
                *(options.device, *([options.activations] if name == "SheepOp" else [])),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": threads},
        )
        self.read_bytes: list[float] | None = self._answer()["read_bytes"]  # of passes over 1, 2, ... tokens

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


def prepare(files: Path, shape: str, contestants: list[str], precisions: list[str], peers: Path | None) -> None:
    """The same weights in every program's format, but for those that `files` already has."""
    from sheepop.jobs.exchange import export_model

    source, size = files / "transformers", SHAPES[shape].vocabulary
    if not (files / "sheepop").exists():
        _draw(files, source, shape, size)
    for precision in precisions if {"llama.cpp", "openvino-genai"} & set(contestants) else ():
        kind = {"fp32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}}
        found, file = kind.get(precision, {"quantize": GGUF[precision]}), files / f"{GGUF[precision]}.gguf"
        if not file.exists():
            export_model(files / "sheepop", file, format="gguf", **found)
    if "ctranslate2" in contestants and not (files / "ctranslate2").exists():
        sys.path[:0] = [str(peers)] if peers else []
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(source)).convert(str(files / "ctranslate2"))


def _draw(files: Path, source: Path, shape: str, size: int) -> None:
    """Draws the weights, and saves them for transformers in `source` and for SheepOp."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    from sheepop.jobs.exchange import import_model

    torch.manual_seed(0)
    common: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id"), size - 1)
    common |= {"vocab_size": size, "max_position_embeddings": SHAPES[shape].context, "tie_word_embeddings": True}
    model: Any
    if shape == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=size))
    elif shape == "wide":
        sizes = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 64}
        heads = {"num_attention_heads": 10, "num_key_value_heads": 5}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **common))
    else:
        sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 8, "head_dim": 64}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        experts = {"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **common))
    model.save_pretrained(source)
    tokenizer = _tokenizer(size)
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    names = {**tokenizer["model"]["vocab"], END: size - 1}
    (files / "names.json").write_text(json.dumps(sorted(names, key=names.__getitem__)))
    import_model(source, files / "sheepop")


def _tokenizer(size: int) -> dict[str, Any]:
    """Byte-level BPE with `size` tokens: every byte, and the first strings of two and three bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    twos = [(a, b) for a in alphabet for b in alphabet]
    pairs = [*twos, *((a + b, c) for a, b in twos for c in alphabet)][: size - 1 - len(alphabet)]
    tokens = [*alphabet, *(a + b for a, b in pairs)]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": size - 1,
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
    shape, rows = SHAPES[options.shape], []
    try:
        for work in works(options.batches, options.prompt, options.written, shape):
            if options.works and work.name not in options.works:
                continue
            rows.append(_race(work, contestants, options.rounds, precision, shape))
            if work.name.startswith("batch") and (moved := contestants["SheepOp"].read_bytes) is not None:
                texts = len(work.counts)
                passes = rows[-1]["tokens_per_second"]["SheepOp"] / texts
                rows[-1]["memory"] = passes * moved[min(texts, len(moved)) - 1] / options.bandwidth
            show(rows[-1])
    finally:
        for contestant in contestants.values():
            contestant.close()
    return rows


def _race(work: Work, contestants: dict[str, Contestant], rounds: int, precision: str, shape: Shape) -> dict[str, Any]:
    here = {name: contestant for name, contestant in contestants.items() if name in work.contestants}
    taken: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in here} for kind in ("seconds", "processor")}
    tokens: dict[str, list[list[int]]] = {}
    first = 0 if work.name in ("mixed", "second turn") else 1  # other works have a turn to warm up
    for turn in range(rounds + first):
        for name, contestant in here.items():
            *before, request = work.requests(shape.vocabulary, turn)
            for preparing in before:
                contestant.ask(preparing)
            found = contestant.ask(request)
            tokens[name] = found["tokens"]
            for kind, of_kind in taken.items():
                of_kind[name] += [found[kind]] if turn >= first else []
    reads = {"prefill": sum(work.lengths), "second turn": NEW}
    amount = reads.get(work.name, sum(work.counts))
    speeds, by_processor = (
        {name: amount / statistics.median(found) for name, found in of_kind.items()} for of_kind in taken.values()
    )
    same = {name: _same(found, tokens["SheepOp"]) for name, found in tokens.items() if name != "SheepOp"}
    return {
        "work": work.name,
        "precision": precision,
        "tokens_per_second": speeds,
        "tokens_per_processor_second": by_processor,
        "ratio": _ratio(speeds),
        "processor_ratio": _ratio(by_processor),
        "same_tokens": {} if work.sampled else same,
    }


def _ratio(speeds: dict[str, float]) -> float | None:
    """SheepOp's speed over that of the fastest peer."""
    peers = [speed for name, speed in speeds.items() if name != "SheepOp"]
    return speeds["SheepOp"] / max(peers) if peers else None


def _same(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of texts that are equal."""
    return statistics.mean(a == b for a, b in zip(one, other, strict=True))


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    speeds = "  ".join(
        f"{name} {speed:,.1f} ({row['tokens_per_processor_second'][name]:,.1f})"
        for name, speed in row["tokens_per_second"].items()
    )
    ratio = "" if row["ratio"] is None else f"  ratio {row['ratio']:.2f} ({row['processor_ratio']:.2f})"
    share = f"  memory {row['memory']:.0%}" if "memory" in row else ""
    same = "  ".join(f"{name} {share:.0%}" for name, share in row["same_tokens"].items())
    print(
        f"{row['precision']:>5} {row['work']:<16} {speeds}{ratio}{share}" + (f"  same texts: {same}" if same else ""),
        flush=True,
    )


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute without end meanwhile."""
    program = "while True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Runs the races, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="gpt2")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS["SheepOp"], default=["fp32", "int8"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt of a batch")
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens to write for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, after one to warm up")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--activations", choices=("exact", "rounded"), default="exact", help="SheepOp's")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--peers", type=Path, help="where other programs are installed")
    parser.add_argument("--files", type=Path, help="a folder that keeps the weights of this shape for later runs")
    parser.add_argument("--without", nargs="+", default=[], choices=tuple(MODULES), help="programs to leave out")
    parser.add_argument("--works", nargs="+", help="only these rows of the table, such as 'batch 8' or prefill")
    add_json_option(parser)
    options = parser.parse_args()
    if options.peers:
        sys.path.insert(0, str(options.peers))
    modules = MODULES if options.device == "cpu" else {"transformers": "transformers"}
    here = [name for name, module in modules.items() if importlib.util.find_spec(module)]
    without = {*options.without, *SHAPES[options.shape].without}
    options.contestants = ["SheepOp", *(name for name in here if name not in without)]
    options.bandwidth = bandwidth(options.threads, options.device)
    read = f"memory read at {options.bandwidth / 1e9:.1f} GB/s"
    how = f"{options.threads} threads; {options.busy} busy; {options.activations} activations"
    print(f"{', '.join(options.contestants)}; {options.shape}; {how}; {read}")
    print("tokens per second (per second of processor time)")
    with tempfile.TemporaryDirectory() as folder, busy(options.busy):
        files = options.files or Path(folder)
        prepare(files, options.shape, options.contestants, options.precisions, options.peers)
        settings = {name: getattr(options, name) for name in RECORDED}
        rows: list[dict[str, Any]] = []
        for precision in options.precisions:
            rows += measure(files, options, precision)
            write_record(options.json, {**settings, "results": rows})
    return int(any(row["precision"] == "fp32" and min(row["same_tokens"].values(), default=1.0) < 1 for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
