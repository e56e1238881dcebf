"""Loss curves of one small network in every precision that this machine computes in: do they fall alike?

The same weights, data order and steps; only the arithmetic differs. Rounding parts the curves of one seed from each
other to either side, so several seeds are averaged. The table holds the largest and the mean distance of the averages
from float32, relative to its loss, the mean of the last ten losses, and for every seed how far that is from float32's;
the picture shows the averages and their distances.

python bench/precision_parity.py --text FILE --picture parity.png --json bench/results/precision_parity.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from record import add_json_option, write_record
from sheepop.core.device import resolve_device
from sheepop.core.errors import DeviceError
from sheepop.core.random import torch_generator
from sheepop.model import ModelConfig, build_model
from sheepop.train import Schedule, TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken
from sheepop.train.placement import OneDevice
from sheepop.train.precision import apply_precision, check_precision, choose_matrix_arithmetic, initial_loss_scale
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
ROWS, LENGTH = 16, 128


def loss_curve(text: bytes, precision: str, device: str, steps: int, preset: str, seed: int) -> list[float]:
    """The loss of every step on bytes of `text`, drawn by seed and step."""
    config = ModelConfig(preset=preset, vocab_size=256, max_seq_len=LENGTH, dropout=0.0)
    model = build_model(config, seed, device)
    apply_precision(model, precision)
    settings = TrainingConfig()
    placement = OneDevice(model, precision=precision, device=device)
    runner = StepRunner(
        placement, NextToken(), build_optimizers(model, settings), TrainedWeights(), settings.max_grad_norm
    )
    schedule = Schedule("cosine", settings.learning_rate, 0.0, max(1, steps // 20), steps)
    tokens, scale, losses = torch.tensor(list(text)), initial_loss_scale(precision), []
    for step in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (ROWS, 1), generator=torch_generator(seed, "parity", step))
        rows = tokens[starts + torch.arange(LENGTH + 1)].to(device)
        inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        batch = TensorBatch({"input_ids": inputs}, labels, slice(None))
        prepared = PreparedStep([batch], labels.numel(), labels.numel(), labels.numel())
        outcome = runner.take(prepared, number=step, rate=schedule(step), loss_scale=scale.scale if scale else 1.0)
        scale = scale.after(finite=outcome.is_taken) if scale else None
        losses.append(outcome.loss)
    return losses


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """The curves above, their distance from float32 below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for number, (name, losses) in enumerate(curves.items()):
        # The curves lie upon each other: the first is the widest.
        style = {"label": name, "color": f"C{number}"}
        above.plot(range(1, len(losses) + 1), losses, linewidth=4 - number, **style)
        if name != "fp32":
            distance = [100 * (one / exact - 1) for one, exact in zip(losses, curves["fp32"], strict=True)]
            below.plot(range(1, len(losses) + 1), distance, linewidth=1, **style)
    above.set_ylabel("loss (nats per byte)")
    below.set_ylabel("distance from fp32 (%)")
    below.set_xlabel("step")
    above.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Trains in every precision, prints the table, writes picture and JSON when they were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="file whose bytes are learned")
    parser.add_argument("--preset", default="llama-1m", help="model preset")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--seeds", type=int, default=3, help="weights and orders of data, over which curves are averaged"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--picture", type=Path, help="file for the picture, .png or .svg")
    add_json_option(parser)
    options = parser.parse_args()
    device = resolve_device(options.device)
    choose_matrix_arithmetic(device)
    text, curves, refused = options.text.read_bytes(), {}, {}
    print(f"{'precision':<10} {'largest':>9} {'mean':>9} {'final loss':>11}   of each seed")
    for precision in PRECISIONS:
        try:
            check_precision(precision, device)
        except DeviceError as error:
            refused[precision] = str(error)
            print(f"{precision:<10} {error}")
            continue
        curves[precision] = [
            loss_curve(text, precision, device, options.steps, options.preset, seed) for seed in range(options.seeds)
        ]
        ours, exact = (torch.tensor(curves[name]) for name in (precision, "fp32"))
        distance = (ours.mean(0) / exact.mean(0) - 1).abs()
        last, last_exact = (found[:, -10:].mean(1) for found in (ours, exact))
        of_seeds = "  ".join(f"{value:+.3%}" for value in (last / last_exact - 1).tolist())
        print(f"{precision:<10} {distance.max():>9.3%} {distance.mean():>9.3%} {last.mean():>11.4f}   {of_seeds}")
    if options.picture is not None:
        draw({name: torch.tensor(found).mean(0).tolist() for name, found in curves.items()}, options.picture)
    results: dict[str, Any] = {"device": device, "preset": options.preset, "losses": curves, "refused": refused}
    write_record(options.json, results)


if __name__ == "__main__":
    main()
