"""A published model as people use it: loading, encoding, the first token, and perplexity, with their memory.

MODEL is anything that `sheepop generate` takes; HF is the same model in a directory of Hugging Face's format, which
transformers runs in float32 on the same windows of the same text. Every measurement has a process of its own; the two
take turns, and the losses must agree. Shown are medians of the processor's own time, which other programs disturb less,
and of wall-clock time. Memory is the peak of the process, libraries included, over the bytes of the stored weights.

python bench/published_model.py MODEL HF --text book.txt --json bench/results/published_model.json
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from processes import answer, measured_apart, peak_bytes
from record import add_json_option, write_record
from sheepop import load_tokenizer
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.evaluate.perplexity import Text, Window, evaluate_perplexity, windows
from sheepop.generate import GenerationConfig, Generator
from sheepop.jobs.generate import load_adapted

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PROMPT = "The capital of France is"
# Both sum in float32, in another order.
TOLERANCE = 1e-4


class Clock:
    """Seconds since it was made: wall-clock, and of the processor."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """The seconds so far."""
        return {
            "seconds": time.perf_counter() - self._wall,
            "processor_seconds": time.process_time() - self._processor,
        }


def measure(
    what: str, model: str, tokenizer: str, text: str, context: int, stride: int, dtype: str | None
) -> dict[str, Any]:
    """One measurement: `encode`, `sheepop` or `transformers`; the last two load and predict the text in windows."""
    content = Path(text).read_text(encoding="utf-8")
    if what == "encode":
        clock = Clock()
        tokens = load_tokenizer(tokenizer).encode(content)
        return {"tokens": len(tokens), **clock.read(), "peak_bytes": peak_bytes("cpu")}
    return (of_sheepop if what == "sheepop" else of_transformers)(model, tokenizer, content, context, stride, dtype)


def of_sheepop(
    model: str, tokenizer: str, content: str, context: int, stride: int, dtype: str | None
) -> dict[str, Any]:
    """Loads the model, writes one token, and computes the perplexity of the text."""
    clock = Clock()
    loaded = load_adapted(model, device="cpu", dtype=dtype)
    generator = Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids)
    load = clock.read()
    clock = Clock()
    generator.generate([PROMPT], GenerationConfig(max_new_tokens=1, temperature=0.0))
    first = clock.read()
    of_first = peak_bytes("cpu")
    clock = Clock()
    found = evaluate_perplexity(generator, [Text("text", content)], context=context, stride=stride)
    return {
        "weights_bytes": sum(map(stored_bytes, loaded.model.parameters())),
        "load": load,
        "first_token": first,
        "peak_bytes_of_first_token": of_first,
        "perplexity": clock.read(),
        "peak_bytes": peak_bytes("cpu"),
        "tokens": found.measure("loss").count,
        "loss": found.measure("loss").value,
    }


def stored_bytes(weight: torch.Tensor) -> int:
    """The bytes of a weight in the format that it is stored in."""
    return (
        sum(part.nbytes for part in weight.parts if part is not None)
        if isinstance(weight, StoredWeight)
        else weight.nbytes
    )


def of_transformers(
    model: str, tokenizer: str, content: str, context: int, stride: int, _: str | None
) -> dict[str, Any]:
    """The same by transformers."""
    from transformers import AutoModelForCausalLM

    clock = Clock()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    load = clock.read()
    ours = load_tokenizer(tokenizer)
    clock = Clock()
    with torch.inference_mode():
        network(torch.tensor([[*ours.prefix_ids, *ours.encode(PROMPT)]]), logits_to_keep=1).logits[
            0, -1
        ].argmax().item()
    first = clock.read()
    of_first = peak_bytes("cpu")
    clock = Clock()
    nats, tokens = 0.0, 0
    with torch.inference_mode():
        for window in windows(Text("text", content), ours, context, stride):
            nats += loss_of(network, window)
            tokens += len(window.predicted)
    return {
        "weights_bytes": sum(weight.nbytes for weight in network.parameters()),
        "load": load,
        "first_token": first,
        "peak_bytes_of_first_token": of_first,
        "perplexity": clock.read(),
        "peak_bytes": peak_bytes("cpu"),
        "tokens": tokens,
        "loss": nats / tokens,
    }


def loss_of(network: torch.nn.Module, window: Window) -> float:
    """The summed loss of the predicted tokens of a window, as transformers' documentation computes perplexity."""
    ids = torch.tensor([[*window.context, *window.predicted]])
    labels = ids.clone()
    labels[:, : len(window.context)] = -100
    return float(network(ids, labels=labels).loss) * len(window.predicted)


