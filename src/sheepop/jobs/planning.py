"""What a run over ranks would be, in words and as a picture, before anything is started or read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sheepop.checkpoint import resolve_model_directory
from sheepop.checkpoint.model_directory import read_model_config
from sheepop.core.config import value_text
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import ConfigError
from sheepop.data import Corpus, is_corpus
from sheepop.jobs.bench import training_speed
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.layout import shared_steps
from sheepop.jobs.layout_picture import SharedStep, draw_layout
from sheepop.jobs.recipe import complete
from sheepop.jobs.resume import refuse_changes
from sheepop.jobs.run_record import StoredRun
from sheepop.jobs.start import Asked, asked_for
from sheepop.jobs.training_run import costs
from sheepop.model import blank_model
from sheepop.parallel.layout import Layout
from sheepop.parallel.plan import Plan
from sheepop.parallel.ranks import Ranks
from sheepop.report import save_png
from sheepop.tokenizer import load_tokenizer
from sheepop.train import TrainingConfig, build_optimizers

# Operations a second of machines between which every other lies.
_SLOWEST, _FASTEST = 1e6, 1e18


@dataclass(frozen=True)
class Planned:
    """What each rank would hold, send and compute, and what that rests on where it is not known yet."""

    plan: Plan
    step: SharedStep
    assumed: Sequence[str]

    def draw(self, path: Path) -> None:
        """Writes the picture."""
        save_png(draw_layout(self.step), path)


def plan_run(
    options: dict[str, Any],
    *,
    overrides: Sequence[str] = (),
    config: Path | None = None,
    output: Path | None = None,
    resume: str | None = None,
    fork: Path | None = None,
    num_ranks: int,
    console: Console,
) -> Planned:
    """The layout of the run that `sheepop.jobs.start.start` would make of the same arguments over `num_ranks`.

    It takes no step and needs none of the devices; where the size of the network is left open, this machine is
    measured as the run would measure it. Raises what the run would for settings or ranks that do not fit.
    """
    ranks = Ranks(0, num_ranks)
    asked = asked_for(options, overrides, config, output, resume, fork, ranks=ranks)
    if asked.stored is not None:
        found, assumed = _gone_on(asked.settings, asked.stored), list[str]()
        is_open = asked.settings.training.micro_batch_size is None
    else:
        found, assumed = _started(asked, fork, console)
        is_open = found.training.micro_batch_size is None
    found = shared_steps(found, ranks, is_open=is_open)
    if asked.stored is None:
        training, more = _resolved(found.training, found.device)
        found, assumed = found.replace(training=training.model_dump()), [*assumed, *more]
    layout, num_tokens = Layout(ranks, found.parallel), found.data.max_length or found.model.max_seq_len
    with torch.device("meta"):
        optimizers = build_optimizers(blank_model(found.model), found.training)
    # Kernels are those of this machine, whatever the run will have.
    device = "cuda" if found.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"
    plan = costs(found, optimizers, layout, num_tokens, device)
    return Planned(plan, SharedStep.of(found, layout, num_tokens), assumed)


@dataclass(frozen=True)
class _KeptData:
    """The data of a run that goes on, which is not read."""

    directory: Path
    fingerprint: str


def _gone_on(wanted: SheepOpConfig, stored: StoredRun) -> SheepOpConfig:
    assert wanted.output_dir is not None
    path = Path(wanted.output_dir)
    return refuse_changes(stored, wanted, _KeptData(path, stored.record.corpus_fingerprint), path)


def _started(asked: Asked, fork: Path | None, console: Console) -> tuple[SheepOpConfig, list[str]]:
    """The settings of a new run as far as they are known without its text, and what was assumed of the others."""
    settings, assumed = asked.settings, list[str]()
    if settings.tuning.method is not None and fork is None:
        raise ConfigError(
            f"tuning.method = {settings.tuning.method} teaches a finished model. Say which: --fork MODEL."
        )
    missing = [path for path in settings.data.paths if "://" not in path and not Path(path).exists()]
    if missing or not settings.data.paths:
        what = f"{missing[0]} is not here" if missing else "No text is named"
        assumed.append(f"{what}, so what a run chooses by its text is left at the smallest.")
    else:
        settings = _chosen(asked.given, fork, console)
    if fork is not None:
        found = read_model_config(resolve_model_directory(fork))
        dropout = settings.model.dropout if "dropout" in asked.given.get("model", {}) else found.dropout
        settings = settings.replace(model={**found.model_dump(), "dropout": dropout})
    if settings.model.vocab_size is None:
        size = _vocabulary(settings)
        if size is None:
            size = settings.tokenizer.vocab_size
            assumed.append(f"The vocabulary is still to be trained; tokenizer.vocab_size = {size:,} is assumed.")
        settings = settings.replace(model={**settings.model.model_dump(), "vocab_size": size})
    return settings, assumed


def _resolved(training: TrainingConfig, device: str) -> tuple[TrainingConfig, list[str]]:
    """`training` with all that a loop needs, and what was assumed of that which is measured where a run begins."""
    on_gpu = (resolve_device("auto") if device == "auto" else device) == "cuda"
    measured = {
        "precision": "bf16" if on_gpu else "fp32",
        "activation_checkpointing": "none",
        "compile": on_gpu,
    }
    open_ones = {name: value for name, value in measured.items() if getattr(training, name) in ("auto", None)}
    steps = 1 + (training.warmup_steps or 0) + (training.decay_steps or 1)  # how many they are changes nothing here
    usual = {
        "micro_batch_size": training.global_batch_size, "max_steps": steps, "warmup_steps": 0,
        "eval_interval": 1, "sample_interval": 1, "checkpoint_interval": 1,
        **({"decay_steps": 1} if training.schedule == "wsd" else {}),
    }  # fmt: skip
    left = {name: value for name, value in usual.items() if getattr(training, name) is None}
    said = " and ".join(
        f"training.{name} = {value_text(value)}" for name, value in open_ones.items() if name != "compile"
    )
    found = training.replace(**open_ones, **left, max_minutes=None)
    return found, [f"A run measures what is best where it begins; {said} is assumed."] if said else []


def _chosen(given: dict[str, Any], fork: Path | None, console: Console) -> SheepOpConfig:
    """What the recipe makes of `given`; this machine is measured only where its speed makes a difference."""
    anywhere = {**given, "device": "cpu"}
    slow, fast = (
        complete(anywhere, lambda device, speed=speed: speed, Console.silent(), fork=fork)  # type: ignore[misc]
        for speed in (_SLOWEST, _FASTEST)
    )
    if slow.config == fast.config:
        return slow.config
    return complete(given, training_speed, console, fork=fork).config


def _vocabulary(settings: SheepOpConfig) -> int | None:
    """The size of a tokenizer that is there already."""
    if settings.tokenizer.path is not None:
        return load_tokenizer(settings.tokenizer.path).vocab_size
    corpora = [path for path in settings.data.paths if is_corpus(path)]
    return Corpus.open(corpora[0], verify=False).tokenizer().vocab_size if corpora else None
