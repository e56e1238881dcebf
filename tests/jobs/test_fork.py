"""Beginning a run with the weights of another, and keeping two processes from one run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.checkpoint.weight_files import WEIGHTS, open_weights, write_weights
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError, UsageError
from sheepop.core.files import read_json, write_checksums
from sheepop.jobs.config import SheepOpConfig

from ..running import train, train_given

MODEL = {"d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 32, "dropout": 0.0}
TRAINING = {
    "max_steps": 4,
    "global_batch_size": 4,
    "precision": "fp32",
    "warmup_steps": 0,
    "sample_tokens": 4,
    "sinks": [],
}


def config(text_folder: Path, output: Path, *, model: Any = MODEL, **training: Any) -> SheepOpConfig:
    tree = {
        "data": {"paths": [str(text_folder)]},
        "tokenizer": {"algorithm": "char"},
        "model": model,
        "training": {**TRAINING, **training},
        "device": "cpu",
        "output_dir": str(output),
    }
    return validate(SheepOpConfig, tree)


@pytest.fixture(scope="module")
def parent(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("parent") / "run"
    train(config(text_folder, output, learning_rate=0.01))
    return output


def forked(text_folder: Path, output: Path, parent: Path, *, model: Any = None, **training: Any) -> Path:
    asked = config(text_folder, output, model=model or {}, **training)
    asked = asked.replace(tokenizer={"path": None})
    train(asked, fork=parent)
    return output


def test_a_fork_begins_with_the_weights_of_another_run(text_folder: Path, parent: Path, tmp_path: Path) -> None:
    output = forked(text_folder, tmp_path / "fork", parent, learning_rate=1e-12, max_steps=2)
    before, after = load_model(parent), load_model(RunDirectory(output).checkpoint(2))
    assert after.config == before.config
    assert after.tokenizer.fingerprint() == before.tokenizer.fingerprint()
    for name, weight in before.model.named_parameters():
        assert torch.allclose(weight, after.model.get_parameter(name), atol=1e-6), name
    record = read_json(output / "environment.json")
    assert record["forked_from"]["path"] == str(before.directory.resolve())


def divided(model: Path, target: Path) -> Path:
    """A copy of a model directory with its weights in shards."""
    shutil.copytree(model, target)
    tensors = open_weights(model)
    (target / WEIGHTS).unlink()
    write_weights(target, tensors, max_shard_bytes=2000)
    write_checksums(target)
    assert len(list(target.glob("*.safetensors"))) > 1
    return target


def test_a_fork_begins_with_weights_in_shards(text_folder: Path, parent: Path, tmp_path: Path) -> None:
    model = divided(load_model(parent).directory, tmp_path / "shards")
    output = forked(text_folder, tmp_path / "fork", model, learning_rate=1e-12, max_steps=1)
    after = load_model(output)
    for name, weight in load_model(parent).model.named_parameters():
        assert torch.allclose(weight, after.model.get_parameter(name), atol=1e-6), name


def test_a_run_goes_on_from_a_checkpoint_in_shards(text_folder: Path, parent: Path, tmp_path: Path) -> None:
    whole, run = (RunDirectory(shutil.copytree(parent, tmp_path / name)) for name in ("whole", "run"))
    checkpoint = run.checkpoint(max(run.steps()))
    divided(checkpoint, tmp_path / "shards")
    shutil.rmtree(checkpoint)
    (tmp_path / "shards").rename(checkpoint)
    for each in (whole, run):
        train(config(text_folder, each.path, learning_rate=0.01, max_steps=6), resume=True)
    one, other = load_model(whole.checkpoint(6)), load_model(run.checkpoint(6))
    for name, weight in one.model.named_parameters():
        assert torch.equal(weight, other.model.get_parameter(name)), name


def test_a_fork_goes_on_from_its_beginning_when_it_was_stopped_before_the_first_step(
    text_folder: Path, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = forked(text_folder, tmp_path / "whole", parent)
    with monkeypatch.context() as patch:
        patch.setattr("sheepop.train.step.StepRunner.gradients", _fail)
        with pytest.raises(RuntimeError, match="stopped"):
            forked(text_folder, tmp_path / "stopped", parent)
    assert RunDirectory(tmp_path / "stopped").steps() == [0]
    asked = config(text_folder, tmp_path / "stopped", model={}).replace(tokenizer={"path": None})
    train(asked, resume=True)
    one, other = (load_model(RunDirectory(path).checkpoint(4)).model for path in (whole, tmp_path / "stopped"))
    for name, weight in one.named_parameters():
        assert torch.equal(weight, other.get_parameter(name)), name


def test_a_fork_that_was_stopped_before_its_beginning_was_saved_is_not_begun_with_other_weights(
    text_folder: Path, parent: Path, tmp_path: Path
) -> None:
    output = forked(text_folder, tmp_path / "fork", parent)
    shutil.rmtree(output / "checkpoints")
    asked = config(text_folder, output, model={}).replace(tokenizer={"path": None})
    with pytest.raises(CheckpointError, match=r"before it had saved the weights it.* --fork .* --overwrite"):
        train(asked, resume=True)


@pytest.mark.parametrize("part", ["fork", "data", "tokenizer", "embeddings"])
def test_no_run_is_replaced_by_one_that_begins_with_a_part_of_it(
    text_folder: Path, parent: Path, tmp_path: Path, part: str
) -> None:
    run = Path(shutil.copytree(parent, tmp_path / "run"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    asked, checkpoint = config(text_folder, run), RunDirectory(run).checkpoint(4)
    if part == "data":
        asked = asked.replace(data={"paths": [str(run / "corpus")]}, tokenizer={})
    if part == "tokenizer":
        asked = asked.replace(tokenizer={"path": str(checkpoint)})
    if part == "embeddings":
        vectors = {**asked.training.model_dump(), "initial_embeddings": str(checkpoint / WEIGHTS)}
        asked = asked.replace(training=vectors)
    with pytest.raises(UsageError, match=r"would read .*, which is part of the run"):
        train(asked, overwrite=True, fork=run if part == "fork" else None)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.norm=layernorm"], r"model\.norm is 'rmsnorm' there, not 'layernorm'"),
        (
            ["model.bias=true", "model.norm=layernorm"],
            r"model\.norm is 'rmsnorm' there, not 'layernorm'; model\.bias is ",
        ),
        (["model.d_model=256"], r"model\.d_model is 16 there, not 256"),
    ],
)
def test_a_given_setting_that_the_network_does_not_have_is_refused_also_at_its_default(
    text_folder: Path, bare: Path, tmp_path: Path, settings: list[str], words: str
) -> None:
    places = (f"data.paths={text_folder}", f"output_dir={tmp_path / 'fork'}", "device=cpu", "training.max_steps=1")
    with pytest.raises(ConfigError, match=rf"A fork keeps the network of .*, but {words}"):
        train_given([*places, *settings], fork=bare)
    assert not (tmp_path / "fork").exists()


def test_given_settings_that_the_network_has_and_null_are_taken(text_folder: Path, bare: Path, tmp_path: Path) -> None:
    places = (f"data.paths={text_folder}", f"output_dir={tmp_path / 'fork'}", "device=cpu", "training.max_steps=1")
    run = train_given([*places, "model.bias=false", "model.d_ff=null", "training.precision=fp32"], fork=bare).run
    assert load_model(run).config == load_model(bare).config


@pytest.fixture(scope="module")
def bare(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose norm and bias are not the defaults."""
    model = {**MODEL, "norm": "rmsnorm", "bias": False}
    return train(config(text_folder, tmp_path_factory.mktemp("bare") / "run", model=model, max_steps=1)).run


