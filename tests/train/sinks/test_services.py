"""The sinks that exist, what they write into their own stores, and what is said when a package is missing."""

from __future__ import annotations

import importlib.machinery
import io
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.train.config import SinkName
from sheepop.train.sinks import KINDS, RunDescription, open_sinks, require_sinks

ROWS = [
    {"step": 4, "split": "train", "loss": 2.25, "grad_norm": None, "tokens": 512},
    {"step": 8, "split": "train", "loss": 2.0, "grad_norm": 0.5, "tokens": 1024},
    {"step": 8, "split": "validation", "loss": 2.5},
]


def description(directory: Path, first_step: int = 1) -> RunDescription:
    settings = {"seed": 7, "training": {"learning_rate": 0.001, "betas": [0.9, 0.95], "compile": False}}
    return RunDescription(directory, directory.name, "0123456789abcdef", first_step, settings)


def record(name: str, run: RunDescription, rows: list[dict[str, Any]]) -> str:
    """Writes rows through the guarded sink; returns what was said meanwhile."""
    said = io.StringIO()
    with open_sinks([name], run, Console(file=said)) as sinks:
        for row in rows:
            sinks.write(row)
    return said.getvalue()


def logged(content: bytes) -> Iterator[bytes]:
    """The records of a W&B file: seven bytes of head, then blocks of 32 KiB as in a LevelDB log."""
    block, place, pieces = 2**15, 7, b""
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        pieces += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield pieces
            pieces = b""


def test_every_name_of_the_configuration_has_its_row_in_the_table() -> None:
    assert KINDS.keys() == set(get_args(SinkName))


def test_settings_are_flattened_to_text() -> None:
    assert description(Path("x")).flat_settings() == {
        "seed": "7",
        "training.learning_rate": "0.001",
        "training.betas": "[0.9, 0.95]",
        "training.compile": "false",
    }


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.machinery.PathFinder.find_spec
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(
        importlib.machinery.PathFinder,
        "find_spec",
        lambda name, *rest: None if name in ("wandb", "mlflow") else find(name, *rest),
    )
    require_sinks(["tensorboard"])
    for name in ("wandb", "mlflow"):
        with pytest.raises(ConfigError, match=rf'names {name},.*pip install "sheepop\[tracking\]"'):
            require_sinks(["tensorboard", name])


def test_no_sink_is_imported_unless_it_is_named(tmp_path: Path) -> None:
    before = {name.partition(".")[0] for name in sys.modules}
    record("tensorboard", description(tmp_path), ROWS)
    assert not ({"wandb", "mlflow"} - before) & {name.partition(".")[0] for name in sys.modules}


def test_tensorboard_holds_every_number_under_its_split(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert record("tensorboard", description(tmp_path), ROWS) == ""
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/grad_norm", "train/loss", "train/tokens", "validation/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 2.25), (8, 2.0)]


def test_tensorboard_strikes_out_steps_that_are_taken_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record("tensorboard", description(tmp_path), ROWS)
    (first,) = (tmp_path / "tensorboard").iterdir()  # whose name begins with the second: this one was before
    first.rename(first.with_name(first.name.replace("tfevents.", "tfevents.0")))
    record("tensorboard", description(tmp_path, first_step=5), [{"step": 8, "split": "train", "loss": 1.0}])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 2.25), (8, 1.0)]


def test_tensorboard_strikes_out_what_a_run_went_back_behind(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    back = {"step": 9, "split": "trouble", "kind": "spike", "at_step": 10, "batch": 9, "back_to": 4}
    again = [{"step": step, "split": "train", "loss": 1.0} for step in (6, 12)]
    record("tensorboard", description(tmp_path), [*ROWS, back, *again])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 2.25), (6, 1.0), (12, 1.0)]
    assert events.Scalars("trouble/batch")[0].value == 9


def test_mlflow_holds_numbers_and_settings_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs MLflow: the extra tracking")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert record("mlflow", description(tmp_path / "first"), ROWS) == ""
    assert record("mlflow", description(tmp_path / "first", 9), [{"step": 9, "split": "train", "loss": 1.5}]) == ""
    client = MlflowClient()
    experiment = client.get_experiment_by_name("sheepop")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["training.betas"] == "[0.9, 0.95]"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in history) == [(4, 2.25), (8, 2.0), (9, 1.5)]


def test_mlflow_keeps_a_setting_that_is_too_long_for_a_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs MLflow: the extra tracking")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    paths = [f"folder/{number}" for number in range(200)]
    run = RunDescription(tmp_path, "long", "f" * 16, 1, {"data": {"paths": paths}})
    assert record("mlflow", run, []) == ""
    client = MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("sheepop").experiment_id])
    assert "folder/199" in found.data.tags["setting.data.paths"]


def test_weights_and_biases_records_offline_where_nobody_is_logged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="needs Weights & Biases: the extra tracking")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    said = record("wandb", description(tmp_path), ROWS)
    assert said == f"Weights & Biases: not logged in here, so the run is recorded in {tmp_path / 'wandb'}.\n"
    wandb.teardown()  # its own process writes the file, and ends now
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    found: dict[str, list[float]] = {}
    for data in logged(file.read_bytes()):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(data)
        for item in entry.history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    assert found["train/loss"] == [2.25, 2.0]
    assert found["validation/loss"] == [2.5]
    assert found["_step"] == [4, 8]
