"""SheepOp's training step and nanoGPT's in turn, each in a process of its own, on the same rows and initial weights."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contestants import Contestant, Shape
from sheepop.core.machine import find_compiler, has_python_headers
from sheepop.train.precision import candidates

SHAPES = {
    "small": Shape(num_layers=6, num_heads=6, d_model=384, seq_len=256, batch=12, vocab_size=65),
    "gpt2": Shape(num_layers=12, num_heads=12, d_model=768, seq_len=512, batch=4, vocab_size=50304),
}
LOSS_TOLERANCE = 0.005  # of nanoGPT's float32 loss after the same tokens

# nanoGPT's settings: precision and whether compiled. All but the last keep float32 weights.
SETTINGS = {
    "fp32": ("fp32", False),
    "fp32 compiled": ("fp32", True),
    "bf16 autocast": ("bf16", False),
    "bf16 autocast compiled": ("bf16", True),
    "all-bf16": ("all-bf16", False),
}
ALL_BF16 = "all-bf16"


@dataclass(frozen=True)
class Pace:
    """How long a race is: steps before it (whose losses are compared), rounds, and seconds of work in a round."""

    warmup_steps: int = 5
    rounds: int = 5
    seconds: float = 4.0


class Runner:
    """A contestant's process: ask it for steps, or for its peak memory."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.parameters = int(self._answer()["parameters"])

    def steps(self, count: int) -> dict[str, Any]:
        """Takes steps; seconds, seconds of processor time, and the loss of each."""
        return self._ask({"steps": count})

    def peak_memory(self) -> int:
        """Bytes so far."""
        return int(self._ask({"memory": True})["memory"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant ended with exit code {self._process.wait()}; its errors are above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running(contestant: Contestant) -> Iterator[Runner]:
    """The process of a contestant, ended with the block."""
    command = [sys.executable, str(Path(__file__).with_name("contestants.py")), contestant.to_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Runner(process)
        finally:
            process.kill()


def race(
    name: str, shape: Shape, nanogpt: str, device: str, pace: Pace, only: Sequence[str] | None = None
) -> dict[str, Any]:
    """Both in every setting of nanoGPT's, or in float32 and `only` some; rates, ratios, losses and memory."""
    own = chosen_setting(shape, device)
    _say(f"{name}: SheepOp chose {own.precision}{' compiled' if own.compiled else ''}")
    settings: dict[str, dict[str, Any]] = {}
    for setting, (precision, compiled) in SETTINGS.items():
        asked = only is None or setting in (*only, "fp32")
        reason = reason_to_skip(precision, compiled, device) if asked else "not asked for"
        if reason is not None:
            settings[setting] = {"skipped": reason}
            _say(f"{name}: nanoGPT {setting} skipped: {reason}")
            continue
        other = Contestant(shape, device, precision, compiled, nanogpt)
        settings[setting] = duel(own, other, pace)
        _say(f"{name}: {settings[setting]['ratio']:.2f} times nanoGPT {setting}")
    return summary(own, settings)


def duel(own: Contestant, other: Contestant, pace: Pace) -> dict[str, Any]:
    """The two in turn; a ratio above 1 says that SheepOp is faster."""
    with ExitStack() as stack:
        runners = [stack.enter_context(running(contestant)) for contestant in (own, other)]
        if runners[0].parameters != runners[1].parameters:
            raise RuntimeError(f"{runners[0].parameters} and {runners[1].parameters} parameters: not the same model")
        warm = [runner.steps(pace.warmup_steps) for runner in runners]
        # A second look at the time, now that everything is compiled and allocated.
        counts = [max(1, round(pace.seconds / runner.steps(1)["seconds"])) for runner in runners]
        rounds = []
        for _ in range(pace.rounds):
            answers = [runner.steps(count) for runner, count in zip(runners, counts, strict=True)]
            rounds.append(
                {
                    key: [answer[key] / count for answer, count in zip(answers, counts, strict=True)]
                    for key in ("seconds", "processor_seconds")
                }
            )
        memory = [runner.peak_memory() for runner in runners]
    return {
        "ratio": _median_ratio(rounds, "seconds"),
        "processor_ratio": _median_ratio(rounds, "processor_seconds"),
        "tokens_per_second": _rates(own.shape, rounds),
        "losses": [answer["losses"] for answer in warm],
        "peak_memory": memory,
        "parameters": runners[0].parameters,
        "rounds": rounds,
    }


def summary(own: Contestant, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is asked of a race: the ratio to the fastest setting with float32 weights, to all-bf16, equal losses."""
    ran = {name: result for name, result in settings.items() if "ratio" in result}
    keeping = {name: result for name, result in ran.items() if name != ALL_BF16}
    fastest = min(keeping, key=lambda name: keeping[name]["ratio"])
    reference = ran["fp32"]["losses"][1][-1]
    difference = max(abs(result["losses"][0][-1] / reference - 1) for result in ran.values())
    return {
        "setting": {"precision": own.precision, "compiled": own.compiled},
        "fastest_with_float32_weights": fastest,
        "ratio": keeping[fastest]["ratio"],
        "ratio_to_all_bf16": ran[ALL_BF16]["ratio"] if ALL_BF16 in ran else None,
        "loss_difference": difference,
        "equal_work": difference <= LOSS_TOLERANCE,
        "nanogpt": settings,
    }


def chosen_setting(shape: Shape, device: str) -> Contestant:
    """SheepOp in the precision and compilation that a run on ``auto`` chooses here, measured in its own process."""
    asked = Contestant(shape, device, compiled=_can_compile(device))
    command = [sys.executable, str(Path(__file__).with_name("contestants.py")), "choose", asked.to_json()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    precision, compiled = json.loads(done.stdout.splitlines()[-1])
    return replace(asked, precision=precision, compiled=compiled)


def reason_to_skip(precision: str, compiled: bool, device: str) -> str | None:
    """Why a setting is not worth running here, or None."""
    if "bf16" in precision and "bf16" not in candidates("auto", device):
        return "bfloat16 is emulated on this machine, slower than float32"
    if compiled and not _can_compile(device):
        return "no C++ compiler, or no Python headers"
    return None


def report(results: dict[str, dict[str, Any]], device: str) -> dict[str, Any]:
    """Everything that was found, the ratios first."""
    return {
        "ratios": {name: result["ratio"] for name, result in results.items()},
        "ratios_to_all_bf16": {name: result["ratio_to_all_bf16"] for name, result in results.items()},
        "equal_work": all(result["equal_work"] for result in results.values()),
        "device": device,
        "shapes": results,
    }


def table(results: dict[str, dict[str, Any]]) -> Sequence[str]:
    """A line for every setting of every shape."""
    lines = [
        f"{'shape':<6} {'nanoGPT':<23} {'tokens/s':>9} {'SheepOp':>9} {'ratio':>6} {'of CPU':>6} "
        f"{'peak MB':>8} {'SheepOp':>8} {'loss':>8} {'SheepOp':>8}"
    ]
    for name, result in results.items():
        for setting, row in result["nanogpt"].items():
            if "skipped" in row:
                lines.append(f"{name:<6} {setting:<23} {row['skipped']}")
                continue
            (own_rate, rate), (own_memory, memory) = row["tokens_per_second"], row["peak_memory"]
            own_loss, loss = (losses[-1] for losses in row["losses"])
            lines.append(
                f"{name:<6} {setting:<23} {rate:>9,.0f} {own_rate:>9,.0f} {row['ratio']:>6.2f} "
                f"{row['processor_ratio']:>6.2f} {memory / 1e6:>8,.0f} {own_memory / 1e6:>8,.0f} "
                f"{loss:>8.4f} {own_loss:>8.4f}"
            )
    return lines


def _median_ratio(rounds: list[dict[str, list[float]]], key: str) -> float:
    return statistics.median(found[key][1] / found[key][0] for found in rounds)


def _rates(shape: Shape, rounds: list[dict[str, list[float]]]) -> list[float]:
    return [shape.tokens / statistics.median(found["seconds"][who] for found in rounds) for who in (0, 1)]


def _can_compile(device: str) -> bool:
    return device != "cpu" or (find_compiler() is not None and has_python_headers())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
