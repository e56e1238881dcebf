"""Faults planted into small runs and what the analysis says of them, beside ten healthy runs, which must give no alarm.

    python bench/control_faults.py src/sheepop/train docs --json bench/results/control_faults.json

Each run trains a network of two blocks on characters of one of the folders, with `analysis.quantities` on. The table
has the causes that the advice names, and the highest share of the learning rate's limit that two measurements in a row
reach.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

import sheepop
from record import add_json_option, write_record
from sheepop.checkpoint import save_model
from sheepop.core.json_lines import read_json_lines
from sheepop.generate import GenerationConfig
from sheepop.interpret.control.advice import BATCH, HEADS, LAYER, RATE, advice_of, noise_scale_of, seconds_of_step
from sheepop.jobs.analyze_run import RunAnalysisRequest, analyze_run, reopen, sharpness_of
from sheepop.jobs.config import load_config
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train
from sheepop.model import build_model
from sheepop.train.step import StepRunner

STEPS, HEALTHY_STEPS = 80, 320
SEEDS, RATES = (0, 1, 2), (3e-3, 6e-3, 1.2e-2)  # of the runs whose losses are compared
USUAL = (
    *(
        "data.ignore=[images/]",
        "device=cpu",
        "tokenizer.algorithm=char",
        "model.d_model=32",
        "model.num_layers=2",
        "model.num_heads=2",
    ),
    *("model.max_seq_len=32", "model.ngrams=null", "model.short_convolution=null", "training.optimizer=adamw"),
    *("training.precision=fp32", "training.global_batch_size=64", "training.learning_rate=3e-3", "training.sinks=[]"),
    *("training.sample_prompts=[]", "training.keep_milestones=false", "training.trouble.spike=ignore"),
    *(f"training.max_steps={STEPS}", f"training.eval_interval={STEPS}", f"training.checkpoint_interval={STEPS}"),
    *("analysis.quantities=[sharpness,noise,layers]", "analysis.interval=10"),
)
# Rates like the best ones of bench/control_advice.py for networks of these forms.
HEALTHY: Mapping[str, tuple[str, ...]] = {
    "sheepop preset, AdamW": ("model.preset=sheepop-tiny", "training.learning_rate=1e-2"),
    "llama preset, AdamW": ("model.preset=llama-1m", "training.learning_rate=1e-2"),
    "gpt2 preset, Adam": (
        *("model.preset=gpt2", "model.vocab_size=512", "training.learning_rate=6e-3"),
        *("training.optimizer=adam", "training.weight_decay=0"),
    ),
    "llama preset, Muon": ("model.preset=llama-1m", "training.optimizer=muon", "training.learning_rate=3e-2"),
    "sheepop preset, SGD": (
        *("model.preset=sheepop-tiny", "training.optimizer=sgd"),
        *("training.learning_rate=0.3", "training.weight_decay=0"),
    ),
    "twice the rate": ("model.preset=llama-1m", "training.learning_rate=2e-2"),
    "gpt2 preset, seed 7": ("model.preset=gpt2", "model.vocab_size=512", "training.learning_rate=6e-3", "seed=7"),
    "constant rate, seed 3": (
        *("model.preset=sheepop-tiny", "training.learning_rate=1e-2"),
        *("training.schedule=constant", "seed=3"),
    ),
    "norms of heads, ALiBi": (
        *("model.position_encoding=alibi", "model.qk_norm=head", "model.num_kv_heads=1"),
        "training.learning_rate=1e-2",
    ),
    "n-grams, convolutions, BPE": (
        *("tokenizer.algorithm=bpe", "tokenizer.vocab_size=512", "model.preset=llama-1m"),
        *("model.ngrams.rows=4096", "model.short_convolution=3", "training.learning_rate=1e-2"),
    ),
}
MATRICES = (
    "blocks.1.attention.q_proj.weight",
    "blocks.0.attention.v_proj.weight",
    "blocks.1.attention.o_proj.weight",
    "blocks.0.feed_forward.up_proj.weight",
    "blocks.1.feed_forward.down_proj.weight",
)
DESCENT = (
    *("training.optimizer=sgd", "training.momentum=0", "training.weight_decay=0", "training.max_grad_norm=null"),
    "training.schedule=constant",
)


@dataclass
class Bench:
    """The runs of this benchmark in a `folder`; a row of the table for each that was looked at, written to `json`."""

    folder: Path
    json: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, data: Path, *settings: str, fork: Path | None = None, config: Path | None = None) -> Path:
        """Trains once, and returns the run's directory."""
        place = self.folder / f"run-{len(list(self.folder.iterdir()))}"
        usual = USUAL if config is None else ("data.ignore=[images/]", "device=cpu", "training.sinks=[]")
        given = (*usual, f"data.paths={data}", f"output_dir={place}", *settings)
        return train(RunRequest.exactly(load_config(config, overrides=given), fork=fork)).run

    def look(self, name: str, run: Path, expected: Sequence[str] = ()) -> None:
        """Adds the advice on a run to the table; it is right if it names an `expected` cause, or nothing if none is."""
        measured = read_json_lines(run / "metrics.jsonl").rows
        advice = advice_of(measured)
        causes = [each.cause for each in advice]
        shares = [row["sharpness_share"] for row in measured if row.get("sharpness_share") is not None]
        near = max((min(pair) for pair in pairwise(shares)), default=0.0)
        is_right = bool(set(causes) & set(expected)) if expected else not causes
        words = next((each.words for each in advice if each.cause in expected or not expected), None)
        self.say(name, expected, causes, is_right, words, {"share": near})

    def say(
        self,
        name: str,
        expected: Sequence[str],
        found: Sequence[str],
        is_right: bool,
        words: str | None,
        numbers: Mapping[str, Any],
    ) -> None:
        """Adds a row and prints it."""
        row = {"run": name, "expected": list(expected), "found": list(found), "is_right": is_right, "words": words}
        self.rows.append({**row, **numbers})
        write_record(self.json, {"steps": STEPS, "rows": self.rows})
        share = f"{numbers['share']:.2f}" if "share" in numbers else ""
        print(f"{name:34}  {'yes' if is_right else 'NO':3}  {share:>6}  {', '.join(found) or 'nothing'}", flush=True)


