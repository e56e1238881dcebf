"""The parts of a step of PPO and GRPO: sampling answers, rewarding and scoring them, and learning from them.

The model has the shape of Gemma 3 270M with its vocabulary of 262,144 tokens and new weights, so that almost every
answer is as long as it may be; an adapter of LoRA is trained, as for a published model. Every measurement has a process
of its own. A row is a rollout with all steps that learn from it.

python bench/rollout_speed.py --json bench/results/rollout_speed.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from processes import answer, forget_peak, measured_apart, peak_bytes
from record import add_json_option, write_record

MEBIBYTE = 2**20
WORDS = "sheep wool fence meadow shepherd barn lamb grass hill dog river stone cloud evening morning gate"
SHAPE: dict[str, Any] = {
    "vocab_size": 262_144, "d_model": 640, "num_layers": 18, "num_heads": 4, "num_kv_heads": 1, "head_dim": 256,
    "d_ff": 2048, "max_seq_len": 2048, "norm": "rmsnorm_zero_centered", "norm_position": "sandwich", "qk_norm": "head",
    "activation": "geglu_tanh", "embedding_scale": 640**0.5, "position_encoding": "rope", "position_base": 1e6,
    "sliding_position_base": 1e4, "sliding_window": 512, "tie_weights": True, "bias": False, "dropout": 0.0,
    "sliding_layers": [layer for layer in range(18) if layer % 6 != 5],
}  # fmt: skip


def measure(
    method: str, model: str, data: str, reward: str, settings: dict[str, Any], training: dict[str, Any], rollouts: int
) -> dict[str, Any]:
    """Seconds of the parts of a rollout with its steps (medians, without the first), and the peak of memory."""
    from sheepop.checkpoint import RunDirectory
    from sheepop.core.console import Console
    from sheepop.core.random import seed_torch
    from sheepop.jobs.config import load_config
    from sheepop.jobs.run.open import task_of
    from sheepop.jobs.run.resolve import build_network, prepare_process
    from sheepop.jobs.task.fork import Fork
    from sheepop.train import build_optimizers
    from sheepop.train.evaluation_weights import TrainedWeights
    from sheepop.train.placement import OneDevice
    from sheepop.train.step import StepRunner

    asked: dict[str, Any] = {
        "tuning": {"method": method, "lora": {"rank": 16}, method: {"reward": reward, **settings}},
        "data": {"paths": [data], "validation_fraction": 0.0},
        "training": {
            "learning_rate": 1e-5, "max_steps": 100, "compile": False, "warmup_steps": 0, **training,
            **dict.fromkeys(("eval_interval", "sample_interval", "checkpoint_interval"), 100),
        },
        "device": "cpu",
    }  # fmt: skip
    forget_peak("cpu")
    before = peak_bytes("cpu")
    found: dict[str, list[float]] = {"rollout": [], "scoring": [], "updates": [], "peak": []}
    with tempfile.TemporaryDirectory() as output:
        config = load_config(options={**asked, "output_dir": output})
        prepare_process(config)
        task = task_of(config, RunDirectory(Path(output)), Console.silent(), Fork(Path(model))).prepared({})
        network = build_network(task, "cpu")
        placement = OneDevice(network, precision=training["precision"], device="cpu")
        objective = task.objective()
        source: Any = task.source(objective, placement)
        runner = StepRunner(
            placement, objective, build_optimizers(network, task.config.training), TrainedWeights(), 1.0
        )
        task.origin.forget()  # type: ignore[union-attr]
        for rollout in range(rollouts):
            updates = 0.0
            for number in range(rollout * source.steps_per_rollout, (rollout + 1) * source.steps_per_rollout):
                prepared = source.prepare(number)
                started = time.perf_counter()
                runner.take(
                    prepared, number=number, rate=1e-5, before_forward=partial(seed_torch, 0, "dropout", number)
                )
                updates += time.perf_counter() - started
            measured = prepared.measured
            found["rollout"].append(measured["rollout_seconds"])
            found["scoring"].append(measured["preparation_seconds"] - measured["rollout_seconds"])
            found["updates"].append(updates)
            found["peak"].append(peak_bytes("cpu"))
            forget_peak("cpu")
    parts = {name: statistics.median(values[1:]) for name, values in found.items()}
    return {**parts, "before": before, "length": measured["length"], "steps": source.steps_per_rollout}


def write_inputs(place: Path, prompts: int) -> tuple[Path, Path, Path]:
    """A model with new weights, prompts of different lengths, and a reward program."""
    from sheepop.checkpoint import save_model
    from sheepop.core.console import Console
    from sheepop.model import ModelConfig, build_model
    from sheepop.tokenizer import TokenizerConfig, train_tokenizer

    texts = [WORDS + "\n"] * 50 + [Path(json.__file__).read_text()] * 3
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=1024), texts, console=Console.silent())
    save_model(place / "model", build_model(ModelConfig(**SHAPE), seed=0, device="cpu"), tokenizer, {})
    draw, words = random.Random(0), WORDS.split()
    rows = [{"prompt": " ".join(draw.choice(words) for _ in range(draw.randint(10, 60)))} for _ in range(prompts)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "reward.py").write_text(
        "def reward(prompt, completion, **fields):\n    return completion.count('e') / (1 + len(completion))\n"
    )
    return place / "model", place / "prompts.jsonl", place / "reward.py"


def main() -> None:
    """Runs the benchmark."""
    if answer(measure):
        return
    parser = argparse.ArgumentParser(description="The parts of a step of PPO and GRPO.")
    parser.add_argument("--methods", nargs="+", choices=["ppo", "grpo"], default=["ppo", "grpo"])
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--answers", type=int, default=16, help="answers in a rollout")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="the most tokens of an answer")
    parser.add_argument("--rollouts", type=int, default=3)
    add_json_option(parser)
    asked = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model, data, reward = write_inputs(Path(folder), 4 * asked.answers)
        for method in asked.methods:
            for precision in asked.precisions:
                training = {
                    "global_batch_size": asked.answers, "micro_batch_size": asked.micro_batch, "precision": precision,
                }  # fmt: skip
                row = measured_apart(
                    __file__,
                    {
                        "method": method, "model": str(model), "data": str(data), "reward": str(reward),
                        "settings": {"max_new_tokens": asked.tokens}, "training": training, "rollouts": asked.rollouts,
                    },
                )  # fmt: skip
                results.append({"method": method, "precision": precision, **row})
                print(told(results[-1]), flush=True)
    write_record(asked.json, {"settings": {**vars(asked), "json": None}, "results": results})


def told(row: dict[str, Any]) -> str:
    """A row of the table."""
    parts = {name: row[name] for name in ("rollout", "scoring", "updates")}
    whole, peak = sum(parts.values()), row["peak"] / MEBIBYTE
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in parts.items())
    share = f"rollout {parts['rollout'] / whole:.0%}"
    return (
        f"{row['method']:5} {row['precision']}: {seconds} ({row['steps']} steps); {share} of {whole:.1f} s; "
        f"{row['length']:.0f} tokens an answer; "
        f"peak {peak:,.0f} MiB, {peak - row['before'] / MEBIBYTE:,.0f} over libraries"
    )


if __name__ == "__main__":
    main()
