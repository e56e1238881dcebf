"""What a start measures is used by the next one, from a file that may be missing, damaged or refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sheepop.core.measurements import measurement_key, recall, remember
from sheepop.core.speed import best_of_rounds, matrix_peak, measure_matrix_peak
from sheepop.jobs import bench
from sheepop.jobs.bench import training_speed


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "measurements.json"
    monkeypatch.setenv("SHEEPOP_MEASUREMENTS", str(path))
    return path


@dataclass(frozen=True)
class Timed:
    seconds: float
    name: str


def test_a_value_is_remembered_under_its_key(file: Path) -> None:
    assert recall("a", float) is None
    remember("a", 1.5)
    remember("b", Timed(2.0, "x"))
    assert (recall("a", float), recall("b", Timed), recall("c", float)) == (1.5, Timed(2.0, "x"), None)
    assert json.loads(file.read_text()) == {"a": 1.5, "b": {"seconds": 2.0, "name": "x"}}
    assert [path.name for path in file.parent.iterdir()] == ["measurements.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "null", "\x00", '{"a": "fast"}', '{"a": null}', '{"a": [1.5]}', "[" * 9999]
)
def test_a_damaged_file_is_ignored_and_replaced(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    assert recall("a", float) is None
    remember("a", 2.5)
    assert recall("a", float) == 2.5


def test_a_file_of_other_bytes_is_ignored(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"\xff\xfe")
    assert recall("a", float) is None


def test_a_file_that_cannot_be_written_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocked").write_text("a file, not a directory")
    monkeypatch.setenv("SHEEPOP_MEASUREMENTS", str(tmp_path / "blocked" / "measurements.json"))
    remember("a", 1.5)
    assert recall("a", float) is None


def test_a_user_without_a_home_directory_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SHEEPOP_MEASUREMENTS")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    remember("a", 1.5)
    assert recall("a", float) is None


def test_the_file_is_in_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHEEPOP_MEASUREMENTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remember("a", 1.5)
    assert (tmp_path / "sheepop" / "measurements.json").is_file()


def test_the_oldest_of_many_measurements_are_dropped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheepop.core.measurements._MOST_ENTRIES", 2)
    for key in "abac":
        remember(key, 1.0)
    assert list(json.loads(file.read_text())) == ["a", "c"]


def test_a_key_depends_on_details_threads_versions_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {measurement_key("peak", "cpu", "a"), measurement_key("peak", "cpu", "b"), measurement_key("x", "cpu", "a")}
    assert measurement_key("peak", "cpu", "a") in keys
    for name, value in [
        ("torch.get_num_threads", 99),
        ("torch.get_float32_matmul_precision", "other"),
        ("sheepop.core.measurements.processor_name", "another processor"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(name, lambda value=value: value)
            keys.add(measurement_key("peak", "cpu", "a"))
    monkeypatch.setattr("sheepop.core.measurements.installed_versions", lambda names: {"torch": "9.9"})
    keys.add(measurement_key("peak", "cpu", "a"))
    assert len(keys) == 7


def test_the_record_of_a_machine_is_kept_and_raised_by_later_starts(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sheepop.core.speed._SECONDS", 0.02)
    peak = measure_matrix_peak(torch.float32, "cpu")
    assert list(json.loads(file.read_text()).values()) == [peak]
    for measured, expected in ((0.1 * peak, peak), (3 * peak, 3 * peak), (peak, 3 * peak)):
        monkeypatch.setattr("sheepop.core.speed._best_rate", lambda *rest, rate=measured: rate)
        matrix_peak.cache_clear()
        assert matrix_peak(torch.float32, "cpu") == expected
    matrix_peak.cache_clear()


@pytest.mark.parametrize(
    ("rounds", "best", "taken"),
    [([1.0, 9.0, 9.2, 50.0], 9.2, 3), ([5.0, 4.0, 50.0], 5.0, 2), ([1.0, 2.0, 4.0, 8.0, 16.0], 8.0, 4)],
)
def test_a_measurement_is_repeated_until_it_is_stable(rounds: list[float], best: float, taken: int) -> None:
    left = iter(rounds)
    assert best_of_rounds(lambda: next(left)) == best
    assert len(list(left)) == len(rounds) - taken


def speeds_of_starts(
    monkeypatch: pytest.MonkeyPatch, speeds: list[float], during: list[float], after: list[float]
) -> list[float]:
    """The speeds that one start after the other finds: what it measures, its shares meanwhile and when it is done."""
    rates, shares, shares_after = iter(speeds), iter(during), iter(after)
    with monkeypatch.context() as patch:
        patch.setattr("sheepop.jobs.bench.candidates", lambda precision, device: ["fp32"])
        patch.setattr("sheepop.jobs.bench.measure_training", lambda *rest, training: {"flops_per_second": next(rates)})
        patch.setattr("sheepop.core.processor_time.ProcessorTime.take", lambda self: next(shares))
        patch.setattr("sheepop.jobs.bench.processor_share", lambda device: next(shares_after))
        found = []
        for _ in during:
            bench._speed_alone.cache_clear()  # as in another process
            found.append(training_speed("cpu"))
    bench._speed_alone.cache_clear()
    return found


def test_a_busy_machine_is_slow_by_the_share_that_is_free_and_keeps_its_record(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its training speed follows the share of its processors, not what a single measurement happens to see."""
    found = speeds_of_starts(monkeypatch, [2e9, 2.01e9, 0.1e9, 3e9], [1.0, 0.3, 0.95], [1.0, 0.25, 0.5])
    assert found == [2.01e9, 0.25 * 2.01e9, 0.5 * 3e9]
    assert list(json.loads(file.read_text()).values()) == [3e9]


def test_a_machine_that_was_busy_from_the_first_start_on_has_no_record(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its processors gave 1e9, so alone it would have given 2e9, of which a quarter is free now."""
    found = speeds_of_starts(monkeypatch, [1e9, 1e9, 1.5e9, 1.5e9, 2.2e9, 2.2e9], [0.5, 0.75, 1.0], [0.25, 0.5, 1.0])
    assert found == [0.25 * 2e9, 0.5 * 2e9, 2.2e9]
    assert list(json.loads(file.read_text()).values()) == [2.2e9]


def test_the_speed_of_a_machine_is_that_of_the_steps_that_the_recipe_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, taken = bench.small_run(), []
    monkeypatch.setattr(
        "sheepop.jobs.bench.measure_training",
        lambda model, device, precision, seconds, training: (
            taken.append((model, training)) or {"flops_per_second": 1.0}
        ),
    )
    assert bench._probed(probe, "cpu", "fp32", 0.1) == 1.0
    ((model, training),) = taken
    assert (model.d_model, model.num_layers, model.vocab_size, training.optimizer) == (128, 2, 2048, "muon")
    assert model.ngrams is not None and model.short_convolution is not None
    assert training.global_batch_size * model.max_seq_len == 2048