def healthy(bench: Bench, data: Sequence[Path], seed: int | None) -> None:
    """Ten runs of different networks, optimizers, seeds and texts, long enough to judge a rate too low.

    With a `seed` they have seeds from that one on instead of their own.
    """
    longer = (*for_steps(HEALTHY_STEPS), "analysis.interval=20")
    for number, (name, settings) in enumerate(HEALTHY.items()):
        other = () if seed is None else (f"seed={seed + number}",)
        bench.look(name, bench.run(data[number % len(data)], *longer, *settings, *other))


def too_fast(bench: Bench, data: Path) -> None:
    """Plain descent that continues at 1.3 times the rate that its last checkpoint bears, or with one fast matrix."""
    path = bench.run(data, *DESCENT, "training.learning_rate=0.2")
    found = analyze_run(RunAnalysisRequest(path, device="cpu"), "sharpness", lambda run: sharpness_of(run, rows=64))
    limit = found.rate / found.sharpness.share
    short = ("training.warmup_steps=0", "training.max_steps=6", "analysis.interval=1", "analysis.rows=64")
    again = (*DESCENT, *short, "training.eval_interval=6", "training.checkpoint_interval=6")
    run = bench.run(data, *again, f"training.learning_rate={1.3 * limit}", fork=path)
    bench.look("a rate 1.3 times too high", run, (RATE, LAYER))
    matrix = "blocks.1.feed_forward.down_proj.weight"
    layers = f"training.layers=[{{pattern: {matrix}, learning_rate: 2000}}]"
    run = bench.run(data, *again, layers, f"training.learning_rate={0.5 * limit}", fork=path)
    bench.look("a matrix with 2,000 times the rate", run, (LAYER, RATE))
    bench.rows[-1]["is_right"] &= matrix in (bench.rows[-1]["words"] or "")


def muon(bench: Bench, data: Path) -> dict[str, list[float]]:
    """Muon at the best of the rates 1e-2, 3e-2, ..., and at 10 and 100 times that, in two networks with three seeds.

    Returns the held-out losses by the rate. A network with norms of heads bears higher rates.
    """
    losses: dict[str, list[float]] = {}
    norms = ("model.position_encoding=rope", "model.norm=rmsnorm", "model.qk_norm=head")
    for name, settings, best in (("llama", ("model.preset=llama-1m",), 3e-2), ("norms of heads", norms, 1e-1)):
        for times, seed in product((1, 10, 100), SEEDS):
            given = (*settings, "training.optimizer=muon", f"training.learning_rate={times * best}", f"seed={seed}")
            run = bench.run(data, *for_steps(HEALTHY_STEPS), "analysis.interval=20", *given)
            bench.look(f"Muon, {name}, {times * best:g}, seed {seed}", run, () if times == 1 else (RATE, LAYER))
            losses.setdefault(f"{name}, {times * best:g}", []).append(held_out(run))
    return losses


