"""How far plans are from runs: peak memory and time of runs that are drawn at random, predicted and measured.

python bench/plan_accuracy.py --json bench/results/plan_accuracy.json
python bench/plan_accuracy.py --json bench/results/plan_accuracy.json --runs 4-7    # only these, beside those there

Every configuration is planned and run in processes of their own, one after the other. The peak memory of a run is that
of its process (`ru_maxrss`), and its time that of the whole command. Memory is predicted twice: by counting, and by
what the process of the plan took in the first steps. Tensors are counted, and measured in two steps of the plan. Times
are also compared as they would have been without other programs, by the shares of the processors that the plan and the
run got. With --by-processor all clocks count the processor time of one thread, which other programs change little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from record import add_json_option, write_record

_KINDS = ("text", "lora", "grpo", "text", "lora", "grpo", "text", "lora", "grpo", "text")
_COMPARED = ("memory", "counted_memory", "tensors", "seconds", "seconds_alone")
# Operations of the steps of a run, about a quarter of a minute on two cores, and the fewest and the most steps.
_OPERATIONS, _FEWEST_STEPS, _MOST_STEPS = 1.2e11, 12, 800
_BASE = (256, 6)  # width and layers of the model to tune
_WORDS = ("sheep", "wolf", "meadow", "fence", "night", "jumps", "over", "sleeps", "under", "counts", "the", "a")
_REWARD = "def reward(prompt, answer, **fields):\n    return float(answer.count('e'))\n"
_RUNNER = """
import json, resource, sys, time
arguments, by_processor = json.loads(sys.argv[1]), sys.argv[2] == "True"
if by_processor and arguments[0] == "plan":
    time.perf_counter = time.monotonic = time.process_time
from sheepop.cli.main import main
from sheepop.core.processor_time import ProcessorTime
if by_processor:
    ProcessorTime.take = lambda self: 1.0
sys.argv = ["sheepop", *arguments]
try:
    main()
