"""How many questions with choices a second are answered through lm-eval, by SheepOp and by lm-eval's own backend.

python bench/multiple_choice.py --json bench/results/multiple_choice.json
python bench/multiple_choice.py --device cuda

Both have the same drawn weights of the GPT-2 124M shape in float32 and answer the same local tasks. Questions in the
shape of HellaSwag have a beginning of 40 to 80 tokens and four endings of about 25; those in the shape of MMLU stand
behind five examples, which all questions of a subject share, and have four choices of a token each. A pass is all of
lm-eval's evaluation but loading. The backend for transformers has the fastest of some batch sizes, found on a part of
the questions. A ratio above 1 says that SheepOp is faster. The exit code is 1 when log-probabilities or scores differ.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generate_speed import prepare
from record import add_json_option, write_record
from sheepop.checkpoint import load_model
from sheepop.core.speed import synchronize
from sheepop.evaluate.harness_model import Answers, language_model
from sheepop.generate import Generator
from sheepop.tokenizer import Tokenizer

SUBJECTS, SHOTS = 4, 5
TOLERANCE = 1e-3  # of a log-probability of about 25 tokens
TASK = """task: {name}
output_type: multiple_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: text
doc_to_choice: choices
doc_to_target: right
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
Evaluate = Callable[[str, int | None], dict[str, Any]]


class Writer:
    """Draws text of a given number of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.draw = tokenizer, np.random.default_rng(0)

    def text(self, tokens: int) -> str:
        """Words of four letters until there are so many tokens."""
        words = "".join(" " + "".join(map(chr, self.draw.integers(97, 123, 4))) for _ in range(tokens))
        return self._tokenizer.decode(self._tokenizer.encode(words)[:tokens])

    def sentences(self) -> dict[str, Any]:
        """A question in the shape of HellaSwag."""
        text = self.text(int(self.draw.integers(40, 81))).lstrip()
        choices = [f" {self.text(int(self.draw.integers(20, 31))).strip()}" for _ in range(4)]
        return {"text": text, "choices": choices, "right": int(self.draw.integers(4))}

    def question(self) -> str:
        """A question with its choices and the word that asks for a letter."""
        choices = "".join(f"\n{letter}. {self.text(8).strip()}" for letter in "ABCD")
        return f"{self.text(int(self.draw.integers(20, 41))).strip()}{choices}\nAnswer:"


def write_tasks(folder: Path, tokenizer: Tokenizer, documents: int) -> dict[str, dict[str, float]]:
    """Task files in both shapes; the mean number of tokens of their contexts and choices."""
    writer = Writer(tokenizer)
    subjects = [
        "".join(f"{writer.question()}{'ABCD'[writer.draw.integers(4)]}\n\n" for _ in range(SHOTS))
        for _ in range(SUBJECTS)
    ]
    rows = {
        "hellaswag-shaped": [writer.sentences() for _ in range(documents)],
        "mmlu-shaped": [
            {
                "text": subjects[number * SUBJECTS // documents] + writer.question(),
                "choices": list("ABCD"),
                "right": int(writer.draw.integers(4)),
            }
            for number in range(documents)
        ],
    }
    shapes = {}
    for name, found in rows.items():
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, found)))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file))
        contexts = [len(tokenizer.encode(row["text"])) for row in found]
        choices = [len(tokenizer.encode(choice)) for row in found for choice in row["choices"]]
        shapes[name] = {"context": statistics.mean(contexts), "choice": statistics.mean(choices)}
    return shapes


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without lm-eval's bars."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def evaluators(files: Path, folder: Path, options: argparse.Namespace) -> dict[str, Callable[[int], Evaluate]]:
    """Both systems by name; each takes a batch size, which SheepOp does not need."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with silence():
        tasks = {path.stem: manager.load([path.stem]) for path in folder.glob("*.yaml")}
    loaded = load_model(files / "sheepop", options.device)
    ours = language_model(Answers(Generator(loaded.model, loaded.tokenizer)))
    theirs = AutoModelForCausalLM.from_pretrained(files / "transformers", dtype=torch.float32).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(files / "transformers")

    def asking(model: Any) -> Evaluate:
        def run(name: str, limit: int | None) -> dict[str, Any]:
            with silence():
                return evaluate(model, tasks[name], limit=limit, bootstrap_iters=0)

        return run

    def backend(batch_size: int) -> Evaluate:
        with silence():
            return asking(HFLM(pretrained=theirs, tokenizer=tokenizer, batch_size=batch_size, device=options.device))

    return {"SheepOp": lambda _: asking(ours), "lm-eval": backend}


