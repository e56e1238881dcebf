"""Tuning a published model needs no settings to fit into memory: rows, micro-batches, adapters, recomputation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from sheepop.checkpoint.model_description import read_model_config
from sheepop.core.console import Console
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.quantize import quantize_model
from sheepop.jobs.recipe import complete, draft
from sheepop.jobs.run import step_memory
from sheepop.jobs.run.step_memory import bytes_of_a_step
from sheepop.jobs.task.fork import Fork
from sheepop.jobs.task.preferences import PreferenceTask
from sheepop.jobs.task.rewards import GroupPolicyTask
from sheepop.jobs.task.supervised import SupervisedTask
from sheepop.model import num_parameters

# The sizes of a published model, with fewer layers.
MODEL: dict[str, Any] = {
    "vocab_size": 262_144, "d_model": 640, "num_layers": 2, "num_heads": 4, "num_kv_heads": 1, "head_dim": 256,
    "d_ff": 2048, "max_seq_len": 32_768, "position_encoding": "rope", "norm": "rmsnorm", "activation": "geglu_tanh",
    "bias": False, "dropout": 0.0,
}  # fmt: skip


def config(**training: Any) -> SheepOpConfig:
    given: dict[str, Any] = {"precision": "fp32", "global_batch_size": 16, **training}
    return SheepOpConfig.model_validate({"model": MODEL, "training": given, "tuning": {"method": "sft"}})


def fitting(given: SheepOpConfig, length: int, said: list[str] | None = None, texts: int = 1) -> Any:
    console = SimpleNamespace(info=[].append if said is None else said.append)
    task: Any = SimpleNamespace(config=given, console=console, origin=None, texts_of_row=texts)
    named = given.training.model_dump(exclude_defaults=True)
    return step_memory._fitting(task, given.training, named, length, "cpu")


@pytest.mark.parametrize("lora", [None, {}])
def test_a_micro_batch_needs_no_more_memory_than_the_weights_and_their_states(
    lora: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_memory, "usable_memory", lambda training, device: 10**11)
    monkeypatch.setattr(step_memory, "_CPU_TOKENS", 10**9)
    given, said = config(global_batch_size=64), []
    given = given.replace(tuning={**given.tuning.model_dump(), "lora": lora})
    found = fitting(given, 2048, said).micro_batch_size

    def activations(rows: int) -> tuple[int, int]:
        needed = bytes_of_a_step(given, given.training.replace(micro_batch_size=rows), 2048, "cpu")
        return needed.peak("none", 0) - needed.state - needed.loss, max(needed.state, 10**9)

    assert 1 <= found < 64 and 64 % found == 0
    needs, may = activations(found)
    assert needs <= may
    needs, may = activations(2 * found)
    assert needs > may
    assert said[0].startswith(f"A step reads {found} rows of 2,048 tokens at a time")


def test_a_cpu_reads_at_most_256_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "usable_memory", lambda training, device: 10**11)
    assert [fitting(config(), length).micro_batch_size for length in (128, 192, 2048)] == [2, 1, 1]
    assert fitting(config(), 128, texts=2).micro_batch_size == 1  # a pair of answers


def test_a_row_of_two_texts_needs_as_much_as_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    given = config(micro_batch_size=1)
    pair = bytes_of_a_step(given, given.training, 64, "cpu", texts=2)
    assert pair == bytes_of_a_step(given, given.training.replace(micro_batch_size=2), 64, "cpu")
    monkeypatch.setattr(step_memory, "usable_memory", lambda training, device: pair.peak("none", 0) - 1)
    found = [fitting(given, 64, texts=texts).activation_checkpointing for texts in (1, 2)]
    assert found == ["none", "auto"]


def test_blocks_are_recomputed_where_one_row_does_not_fit_and_nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = bytes_of_a_step(config(), config().training.replace(micro_batch_size=1), 2048, "cpu").peak("none", 0)
    for usable, mode in ((needed + 1, "none"), (needed - 1, "auto")):
        monkeypatch.setattr(step_memory, "usable_memory", lambda training, device, usable=usable: usable)
        found = fitting(config(), 2048)
        assert (found.micro_batch_size, found.activation_checkpointing) == (1, mode)
    assert fitting(config(activation_checkpointing="selective"), 2048).activation_checkpointing == "selective"
    assert fitting(config(micro_batch_size=8), 2048).micro_batch_size == 8


def test_steps_of_small_models_stay_whole() -> None:
    small = SheepOpConfig.model_validate({"model": {"vocab_size": 128, "d_model": 32, "num_layers": 2, "num_heads": 2}})
    assert fitting(small, 256).micro_batch_size is None


@pytest.mark.parametrize(
    ("kind", "method", "packing", "expected"),
    [
        # The longest example has 70 tokens and the mean is 40: rows for four of them, in whole 64s.
        (SupervisedTask, "sft", True, 192),
        (SupervisedTask, "sft", False, 128),
        (PreferenceTask, "dpo", True, 128),
        (GroupPolicyTask, "grpo", True, 256),
    ],
)
def test_rows_hold_the_longest_example(kind: Any, method: str, packing: bool, expected: int) -> None:
    lengths = np.array([10, 70])
    split = SimpleNamespace(lengths=lengths, num_tokens=80, num_examples=2)
    tuning: dict[str, Any] = {"method": method, **({"grpo": {"max_new_tokens": 150}} if method == "grpo" else {})}
    settings = {"model": MODEL, "data": {"packing": packing}, "tuning": tuning}
    task = kind(SheepOpConfig.model_validate(settings), None, Console.silent())
    task.__dict__["store"] = SimpleNamespace(train=split, validation=split, longest=70)
    assert task.row_length_for(task.store) == task.with_row_length().config.data.max_length == expected
    assert task.row_length == 2048  # the longest example that is read without a given length
    given = task.config.replace(data={**task.config.data.model_dump(), "max_length": 4096})
    assert task.with_config(given).row_length == 4096


def test_an_adapter_is_trained_where_the_weights_cannot_be(base: Path, tmp_path: Path) -> None:
    tuning = {"tuning": {"method": "sft"}, "data": {"paths": ["x.jsonl"]}}
    plain = complete(draft(tuning, base), lambda device: 1e9, Console.silent())
    assert plain.config.tuning.lora is None
    little = {**tuning, "training": {"activation_checkpointing": "auto", "memory_budget": 1e-5}}
    quantised = tmp_path / "quantised"
    quantize_model(base, quantised, to="int8", console=Console.silent())
    for given, model in ((little, base), (tuning, quantised)):
        found = complete(draft(given, model), lambda device: 1e9, Console.silent())
        assert found.config.tuning.lora is not None
        assert found.chosen["tuning.lora.rank"] == found.config.tuning.lora.rank
        assert found.config.training.learning_rate == min(1e-2, 10 * plain.config.training.learning_rate)
        none = {**given, "tuning": {"method": "sft", "lora": None}}
        assert complete(draft(none, model), lambda device: 1e9, Console.silent()).config.tuning.lora is None


def test_frozen_integers_count_as_they_are_stored(base: Path, tmp_path: Path) -> None:
    quantised = tmp_path / "quantised"
    quantize_model(base, quantised, to="int8", console=Console.silent())
    settings = SheepOpConfig.model_validate(
        {"model": read_model_config(quantised).model_dump(), "tuning": {"method": "sft", "lora": {}}}
    )
    stored = load_file(quantised / "model.safetensors")
    expected = sum(4 * each.size if each.dtype == np.float32 else each.nbytes for each in stored.values())
    assert bytes_of_a_step(settings, settings.training, 8, "cpu", Fork(quantised)).state == expected
    assert expected < num_parameters(settings.model) * 3