def test_a_run_is_not_resumed_as_the_child_of_another_model(
    text_folder: Path, parent: Path, bare: Path, tmp_path: Path
) -> None:
    output = forked(text_folder, tmp_path / "fork", parent)
    asked = config(text_folder, output, model={}, max_steps=6).replace(tokenizer={"path": None})
    with pytest.raises(ConfigError, match=rf"started from .*, not from {bare}\. Leave the model out"):
        train(asked, fork=bare, resume=True)
    for same in (parent, load_model(parent).directory):
        train(asked, fork=same, resume=True)
    with pytest.raises(ConfigError, match="started from new weights, not from"):
        train(config(text_folder, bare, model={**MODEL, "norm": "rmsnorm", "bias": False}), fork=parent, resume=True)


def _fail(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("stopped")


def test_a_fork_keeps_the_network(text_folder: Path, parent: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.num_layers is 1 there, not 3"):
        forked(text_folder, tmp_path / "fork", parent, model={"num_layers": 3})
    assert not (tmp_path / "fork").exists()


def test_what_a_resumed_run_refuses_names_the_way_to_fork(text_folder: Path, parent: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.learning_rate was 0\.01 and is now 0\.5.*--fork"):
        train(config(text_folder, parent, learning_rate=0.5), resume=True)


def test_a_second_process_on_a_run_is_refused(text_folder: Path, parent: Path) -> None:
    # A lock belongs to an open file, so this process stands for another one.
    with RunDirectory(parent).locked() as held:
        assert held
        with pytest.raises(CheckpointError, match="Another process is working on the run"):
            train(config(text_folder, parent, learning_rate=0.01), resume=True)


def test_a_lock_leaves_nothing_where_no_run_began(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").locked():
        pass
    assert not (tmp_path / "run").exists()
