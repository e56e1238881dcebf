"""Plans a run over ranks, in words and as a picture, before anything is started or read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from sheepop.checkpoint import resolve_model_directory
from sheepop.checkpoint.model_description import read_model_config
from sheepop.core.config import value_text
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import ConfigError
from sheepop.data import Corpus, is_corpus
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.recipe import complete
from sheepop.jobs.run.open import find_start
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import check_layout, shared_steps
from sheepop.jobs.task.fork import inherited
from sheepop.model import blank_model
from sheepop.parallel.layout import Layout
from sheepop.parallel.plan import Plan
from sheepop.parallel.stage_memory import StepShape
from sheepop.report import save_png
from sheepop.tokenizer import load_tokenizer
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.layout_picture import SharedStep, draw_layout
from sheepop.train.optimizers.build import optimizer_slots

# Operations a second of a machine slower, and one faster, than any other.
_SLOWEST, _FASTEST = 1e6, 1e18


@dataclass(frozen=True)
class Planned:
    """What each rank would hold, send and compute, and the assumptions behind it."""

    words: str
    step: SharedStep
    assumed: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        config: SheepOpConfig,
        optimizers: Sequence[torch.optim.Optimizer],
        layout: Layout,
        num_tokens: int,
        device: str,
        assumed: Sequence[str] = (),
    ) -> Self:
        """Predicts memory, messages and computation of the rank that needs most memory, for rows of `num_tokens`."""
        training, settings = config.training, config.training.resolved()
        step = StepShape(
            rows=settings.micro_batch_size,
            num_tokens=num_tokens,
            micro_batches=max(1, training.global_batch_size // settings.micro_batch_size // layout.num_data),
            precision=settings.precision,
            device=device,
            recomputed=settings.activation_checkpointing,
            recomputed_blocks=training.checkpointed_blocks,
        )
        state = state_numbers(config.training, optimizers)
        with torch.device("meta"):
            whole = blank_model(config.model)
        plan = Plan.largest(whole, layout, step, state=state)
        return cls(str(plan), SharedStep.of(config.model, training, layout, num_tokens), assumed)

    def draw(self, path: Path) -> None:
        """Writes the picture."""
        save_png(draw_layout(self.step), path)


def state_numbers(training: TrainingConfig, optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """The numbers that optimizers, and an average of the weights, keep for each weight."""
    # By the shapes of the parameters here, which are those of pieces.
    numbers, kept = 0, 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slots = optimizer_slots(optimizer, group, parameter).values()
                numbers += parameter.numel()
                kept += sum(math.prod(shape) for shape in slots if shape is not None)
    return kept / max(1, numbers) + (training.ema_decay is not None)


def plan_run(request: RunRequest) -> Planned:
    """The layout that the requested run would have over the ranks of the request.

    It takes no step and needs none of the devices; if the size of the network is open, this machine is measured as the
    run would measure it. Raises what the run would for settings or ranks that do not fit.
    """
    request.check()
    ranks, start = request.ranks, find_start(request)
    check_layout(start.config, ranks)
    config, assumed = new_settings(request) if start.stored is None else (start.config, list[str]())
    config = shared_steps(config, ranks, is_open=start.requested.training.micro_batch_size is None)
    if start.stored is None:
        training, more = assumed_training(config.training, on_gpu=_is_gpu(config.device))
        config, assumed = config.replace(training=training.model_dump()), [*assumed, *more]
    layout, num_tokens = Layout(ranks, config.parallel), config.data.max_length or config.model.max_seq_len
    with torch.device("meta"):
        optimizers = build_optimizers(blank_model(config.model), config.training)
    # Kernels are those of this machine, whatever the run will have.
    device = "cuda" if config.device in ("auto", "cuda") and torch.cuda.is_available() else "cpu"
    return Planned.of(config, optimizers, layout, num_tokens, device, assumed)


def new_settings(request: RunRequest, speed: float | None = None) -> tuple[SheepOpConfig, list[str]]:
    """The settings of a new run as far as they are known without its text, and what was assumed for the others.

    `speed` are the operations per second of the machine that will run it; None is this machine, which is measured if
    need be.
    """
    config, fork, assumed = request.settings, request.fork, list[str]()
    if config.tuning.method is not None and fork is None:
        raise ConfigError(f"tuning.method = {config.tuning.method} teaches a finished model. Say which: --fork MODEL.")
    missing = [path for path in config.data.paths if "://" not in path and not Path(path).exists()]
    if missing or not config.data.paths:
        what = f"{missing[0]} is not here" if missing else "No text is named"
        assumed.append(f"{what}, so what a run chooses by its text is left at the smallest.")
    else:
        config = _chosen(request, speed)
    if fork is not None:
        found = read_model_config(resolve_model_directory(fork, request.console))
        model = inherited(found, config, request.given, f"A fork keeps the network of {fork}")
        config = config.replace(model=model)
    if config.model.vocab_size is None:
        size = _vocabulary(config)
        if size is None:
            size = config.tokenizer.vocab_size
            assumed.append(f"The vocabulary is still to be trained; tokenizer.vocab_size = {size:,} is assumed.")
        config = config.replace(model={**config.model.model_dump(), "vocab_size": size})
    return config, assumed


def _is_gpu(device: str) -> bool:
    return (resolve_device("auto") if device == "auto" else device) == "cuda"


def assumed_training(training: TrainingConfig, *, on_gpu: bool) -> tuple[TrainingConfig, list[str]]:
    """`training` with all that a loop needs, and what was assumed for the settings that a run measures at its start."""
    measured = {
        "precision": "bf16" if on_gpu else "fp32",
        "activation_checkpointing": "none",
        "compile": on_gpu,
    }
    to_measure = {name: value for name, value in measured.items() if getattr(training, name) in ("auto", None)}
    steps = 1 + (training.warmup_steps or 0) + (training.decay_steps or 1)  # their number changes nothing here
    usual = {
        "micro_batch_size": training.global_batch_size, "max_steps": steps, "warmup_steps": 0,
        "eval_interval": 1, "sample_interval": 1, "checkpoint_interval": 1,
        **({"decay_steps": 1} if training.schedule == "wsd" else {}),
    }  # fmt: skip
    left = {name: value for name, value in usual.items() if getattr(training, name) is None}
    said = " and ".join(
        f"training.{name} = {value_text(value)}" for name, value in to_measure.items() if name != "compile"
    )
    found = training.replace(**to_measure, **left, max_minutes=None)
    return found, [f"A run measures what is best at its start; {said} is assumed."] if said else []


def _chosen(request: RunRequest, known: float | None) -> SheepOpConfig:
    """The settings with the recipe's choices; this machine is measured only if its speed makes a difference."""
    if known is not None:
        return complete(request.draft, lambda device: known, Console.silent()).config
    slow, fast = (
        complete(request.draft, lambda device, speed=speed: speed, Console.silent())  # type: ignore[misc]
        for speed in (_SLOWEST, _FASTEST)
    )
    if slow.config == fast.config:
        return slow.config
    return request.completed().config


def _vocabulary(settings: SheepOpConfig) -> int | None:
    """The vocabulary size of a tokenizer that exists already."""
    if settings.tokenizer.path is not None:
        return load_tokenizer(settings.tokenizer.path).vocab_size
    corpora = [path for path in settings.data.paths if is_corpus(path)]
    return Corpus.open(corpora[0], verify=False).tokenizer().vocab_size if corpora else None
