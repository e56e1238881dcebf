"""A run over several ranks: what they must agree on, how they share a step, and how the others see its directory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sheepop import __version__
from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import ConfigError
from sheepop.jobs.config import SheepOpConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import Ranks
from sheepop.parallel.requirements import check_network
from sheepop.posttrain.config import Method

_WEIGHTED = "each answer is weighted as a whole, and context ranks have parts of its tokens"
_REREAD = "answers are read again before a step, in a pass for which no rank of a pipeline has all layers"
_UNSHARED: Mapping[Method, Mapping[str, str]] = {
    "sft": {},
    "dpo": {"context": _WEIGHTED},
    "reward": {"context": _WEIGHTED},
    "ppo": {"context": _WEIGHTED, "pipeline": _REREAD},
    "grpo": {"context": _WEIGHTED, "pipeline": _REREAD},
}
"""The kinds of ranks that a method of post-training does not support, each with the reason."""


def require_agreement(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` on a rank whose code or settings differ from those of the first rank."""
    if ranks.are_several:
        ranks.require_same("The files of SheepOp here are", _code())
        ranks.require_same("The settings given here are", json.dumps(settings, sort_keys=True, default=str))


def check_layout(config: SheepOpConfig, ranks: Ranks) -> None:
    """Raises `ConfigError` for a layout or settings with which these ranks cannot train."""
    Layout(ranks, config.parallel)
    if not ranks.are_several:
        return
    if config.output_dir is None:
        raise ConfigError("Several ranks need the directory of the run, which all of them find: give --output DIR.")
    _check_tuning(config)


def shared_steps(config: SheepOpConfig, ranks: Ranks, *, is_open: bool) -> SheepOpConfig:
    """`config` with a micro-batch size that gives every rank the same share of a step; it is chosen if `is_open`.

    Raises `ConfigError` if rows cannot be shared evenly.
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
    lengths = [config.data.max_length or config.model.max_seq_len, *dict(training.sequence_length_warmup).values()]
    for length in lengths:
        if length % (parallel.tensor * parallel.context):
            raise ConfigError(
                f"Rows of {length} tokens (data.max_length, model.max_seq_len, training.sequence_length_warmup) cannot "
                f"be shared evenly by parallel.tensor = {parallel.tensor} times parallel.context = {parallel.context} "
                "ranks. Use a multiple."
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


class FollowedRun(RunDirectory):
    """The directory of a run as the ranks after the first see it: they read it and change nothing."""

    def mark_best(self, step: int) -> None:
        """Does nothing; the first rank marks checkpoints."""

    def forget_best(self) -> None:
        """Does nothing; the first rank marks checkpoints."""

    def prune(self, newest: int, keep_last: int, milestones: set[int]) -> None:
        """Does nothing; the first rank removes checkpoints."""

    def forget_after(self, step: int) -> None:
        """Does nothing; the first rank removes checkpoints."""

    def mark_latest(self, step: int) -> None:
        """Does nothing; the first rank marks checkpoints."""


def _code() -> str:
    """A checksum of the program: its version and every source file of the package."""
    import torch

    package = Path(__file__).parents[2]
    found = hashlib.blake2b(f"{__version__} {torch.__version__}".encode(), digest_size=16)
    for file in sorted(package.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()