except SystemExit as end:
    if end.code:
        raise
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("PEAK", 1024 * used.ru_maxrss, used.ru_utime + used.ru_stime)
"""


def sheepop(*arguments: object, by_processor: bool = False) -> tuple[str, int, float]:
    """The output of a command, the peak memory of its process in bytes, and its seconds, also `by_processor`."""
    given, began = json.dumps([str(each) for each in arguments]), time.perf_counter()
    program = [sys.executable, "-c", _RUNNER, given, str(by_processor)]
    threads = {"OMP_NUM_THREADS": "1"} if by_processor else {}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env={**os.environ, **threads})
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    output, _, peak_and_seconds = done.stdout.rpartition("PEAK ")
    peak, seconds = peak_and_seconds.split()
    return output, int(peak), float(seconds) if by_processor else time.perf_counter() - began


def drawn(kind: str, draw: random.Random, place: Path) -> tuple[list[str], list[str], list[str]]:
    """The command of a run, the arguments that a plan shares with it, and the settings."""
    rows = draw.choice((4, 8, 16))
    settings = [f"training.global_batch_size={rows}", "training.precision=fp32"]
    if kind == "text":
        size, layers, length = draw.choice((128, 192, 256)), draw.choice((2, 4, 6)), draw.choice((64, 128, 256))
        settings += [
            f"model.d_model={size}", f"model.num_layers={layers}", f"model.num_heads={size // 64}",
            f"model.max_seq_len={length}", "model.ngrams=null", f"training.optimizer={draw.choice(('adamw', 'muon'))}",
            "tokenizer.vocab_size=300", steps_of(size, layers, rows * length),
        ]  # fmt: skip
        return ["train"], ["--data", str(place / "text")], settings
    data = ["--data", str(place / "chats.jsonl")]
    if kind == "lora":
        settings += [f"tuning.lora.rank={draw.choice((4, 16))}", steps_of(*_BASE, rows * 192)]
        return ["tune", "sft", str(place / "base")], data, settings
    tokens = draw.choice((16, 32))
    settings += [
        f"tuning.grpo.reward={place / 'check.py'}", f"tuning.grpo.group_size={draw.choice((2, 4))}",
        f"tuning.grpo.max_new_tokens={tokens}", steps_of(*_BASE, rows * (16 + 4 * tokens)),
    ]  # fmt: skip
    return ["tune", "grpo", str(place / "base")], data, settings


def steps_of(width: int, layers: int, tokens: int) -> str:
    """The setting of so many steps on `tokens` that they take about a quarter of a minute."""
    steps = round(_OPERATIONS / (6 * 12 * layers * width**2 * tokens))
    return f"training.max_steps={min(max(steps, _FEWEST_STEPS), _MOST_STEPS)}"


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
            f"model.d_model={_BASE[0]}", f"model.num_layers={_BASE[1]}", "model.num_heads=4", "model.max_seq_len=256",
            "model.ngrams=null", "tokenizer.vocab_size=300", "training.max_steps=4", "training.global_batch_size=8",
            "training.precision=fp32")  # fmt: skip


def compared(
    kind: str, draw: random.Random, place: Path, number: int, seconds: float, *, by_processor: bool
) -> dict[str, Any]:
    """Plans and runs one configuration."""
    command, data, settings = drawn(kind, draw, place)
    method = [command[2], "--method", command[1]] if command[0] == "tune" else []
    run, common = place / f"run-{number}", [*data, "--device", "cpu", "--quiet"]
    how = {"by_processor": by_processor}
    plan, _, planning = sheepop(
        "plan", *method, *common, "--run", run, "--seconds", seconds, "--json", *settings, **how
    )
    found = json.loads(plan)
    _, peak, measured = sheepop(*command, *common, "--output", run, *settings, **how)
    expected, memory = found["time"]["seconds"], found["memory"]
    counted, process = memory["tensors"], max(memory["preparation"], found["measured_process"])
    record = json.loads((run / "environment.json").read_text())
    stages, share, planned_share = record["stage_seconds"], record["processor_share"], found["time"]["processor_share"]
    return {
        "number": number,
        "kind": kind,
        "settings": settings,
        "memory_predicted": process,
        "memory_measured": peak,
        "memory_off": process / peak - 1,
        "counted_memory_off": memory["peak"] / peak - 1,
        "tensors_counted": counted,
        "tensors_measured": found["measured_tensors"],
        "tensors_off": counted / found["measured_tensors"] - 1,
        "seconds_predicted": expected,
        "seconds_measured": measured,
        "seconds_off": expected["middle"] / measured - 1,
        "seconds_alone_off": planned_share * expected["middle"] / (share * measured) - 1,
        "shares": [planned_share, share],
        "is_inside": expected["low"] <= measured <= expected["high"],
        "besides_predicted": found["time"]["besides_seconds"],
        "step_predicted": found["time"]["step_seconds"],
        "stages": stages,
        "planning_seconds": planning,
        "load": psutil.getloadavg()[0],
    }


def main() -> None:
    """Compares and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=f"0-{len(_KINDS) - 1}", metavar="FROM-TO", help="the numbers of the runs")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a plan times steps")
    parser.add_argument(
        "--by-processor", action="store_true", help="compare processor time of one thread, for a busy machine"
    )
    add_json_option(parser)
    given = parser.parse_args()
    first, last = map(int, given.runs.split("-"))
    results: dict[int, dict[str, Any]] = {}
    if given.json is not None and given.json.is_file() and (first, last) != (0, len(_KINDS) - 1):
        results = {each["number"]: each for each in json.loads(given.json.read_text())["runs"]}
    with TemporaryDirectory() as folder:
        place = Path(folder)
        prepared(place)
        for number in range(first, last + 1):
            draw = random.Random(number)
            found = results[number] = compared(
                _KINDS[number], draw, place, number, given.seconds, by_processor=given.by_processor
            )
            off = " ".join(f"{name} {found[f'{name}_off']:+.1%}" for name in _COMPARED)
            print(found["kind"], off, "inside" if found["is_inside"] else "outside", flush=True)
            clock = "processor time of one thread" if given.by_processor else "wall time"
            write_record(given.json, {"clock": clock, "runs": [results[each] for each in sorted(results)]})
    for name in _COMPARED:
        sizes = sorted(abs(each[f"{name}_off"]) for each in results.values())
        print(f"{name}: off by {statistics.median(sizes):.1%} in the middle, {sizes[-1]:.1%} at most")
    print(f"{sum(each['is_inside'] for each in results.values())} of {len(results)} times inside their intervals")


if __name__ == "__main__":
    main()
