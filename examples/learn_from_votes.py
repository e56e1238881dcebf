"""Goes once around the circle: train, tune, serve, vote, monitor, tune again; and measures it by held-out votes.

A small model learns to answer questions about colors in three manners. Simulated voters prefer some of these manners,
and vote on the answers of a server. The log of the server becomes preferences, from which the model learns. At the end
both models answer questions that nobody voted on before, and the same voters vote on the answers.

Example:  python examples/learn_from_votes.py --output runs/circle
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sheepop

COLORS = {
    "red": "rose cherry brick tomato", "blue": "sea sky jeans lake", "green": "grass leaf frog moss",
    "white": "snow milk salt swan", "black": "coal night raven ink", "yellow": "sun lemon butter corn",
}  # fmt: skip
THINGS = {thing: color for color, things in COLORS.items() for thing in things.split()}
# The chance that a voter likes a manner of answering. They do not judge whether the color is right.
LIKED = {"sentence": 0.95, "word": 0.4, "unknown": 0.05, "other": 0.05}
NETWORK = {
    "model.d_model": 64, "model.num_layers": 2, "model.num_heads": 4, "model.max_seq_len": 48, "model.dropout": 0.0,
    "model.position_encoding": "rope", "model.norm": "rmsnorm", "model.activation": "swiglu", "model.bias": False,
    "model.short_convolution": None, "model.ngrams": None, "tokenizer.vocab_size": 350, "data.documents": "line",
    "data.clean.stages": [],  # which would remove the copies of a line
}  # fmt: skip


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Train, tune, serve, vote, monitor, and tune again.")
    parser.add_argument("--output", type=Path, default=Path("runs/circle"), help="a new folder for everything made")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies steps and questions; below 1 for a trial")
    parser.add_argument("--seed", type=int, default=0, help="of the voters, and of what they ask")
    arguments = parser.parse_args()
    circle(arguments.output, arguments.scale, arguments.seed)


def circle(place: Path, scale: float, seed: int) -> None:
    """Makes everything in `place`, and prints a table of the votes on both models."""
    draw = random.Random(seed)
    place.mkdir(parents=True)
    things = sorted(THINGS)
    draw.shuffle(things)
    asked, held_out = things[:16], things[16:]
    write_text(place / "text.txt", random.Random(1))
    rows = [{"prompt": question(thing), "completion": answer(thing, draw)} for thing in asked for _ in range(4)]
    (place / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = {"training.max_steps": max(2, round(200 * scale)), "training.learning_rate": 3e-3}
    common = {"training.global_batch_size": 32, "training.precision": "fp32"}
    base = place / "base"
    sheepop.train(place / "text.txt", base, device="cpu", quiet=True, settings={**NETWORK, **common, **steps})

    def tuned(method: Any, model: Path, data: str, output: str, epochs: int, rate: float) -> Path:
        settings = {**common, "training.max_epochs": max(1, round(epochs * scale)), "training.learning_rate": rate}
        sheepop.tune(model, place / data, place / output, method=method, device="cpu", quiet=True, settings=settings)  # type: ignore[arg-type]
        return place / output

    first = tuned("sft", base, "answers.jsonl", "first", 4, 2e-4)
    vote(first, place / "log", asked, max(1, round(4 * scale)), draw)
    sheepop_command("monitor", place / "log", "--to", "preferences", "--output", place / "votes.jsonl")
    second = tuned("dpo", first, "votes.jsonl", "second", 6, 3e-4)
    print(f"{'model':8} {'good votes':>10}  95 percent interval")
    for name, model in (("first", first), ("second", second)):
        log = place / f"held-out-{name}"
        vote(model, log, held_out, max(1, round(6 * scale)), random.Random(seed + 1))
        (figures,) = json.loads(sheepop_command("monitor", log, "--json"))["models"].values()
        bad = figures["shares"]["bad"]
        print(f"{name:8} {1 - bad['value']:>10.0%}  {1 - bad['high']:.0%} to {1 - bad['low']:.0%} of {bad['count']}")


def question(thing: str) -> str:
    """What a user asks about a thing."""
    return f"what color is {thing}?"


def answer(thing: str, draw: random.Random) -> str:
    """An answer in one of three manners."""
    return draw.choice([f" it is {THINGS[thing]}", f" {THINGS[thing]}", " i do not know"])


def manner(text: str) -> str:
    """The manner of an answer, in the words of `LIKED`."""
    said = text.strip()
    known = (
        {"i do not know": "unknown"} | dict.fromkeys(COLORS, "word") | {f"it is {each}": "sentence" for each in COLORS}
    )
    return known.get(said, "other")


def write_text(path: Path, draw: random.Random) -> None:
    """The text for the base model: a question with an answer on each line."""
    things = list(THINGS)
    lines = [f"{question(thing)}{answer(thing, draw)}\n" for thing in draw.choices(things, k=12_000)]
    path.write_text("".join(lines))


def vote(model: Path, log: Path, things: list[str], times: int, draw: random.Random) -> None:
    """Serves a model with a log, asks it about all things, and votes on each of its answers as the voters would."""
    with served(model, log) as url:
        for thing in things * times:
            seed = draw.randrange(2**31)
            asked = {"model": model.name, "prompt": question(thing), "n": 4, "max_tokens": 12, "seed": seed}
            given = post(f"{url}/completions", asked)
            for choice in given["choices"]:
                likes = draw.random() < LIKED[manner(choice["text"])]
                post(f"{url}/votes", {"id": given["id"], "choice": choice["index"], "vote": 1 if likes else -1})


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """A server of the model with a log, and the address of its API."""
    command = [sys.executable, "-m", "sheepop", "serve", model, "--log", log, "--port", "0", "--device", "cpu"]
    said = log.with_name(f"{log.name}-server.txt")
    with said.open("wb") as file, subprocess.Popen(list(map(str, command)), stderr=file) as server:
        while not (found := re.search(r"http://\S+/v1", said.read_text())):
            if server.poll() is not None:
                raise SystemExit(f"The server did not start: {said.read_text()}")
            time.sleep(0.1)
        try:
            yield found[0]
        finally:
            server.terminate()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a server to a request."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        found: dict[str, Any] = json.load(response)
    return found


def sheepop_command(*arguments: object) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "sheepop", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
