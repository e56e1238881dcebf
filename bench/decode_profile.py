"""Where the time of one decode step goes, part by part: a token for each of a few texts that are written greedily.

python bench/decode_profile.py --json bench/results/decode_profile.json
python bench/decode_profile.py --threads 2 --clock wall

Functions are replaced by ones that note when they begin and end; a part has the time of its functions less that of the
parts inside. The weights are those of `generate_speed.py`. Processor time with one thread says something on a busy
machine, too; the clock does on a quiet one only. Times are medians of the steps, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from generate_speed import SHAPES, prepare
from record import add_json_option, write_record
from sheepop.adapt import stored_weight
from sheepop.adapt.quantization import quantize
from sheepop.checkpoint import load_model
from sheepop.generate import GenerationConfig, Generator, native_block, sampling_kernels
from sheepop.generate.engine import Engine
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.runner import PagedRunner
from sheepop.generate.sampler import Sampled, Sampler
from sheepop.generate.scheduler import Scheduler
from sheepop.model import Transformer

PROMPT, SKIPPED = 64, 4  # steps at the beginning, which are not measured
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Functions by the part that they belong to. Those of C++ code are returned by a function.
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "requests, tokens and texts": ((Engine, "step"),),
    "scheduling": ((Scheduler, "schedule"),),
    "tables of the pass": ((PagedRunner, "read"), (PagedCache, "read"), (PagedCache, "prepare")),
    "embedding": ((Transformer, "embed"),),
    "angles and last norm": ((Transformer, "angles"), (Transformer, "finish")),
    "network, in Python": ((Transformer, "run"),),
    "blocks, in Python": ((native_block, "run_together"),),
    "output projection, in Python": ((Transformer, "read_out"),),
    "sampler, in Python": ((Sampler, "sample"), (Sampled, "choice")),
}
NATIVE = {
    "blocks, native": (native_block, "_run"),
    "output projection, native": (stored_weight, "_run"),
    "sampler, native": (sampling_kernels, "_choose"),
}


class Profile:
    """The time of each part in each step."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now, self._open, self._since = now, list[str](), 0
        self.steps: list[dict[str, int]] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time belongs to `part`; a step begins with the outermost one."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._open:
                self.steps.append(defaultdict(int))
            self._switch(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(None)

        return call

    def _switch(self, part: str | None) -> None:
        """Enters a part, or leaves the current one; what has passed belongs to the part before."""
        now = self._now()
        if self._open:
            self.steps[-1][self._open[-1]] += now - self._since
        if part is None:
            self._open.pop()
        else:
            self._open.append(part)
        self._since = self._now()


def install(profile: Profile) -> None:
    """Replaces the functions of all parts."""
    for part, functions in PARTS.items():
        for owner, name in functions:
            setattr(owner, name, profile.timed(part, getattr(owner, name)))
    for part, (owner, name) in NATIVE.items():
        native = profile.timed(part, getattr(owner, name)())
        setattr(owner, name, lambda native=native: native)


def steps_of(generator: Generator, texts: int, written: int, activations: Any, profile: Profile) -> dict[str, float]:
    """The median of each part over the steps of one call, in microseconds."""
    drawn = torch.Generator().manual_seed(texts)
    vocabulary = generator.tokenizer.vocab_size - 1
    prompts = torch.randint(vocabulary, (texts, PROMPT), generator=drawn).tolist()
    profile.steps.clear()
    config = GenerationConfig(max_new_tokens=written, min_new_tokens=written, temperature=0.0, activations=activations)
    generator.generate(prompts, config)
    steps = profile.steps[SKIPPED:]
    found = {part: statistics.median(step[part] for step in steps) / 1e3 for part in (*PARTS, *NATIVE)}
    return {**found, "all": statistics.median(sum(step.values()) for step in steps) / 1e3}


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="wide")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16", "int8", "int4"), default=["int8", "bf16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--written", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("processor", "wall"), default="processor")
    parser.add_argument("--activations", choices=("exact", "rounded"), default="exact")
    parser.add_argument("--files", type=Path, help="a folder that keeps the weights of this shape for later runs")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    profile = Profile(time.process_time_ns if options.clock == "processor" else time.perf_counter_ns)
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = options.files or Path(folder)
        prepare(files, options.shape, ["SheepOp"], [], None)
        for precision in options.precisions:
            loaded = load_model(files / "sheepop", "cpu", KINDS.get(precision))
            model = loaded.model if precision in KINDS else quantize(loaded.model, precision)
            generator = Generator(model, loaded.tokenizer, max_batch_size=max(options.batches))
            # Loads the native code.
            generator.generate([[1]], GenerationConfig(max_new_tokens=2, activations=options.activations))
            if not columns:
                install(profile)
            for texts in options.batches:
                columns[f"{precision}, {texts}"] = steps_of(
                    generator, texts, options.written, options.activations, profile
                )
    print(f"{options.shape}, {options.threads} threads, {options.clock} time of a step in microseconds")
    print(f"{'part':<30}" + "".join(f"{name:>12}" for name in columns))
    for part in (*PARTS, *NATIVE, "all"):
        print(f"{part:<30}" + "".join(f"{column[part]:>12,.0f}" for column in columns.values()))
    settings = {name: getattr(options, name) for name in ("shape", "threads", "clock", "written", "activations")}
    write_record(options.json, {**settings, "microseconds": columns})


if __name__ == "__main__":
    main()
