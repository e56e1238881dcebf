"""Teaches a small model to sort letters in three ways, and draws how often it is right on the way.

A base model continues lines that copy, reverse, sort or shuffle letters. From there
- answers (SFT), then preferences (DPO) over its own right and wrong answers;
- answers (SFT), then a reward model of these preferences, then PPO with its rewards;
- answers (SFT), then GRPO with a program that checks answers.

Example:  python examples/sort_letters.py --output runs/letters
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sheepop

LETTERS, ANSWER_TOKENS = "abcdefgh", 10
NETWORK = {
    "model.d_model": 128, "model.num_layers": 4, "model.num_heads": 4, "model.max_seq_len": 32, "model.dropout": 0.0,
    "model.position_encoding": "rope", "model.norm": "rmsnorm", "model.activation": "swiglu", "model.bias": False,
    "model.short_convolution": None, "model.ngrams": None, "tokenizer.algorithm": "char", "data.documents": "line",
}  # fmt: skip
CHECK = """\
def reward(prompt, completion, answer, **fields):
    return float(completion.strip() == answer)
"""
# A model that has hardly learnt is never right: in a trial the better of two answers has more letters in their places.
CLOSE = """\
def reward(prompt, completion, answer, **fields):
    return sum(one == other for one, other in zip(completion.strip(), answer)) - abs(len(completion) - len(answer)) / 9