def unstable(bench: Bench, data: Path, healthy_run: Path) -> None:
    """Matrices that are 8 times as long at step 0 as they are drawn, and one with 30 times the rate of the others."""
    lm = sheepop.load(healthy_run, device="cpu")
    for number, matrix in enumerate(MATRICES):
        model = build_model(lm.model.config, 1, "cpu")
        with torch.no_grad():
            model.get_parameter(matrix).mul_(8)
        save_model(bench.folder / f"scaled-{number}", model, lm.tokenizer, {})
        named(bench, f"{matrix} times 8", bench.run(data, fork=bench.folder / f"scaled-{number}"), matrix)
    layers = f"training.layers=[{{pattern: {MATRICES[0]}, learning_rate: 30}}]"
    named(bench, f"{MATRICES[0]} at 30 times the rate", bench.run(data, layers), MATRICES[0])


def named(bench: Bench, name: str, run: Path, matrix: str) -> None:
    """Looks at a run whose advice must name a matrix."""
    bench.look(name, run, (LAYER,))
    bench.rows[-1]["is_right"] &= matrix in (bench.rows[-1]["words"] or "")


def too_small(bench: Bench, data: Path) -> dict[str, Any]:
    """A quarter of the fewest rows that may be best; returns the losses of that batch and of the advised one.

    Rows are short, so that a step of few rows takes hardly longer than one of a single row. The advised batch trains
    for as many steps as take four fifths of the processor time.
    """

    def trained(rows: int, steps: int, *settings: str) -> Path:
        short = ("model.max_seq_len=8", "training.schedule=constant", f"training.global_batch_size={rows}")
        return bench.run(data, *short, *for_steps(steps), "analysis.interval=5", *settings)

    def losses(rows: int, steps: int) -> dict[str, list[float]]:
        """By the rate, for several seeds."""
        return {
            f"{rate:g}": [
                held_out(
                    trained(rows, steps, "analysis.quantities=[]", f"training.learning_rate={rate}", f"seed={seed}")
                )
                for seed in SEEDS
            ]
            for rate in RATES
        }

    rows = read_json_lines(trained(64, 240) / "metrics.jsonl").rows
    scale, step = noise_scale_of(rows), seconds_of_step(rows)
    assert scale is not None and step is not None
    size, steps = max(2, round(math.sqrt(scale.low * step[0] / step[1]) / 4)), 480
    path = trained(size, steps)
    bench.look("a batch four times too small", path, (BATCH,))
    advice = advice_of(read_json_lines(path / "metrics.jsonl").rows)
    advised = next((each.changes["training.global_batch_size"] for each in advice if each.cause == BATCH), None)
    if advised is None:
        return {"rows": size}
    fewer = round(0.8 * steps * seconds_of(path) / seconds_of(trained(advised, 10)))
    found = {"rows": size, "steps": steps, "losses": losses(size, steps)}
    return {**found, "advised_rows": advised, "advised_steps": fewer, "advised_losses": losses(advised, fewer)}


def for_steps(steps: int) -> tuple[str, ...]:
    """The settings of a run that validates once, at its end."""
    return tuple(f"training.{key}={steps}" for key in ("max_steps", "eval_interval", "checkpoint_interval"))


def held_out(run: Path) -> float:
    """The held-out loss of a run at its end."""
    return float(
        [row for row in read_json_lines(run / "metrics.jsonl").rows if row["split"] == "validation"][-1]["loss"]
    )


def seconds_of(run: Path) -> float:
    """The least processor time of a step at the end of a run."""
    found = reopen(RunAnalysisRequest(run, device="cpu"), "noise")
    parts, prepared = found.parts, found.parts.source.prepare(found.state.batch_number)
    runner = StepRunner(parts.placement, parts.objective, parts.optimizers, parts.evaluation, None)
    seconds = []
    for number in range(20):
        started = time.process_time()
        runner.take(prepared, number=number, rate=found.rate)
        seconds.append(time.process_time() - started)
    return min(seconds)


