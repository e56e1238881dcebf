"""Measures the training and generation speed of a machine, also as a share of its peak matrix speed."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sheepop.core.config import validate
from sheepop.core.console import Console
from sheepop.core.device import keep_freed_memory, resolve_device
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.core.measurements import best_known, measurement_key, recall
from sheepop.core.processor_time import QUIET, ProcessorTime
from sheepop.core.random import numpy_generator
from sheepop.core.speed import best_of_rounds, matrix_peak, processor_share, share_of_peak, synchronize
from sheepop.data import Batch
from sheepop.generate import GenerationConfig, Generator
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.recipe import small_run
from sheepop.model import ModelConfig, build_model
from sheepop.model.accounting.cost import decoding_flops_per_token, training_flops_per_token
from sheepop.model.accounting.saved_activations import Mode
from sheepop.tokenizer import CharTokenizer
from sheepop.train.activation_checkpointing import apply_activation_checkpointing
from sheepop.train.budget import runner_here
from sheepop.train.config import TrainingConfig
from sheepop.train.objective import NextToken
from sheepop.train.precision import apply_precision, candidates, torch_dtype
from sheepop.train.source import PreparedStep

_VOCABULARY = 4096  # for presets without a vocabulary size
_BATCH = 8
_PROMPT = 16
_PROBE_SECONDS, _GLANCE_SECONDS = 0.5, 0.1  # of a round, and of a start on a machine that was measured before


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
        f"{counted(result['threads'], 'thread')}, torch {result['torch']}",
        f"{'benchmark':<10} {'precision':<10} {'shape':<14} {'tokens/s':>10} {'GFLOP/s':>9} {'of peak':>8}",
    ]
    for row in result["results"]:
        lines.append(
            f"{row['name']:<10} {row['precision']:<10} {row['shape']:<14} {row['tokens_per_second']:>10,.0f} "
            f"{row['flops_per_second'] / 1e9:>9,.1f} {row['share_of_peak']:>8.1%}"
        )
    return "\n".join(lines)


def measure_training(
    config: ModelConfig,
    device: str,
    precision: str,
    seconds: float,
    *,
    training: TrainingConfig = TrainingConfig(global_batch_size=_BATCH),
    longest: int = 256,
    compiled: bool = False,
    activation_checkpointing: Mode = "none",
) -> dict[str, Any]:
    """Measures optimizer steps (forward, loss, backward, clipping, update) on rows of up to `longest` tokens."""
    keep_freed_memory(device)  # as a run does
    rows, seq_len = training.global_batch_size, min(config.max_seq_len, longest)
    model = build_model(config, 0, device)
    apply_precision(model, precision)
    apply_activation_checkpointing(model, activation_checkpointing)
    runner = runner_here(model, NextToken(), training, precision, device, compiled=compiled)
    batch = RandomBatches(config.vocabulary, seq_len).batch(np.arange(rows))
    prepared = PreparedStep.of(batch, rows, NextToken(), device=device)

    def step() -> None:
        runner.take(prepared, number=0)

    rate = rows * seq_len / _median_seconds(step, device, seconds)
    flops = rate * training_flops_per_token(config, seq_len)
    return _row("train", precision, f"{rows} x {seq_len}", rate, flops, device)


def training_speed(device: str) -> float:
    """FLOP/s of a small run's training steps on `device`, in the fastest precision, at the share that is free now.

    That is the speed of this machine alone times the share of its processors that this process gets. The steps are
    those that the recipe trains, because machines differ in how much of a step their matrix products take.
    """
    device = resolve_device(device)
    return _speed_alone(device) * processor_share(device)


@cache
def _speed_alone(device: str) -> float:
    """The record of this machine, which every start on a quiet machine may raise.

    Without a record, a busy machine is measured, and its speed divided by the share that this process got.
    """
    probe, processor = small_run(), ProcessorTime()
    key = measurement_key("training speed", device, probe.model_dump_json())
    *others, last = candidates("auto", device)  # the last one is the fastest, if any is
    record = recall(key, float)
    with processor.counted():
        if record is None:
            found = max(
                best_of_rounds(partial(_probed, probe, device, each, _PROBE_SECONDS)) for each in (*others, last)
            )
        else:
            found = _probed(probe, device, last, _GLANCE_SECONDS)
    share = processor.take() if device == "cpu" else 1.0
    if share < QUIET:
        return record or found / share
    return best_known(key, found)


def _probed(probe: SheepOpConfig, device: str, precision: str, seconds: float) -> float:
    """The FLOP/s of so many seconds of training steps."""
    return float(measure_training(probe.model, device, precision, seconds, training=probe.training)["flops_per_second"])


@dataclass(frozen=True)
class RandomBatches:
    """Rows of random tokens in place of a corpus; each row depends only on its index."""

    vocab_size: int
    max_length: int
    num_samples: int = 1 << 30

    def batch(self, sample_indices: NDArray[np.int64]) -> Batch:
        """The rows with these indices; every position has a label."""
        shape = (len(sample_indices), self.max_length)
        tokens = np.stack(
            [
                numpy_generator(int(index), "random row").integers(self.vocab_size, size=self.max_length + 1)
                for index in sample_indices
            ]
        )
        return Batch(
            input_ids=tokens[:, :-1].copy(),
            labels=tokens[:, 1:].copy(),
            positions=np.broadcast_to(np.arange(self.max_length), shape),
            document_ids=np.zeros(shape, dtype=np.int64),
            has_boundaries=False,
        )


def measure_generation(config: ModelConfig, device: str, precision: str, seconds: float) -> dict[str, Any]:
    """Measures greedy generation of one sequence with the engine: the time between streamed tokens."""
    model = build_model(config, 0, device).to(torch_dtype(precision))
    length = min(config.max_seq_len, 256)
    generator, prompt = Generator(model, CharTokenizer()), [CharTokenizer().bos_id] * _PROMPT
    num_new = length - _PROMPT
    settings = GenerationConfig(temperature=0, max_new_tokens=num_new, min_new_tokens=num_new)
    rate = num_new / _median_seconds(lambda: generator.generate([prompt], settings), device, seconds)
    flops = rate * decoding_flops_per_token(config, length / 2)
    return _row("generate", precision, f"1 x {length}", rate, flops, device)


BENCHES: dict[str, Callable[[ModelConfig, str, str, float], dict[str, Any]]] = {
    "train": measure_training,
    "generate": measure_generation,
}


def _median_seconds(work: Callable[[], Any], device: str, seconds: float) -> float:
    """Median time of a call of `work`, over about `seconds` and at least three calls, after one untimed call."""
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
        "share_of_peak": share_of_peak(flops, matrix_peak(torch_dtype(precision), device)),
    }
