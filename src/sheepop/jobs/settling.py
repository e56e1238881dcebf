"""What the settings of a run become before its first step: what is derived, what is measured, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DeviceError
from sheepop.core.freed_memory import keep_freed_memory
from sheepop.core.machine import find_compiler, has_python_headers
from sheepop.core.speed import matrix_peak, nominal_peak
from sheepop.data import Batches
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.run_kind import RunData, with_training
from sheepop.jobs.run_record import Budget, Request, RunRecord
from sheepop.jobs.training_run import build_network, bytes_of_a_step
from sheepop.model import blank_model, num_parameters
from sheepop.model.attention.choose import require_backend
from sheepop.parallel.ring import check_ring_here
from sheepop.train import check_layers
from sheepop.train.activation_checkpointing import resolve_activation_checkpointing
from sheepop.train.budget import (
    loop_seconds,
    measure_step,
    measuring_seconds,
    most_steps,
    needs_measuring,
    resolve_compile,
    resolve_training,
)
from sheepop.train.precision import check_precision, choose_matrix_arithmetic, torch_dtype


def resolved(
    config: SheepOpConfig,
    asked: SheepOpConfig,
    run: RunDirectory,
    data: RunData,
    device: str,
    console: Console,
    fork: Fork | None,
    request: Request,
    num_ranks: int,
) -> tuple[SheepOpConfig, RunRecord]:
    """Fills in what is derived or measured, before the first step."""
    batches = data.batches(config)
    training = resolve_compile(config.training, device)
    with torch.device("meta"):
        check_layers(dict(blank_model(config.model).named_parameters()), training.layers)
    if training.compile and device == "cpu" and not _has_compiler():
        if training.compile is True:
            console.warn(
                "training.compile needs a C++ compiler and Python's headers, which were not found; "
                "the run continues without it."
            )
        training = training.replace(compile=False)
    training = resolve_activation_checkpointing(
        training, lambda: bytes_of_a_step(config, training, batches.max_length, device), device
    )
    timing = None
    if needs_measuring(training, device):
        timing = measure_step(
            lambda: build_network(data, with_training(config, training), device),
            batches,
            data.objective(with_training(config, training)),
            training,
            device,
            seconds=measuring_seconds(training),
            console=console,
            shape=_step_shape(with_training(config, training), batches),
        )
        timing = replace(timing, seconds=timing.seconds / num_ranks)
    validation_tokens = data.held_out_tokens
    num_samples = data.plan(config, run, console).num_samples
    training = resolve_training(
        training,
        timing,
        device=device,
        num_samples=num_samples,
        seq_len=batches.tokens_per_sample,
        validation_tokens=min(validation_tokens, training.eval_tokens or validation_tokens),
    )
    settings = training.resolved()
    if asked.training.eval_interval is not None and validation_tokens == 0:
        console.warn(
            "training.eval_interval is set, but no text is held out, so there will be no validations. "
            "Raise data.validation_fraction in a new run to have them."
        )
    if config.training.warmup_steps is not None and settings.warmup_steps >= settings.total_steps:
        console.warn(
            f"training.warmup_steps = {settings.warmup_steps} is not over when the run ends after "
            f"{settings.total_steps} steps, so the learning rate never reaches {training.learning_rate}."
        )
    seconds = loop_seconds(config.training, timing)
    most = most_steps(config.training, num_samples, batches.tokens_per_sample)
    record = RunRecord.create(
        data.fingerprint,
        data.tokenizer().fingerprint(),
        asked=asked,
        step_seconds=timing.seconds if timing else None,
        deadline=None if seconds is None else Budget(seconds, most),
        matrix_peak_flops=matrix_peak(torch_dtype(training.precision), device),
        nominal_peak_flops=nominal_peak(torch_dtype(training.precision), device),
        fork=fork,
        device=device,
        num_parameters=num_parameters(config.model),
        request=request,
    )
    return with_training(config, training), record


def _step_shape(config: SheepOpConfig, batches: Batches) -> str:
    """The settings and lengths that decide how long a step takes, as JSON; budgets and intervals do not."""
    parts = {"model", "tuning", "training", "deterministic"}
    settings = config.model_dump(
        mode="json", include=parts, exclude={"training": {"max_steps", "max_epochs", "max_tokens", "max_minutes"}}
    )
    return json.dumps([settings, batches.max_length, batches.tokens_per_sample])


def check_settings(config: SheepOpConfig, data: RunData, device: str) -> None:
    """Refuses before a step is taken what would end the run in its middle, or be ignored."""
    narrowest = min(config.model.head_size, config.model.value_size)
    require_backend(config.model.attention_backend, torch.device(device), narrowest)
    check_ring_here(config.model, config.parallel, device, config.training.precision)
    if config.training.early_stopping is not None and data.held_out_tokens == 0:
        raise ConfigError(
            "training.early_stopping watches the loss on held-out text, but no text is held out. "
            "Raise data.validation_fraction in a new run, or leave early_stopping out."
        )
    data.asked(config)


def require_arithmetic(config: SheepOpConfig, device: str) -> None:
    """Raises `DeviceError` when a run cannot go on here with the arithmetic that it began with."""
    settings = config.training.resolved()
    check_precision(settings.precision, device)
    check_ring_here(config.model, config.parallel, device, settings.precision)
    if settings.compile and device == "cpu" and not _has_compiler():
        raise DeviceError(
            "This run uses training.compile = true, but no C++ compiler with Python's headers was found. "
            "Install them (`sheepop doctor` says how), or resume on a machine that has them."
        )


def prepare_process(config: SheepOpConfig, device: str) -> None:
    """Sets for this process how `device` computes, as `config.deterministic` says, and that it keeps its memory.

    What CUDA's library of products needs for it is set by `resolve_device`, before CUDA starts.
    """
    choose_matrix_arithmetic(device)
    keep_freed_memory(device)
    torch.use_deterministic_algorithms(config.deterministic)
    # Filling memory that is about to be written costs time; no kernel used here reads it before.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not config.deterministic


def _has_compiler() -> bool:
    return find_compiler() is not None and has_python_headers()