def dead_head(bench: Bench, data: Path, healthy_run: Path) -> None:
    """A head whose values and outputs are 0, so that no gradient revives it."""
    lm = sheepop.load(healthy_run, device="cpu")
    attention = lm.model.layers[1].attention
    assert attention is not None
    with torch.no_grad():
        attention.v_proj.weight[16:] = 0
        if attention.v_proj.bias is not None:
            attention.v_proj.bias[16:] = 0
        attention.o_proj.weight[:, 16:] = 0
    save_model(bench.folder / "doctored", lm.model, lm.tokenizer, {})
    bench.look("a dead head", bench.run(data, "training.max_steps=40", fork=bench.folder / "doctored"), (HEADS,))
    bench.rows[-1]["is_right"] &= bench.rows[-1]["found"] == [HEADS]
    bench.rows[-1]["is_right"] &= "blocks.1.attention head 1" in (bench.rows[-1]["words"] or "")


def looping(bench: Bench, healthy_run: Path) -> None:
    """A sampler at a low temperature, and the same network at temperature 1."""
    lm = sheepop.load(healthy_run, device="cpu")
    for temperature, expected in ((0.1, True), (1.0, False)):
        found = lm.analyze.decode("the ", GenerationConfig(temperature=temperature), length=24)
        wanted, named = (["loop"] if loops else [] for loops in (expected, found.is_looping))
        name, words = f"a sampler at temperature {temperature:g}", found.sentences()[-1]
        bench.say(name, wanted, named, wanted == named, words, {"text": found.text})


def diverging(bench: Bench, data: Path) -> dict[str, int | None]:
    """The step at which the recipe's run names its cause, and the one at which its loss shows it.

    The loss shows it once the mean of twenty steps is a tenth above its lowest.
    """
    run = bench.run(data, config=Path(__file__).parents[1] / "recipes" / "diverging.yaml")
    rows = read_json_lines(run / "metrics.jsonl").rows
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    means = [sum(losses[end - 20 : end]) / 20 for end in range(20, len(losses) + 1)]
    shown = next((20 + at for at, mean in enumerate(means) if mean > 1.1 * min(means[: at + 1])), None)
    analysed = [row for row in rows if row["split"] == "analysis"]
    counts = range(1, len(analysed) + 1)
    named = next((n for n in counts if {RATE, LAYER} & {each.cause for each in advice_of(analysed[:n])}), None)
    step = analysed[named - 1]["step"] if named else None
    bench.look("recipes/diverging.yaml", run, (RATE, LAYER))
    bench.rows[-1]["is_right"] &= step is not None and shown is not None and step + 50 <= shown
    return {"named_at_step": step, "loss_shows_it_at_step": shown}


def main() -> None:
    """Runs everything, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="+", help="folders of text")
    parts = ("healthy", "planted", "fast", "muon", "unstable")
    parser.add_argument("--only", choices=parts, help="leave the other runs out")
    parser.add_argument("--seed", type=int, help="of the first healthy run; each has one more than the one before")
    add_json_option(parser)
    options = parser.parse_args()
    print(f"{'run':34}  ok?  {'share':>6}  named")
    first, numbers = options.data[0], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.json)
        if options.only in (None, "healthy"):
            healthy(bench, options.data, options.seed)
        if options.only in (None, "planted"):
            usual = bench.run(first, "model.dropout=0")
            dead_head(bench, first, usual)
            looping(bench, usual)
            numbers["diverging"] = diverging(bench, first)
            print(numbers["diverging"])
            numbers["too_small"] = too_small(bench, first)
            print(numbers["too_small"])
        if options.only in (None, "fast"):
            too_fast(bench, first)
        if options.only in (None, "muon"):
            numbers["muon"] = muon(bench, first)
            print(numbers["muon"])
        if options.only in (None, "unstable"):
            unstable(bench, first, bench.run(first, "model.dropout=0", "training.max_steps=2"))
    right = sum(row["is_right"] for row in bench.rows)
    print(f"{right} of {len(bench.rows)} runs are judged as they should be.")
    write_record(options.json, {"steps": STEPS, "rows": bench.rows, **numbers})


if __name__ == "__main__":
    main()