def measure_command(model: str, dtype: str | None, cache: str | None = None) -> dict[str, Any]:
    """Seconds of `sheepop generate` from its start to its end, for one token; `cache` is another cache of models."""
    command = [
        sys.executable,
        "-m",
        "sheepop",
        "generate",
        model,
        PROMPT,
        "--greedy",
        "--max-new-tokens",
        "1",
        "--quiet",
    ]
    environment = os.environ | ({"SHEEPOP_MODELS": cache} if cache else {})
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = [*command, *(["--dtype", dtype] if dtype else [])]
    subprocess.run(whole, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - started, "processor_seconds": used}


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number over the rounds."""
    return {
        name: medians([found[name] for found in rounds])
        if isinstance(value, dict)
        else statistics.median(found[name] for found in rounds)
        for name, value in rounds[0].items()
    }


def main() -> None:
    """Measures all, prints the table and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model for SheepOp")
    parser.add_argument("hf", help="the same model in a directory for transformers")
    parser.add_argument("--text", required=True, help="a file of text to predict")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--stride", type=int, default=1024, help="tokens that a window predicts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", help="SheepOp's dtype, for example float32; by default that of the stored weights")
    add_json_option(parser)
    options = parser.parse_args()
    shared = {name: vars(options)[name] for name in ("text", "context", "stride", "dtype")}
    paths = {"encode": options.model, "sheepop": options.model, "transformers": options.hf}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in (*paths, "command", "first_command")}
    for _ in range(options.rounds):
        for what, path in paths.items():
            settings = {"what": what, "model": path, "tokenizer": options.model, **shared}
            rounds[what].append(measured_apart(__file__, settings))
        rounds["command"].append(measure_command(options.model, options.dtype))
        with tempfile.TemporaryDirectory() as empty:
            rounds["first_command"].append(measure_command(options.model, options.dtype, empty))
    found = {name: medians(results) for name, results in rounds.items()}
    ours, theirs, encode = found["sheepop"], found["transformers"], found["encode"]
    if ours["tokens"] != theirs["tokens"] or abs(ours["loss"] - theirs["loss"]) > TOLERANCE * theirs["loss"]:
        raise SystemExit(f"it is not the same work: losses {ours['loss']} and {theirs['loss']}")
    print(f"{'':<22} {'SheepOp':>10} {'transformers':>13} {'ratio':>7}")
    for step in ("load", "first_token", "perplexity"):
        for clock, shown in (("processor_seconds", "processor s"), ("seconds", "wall s")):
            one, other = ours[step][clock], theirs[step][clock]
            print(f"{step.replace('_', ' ') + ', ' + shown:<22} {one:>10.2f} {other:>13.2f} {other / one:>7.2f}")
    for name, shown in (("peak_bytes_of_first_token", "peak at first token"), ("peak_bytes", "peak")):
        over = [(results[name] - results["weights_bytes"]) / 1e6 for results in (ours, theirs)]
        print(f"{shown + ', MB over weights':<22} {over[0]:>10,.0f} {over[1]:>13,.0f}")
    print(f"weights, MB: {ours['weights_bytes'] / 1e6:,.0f} and {theirs['weights_bytes'] / 1e6:,.0f}")
    print(f"encoding {encode['tokens']:,} tokens: {encode['seconds']:.2f} s")
    for name, shown in (("command", "one token"), ("first_command", "the first time")):
        seconds, used = found[name]["seconds"], found[name]["processor_seconds"]
        print(f"sheepop generate, {shown}: {seconds:.2f} s, of the processor {used:.2f} s")
    write_record(options.json, {**shared, "rounds": options.rounds, "threads": torch.get_num_threads(), **found})


if __name__ == "__main__" and not answer(measure):
    main()
