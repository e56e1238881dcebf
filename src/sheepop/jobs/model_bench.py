"""Measures how fast a model from disk reads and writes, and names what limits it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sheepop.adapt.quantization import weight_bytes
from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.core.random import numpy_generator
from sheepop.core.speed import matrix_peak, read_bandwidth, share_of_peak, synchronize
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.arithmetic import rounds_inputs
from sheepop.generate.config import Activations
from sheepop.generate.engine import BLOCK_SIZE, Engine
from sheepop.generate.paged_cache import bytes_per_block
from sheepop.jobs.generate import load_generator
from sheepop.model import Transformer
from sheepop.model.accounting.cost import decoding_flops_per_token, step_flops
from sheepop.model.experts import Experts

_BATCHES = (1, 8, 32)
_PROMPT = 16
_LONGEST_PROMPT, _LONGEST_TEXT = 1000, 512
_SETTINGS = {"greedy": GenerationConfig(temperature=0.0), "sampled": GenerationConfig()}
_WALL = 0.5  # a share of the machine's speed, or of a step, from which on it is the limit
_ROUNDS, _MOST_ROWS = 7, 256  # of the product that is measured alone
_CALL = 5e-5  # seconds; a shorter product shows the time of its call


@dataclass(frozen=True)
class _Measured:
    """The median step of a kind of work: tokens, seconds, and the bytes and operations that it cannot do without.

    `product_rate` is how many operations a second a product of this network reaches alone, with as many rows.
    """

    name: str
    texts: int
    sampling: str
    tokens: int
    seconds: float
    bytes: float
    operations: float
    product_rate: float

    def row(self, bandwidth: float, peak: float) -> dict[str, Any]:
        """Returns the result as plain data; a share of half or more names the wall, the larger one if both are.

        If neither is, the wall are the products, if at their own rate they take half of the step or more.
        """
        shares = {
            "memory": share_of_peak(self.bytes / self.seconds, bandwidth),
            "arithmetic": share_of_peak(self.operations / self.seconds, peak),
        }
        products = share_of_peak(self.operations / self.seconds, self.product_rate)
        wall = max(shares, key=lambda name: shares[name])
        if shares[wall] < _WALL:
            wall = "products" if products >= _WALL else "calls and threads"
        return {
            "name": self.name,
            "texts": self.texts,
            "sampling": self.sampling,
            "tokens_per_second": self.tokens / self.seconds,
            "step_seconds": self.seconds,
            "share_of_bandwidth": shares["memory"],
            "share_of_peak": shares["arithmetic"],
            "share_of_products": products,
            "wall": wall,
        }


def bench_model(
    path: str | Path,
    *,
    seconds: float,
    device: str,
    dtype: str | None,
    activations: Activations = "exact",
    console: Console,
) -> dict[str, Any]:
    """Measures reading a prompt, and decoding 1, 8 and 32 texts, for about `seconds` each; returns plain data.

    Each row has tokens per second, the shares of the memory's and the processor's measured speed, and the wall: what
    limits the speed. Tokens are random, because the time does not depend on them. Raises `UsageError` for a model that
    does not continue texts, or whose context is too short.
    """
    generator = load_generator(path, device=device, dtype=dtype, activations=activations)
    model = generator.model
    if not generator.continues_prompts or model.config.max_seq_len < 2 * _PROMPT:
        raise UsageError(f"{path} cannot be measured: this benchmark needs a decoder with a context of {2 * _PROMPT}.")
    device = model.device.type
    console.info("Measuring the machine")
    bandwidth, peak = read_bandwidth(device), matrix_peak(model.dtype, device)
    console.info(f"Measuring a prompt for {seconds:g} s")
    found = [_prefill(generator, seconds)]
    for batch in _BATCHES:
        for kind in _SETTINGS:
            console.info(f"Measuring {counted(batch, 'text')}, {kind}, for {seconds:g} s")
            found.append(_decode(generator, batch, kind, seconds))
    return {
        "model": str(path),
        "device": device,
        "threads": torch.get_num_threads(),
        "activations": "rounded" if rounds_inputs(model) else "exact",
        "weight_bytes": weight_bytes(model.parameters()),
        "bandwidth": bandwidth,
        "peak": peak,
        "results": [measured.row(bandwidth, peak) for measured in found],
    }


def render_model_bench(result: dict[str, Any]) -> str:
    """The measurements as a table."""
    lines = [
        f"{result['model']} ({result['weight_bytes'] / 1e9:.2f} GB of weights) on {result['device']}, "
        f"{counted(result['threads'], 'thread')}, {result['activations']} inputs of products: reads "
        f"{result['bandwidth'] / 1e9:.1f} GB/s, computes {result['peak'] / 1e9:,.0f} GFLOP/s",
        f"{'work':<8} {'texts':>5} {'sampling':<9} {'tokens/s':>9} {'ms':>8} {'bandwidth':>9} {'arithmetic':>10} "
        f"{'products':>8}  wall",
    ]
    for row in result["results"]:
        lines.append(
            f"{row['name']:<8} {row['texts']:>5} {row['sampling']:<9} {row['tokens_per_second']:>9,.1f} "
            f"{row['step_seconds'] * 1e3:>8.1f} {row['share_of_bandwidth']:>9.0%} {row['share_of_peak']:>10.0%} "
            f"{row['share_of_products']:>8.0%}  {row['wall']}"
        )
    return "\n".join(lines)


def _prefill(generator: Generator, seconds: float) -> _Measured:
    """Measures the steps that read a prompt; each prompt is new to the cache."""
    model = generator.model
    length = min(_LONGEST_PROMPT, model.config.max_seq_len - 1)
    engine = generator.serving_engine(max_sequences=1, max_waiting=0)
    times: list[float] = []
    until = time.monotonic() + seconds
    while len(times) < 3 or time.monotonic() < until:
        _add(generator, engine, 1, length, _SETTINGS["greedy"], seed=len(times))
        times.append(_seconds(engine, model.device.type, until_written=True))
        engine.abort_all()
    # Only the last token has logits.
    moved, operations = read_bytes(model, length), step_flops(model.config, length, length, 1) / 3
    rate = _product_rate(model, min(length, _MOST_ROWS))
    return _Measured("prompt", 1, "", length, statistics.median(times), moved, operations, rate)


def _decode(generator: Generator, batch: int, kind: str, seconds: float) -> _Measured:
    """Measures the steps that each add a token to every one of `batch` texts."""
    model = generator.model
    longest = min(_LONGEST_TEXT, model.config.max_seq_len - _PROMPT)
    config = _SETTINGS[kind].replace(max_new_tokens=longest, min_new_tokens=longest)
    engine = generator.serving_engine(max_sequences=batch, max_waiting=0)
    times: list[float] = []
    contexts: list[int] = []
    until = time.monotonic() + seconds
    context = longest + _PROMPT
    while len(times) < 8 or time.monotonic() < until:
        if engine.is_idle or context + 1 >= longest + _PROMPT:
            engine.abort_all()
            _add(generator, engine, batch, _PROMPT, config, seed=len(times))
            _seconds(engine, model.device.type, until_written=True)
            context = _PROMPT
        context += 1
        times.append(_seconds(engine, model.device.type, until_written=False))
        contexts.append(context)
    keys = statistics.mean(contexts)
    moved = read_bytes(model, batch) + batch * keys * bytes_per_block(model, BLOCK_SIZE) / BLOCK_SIZE
    operations = batch * decoding_flops_per_token(model.config, keys)
    return _Measured(
        "decode", batch, kind, batch, statistics.median(times), moved, operations, _product_rate(model, batch)
    )


def _add(generator: Generator, engine: Engine, count: int, length: int, config: GenerationConfig, *, seed: int) -> None:
    """Adds `count` requests with random prompts of `length` tokens."""
    draws = numpy_generator(seed, "benchmark prompt")
    for number in range(count):
        prompt = draws.integers(generator.tokenizer.vocab_size, size=length).tolist()
        engine.add(generator.request(prompt, config.replace(seed=number), number=number))


def _seconds(engine: Engine, device: str, *, until_written: bool) -> float:
    """Takes a step, or all until the texts begin; returns the seconds."""
    synchronize(device)
    begin = time.perf_counter()
    with torch.inference_mode():
        while not engine.step() and until_written:
            pass
    synchronize(device)
    return time.perf_counter() - begin


def _product_rate(model: Transformer, num_rows: int) -> float:
    """The best rate of a product of `num_rows` rows alone, in operations per second; infinite if a call takes longer.

    It is the output projection, or the largest product of the blocks for more rows than texts.
    """
    linears = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    layer = model.lm_head if num_rows <= max(_BATCHES) else max(linears, key=lambda each: each.weight.numel())
    num_outputs, num_inputs = layer.weight.shape
    x_RD = torch.randn(num_rows, num_inputs, dtype=model.dtype, device=model.device)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            synchronize(model.device.type)
            begin = time.perf_counter()
            layer(x_RD)
            synchronize(model.device.type)
            best = min(best, time.perf_counter() - begin)
    return 2 * num_rows * num_inputs * num_outputs / best if best > _CALL else float("inf")


def read_bytes(model: Transformer, num_tokens: int) -> float:
    """Returns the bytes of weights that a pass over `num_tokens` tokens reads; of experts it counts the likely ones."""
    tables = {id(model.embedding.weight)} - {id(model.lm_head.weight)}
    if model.added_positions is not None:
        tables.add(id(model.added_positions.table))
    total = 0.0
    for module in model.modules():
        share = 1.0
        if isinstance(module, Experts):
            experts = model.config.experts
            assert experts is not None
            share = 1 - (1 - experts.per_token / experts.count) ** num_tokens
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in tables:
                tables.add(id(parameter))
                total += share * weight_bytes([parameter])
    return total
