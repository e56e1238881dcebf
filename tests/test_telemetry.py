"""Libraries that report their use to their makers are told not to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Most libraries leave their reports out on machines of continuous integration, which would hide what is tested here.
VARIABLES = {name: value for name, value in os.environ.items() if not name.startswith(("CI", "GITHUB", "ORT_", "RAY_"))}


def run(code: str, home: Path, **variables: str) -> str:
    """Returns what `code` prints in a process of a user with an empty home directory."""
    home.mkdir()
    environment = {**VARIABLES, "HOME": str(home), "XDG_CACHE_HOME": str(home), **variables}
    process = [sys.executable, "-c", code]
    return subprocess.run(process, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_model_that_recognises_files_leaves_no_identifier(tmp_path: Path) -> None:
    pytest.importorskip("magika")
    code = "from sheepop.data.extract.detection import _model; print(_model().identify_bytes(b'def f(): pass').ok)"
    assert run(code, tmp_path / "home") == "True\n"
    assert list((tmp_path / "home").rglob("*deviceid*")) == []


def test_ray_reports_only_where_its_variable_asks_for_it(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    code = "import sheepop; from ray._common.usage.usage_lib import usage_stats_enabled; print(usage_stats_enabled())"
    assert run(code, tmp_path / "silent") == "False\n"
    assert run(code, tmp_path / "asked", RAY_USAGE_STATS_ENABLED="1") == "True\n"
