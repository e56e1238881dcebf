"""A build of a corpus that is killed, wherever it stands, goes on to the same bytes as the build that was not."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from ..command_line import COMMAND, Launcher

WORDS = [a + b for a in ("sheep", "stone", "river", "lamp", "field", "wind") for b in ("", "s", "fold", "side", "ward")]
NOT_COMPARED = {"build.json", "report.html", "checksums.json"}  # they hold times, or the hashes of files that do


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 4 MB in 60 files: several parts, with exact and near duplicates among them."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(5)
    for number in range(60):
        sentences = [" ".join(draw.choices(WORDS, k=12)).capitalize() + "." for _ in range(800)]
        content = "\n".join(sentences) + f"\nWrite to shepherd{number}@sheep-farm.org about it.\n"
        (folder / f"{number:03}.txt").write_text(content)
        if number % 10 == 0:
            (folder / f"{number:03} copy.txt").write_text(content)
            (folder / f"{number:03} near.txt").write_text(content.replace("Sheep", "Goat", 3))
    return folder


def command(text: Path, output: Path, workers: int) -> list[str]:
    places = ["data", "build", str(text), "--output", str(output)]
    return [*places, "--workers", str(workers), "--quiet", "tokenizer.vocab_size=300", "data.max_file_bytes=1000000"]


def content(corpus: Path) -> dict[str, bytes]:
    files = (path for path in sorted(corpus.rglob("*")) if path.is_file())
    return {str(p.relative_to(corpus)): p.read_bytes() for p in files if p.name not in NOT_COMPARED}


def run_to_end(launcher: Launcher, arguments: list[str]) -> None:
    done = launcher.run(*arguments)
    assert done.code == 0, done.err


@pytest.fixture(scope="module")
def unbroken(launcher: Launcher, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    output = tmp_path_factory.mktemp("unbroken") / "corpus"
    started = time.monotonic()
    run_to_end(launcher, command(text, output, 2))
    return output, time.monotonic() - started


def killed(launcher: Launcher, arguments: list[str], seconds: float) -> bool:
    """Starts a build and kills it after so many seconds; whether it was still at work. None of its children stays."""
    process = launcher.start(*arguments)
    time.sleep(seconds)
    if process.poll() is not None:
        return False
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"still running: {alive}"
    return True


@pytest.mark.parametrize("wanted", [4, pytest.param(20, marks=pytest.mark.campaign)])
def test_a_build_killed_again_and_again_gives_the_same_bytes(
    launcher: Launcher, text: Path, unbroken: tuple[Path, float], tmp_path: Path, wanted: int
) -> None:
    whole, lifetime = unbroken
    output = tmp_path / "corpus"
    draw = random.Random(11)
    arguments = command(text, output, 2)
    kills = attempts = 0
    while kills < wanted:
        attempts += 1
        assert attempts <= 4 * wanted, "builds end before they can be killed"
        if killed(launcher, arguments, draw.uniform(0.1, 0.8 * lifetime)):
            kills += 1
        else:
            assert content(output) == content(whole)
            shutil.rmtree(output)
    run_to_end(launcher, arguments)
    assert content(output) == content(whole)
    assert not (tmp_path / ".corpus.building").exists()


@pytest.mark.parametrize("workers", [0, 4])
def test_the_number_of_workers_does_not_show(
    launcher: Launcher, text: Path, unbroken: tuple[Path, float], tmp_path: Path, workers: int
) -> None:
    output = tmp_path / "corpus"
    run_to_end(launcher, command(text, output, workers))
    assert content(output) == content(unbroken[0])


def test_a_part_that_was_damaged_meanwhile_is_made_again(
    launcher: Launcher, text: Path, unbroken: tuple[Path, float], tmp_path: Path
) -> None:
    whole, _ = unbroken
    output = tmp_path / "corpus"
    arguments = command(text, output, 2)
    parts: list[Path] = []
    process = launcher.start(*arguments)
    while process.poll() is None and not parts:
        time.sleep(0.01)
        parts = sorted((tmp_path / ".corpus.building" / "pass-0").glob("0*/part-*.zst"))
    process.kill()
    assert parts, "the build ended before a part of it was seen"
    damaged = bytearray(parts[0].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    parts[0].write_bytes(damaged)
    run_to_end(launcher, arguments)
    assert content(output) == content(whole)


@pytest.mark.parametrize("workers", [0, 3])
def test_ctrl_c_pressed_twice_ends_a_build_in_one_line_and_the_next_start_goes_on(
    launcher: Launcher, text: Path, unbroken: tuple[Path, float], tmp_path: Path, workers: int
) -> None:
    output, parts = tmp_path / "corpus", list[Path]()
    arguments = command(text, output, workers)
    process = launcher.start(*arguments, program=f"import os; os.setpgid(0, 0)\n{COMMAND}")
    while process.poll() is None and not parts:
        time.sleep(0.01)
        parts = list((tmp_path / ".corpus.building" / "pass-0").glob("0*"))
    children = psutil.Process(process.pid).children(recursive=True)
    for _ in range(2):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
    ended = process.wait()
    assert (ended.code, ended.out, ended.err.count("\n")) == (130, "", 1), ended
    assert ended.err.startswith("Interrupted.")
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"still running: {alive}"
    assert all(part.is_dir() for part in parts)
    run_to_end(launcher, arguments)
    assert content(output) == content(unbroken[0])


def test_a_build_on_a_full_disk_and_on_one_that_cannot_be_written_goes_on_when_there_is_room(
    launcher: Launcher, text: Path, unbroken: tuple[Path, float], small_disk: Path
) -> None:
    output = small_disk / "corpus"
    arguments = command(text, output, 2)

    def mounted(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(small_disk)], check=True)

    for options, words in (("size=3m", "the disk is full"), ("ro", "the file system is read-only")):
        mounted(options)
        ended = launcher.run(*arguments)
        assert (ended.code, ended.out) == (1, ""), ended
        *warnings, error = ended.err.splitlines()
        assert words in error and all(line.startswith("Warning: ") and "free" in line for line in warnings)
    mounted("rw,size=64m")
    run_to_end(launcher, arguments)
    assert content(output) == content(unbroken[0])