def timed(run: Evaluate, name: str, limit: int | None, device: str) -> tuple[float, dict[str, Any]]:
    """Seconds, and what was found."""
    synchronize(device)
    begin = time.perf_counter()
    found = run(name, limit)
    synchronize(device)
    return time.perf_counter() - begin, found


def race(name: str, systems: Mapping[str, Callable[[int], Evaluate]], options: argparse.Namespace) -> dict[str, Any]:
    """One shape: the best batch size of lm-eval, then both in turn."""
    part = max(4, options.documents // 8)
    tried = {}
    for size in options.batch_sizes:
        systems["lm-eval"](size)(name, 2)
        tried[size] = part / timed(systems["lm-eval"](size), name, part, options.device)[0]
    best = max(tried, key=lambda size: tried[size])
    running = {who: make(best) for who, make in systems.items()}
    speeds: dict[str, list[float]] = {who: [] for who in running}
    found: dict[str, dict[str, Any]] = {}
    for run in running.values():
        run(name, part)  # warms up
    for _ in range(options.rounds):
        for who, run in running.items():
            seconds, found[who] = timed(run, name, None, options.device)
            speeds[who].append(options.documents / seconds)
    medians = {who: statistics.median(values) for who, values in speeds.items()}
    return {
        "tasks": name,
        "documents_per_second": speeds,
        "medians": medians,
        "ratio": medians["SheepOp"] / medians["lm-eval"],
        "batch_size": best,
        "by_batch_size": tried,
        **agreement(name, found["SheepOp"], found["lm-eval"]),
    }


def agreement(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Whether both did the same: the scores of each, and the largest difference of a log-probability."""
    pairs = zip(ours["samples"][name], theirs["samples"][name], strict=True)
    differences = [
        abs(one[0][0] - other[0][0])
        for mine, yours in pairs
        for one, other in zip(mine["resps"], yours["resps"], strict=True)
    ]
    scores = [[found["results"][name][f"{metric},none"] for metric in ("acc", "acc_norm")] for found in (ours, theirs)]
    agrees = max(differences) < TOLERANCE and scores[0] == scores[1]
    return {"scores": scores, "largest_difference": max(differences), "agrees": agrees}


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description="Questions a second through lm-eval.")
    parser.add_argument("--documents", type=int, default=100, help="questions of each shape")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="of lm-eval's backend")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": place}
        files, folder = Path(place), Path(place) / "tasks"
        folder.mkdir()
        with silence():
            prepare(files, ["SheepOp", "transformers"], [], None)
        shapes = write_tasks(folder, load_model(files / "sheepop").tokenizer, options.documents)
        systems = evaluators(files, folder, options)
        rows = [{**race(name, systems, options), "shape": shape} for name, shape in shapes.items()]
    versions = {name: version(name) for name in ("torch", "transformers", "lm_eval")}
    print(f"{options.threads} threads, {options.device}, {', '.join(' '.join(each) for each in versions.items())}")
    for row in rows:
        shape = f"context {row['shape']['context']:.0f} and choice {row['shape']['choice']:.0f} tokens on average"
        print(f"{row['tasks']}, {options.documents} questions, {shape}")
        for who, speed in row["medians"].items():
            size = "" if who == "SheepOp" else f" in batches of {row['batch_size']}"
            print(f"  {speed:8.2f} questions/s  {who}{size}")
        print(f"  {row['ratio']:8.2f} times; log-probabilities differ by {row['largest_difference']:.1e} at most")
    settings = {name: getattr(options, name) for name in ("documents", "rounds", "threads", "device")}
    write_record(options.json, {**settings, "versions": versions, "results": rows})
    return int(not all(row["agrees"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