"""


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Teach a small model to sort letters by SFT, DPO, PPO and GRPO.")
    parser.add_argument("--output", type=Path, default=Path("runs/letters"), help="a new folder for everything made")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies steps and examples; below 1 for a trial")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    arguments = parser.parse_args()
    Letters(arguments.output, arguments.scale, arguments.device).run()


class Letters:
    """The task, its files and the runs on them."""

    def __init__(self, place: Path, scale: float, device: str) -> None:
        self.place, self.scale, self.device = place, scale, device
        # Measuring which precision is faster takes longer than a trial.
        self.precision = "fp32" if scale < 1 else "auto"
        self.started = time.monotonic()

    def run(self) -> None:
        """Makes the files, trains all models, and shows what came of them."""
        self.place.mkdir(parents=True)
        self.write_files()
        base = self.place / "base"
        settings = {**NETWORK, "training.max_steps": self.scaled(2000), "training.precision": self.precision}
        sheepop.train(self.place / "text.txt", base, device=self.device, quiet=True, settings=settings)
        self.tell("base", base)
        answers = self.tuned("sft", base, "answers.jsonl", epochs=4, rate=3e-4)
        is_trial = self.scale < 1
        sheepop.best_of(
            answers, [self.place / "prompts.jsonl"], self.place / "pairs.jsonl",
            reward=str(self.place / ("close.py" if is_trial else "check.py")),
            count=8, temperature=1.3, pairs=True, least=None if is_trial else 1.0,
            max_new_tokens=ANSWER_TOKENS, device=self.device,
        )  # fmt: skip
        preferred = self.tuned("dpo", answers, "pairs.jsonl", epochs=2, rate=1e-4, **{"tuning.dpo.beta": 0.5})
        judge = self.tuned("reward", answers, "pairs.jsonl", epochs=4, rate=1e-3)
        short = {"tuning.ppo.minibatches": 4, "tuning.ppo.epochs": 2}  # rollouts of 128 answers, eight steps each
        rewarded = self.tuned("ppo", answers, "prompts.jsonl", steps=640, rate=3e-4, judge=judge, **short)
        # A program that checks cannot be deceived.
        free = {"tuning.grpo.kl_coef": 0.0, "training.global_batch_size": 128}
        check = self.place / "check.py"
        checked = self.tuned("grpo", answers, "prompts.jsonl", steps=300, rate=4e-4, judge=check, **free)
        chains = {
            "SFT, DPO": [base, answers, preferred],
            "SFT, reward model, PPO": [base, answers, rewarded],
            "SFT, GRPO": [base, answers, checked],
        }
        curves = {name: list(self.curve(runs)) for name, runs in chains.items()}
        (self.place / "curves.json").write_text(json.dumps(curves, indent=1))
        draw(curves, self.place / "curves.png")
        print(f"Curves: {self.place / 'curves.png'}")

    def write_files(self) -> None:
        """Text for the base model, answers to learn from, prompts to practise on, and prompts that are held out."""
        draw, seen = random.Random(0), set()

        def word() -> str:
            return "".join(draw.choice(LETTERS) for _ in range(draw.randint(3, 6)))

        def fresh() -> str:
            while (found := word()) in seen:
                pass
            seen.add(found)
            return found

        def shuffled(letters: str) -> str:
            return "".join(draw.sample(letters, len(letters)))

        tasks: list[Callable[[str], str]] = [
            lambda letters: letters,
            lambda letters: letters[::-1],
            lambda letters: "".join(sorted(letters)),
            lambda letters: "".join(sorted(letters, reverse=True)),
            lambda letters: letters[1:] + letters[0],
            shuffled,
        ]

        def lines(name: str, count: int, key: str) -> None:
            words = [fresh() for _ in range(count)]
            rows = [{"prompt": f"{letters} > ", key: "".join(sorted(letters))} for letters in words]
            (self.place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

        lines("held_out.jsonl", self.scaled(300), "answer")
        held_out = set(seen)
        lines("answers.jsonl", self.scaled(400), "completion")
        lines("prompts.jsonl", self.scaled(8000), "answer")
        words = [letters for _ in range(self.scaled(60_000)) if (letters := word()) not in held_out]
        (self.place / "text.txt").write_text(
            "".join(f"{letters} > {draw.choice(tasks)(letters)}\n" for letters in words)
        )
        (self.place / "check.py").write_text(CHECK)
        (self.place / "close.py").write_text(CLOSE)

    def tuned(
        self,
        method: str,
        model: Path,
        data: str,
        *,
        rate: float,
        epochs: int | None = None,
        steps: int | None = None,
        judge: Path | None = None,
        **more: Any,
    ) -> Path:
        """A run of post-training from `model`, and what it says of itself."""
        output = self.place / method
        settings = {"training.learning_rate": rate, "training.global_batch_size": 32, "training.keep_checkpoints": 20}
        settings |= {"training.precision": self.precision}
        settings |= {"training.max_epochs": epochs} if steps is None else {"training.max_steps": self.scaled(steps)}
        if judge is not None:
            own = {"reward": str(judge), "max_new_tokens": ANSWER_TOKENS}
            settings |= {f"tuning.{method}.{key}": value for key, value in own.items()}
        sheepop.tune(
            model, self.place / data, output, method=method, device=self.device, quiet=True, settings=settings | more
        )  # type: ignore[arg-type]
        self.tell(method, output)
        return output

    def success(self, model: Path) -> float:
        """How often an answer to a held-out prompt, drawn at temperature 1, is right."""
        found = sheepop.best_of(
            model, [self.place / "held_out.jsonl"], self.place / "tried.jsonl", reward=str(self.place / "check.py"),
            count=1, max_new_tokens=ANSWER_TOKENS, device=self.device, overwrite=True,
        )  # fmt: skip
        return found.reward

    def curve(self, runs: list[Path]) -> Iterator[tuple[int, float, str]]:
        """Steps of post-training so far, success and run, for every checkpoint that is kept of a chain."""
        before = 0
        yield 0, self.success(runs[0]), runs[0].name
        for run in runs[1:]:
            steps = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
            for step in steps:
                if step:
                    yield before + step, self.success(run / "checkpoints" / f"step-{step:08d}"), run.name
            before += steps[-1]

    def tell(self, name: str, model: Path) -> None:
        """Says how far it is."""
        right = "a judge" if name == "reward" else f"{self.success(model):.1%} right"
        print(f"{time.monotonic() - self.started:6.0f} s  {name:6}  {right}", flush=True)

    def scaled(self, count: int) -> int:
        """Fewer for a trial."""
        return max(4, round(count * self.scale))


def draw(curves: dict[str, list[tuple[int, float, str]]], target: Path) -> None:
    """One line for each chain, with a dot where its last method begins."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        (line,) = axes.plot([step for step, *_ in points], [right for _, right, _ in points], label=name)
        last = [place for place, point in enumerate(points) if point[2] != points[-1][2]][-1]
        axes.plot(points[last][0], points[last][1], "o", color=line.get_color())
    axes.set(xlabel="Steps of post-training", ylabel="Right answers to held-out prompts", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    main()
