"""How far plans are from runs: peak memory and time of runs that are drawn at random, predicted and measured.

python bench/plan_accuracy.py --json bench/results/plan_accuracy.json

Every configuration is planned and run in processes of their own, one after the other. The peak memory of a run is that
of its process (`ru_maxrss`), and its time that of its stages, which it writes down. Tensors are counted, and measured
in two steps of the plan.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from record import add_json_option, write_record

_KINDS = ("text", "lora", "grpo", "text", "lora", "grpo", "text", "lora", "grpo", "text")
_COMPARED = ("memory", "tensors", "seconds")
_WORDS = ("sheep", "wolf", "meadow", "fence", "night", "jumps", "over", "sleeps", "under", "counts", "the", "a")
_REWARD = "def reward(prompt, answer, **fields):\n    return float(answer.count('e'))\n"
_RUNNER = """
import json, resource, sys, time
from sheepop.cli.main import main
sys.argv = ["sheepop", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    if end.code:
        raise
finally:
    print("PEAK", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def sheepop(*arguments: object) -> tuple[str, int]:
    """The output of a command and the peak memory of its process in bytes."""
    program = [sys.executable, "-c", _RUNNER, json.dumps([str(each) for each in arguments])]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    output, _, peak = done.stdout.rpartition("PEAK ")
    return output, int(peak)


def drawn(kind: str, draw: random.Random, place: Path) -> tuple[list[str], list[str], list[str]]:
    """The command of a run, the arguments that a plan shares with it, and the settings."""
    rows = draw.choice((4, 8, 16))
    settings = [f"training.global_batch_size={rows}", "training.precision=fp32", "training.sample_prompts=[]"]
    if kind == "text":
        size = draw.choice((128, 192, 256))
        settings += [
            f"model.d_model={size}", f"model.num_layers={draw.choice((2, 4, 6))}", f"model.num_heads={size // 64}",
            f"model.max_seq_len={draw.choice((64, 128, 256))}", "model.ngrams=null", "training.optimizer=adamw",
            f"training.max_steps={draw.choice((20, 40))}", "tokenizer.vocab_size=300",
        ]  # fmt: skip
        return ["train"], ["--data", str(place / "text")], settings
    data = ["--data", str(place / "chats.jsonl")]
    if kind == "lora":
        settings += [f"tuning.lora.rank={draw.choice((4, 16))}", "training.max_steps=20"]
        return ["tune", "sft", str(place / "base")], data, settings
    settings += [
        f"tuning.grpo.reward={place / 'check.py'}", f"tuning.grpo.group_size={draw.choice((2, 4))}",
        f"tuning.grpo.max_new_tokens={draw.choice((16, 32))}", "training.max_steps=8",
    ]  # fmt: skip
    return ["tune", "grpo", str(place / "base")], data, settings


def prepared(place: Path) -> None:
    """Writes text, prompts, a reward and a model to tune."""
    draw = random.Random(0)
    (place / "text").mkdir()
    for number in range(60):
        words = " ".join(draw.choice(_WORDS) for _ in range(1500))
        (place / "text" / f"{number:02}.txt").write_text(words + "\n")
    rows = [{"prompt": " ".join(draw.choices(_WORDS, k=8)), "completion": " ".join(draw.choices(_WORDS, k=30))}
            for _ in range(300)]  # fmt: skip
    (place / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "check.py").write_text(_REWARD)
    sheepop("train", "--data", place / "text", "--output", place / "base", "--device", "cpu", "--quiet",
            "model.d_model=256", "model.num_layers=6", "model.num_heads=4", "model.max_seq_len=256",
            "model.ngrams=null", "tokenizer.vocab_size=300", "training.max_steps=4", "training.global_batch_size=8",
            "training.precision=fp32")  # fmt: skip


def compared(kind: str, draw: random.Random, place: Path, number: int, seconds: float) -> dict[str, Any]:
    """Plans and runs one configuration."""
    command, data, settings = drawn(kind, draw, place)
    method = [command[2], "--method", command[1]] if command[0] == "tune" else []
    run, common = place / f"run-{number}", [*data, "--device", "cpu", "--quiet"]
    plan, _ = sheepop("plan", *method, *common, "--run", run, "--seconds", seconds, "--json", *settings)
    found = json.loads(plan)
    _, peak = sheepop(*command, *common, "--output", run, *settings)
    stages = json.loads((run / "environment.json").read_text())["stage_seconds"]
    expected, memory = found["time"]["seconds"], found["memory"]
    measured = sum(stages.values())
    return {
        "kind": kind,
        "settings": settings,
        "memory_predicted": memory["peak"],
        "memory_measured": peak,
        "memory_off": memory["peak"] / peak - 1,
        "tensors_counted": memory["peak"] - memory["program"],
        "tensors_measured": found["measured_tensors"],
        "tensors_off": (memory["peak"] - memory["program"]) / found["measured_tensors"] - 1,
        "seconds_predicted": expected,
        "seconds_measured": measured,
        "seconds_off": expected["middle"] / measured - 1,
        "stages": stages,
    }


def main() -> None:
    """Compares and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=len(_KINDS))
    parser.add_argument("--seconds", type=float, default=20.0)
    add_json_option(parser)
    given = parser.parse_args()
    draw = random.Random(1)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        prepared(place)
        results = []
        for number, kind in enumerate(_KINDS[: given.runs]):
            results.append(compared(kind, draw, place, number, given.seconds))
            off = {name: results[-1][f"{name}_off"] for name in _COMPARED}
            print(kind, " ".join(f"{name} {value:+.1%}" for name, value in off.items()), flush=True)
            write_record(given.json, {"runs": results, "load": psutil.getloadavg()})
    for name in _COMPARED:
        sizes = sorted(abs(each[f"{name}_off"]) for each in results)
        print(f"{name}: off by {statistics.median(sizes):.1%} in the middle, {sizes[-1]:.1%} at most")


if __name__ == "__main__":
    main()
