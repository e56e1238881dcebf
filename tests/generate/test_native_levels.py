"""Texts by the native kernels of two levels of instructions, in 1 and in 2 threads, are those of exact arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sheepop.adapt.stored_weight import has_kernels
from sheepop.core.native import levels

from .native_levels import ATTENTION, FLOATS, INTEGERS, PROMPTS

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not has_kernels(), reason="there are no native kernels for this machine")
@pytest.mark.parametrize("level", ["avx2", "the highest"])
def test_texts_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.delenv("SHEEPOP_NATIVE", raising=False)
    highest, *others = (each.name for each in levels())
    if level != "the highest" and level not in others:
        here = "is the highest of this processor" if level == highest else "is none of this processor"
        pytest.skip(f"the level {level} {here}, {highest}")
    name, asked = (highest, "1") if level == "the highest" else (level, level)
    done = subprocess.run(
        [sys.executable, "-m", "tests.generate.native_levels"],
        cwd=ROOT,
        # Threads that wait beside other processes would take most of the processor's time.
        env={**os.environ, "SHEEPOP_NATIVE": asked, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    used, count = done.stdout.split()
    texts = len(PROMPTS) * len(ATTENTION) * (len(FLOATS) + len(INTEGERS))
    assert used == name
    assert 0.9 * texts < int(count) <= texts
