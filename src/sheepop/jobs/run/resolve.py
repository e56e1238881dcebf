"""Resolves the settings of a run before its first step: what is derived, what is measured, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DeviceError
from sheepop.core.machine import find_compiler, has_python_headers
from sheepop.core.speed import matrix_peak, nominal_peak
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.analysis import require_analysis
from sheepop.jobs.run.record import Budget, RunRecord, StageTimes, circumstances
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.step_memory import in_memory
from sheepop.jobs.task.interface import Task, with_training
from sheepop.model import Transformer, blank_model, num_parameters
from sheepop.model.attention.choose import require_backend
from sheepop.parallel.layout import Layout, check_network, check_ring_here
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.posttrain.config import Method
from sheepop.train import TrainingConfig, check_layers
from sheepop.train.activation_checkpointing import (
    apply_activation_checkpointing,
)
from sheepop.train.budget import (
    VALIDATION_SHARE,
    StepTime,
    besides_the_loop,
    loop_seconds,
    measure_step,
    measuring_seconds,
    most_steps,
    needs_measuring,
    resolve_compile,
    resolve_training,
)
from sheepop.train.precision import apply_precision, check_precision, choose_matrix_arithmetic, torch_dtype
from sheepop.train.sinks import require_sinks

_WEIGHTED = "each answer is weighted as a whole, and context ranks have parts of its tokens"
_REREAD = "answers are read again before a step, in a pass for which no rank of a pipeline has all layers"
_WHOLE_ROWS = "its teacher reads whole rows, of which context ranks have parts"
_SAMPLED = "answers are sampled during training, for which every rank needs all layers"
_UNSHARED: Mapping[Method, Mapping[str, str]] = {
    "sft": {},
    "dpo": {"context": _WEIGHTED},
    "reward": {"context": _WEIGHTED},
    "ppo": {"context": _WEIGHTED, "pipeline": _REREAD},
    "grpo": {"context": _WEIGHTED, "pipeline": _REREAD},
    "distill": {"context": _WHOLE_ROWS, "pipeline": _SAMPLED},
}
"""The kinds of ranks that a method of post-training does not support, each with the reason."""


def resolved(
    task: Task,
    requested: SheepOpConfig,
    chosen: Mapping[str, Any],
    request: RunRequest,
    device: str,
    times: StageTimes,
) -> tuple[Task, RunRecord]:
    """The task with all settings that are derived or measured filled in, and the record of the run.

    `requested` are the settings before that, of which the recipe chose `chosen`. A budget in minutes began with
    `times`.
    """
    seq_len, held_out_tokens = task.batches().tokens_per_sample, task.held_out_tokens
    training = _with_compiler(resolve_compile(task.config.training, device), device, task.console)
    with torch.device("meta"):
        check_layers(dict(blank_model(task.config.model).named_parameters()), training.layers)
    chooses = task.origin is not None and not request.ranks.are_several
    training = in_memory(task, training, request.given, device, chooses_rows=chooses)
    timing = _measured(task.with_config(with_training(task.config, training)), device, request.ranks.size)
    tokens = task.schedule.num_samples * seq_len
    elapsed = times.elapsed
    timing, scored = besides_the_loop(training, timing, elapsed, held_out_tokens, seq_len, task.console, tokens)
    settled = resolve_training(
        training,
        timing,
        device=device,
        num_samples=task.schedule.num_samples,
        seq_len=seq_len,
        validation_tokens=min(held_out_tokens, training.eval_tokens or held_out_tokens),
    )
    _warn(requested, settled, held_out_tokens, task.console)
    seconds = loop_seconds(task.config.training, timing)
    minutes = task.config.training.max_minutes
    score_seconds = None if minutes is None else 60 * VALIDATION_SHARE * minutes
    after = 0.0 if timing is None else timing.measured_in - elapsed
    most = most_steps(task.config.training, task.schedule.num_samples, seq_len)
    dtype = torch_dtype(settled.precision)
    record = RunRecord(
        corpus_fingerprint=task.fingerprint,
        tokenizer_fingerprint=task.tokenizer().fingerprint(),
        requested=requested.model_dump(mode="json"),
        step_seconds=timing.seconds if timing else None,
        deadline=None if seconds is None else Budget(seconds, most, scored, score_seconds, after),
        matrix_peak_flops=matrix_peak(dtype, device),
        nominal_peak_flops=nominal_peak(dtype, device),
        forked_from=None if task.origin is None else task.origin.as_record(),
        seed=requested.seed,
        num_parameters=num_parameters(task.config.model),
        command=request.command,
        chosen=dict(chosen),
        plugins=list(request.plugins),
        **circumstances(device),
    )
    return task.with_config(with_training(task.config, settled)), record


def _with_compiler(training: TrainingConfig, device: str, console: Console) -> TrainingConfig:
    """`training` without compiling if the CPU has no compiler for it."""
    if not training.compile or device != "cpu" or _has_compiler():
        return training
    if training.compile is True:
        console.warn(
            "training.compile needs a C++ compiler and Python's headers, which were not found; "
            "the run continues without it."
        )
    return training.replace(compile=False)


def _measured(task: Task, device: str, num_ranks: int) -> StepTime | None:
    """The time of a step, shared by all ranks, if the number of steps depends on it."""
    training = task.config.training
    if not needs_measuring(training, device):
        return None
    steps, shape = (task.batches(), task.objective(), training, device), _step_shape(task)
    seconds, console = measuring_seconds(training), task.console
    timing = measure_step(lambda: build_network(task, device), *steps, seconds=seconds, console=console, shape=shape)
    return replace(timing, seconds=timing.seconds / num_ranks)


def _step_shape(task: Task) -> str:
    """The settings and lengths that decide how long a step takes, as JSON; budgets and intervals do not."""
    parts = {"model", "tuning", "training", "deterministic"}
    settings = task.config.model_dump(
        mode="json", include=parts, exclude={"training": {"max_steps", "max_epochs", "max_tokens", "max_minutes"}}
    )
    batches = task.batches()
    return json.dumps([settings, batches.max_length, batches.tokens_per_sample])


def _warn(requested: SheepOpConfig, training: TrainingConfig, held_out_tokens: int, console: Console) -> None:
    """Warns of settings that have no effect on this run."""
    settings = training.resolved()
    if requested.training.eval_interval is not None and held_out_tokens == 0:
        console.warn(
            "training.eval_interval is set, but no text is held out, so there will be no validations. "
            "Raise data.validation_fraction in a new run to have them."
        )
    if requested.training.warmup_steps is not None and settings.warmup_steps >= settings.total_steps:
        console.warn(
            f"training.warmup_steps = {settings.warmup_steps} is not over when the run ends after "
            f"{settings.total_steps} steps, so the learning rate never reaches {training.learning_rate}."
        )


def fitted(task: Task, ranks: Ranks, device: str, *, is_open: bool) -> Task:
    """The task with a micro-batch size that the `ranks` share evenly; it is chosen if `is_open`.

    Raises `ConfigError` for settings that would end the run halfway, or be ignored.
    """
    task = task.with_config(shared_steps(task.config, ranks, device, is_open=is_open))
    config, model = task.config, task.config.model
    require_backend(model.attention_backend, torch.device(device), model.narrowest_head)
    if config.training.early_stopping is not None and task.held_out_tokens == 0:
        raise ConfigError(
            "training.early_stopping watches the loss on held-out text, but no text is held out. "
            "Raise data.validation_fraction in a new run, or leave early_stopping out."
        )
    _ = task.evaluation_set
    return task


def check_layout(config: SheepOpConfig, ranks: Ranks) -> None:
    """Raises `ConfigError` for a layout or settings with which these ranks cannot train."""
    Layout(ranks, config.parallel)
    if ranks.are_several:
        _check_tuning(config)


def shared_steps(config: SheepOpConfig, ranks: Ranks, device: str | None = None, *, is_open: bool) -> SheepOpConfig:
    """`config` with a micro-batch size that gives every rank the same share of a step; it is chosen if `is_open`.

    Raises `ConfigError` if rows cannot be shared evenly, or the network not at all; None is a `device` that can
    compute everything.
    """
    if not ranks.are_several:
        return config
    _check_training(config)
    layout, training = Layout(ranks, config.parallel), config.training
    sizes = [size for _, size in training.batch_size_warmup] + [training.global_batch_size]
    if is_open:
        chosen = {**_chosen(config), "micro_batch_size": layout.micro_batch_rows(math.gcd(*sizes))}
        config = config.replace(training={**training.model_dump(), **chosen})
    check_network(config.model, config.parallel)
    if device is not None:
        check_ring_here(config.model, config.parallel, device, config.training.precision)
    rows = config.training.micro_batch_size
    assert rows is not None
    for size in sizes:
        layout.check_micro_batches(size, rows)
    return config


def _chosen(config: SheepOpConfig) -> dict[str, Any]:
    """Choices for open settings that the layout dictates."""
    parallel, training, found = config.parallel, config.training, dict[str, Any]()
    if parallel.puts_off_weights and training.compile in (None, "auto"):
        found["compile"] = False
    if parallel.puts_off_weights and training.activation_checkpointing == "auto":
        found |= {"activation_checkpointing": "none", "memory_budget": None}
    return found


def _check_training(config: SheepOpConfig) -> None:
    """Raises `ConfigError` for training settings that the layout does not support."""
    parallel, training = config.parallel, config.training
    whole = config.data.max_length or config.model.max_seq_len
    for length in (whole, training.eval_length or whole, *dict(training.sequence_length_warmup).values()):
        if length % (parallel.tensor * parallel.context):
            raise ConfigError(
                f"Rows of {length} tokens (data.max_length, model.max_seq_len, training.sequence_length_warmup, "
                f"training.eval_length) cannot be shared evenly by parallel.tensor = {parallel.tensor} times "
                f"parallel.context = {parallel.context} ranks. Use a multiple."
            )
    if parallel.context_method == "ring" and config.data.packing:
        raise ConfigError(
            "parallel.context_method = ring is for rows of one document each, and data.packing = true joins several. "
            "Use data.packing=false, or parallel.context_method=ulysses."
        )
    if parallel.puts_off_weights and training.compile is True:
        raise ConfigError(
            "parallel.schedule = zero_bubble does not go with training.compile = true. Leave one of them out."
        )
    if parallel.puts_off_weights and training.activation_checkpointing in ("selective", "full"):
        raise ConfigError(
            "parallel.schedule = zero_bubble goes back through a block twice, which would compute it anew each time "
            f"with training.activation_checkpointing = {training.activation_checkpointing}. Leave one of them out."
        )
    if parallel.tensor > 1 and training.precision == "fp8":
        raise ConfigError(
            "training.precision = fp8 does not go with parallel.tensor: parts of a layer are not multiplied in float8. "
            "Use training.precision=bf16, or parallel.tensor=1."
        )
    if parallel.tensor > 1 and config.model.dropout:
        raise ConfigError(
            "parallel.tensor needs model.dropout = 0: ranks that have parts of a layer would leave out the same places "
            "of each."
        )


def _check_tuning(config: SheepOpConfig) -> None:
    """Raises `ConfigError` for post-training that these kinds of ranks do not support."""
    tuning, sizes = config.tuning, {name: getattr(config.parallel, name) for name in ("tensor", "context", "pipeline")}
    several = [name for name, size in sizes.items() if size > 1]
    if "kto" in tuning.dpo.losses and "pipeline" in several:
        raise ConfigError(
            f"tuning.dpo.loss_type = kto does not go with parallel.pipeline = {sizes['pipeline']}: {_REREAD}. "
            "Use parallel.pipeline=1."
        )
    for name in several:
        if tuning.method is not None and (reason := _UNSHARED[tuning.method].get(name)) is not None:
            raise ConfigError(
                f"tuning.method = {tuning.method} does not go with parallel.{name} = {sizes[name]}: {reason}. "
                f"Use parallel.{name}=1."
            )
    draws = {
        "tuning.neftune_noise_alpha": tuning.neftune_noise_alpha is not None,
        "tuning.lora.dropout": tuning.lora is not None and tuning.lora.dropout > 0,
    }
    for key in (key for key, is_so in draws.items() if is_so and several):
        without = " and ".join(f"parallel.{name}=1" for name in several)
        raise ConfigError(
            f"{key} draws numbers for whole layers and rows, of which these ranks have parts. Leave it out, or use "
            f"{without}."
        )
    if tuning.teacher is not None and "context" in several:
        raise ConfigError(
            f"tuning.teacher reads whole rows, of which parallel.context = {sizes['context']} ranks have parts. Use "
            "parallel.context=1."
        )


def require_arithmetic(config: SheepOpConfig, device: str) -> None:
    """Raises `DeviceError` if a run cannot continue here with the arithmetic it started with."""
    settings = config.training.resolved()
    check_precision(settings.precision, device)
    if settings.compile and device == "cpu" and not _has_compiler():
        raise DeviceError(
            "This run uses training.compile = true, but no C++ compiler with Python's headers was found. "
            "Install them (`sheepop doctor` says how), or resume on a machine that has them."
        )


def build_network(task: Task, device: str) -> Transformer:
    """The initial network of a run, prepared for its precision and activation checkpointing."""
    model, training = task.network(device), task.config.training
    apply_precision(model, training.precision)
    if training.activation_checkpointing != "auto":
        apply_activation_checkpointing(model, training.activation_checkpointing, training.checkpointed_blocks)
    return model


def prepare_process(config: SheepOpConfig, ranks: Ranks = ALONE) -> str:
    """Connects the `ranks` and sets up how this process computes; returns the device of `config`.

    Steps are measured after that, because deterministic algorithms (`config.deterministic`) may be slower. Raises
    `ConfigError` or `DeviceError` for a layout, a sink or a device with which these ranks cannot train.
    """
    check_layout(config, ranks)
    require_analysis(config, ranks)
    require_sinks(config.training.sinks)
    device = ranks.connect(config.device)
    choose_matrix_arithmetic(device)
    torch.use_deterministic_algorithms(config.deterministic)
    # Filling memory that is about to be written costs time, and no kernel used here reads it before.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not config.deterministic
    return device


def _has_compiler() -> bool:
    return find_compiler() is not None and has_python_headers()
