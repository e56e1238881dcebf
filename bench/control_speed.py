"""What the analyses of control cost: gains of GPT-2 at 64 tokens, one sharpness, and the callback of a run.

    python bench/control_speed.py docs --json bench/results/control_speed.json

The gains are those of GPT-2's shape (124M) with random weights, which take as long as trained ones. The sharpness is
that of a small run at a checkpoint, with its 14 products of the Hessian on half a batch, in turn with steps of the run.
The callback's cost is its share of the processor time of a run at the default interval. All times are of the processor.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from record import add_json_option, write_record
from sheepop.core.json_lines import read_json_lines
from sheepop.core.random import torch_generator
from sheepop.interpret.control.analyses import Analyses
from sheepop.interpret.control.curvature import rows_of
from sheepop.interpret.control.stability import measure_sharpness
from sheepop.interpret.control.watching import TrainingAnalysis
from sheepop.jobs.analyze_run import RunAnalysisRequest, reopen
from sheepop.jobs.config import load_config
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer
from sheepop.train.step import StepRunner
from timing import processor_seconds

RUN = (
    *("data.ignore=[images/]", "device=cpu", "tokenizer.algorithm=char", "model.d_model=96", "model.num_layers=4"),
    *("model.num_heads=4", "model.max_seq_len=64", "model.ngrams=null", "model.short_convolution=null"),
    *("training.optimizer=adamw", "training.precision=fp32", "training.global_batch_size=32", "training.sinks=[]"),
    *("training.sample_prompts=[]", "training.keep_milestones=false"),
)


def cost_of_gains(tokens: int) -> dict[str, float]:
    """Seconds of processor and wall time of all gains at a prompt, and how many threads worked."""
    model = build_model(ModelConfig(preset="gpt2", vocab_size=50257), seed=0)
    analyses, ids = Analyses(model, CharTokenizer()), [32 + place for place in range(tokens)]
    started = time.process_time(), time.monotonic()
    analyses.gains(ids)
    seconds = time.process_time() - started[0], time.monotonic() - started[1]
    return {"processor_seconds": seconds[0], "wall_seconds": seconds[1], "threads": torch.get_num_threads()}


def cost_of_sharpness(run: Path, rounds: int) -> dict[str, float]:
    """Processor time of one sharpness as `sheepop analyze sharpness` measures it, in steps of its run."""
    found = reopen(RunAnalysisRequest(run, device="cpu"), "sharpness")
    parts, prepared = found.parts, found.parts.source.prepare(found.state.batch_number)
    batch = rows_of(prepared.micro_batches[0], slice(0, found.config.training.global_batch_size // 2))
    runner = StepRunner(parts.placement, parts.objective, parts.optimizers, parts.evaluation, None)

    def sharpness() -> None:
        with parts.placement.evaluating():
            measure_sharpness(found.model, parts.optimizers, batch, torch_generator(0, "sharpness"), tolerance=0.0)

    seconds, _ = processor_seconds(
        {"step": lambda: runner.take(prepared, number=0, rate=found.rate), "sharpness": sharpness}, rounds
    )
    return {**seconds, "in_steps": seconds["sharpness"] / seconds["step"]}


def cost_of_callback(data: Path, folder: Path, steps: int) -> dict[str, float]:
    """The share of a run's processor time that measuring all quantities takes at the default interval."""
    spent, measured = 0.0, TrainingAnalysis._measured

    def timed(*given: Any) -> dict[str, Any]:
        nonlocal spent
        started = time.process_time()
        row = measured(*given)
        spent += time.process_time() - started
        return row

    TrainingAnalysis._measured = timed  # type: ignore[method-assign]
    quantities = "analysis.quantities=[sharpness,noise,layers]"
    started = time.process_time()
    rows = _trained(data, folder, steps, quantities)
    return {"steps": steps, "measurements": rows, "share": spent / (time.process_time() - started)}


def _trained(data: Path, folder: Path, steps: int, *settings: str) -> int:
    """Trains into `folder`; returns the number of measurements."""
    places = (f"training.eval_interval={steps}", f"training.checkpoint_interval={steps}", f"output_dir={folder}")
    config = load_config(overrides=(*RUN, *places, f"data.paths={data}", f"training.max_steps={steps}", *settings))
    train(RunRequest.exactly(config))
    return sum(row["split"] == "analysis" for row in read_json_lines(folder / "metrics.jsonl").rows)


def main() -> None:
    """Measures all three, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder of text")
    parser.add_argument("--tokens", type=int, default=64, help="of the prompt of the gains")
    parser.add_argument("--steps", type=int, default=900, help="of the run with the callback")
    parser.add_argument("--rounds", type=int, default=5, help="turns of a step and a sharpness")
    add_json_option(parser)
    options = parser.parse_args()
    numbers: dict[str, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        numbers["callback"] = cost_of_callback(options.data, Path(scratch) / "run", options.steps)
        print(f"callback   {numbers['callback']['share']:.2%} of a run's processor time", flush=True)
        numbers["sharpness"] = cost_of_sharpness(Path(scratch) / "run", options.rounds)
        print(f"sharpness  {numbers['sharpness']['in_steps']:.1f} steps of the run", flush=True)
    numbers["gains"] = cost_of_gains(options.tokens)
    print(f"gains      {numbers['gains']['processor_seconds']:.1f} s of processor time", flush=True)
    write_record(options.json, {"tokens": options.tokens, **numbers})


if __name__ == "__main__":
    main()
