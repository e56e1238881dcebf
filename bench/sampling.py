"""The sampler on large vocabularies on a CPU: alone, and in whole steps beside greedy ones.

python bench/sampling.py FILES/sheepop --json bench/results/sampling.json

FILES is what `bench/generate_speed.py --shape wide --files FILES` keeps; any model directory will do. The sampler of 8
rows is timed on logits with a few likely tokens and on flatter ones. Steps are those of the model, after prompts of
drawn tokens; calls with each setting follow each other, and a ratio is the median of those of neighbours. All figures
are processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from record import add_json_option, write_record
from sheepop.adapt.quantization import quantize
from sheepop.checkpoint import load_model
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.sampling_kernels import choose_natively

ROWS, WRITTEN, PROMPT = 8, 16, 8
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "default": {"temperature": 0.8, "top_p": 0.95},
    "top-k 64": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    "top-p 0.3": {"temperature": 0.8, "top_p": 0.3},
    "typical": {"temperature": 0.8, "typical_p": 0.9},
}
IN_STEPS = ("greedy", "default", "top-k 64")


def sampler_milliseconds(logits: torch.Tensor, rounds: int) -> dict[str, float]:
    """The least time of the sampler for these logits, by the settings."""
    found = {}
    for name, settings in SETTINGS.items():
        configs, times = [GenerationConfig(**settings)] * len(logits), []
        for turn in range(rounds):
            seeds = list(range(turn * len(logits), (turn + 1) * len(logits)))
            begin = time.process_time()
            choose_natively(logits, logits, configs, seeds)
            times.append(time.process_time() - begin)
        found[name] = min(times) * 1e3
    return found


def generator_of(directory: Path, precision: str, texts: int) -> Generator:
    """A generator for the model in this precision."""
    loaded = load_model(directory, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}.get(precision))
    model = quantize(loaded.model, precision) if precision in ("int8", "int4") else loaded.model
    return Generator(model, loaded.tokenizer, max_batch_size=texts)


def step_milliseconds(generator: Generator, texts: int, activations: str, rounds: int) -> dict[str, list[float]]:
    """The times of a token in calls with each of the settings, which take turns; the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in IN_STEPS}
    for turn in range(rounds + 1):
        for name in IN_STEPS:
            lengths = {"max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN}
            config = GenerationConfig(**SETTINGS[name], **lengths, activations=activations)
            prompts = torch.randint(200, (texts, PROMPT)).tolist()
            begin = time.process_time()
            generator.generate(prompts, [config] * texts)
            if turn:
                times[name].append((time.process_time() - begin) / WRITTEN * 1e3)
    return times


def main() -> None:
    """Measures, prints two tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vocabulary", type=int, default=2**18, help="of the sampler alone")
    parser.add_argument("--precisions", nargs="+", default=["int8", "int4", "bf16"])
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--activations", choices=("exact", "rounded"), default="rounded")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    normal = torch.randn(ROWS, options.vocabulary)
    peaked = normal.clone()
    peaked[:, :40] += 12
    alone = {
        "40 likely tokens": sampler_milliseconds(peaked, options.rounds),
        "normal, deviation 1": sampler_milliseconds(normal, options.rounds),
        "normal, deviation 0.02": sampler_milliseconds(normal * 0.02, options.rounds),
    }
    print(f"ms of the sampler for {ROWS} rows")
    for name, found in alone.items():
        print(f"  {name:<24}", "  ".join(f"{setting} {each:.2f}" for setting, each in found.items()))
    steps = []
    print("ms of a step, and the ratio to the greedy one")
    for precision in options.precisions:
        generator = generator_of(options.model, precision, max(options.texts))
        for texts in options.texts:
            times = step_milliseconds(generator, texts, options.activations, options.rounds)
            medians = {name: statistics.median(each) for name, each in times.items()}
            ratios = {
                name: statistics.median(own / greedy for own, greedy in zip(each, times["greedy"], strict=True))
                for name, each in times.items()
            }
            steps.append({"precision": precision, "texts": texts, "milliseconds": medians, "ratios": ratios})
            words = "  ".join(f"{name} {medians[name]:.2f} ({ratios[name]:.3f})" for name in IN_STEPS)
            print(f"  {precision:<5} {texts:>3} {words}", flush=True)
        generator.close()
    about = {name: getattr(options, name) for name in ("vocabulary", "activations", "threads", "rounds")}
    write_record(options.json, {**about, "sampler_milliseconds": alone, "steps": steps})


if __name__ == "__main__":
    main()
