"""The whole configuration tree, and how a command's file, options and overrides are merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from sheepop.core.config import (
    Config,
    PathText,
    apply_overrides,
    merge,
    read_config_file,
    refuse_unknown_keys,
    validate,
)
from sheepop.core.console import Console
from sheepop.core.device import DeviceName
from sheepop.core.keys import MayChange
from sheepop.data import DataConfig
from sheepop.download.catalog import HUB
from sheepop.evaluate.config import EvaluationConfig
from sheepop.generate import GenerationConfig
from sheepop.interpret.config import AnalysisConfig, TraceConfig
from sheepop.jobs.original import is_original, translate_original
from sheepop.model import ModelConfig
from sheepop.parallel.config import ParallelConfig
from sheepop.posttrain.config import TuningConfig
from sheepop.serve.config import ServerConfig
from sheepop.tokenizer import TokenizerConfig
from sheepop.train import TrainingConfig

_ROLLOUT = {
    "divergence_weight": "kl_coef",
    "divergence_ceiling": "kl_ceiling",
    "entropy_weight": "entropy_coef",
    "missing_end_penalty": "missing_eos_penalty",
}
_RENAMED = {
    "tuning": {"neftune_alpha": "neftune_noise_alpha"},
    "tuning.reward": {"centring": "center_rewards_coefficient"},
    "tuning.dpo": {"loss": "loss_type"},
    "tuning.ppo": {
        **_ROLLOUT,
        "divergence_target": "kl_target",
        "divergence_horizon": "kl_horizon",
        "discount": "gamma",
        "decay": "gae_lambda",
        "value_weight": "vf_coef",
    },
    "tuning.grpo": {**_ROLLOUT, "divergence_estimator": "kl_estimator", "mean_over": "loss_type"},
}
"""By section, the old names of keys and their present ones."""
_RENAMED_VALUES = {
    "tuning.ppo.value_model": {"apart": "separate"},
    "tuning.grpo.loss_type": {"answers": "grpo", "tokens": "dapo", "longest": "dr_grpo"},
}
_REMOVED: dict[str, Any] = {
    "data.clean.toxicity.classifier": None,
    "data.clean.toxicity.classifier_threshold": 0.9,
    "generation.use_cache": True,
}
"""Keys that are no more, with their defaults. Other values are refused like unknown keys."""


class SheepOpConfig(Config):
    """Every setting of a run. What is left null is derived or measured once and written to the run's config.yaml."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The network: sizes, positions, norms, attention, initial weights."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Which tokenizer to use, or how to train one."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Which text to use, what a document is, and how it is cleaned, split and cut into rows."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """How the weights are trained: budget, batches, optimizer, schedule, precision, logging and checkpoints."""
    tuning: TuningConfig = Field(default_factory=TuningConfig)
    """Post-training: the method, its objective and its data."""
    generation: MayChange[GenerationConfig] = Field(default_factory=GenerationConfig)
    """How text is generated, also for the samples during training."""
    trace: MayChange[TraceConfig] = Field(default_factory=TraceConfig)
    """Which prompt is traced during training."""
    analysis: MayChange[AnalysisConfig] = Field(default_factory=AnalysisConfig)
    """What a run measures of its own stability during training."""
    evaluation: MayChange[EvaluationConfig] = Field(default_factory=EvaluationConfig)
    """Which tasks and texts the model is evaluated on during training."""
    server: MayChange[ServerConfig] = Field(default_factory=ServerConfig)
    """How models are served over HTTP."""
    parallel: MayChange[ParallelConfig] = Field(default_factory=ParallelConfig)
    """How a run is distributed over several processes."""
    device: MayChange[DeviceName] = "auto"
    """The device to compute on: `cpu`, `cuda`, `mps`, or `auto` for the best one present; a missing one is an error."""
    seed: int = Field(0, ge=0)
    """The seed of every random choice: initial weights, order of the data, dropout, samples."""
    deterministic: bool = True
    """Use only algorithms that give the same bits every time; `false` allows faster ones."""
    output_dir: MayChange[PathText | None] = None
    """The run directory; `null` is a folder in `runs/` with the date and time."""


def load_config(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> SheepOpConfig:
    """The validated result of `read_settings`; raises `ConfigError` for unknown keys and invalid values."""
    return validate(SheepOpConfig, read_settings(path, overrides, base=base, options=options))


def read_settings(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Merges `base`, the file at `path`, `options` and ``key=value`` overrides; later ones win. Validates nothing.

    A ``config.json`` of the original system and renamed keys are translated first. Raises `ConfigError` for what cannot
    be read.
    """
    tree: dict[str, Any] = dict(base or {})
    if path is not None:
        found = read_config_file(path)
        tree = merge(tree, translate_original(found) if is_original(found) else with_current_keys(found))
    tree = merge(tree, options or {})
    return apply_overrides(tree, overrides)


def local_files(paths: Iterable[str], columns: str, console: Console) -> list[str]:
    """The `paths`, with datasets on the hub replaced by the files of their ``train`` split, or of the one they name.

    These are downloaded first, below ``data``. Raises what `dataset_files` raises; the setting `columns` names columns.
    """
    found: list[str] = []
    for path in paths:
        if path.startswith(HUB):
            from sheepop.download.download import dataset_files  # which loads the hub's client

            found += map(str, dataset_files(path, console=console, columns=columns))
        else:
            found.append(path)
    return found


def stored_config(tree: Mapping[str, Any]) -> SheepOpConfig:
    """The validated configuration in a stored tree, which may have the old names of renamed keys."""
    current = with_current_keys(tree)
    return validate(SheepOpConfig, current)


def with_current_keys(tree: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """A copy of a stored configuration with the present names of renamed keys and values, without removed ones."""
    renamed, result = _RENAMED.get(section, {}), {}
    for key, value in tree.items():
        # If both are given, validation rejects the old one.
        name = key if renamed.get(key) in tree else renamed.get(key, key)
        path = f"{section}.{name}" if section else name
        if isinstance(value, Mapping):
            result[name] = with_current_keys(value, path)
        elif path not in _REMOVED or value != _REMOVED[path]:
            result[name] = _RENAMED_VALUES[path].get(value, value) if path in _RENAMED_VALUES else value
    return result


def refuse_mistyped(overrides: Iterable[str]) -> None:
    """Raises `ConfigError` for ``key=value`` settings with unknown keys."""
    refuse_unknown_keys(SheepOpConfig, apply_overrides({}, overrides))
