"""First measurements of a machine: training and generation speed beside its matrix peak."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sheepop.core.config import validate
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import UsageError
from sheepop.model import KeyValueCache, ModelConfig, build_model, cross_entropy
from sheepop.model.cost import forward_flops_per_token, training_flops_per_token
from sheepop.model.speed import matrix_peak, synchronize
from sheepop.train.config import TrainingConfig
from sheepop.train.optimizers import build_optimizers, clip_gradients
from sheepop.train.precision import autocast, candidates, torch_dtype

_VOCABULARY = 4096  # of presets that leave it to the tokenizer
_BATCH = 8
_PROMPT = 16


def bench(name: str | None, *, preset: str, seconds: float, device: str, console: Console) -> dict[str, Any]:
    """Runs the benchmark `name`, or all of them, for about `seconds` each; returns plain data."""
    if name is not None and name not in BENCHES:
        raise UsageError(f"There is no benchmark {name!r}. Known: {', '.join(BENCHES)}.")
    device = resolve_device(device)
    given = {"preset": preset}
    config = validate(ModelConfig, given)
    if config.vocab_size is None:
        config = validate(ModelConfig, {**given, "vocab_size": _VOCABULARY})
    config = config.replace(dropout=0.0)
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "device": device,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "preset": preset,
        "parameters": sum(parameter.numel() for parameter in build_model(config, 0).parameters()),
        "results": [],
    }
    for chosen in [name] if name else list(BENCHES):
        for precision in candidates("auto", device):
            console.info(f"Measuring {chosen} in {precision} for {seconds:g} s")
            result["results"].append(BENCHES[chosen](config, device, precision, seconds))
    return result


def render_bench(result: dict[str, Any]) -> str:
    """The measurements as a table."""
    lines = [
        f"{result['preset']} ({result['parameters']:,} parameters) on {result['device']}, "
        f"{result['threads']} threads, torch {result['torch']}",
        f"{'what':<10} {'precision':<10} {'shape':<14} {'tokens/s':>10} {'GFLOP/s':>9} {'of peak':>8}",
    ]
    for row in result["results"]:
        lines.append(
            f"{row['name']:<10} {row['precision']:<10} {row['shape']:<14} {row['tokens_per_second']:>10,.0f} "
            f"{row['flops_per_second'] / 1e9:>9,.1f} {row['share_of_peak']:>8.1%}"
        )
    return "\n".join(lines)


def measure_training(config: ModelConfig, device: str, precision: str, seconds: float) -> dict[str, Any]:
    """Whole optimizer steps: forward, loss, backward, clipping, AdamW."""
    seq_len = min(config.max_seq_len, 256)
    model = build_model(config, 0, device).train()
    optimizer = build_optimizers(model, TrainingConfig())[0]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (_BATCH, seq_len + 1), generator=generator).to(device)

    def step() -> None:
        with autocast(device, precision):
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        torch.autograd.backward(loss)
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    rate = _BATCH * seq_len / _median_seconds(step, device, seconds)
    flops = rate * training_flops_per_token(config, seq_len)
    return _row("train", precision, f"{_BATCH} x {seq_len}", rate, flops, device)


def measure_generation(config: ModelConfig, device: str, precision: str, seconds: float) -> dict[str, Any]:
    """One new token at a time with the key-value cache, for one sequence: the time between streamed tokens."""
    model = build_model(config, 0, device).eval()
    length = min(config.max_seq_len, 256)
    prompt = torch.zeros(1, _PROMPT, dtype=torch.long, device=device)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)

    def write() -> None:
        with torch.inference_mode(), autocast(device, precision):
            cache = KeyValueCache(config, 1, length, device=device, dtype=torch_dtype(precision))
            model(prompt, cache=cache, logits_to_keep=1)
            for _ in range(length - _PROMPT):
                model(token, cache=cache)

    rate = (length - _PROMPT) / _median_seconds(write, device, seconds)
    flops = rate * forward_flops_per_token(config, length / 2)
    return _row("generate", precision, f"1 x {length}", rate, flops, device)


BENCHES: dict[str, Callable[[ModelConfig, str, str, float], dict[str, Any]]] = {
    "train": measure_training,
    "generate": measure_generation,
}


def _median_seconds(work: Callable[[], None], device: str, seconds: float) -> float:
    """Median time of `work` after one untimed call, over about `seconds` and at least three calls."""
    work()
    times: list[float] = []
    started = time.monotonic()
    while len(times) < 3 or time.monotonic() - started < seconds:
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _row(name: str, precision: str, shape: str, rate: float, flops: float, device: str) -> dict[str, Any]:
    return {
        "name": name,
        "precision": precision,
        "shape": shape,
        "tokens_per_second": rate,
        "flops_per_second": flops,
        "share_of_peak": flops / matrix_peak(torch_dtype(precision), device),
    }
