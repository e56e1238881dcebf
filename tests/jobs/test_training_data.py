"""Which rows a run reads: mixtures over the corpus's files, orders from easy to hard, and that the record agrees."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError
from sheepop.core.json_lines import read_json_lines
from sheepop.data import Corpus, batch_hash
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.data import build, show_step
from sheepop.jobs.run.open import find_resumable
from sheepop.jobs.task.corpus_batches import build_batches, build_schedule

from ..running import train

SILENT = Console.silent()
MIXTURE = [
    {"pattern": "a*.txt", "weights": [[0, 3], [10, 1]]},
    {"pattern": "b*.txt", "weights": [[0, 1]]},
    {"pattern": "*", "weights": [[0, 0], [4, 0], [8, 2]]},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        for name in "abc":
            words = " ".join(f"{name}{number * n % 17}" for n in range(1, 20 + number))
            (folder / f"{name}{number:02}.txt").write_text(f"Sheep {name} {number} says {words}.\n")
    output = tmp_path_factory.mktemp("built") / "corpus"
    build([str(folder), "tokenizer.algorithm=char", "data.clean.preset=none"], output, None, SILENT)
    return Corpus.open(output)


def configured(corpus: Corpus, output: Path, **training: Any) -> SheepOpConfig:
    return load_config(
        options={
            "model": {"d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 32, "dropout": 0.0},
            "data": {"paths": [str(corpus.directory)]},
            "training": {"global_batch_size": 8, "max_steps": 10, "precision": "fp32", **training},
            "device": "cpu",
            "output_dir": str(output),
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.mark.parametrize("stride", [1, 5, 16, 32])
def test_overlapping_rows_score_every_token_once(corpus: Corpus, tmp_path: Path, stride: int) -> None:
    """The labels of all rows together are those of the documents, each with 32 - stride tokens before it at least."""
    tokenizer = corpus.tokenizer()
    config = configured(corpus, tmp_path, eval_stride=stride)
    batches = build_batches(config, corpus.validation, tokenizer, evaluation=True)
    found = batches.batch(np.arange(batches.num_samples))
    documents = [corpus.validation.tokens(*ends) for ends in pairwise(corpus.validation.offsets.tolist())]
    assert found.labels[found.labels != -100].tolist() == [token for ids in documents for token in ids[1:].tolist()]
    begins = {batches.token_range(row)[0]: row for row in range(batches.num_samples)}
    inner = [row for start, row in begins.items() if start not in set(corpus.validation.offsets.tolist())]
    assert all((found.labels[row, : 32 - stride] == -100).all() for row in inner)
    training = build_batches(config, corpus.train, tokenizer)
    assert training.num_samples == -(-corpus.train.num_tokens // 32)


def test_held_out_rows_may_be_longer_than_those_of_training(corpus: Corpus, tmp_path: Path) -> None:
    config = configured(corpus, tmp_path, eval_length=32)
    config = config.replace(data={**config.data.model_dump(), "max_length": 8})
    held_out = build_batches(config, corpus.validation, corpus.tokenizer(), evaluation=True)
    training = build_batches(config, corpus.train, corpus.tokenizer())
    assert (held_out.max_length, training.max_length) == (32, 8)
    assert held_out.num_samples == -(-corpus.validation.num_tokens // 32)
    longer = configured(corpus, tmp_path, eval_length=64)
    with pytest.raises(ConfigError, match=r"training\.eval_length = 64 is more than model\.max_seq_len = 32"):
        build_batches(longer, corpus.validation, corpus.tokenizer(), evaluation=True)


def test_an_eval_stride_beyond_a_row_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    config = configured(corpus, tmp_path, eval_stride=33)
    with pytest.raises(ConfigError, match=r"training\.eval_stride = 33 is more than the chunk length 32"):
        build_batches(config, corpus.validation, corpus.tokenizer(), evaluation=True)


def test_rows_of_a_mixture_come_from_the_files_of_their_source(corpus: Corpus, run: RunDirectory) -> None:
    schedule = build_schedule(configured(corpus, run.path, mixture=MIXTURE), corpus, run, SILENT)
    names = [document.source[0] for document in corpus.documents("train")]
    of_documents = np.searchsorted(corpus.train.offsets, np.arange(corpus.train.num_tokens), side="right") - 1
    taken = np.zeros(3)
    for step in range(12):
        rows = schedule.rows(step)
        for source, ranges in zip(rows.sources.tolist(), schedule.token_ranges(step), strict=True):
            found = {names[document] for start, stop in ranges for document in of_documents[start:stop]}
            assert found == {"abc"[source]}
            taken[source] += 1
        if step == 3:
            assert taken[2] == 0
    assert taken.sum() == 96 and taken.min() > 0


def test_the_rows_of_all_sources_hold_every_token(corpus: Corpus, run: RunDirectory) -> None:
    schedule = build_schedule(configured(corpus, run.path, mixture=MIXTURE), corpus, run, SILENT)
    held = [
        np.concatenate(
            [
                np.arange(*places)
                for sample in range(source.batches.num_samples)
                for places in source.token_ranges(*source.batches.token_range(sample))
            ]
        )
        for source in schedule.sources
    ]
    assert np.sort(np.concatenate(held)).tolist() == list(range(corpus.train.num_tokens))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["a*"], r"training documents match no pattern, for example those from 'b"),
        (["*", "a*"], r"no training document matches 'a\*', or an earlier pattern took them all"),
        (["nothing", "*"], r"no training document matches 'nothing'"),
    ],
)
def test_a_mixture_that_does_not_fit_the_files_is_refused(
    corpus: Corpus, run: RunDirectory, patterns: list[str], message: str
) -> None:
    mixture = [{"pattern": pattern, "weights": [[0, 1]]} for pattern in patterns]
    with pytest.raises(DataError, match=message):
        build_schedule(configured(corpus, run.path, mixture=mixture), corpus, run, SILENT)


def test_a_length_that_does_not_divide_the_rows_is_refused(corpus: Corpus, run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="does not divide the rows of 32 tokens"):
        build_schedule(configured(corpus, run.path, sequence_length_warmup=[[3, 12]]), corpus, run, SILENT)


def test_scores_of_difficulty_are_stored_with_the_run_and_rows_follow_them(corpus: Corpus, run: RunDirectory) -> None:
    config = configured(corpus, run.path, curriculum="easy_to_hard", difficulty="length", curriculum_jitter=0)
    unstored = build_schedule(config, corpus, run, SILENT, store=False)
    assert not run.difficulty.exists()
    schedule = build_schedule(config, corpus, run, SILENT)
    assert run.difficulty.is_file()
    again = build_schedule(config, corpus, run, SILENT)
    means = []
    for step in range(schedule.num_samples // 8):
        hashes = {batch_hash(one.batch(step)) for one in (schedule, again, unstored)}
        assert len(hashes) == 1
        for sample in schedule.rows(step).samples.tolist():
            start, stop = schedule.sources[0].batches.token_range(sample)
            inside = np.searchsorted(corpus.train.offsets, np.arange(start, stop), side="right") - 1
            means.append(np.diff(corpus.train.offsets)[inside].mean())
    assert means == sorted(means)


@pytest.mark.parametrize(("epochs", "jitter"), [(1, 0.0), (2, 0.0), (2, 0.3)])
def test_as_many_epochs_as_asked_go_from_easy_to_hard_and_rows_stray_as_far_as_asked(
    corpus: Corpus, run: RunDirectory, epochs: int, jitter: float
) -> None:
    settings = {"curriculum": "easy_to_hard", "difficulty": "length", "curriculum_epochs": epochs}
    schedule = build_schedule(configured(corpus, run.path, **settings, curriculum_jitter=jitter), corpus, run, SILENT)
    plain = build_schedule(configured(corpus, run.path), corpus, run, SILENT)
    count = schedule.num_samples
    ranks = np.argsort(
        build_schedule(configured(corpus, run.path, **settings, curriculum_jitter=0), corpus, run, SILENT)
        .sources[0]
        .order.indices(0, count)
    )
    for epoch in range(3):
        found = schedule.sources[0].order.indices(epoch * count, count)
        if epoch >= epochs:
            assert found.tolist() == plain.sources[0].order.indices(epoch * count, count).tolist()
            continue
        strayed = np.abs(ranks[found] - np.arange(count)).max()
        assert 0.1 * count * (jitter > 0) <= strayed <= jitter * count


def test_scores_are_not_taken_for_those_of_other_rows_or_of_another_kind(corpus: Corpus, run: RunDirectory) -> None:
    """What a run has stored is read again for the same question alone."""

    def order(**settings: Any) -> list[int]:
        config = configured(corpus, run.path, curriculum="easy_to_hard", curriculum_jitter=0, **settings)
        source = build_schedule(config, corpus, run, SILENT).sources[0]
        return source.order.indices(0, source.batches.num_samples).tolist()

    def alone(**settings: Any) -> list[int]:
        run.difficulty.unlink(missing_ok=True)
        return order(**settings)

    swapped = [{"pattern": pattern, "weights": [[0, 1]]} for pattern in ("b*.txt", "a*.txt", "*")]
    questions: list[dict[str, Any]] = [
        {"difficulty": "length"},
        {"difficulty": "rarity"},
        {"difficulty": "rarity", "mixture": MIXTURE},
        {"difficulty": "rarity", "mixture": swapped},
    ]
    answers = [alone(**question) for question in questions]
    assert len({tuple(answer) for answer in answers}) == len(answers)
    run.difficulty.unlink()
    assert [order(**question) for question in questions] == answers


EVERYTHING: dict[str, Any] = {
    "mixture": MIXTURE,
    "batch_size_warmup": [[2, 3], [5, 6]],
    "sequence_length_warmup": [[3, 16]],
    "curriculum": "easy_to_hard",
    "difficulty": "compression",
    "log_batch_hash": True,
    "log_interval": 1,
    "checkpoint_interval": 4,
    "schedule": "constant",
    "warmup_steps": 0,
}


def test_the_documents_named_for_a_step_are_those_it_read(corpus: Corpus, tmp_path: Path) -> None:
    config = configured(corpus, tmp_path / "run", **EVERYTHING)
    train(config)
    run = RunDirectory.open(tmp_path / "run")
    schedule = build_schedule(config, corpus, run, SILENT)
    tokenizer = corpus.tokenizer()
    logged = {row["step"]: row["batch_hash"] for row in read_json_lines(run.metrics_file)[0] if row["split"] == "train"}
    for step in (1, 2, 4, 8, 10):
        batch = schedule.batch(step - 1)
        assert logged[step] == batch_hash(batch)
        texts = dict.fromkeys(range(len(batch.input_ids)), "")
        for row, origin in show_step(run.path, step):
            texts[row] += origin.text
        held = [
            tokenizer.decode([token for token in row if token != tokenizer.pad_id]) for row in batch.input_ids.tolist()
        ]
        assert list(texts.values()) == held


def test_a_run_goes_on_with_another_micro_batch_size_and_sees_the_same_batches(corpus: Corpus, tmp_path: Path) -> None:
    def rows(name: str) -> list[dict[str, Any]]:
        found = [row for row in read_json_lines(tmp_path / name / "metrics.jsonl")[0] if row["split"] == "train"]
        return [{key: row[key] for key in ("step", "loss", "batch_hash", "tokens")} for row in found]

    train(configured(corpus, tmp_path / "whole", **EVERYTHING))
    train(configured(corpus, tmp_path / "cut", **{**EVERYTHING, "max_steps": 4}))
    for setting in ("training.micro_batch_size=4", "training.prefetch=0"):
        stored = find_resumable(tmp_path / "cut")
        assert stored is not None
        steps = stored.step + 3
        overrides = [setting, f"training.max_steps={steps}", f"output_dir={tmp_path / 'cut'}"]
        train(load_config(overrides=overrides, base=stored.record.requested), resume=True)
    whole, cut = rows("whole"), rows("cut")
    assert [row["batch_hash"] for row in cut] == [row["batch_hash"] for row in whole]
    for one, other in zip(cut, whole, strict=True):
        assert (one["step"], one["tokens"]) == (other["step"], other["tokens"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
