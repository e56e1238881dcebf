"""Texts by the native kernels of each level of instructions, in 1 and in 2 threads, are those of exact arithmetic."""

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
@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_texts_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.delenv("SHEEPOP_NATIVE", raising=False)
    if level not in [each.name for each in levels()]:
        pytest.skip(f"this processor has no {level} instructions")
    done = subprocess.run(
        [sys.executable, "-m", "tests.generate.native_levels"],
        cwd=ROOT,
        env={**os.environ, "SHEEPOP_NATIVE": level, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    used, count = done.stdout.split()
    texts = len(PROMPTS) * len(ATTENTION) * (len(FLOATS) + len(INTEGERS))
    assert used == level
    assert 0.9 * texts < int(count) <= texts
