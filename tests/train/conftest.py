"""A small corpus, and trainers on it that differ only in what a test asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.json_lines import JsonLines
from sheepop.data import BatchSchedule, Corpus, DataConfig, PackedBatches, RowSource, SampleOrder, build_corpus
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import TokenizerConfig
from sheepop.train import (
    Checkpointer,
    Schedule,
    Trainer,
    TrainingConfig,
    TrainingState,
    build_evaluation_weights,
    build_optimizers,
    validate,
)
from sheepop.train.agenda import Agenda
from sheepop.train.journal import Journal, Throughput, is_verification
from sheepop.train.objective import NextToken, with_experts
from sheepop.train.placement import OneDevice
from sheepop.train.precision import initial_loss_scale
from sheepop.train.source import ScheduledSource
from sheepop.train.step import StepRunner

PEAK = 1e18  # operations a second, which no step reaches
TEXT = "the quick brown fox jumps over the lazy dog while {} sheep watch and count to {}"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Forty short documents of characters."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(TEXT.format(number, number * number) + "\n")
    output = tmp_path_factory.mktemp("corpus") / "built"
    data = DataConfig(paths=(str(folder),), validation_fraction=0.2)
    return build_corpus(data, TokenizerConfig(algorithm="char"), output, seed=0, console=Console.silent())


@contextmanager
def trainers(corpus: Corpus, folder: Path) -> Iterator[Callable[..., Trainer]]:
    """Builds a trainer in ``folder/name``; with `resume` it goes on from the run's last good checkpoint.

    `network` are settings of the model, `change` does something to it as it is built; all else are training settings.
    """

    made: list[Trainer] = []

    def make(
        name: str,
        *,
        resume: bool = False,
        dropout: float = 0.1,
        seed: int = 0,
        network: Mapping[str, Any] = MappingProxyType({}),
        change: Callable[[Transformer], object] = lambda model: None,
        **settings: Any,
    ) -> Trainer:
        training = TrainingConfig(
            **{
                "max_steps": 12,
                "warmup_steps": 2,
                "global_batch_size": 8,
                "micro_batch_size": 8,
                "learning_rate": 0.01,
                "precision": "fp32",
                "log_interval": 1,
                "eval_interval": 4,
                "sample_interval": 3,
                "checkpoint_interval": 3,
                "keep_checkpoints": 2,
                **settings,
            }
        )
        tokenizer = corpus.tokenizer()
        sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 32, "dropout": dropout}
        config = ModelConfig(vocab_size=tokenizer.vocab_size, **{**sizes, **network})
        model = build_model(config, seed)
        change(model)
        optimizers = build_optimizers(model, training)
        run = RunDirectory.open(folder / name) if resume else RunDirectory.create(folder / name)
        evaluation = build_evaluation_weights(model, optimizers, training)
        checkpointer = Checkpointer(run, model, tokenizer, optimizers, evaluation, {})
        state = TrainingState(loss_scale=initial_loss_scale(training.precision))
        if resume:
            warnings: list[str] = []
            step = run.latest_good(warnings.append)
            state = checkpointer.load(step) if step is not None else state
        resolved = training.resolved()
        batches = PackedBatches(corpus.train, max_length=32, pad_id=tokenizer.pad_id)
        validation = PackedBatches(corpus.validation, max_length=32, pad_id=tokenizer.pad_id)
        objective = with_experts(NextToken.configured(training), config)
        schedule = BatchSchedule(
            [RowSource(batches, SampleOrder(batches.num_samples, seed))],
            training.batch_sizes(),
            training.row_lengths(32),
            seed,
        )
        trainer = Trainer(
            runner=StepRunner(
                OneDevice(model, precision=resolved.precision, device="cpu"),
                objective,
                optimizers,
                evaluation,
                training.max_grad_norm,
            ),
            source=ScheduledSource(
                schedule,
                objective,
                resolved.micro_batch_size,
                "cpu",
                ahead=training.prefetch,
                hashed=training.log_batch_hash,
            ),
            agenda=Agenda.of(training, resolved, validates=True),
            schedule=Schedule(
                training.schedule, training.learning_rate, 0.0, resolved.warmup_steps, resolved.pace.planned
            ),
            journal=Journal(
                JsonLines(run.metrics_file, state.metrics_bytes, is_verification),
                JsonLines(run.samples_file, state.samples_bytes),
                Throughput(lambda step: float(step.num_computed * step.row_length), PEAK),
                device="cpu",
                precision=resolved.precision,
            ),
            checkpointer=checkpointer,
            validate=lambda: validate(
                model, validation, tokenizer.byte_lengths(), batch_size=8, precision="fp32", device="cpu"
            ),
            sample=lambda step: [{"prompt": "the", "text": f"step {step}"}],
            seed=seed,
            keep_checkpoints=training.keep_checkpoints,
            trouble=training.trouble,
            state=state,
        )
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.journal.close()


@pytest.fixture
def make_trainer(corpus: Corpus, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """A way to build trainers; see `trainers`."""
    with trainers(corpus, tmp_path) as make:
        yield make
