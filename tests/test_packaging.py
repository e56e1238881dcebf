"""The package's own data agree with each other: ranges, tested versions, version numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import sheepop
from sheepop.core.machine import compiler_command
from sheepop.core.native import levels

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def test_every_dependency_has_a_tested_version_within_its_range(project: dict[str, Any], constraints: dict[str, str]):
    extras = project["optional-dependencies"].values()
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        requirement = Requirement(line)
        if requirement.name == "sheepop":  # an extra that consists of others
            assert requirement.extras <= project["optional-dependencies"].keys()
            continue
        assert constraints[canonicalize_name(requirement.name)] in requirement.specifier, line


def test_every_dependency_has_a_range(project: dict[str, Any]):
    extras = (project["optional-dependencies"][name] for name in ("data", "ocr", "cluster"))
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        assert {clause.operator for clause in Requirement(line).specifier} == {">=", "<"}, line


def test_the_constraints_fit_every_build_of_torch(constraints: dict[str, str]):
    assert Version(constraints["torch"]).local is None
    assert [name for name in constraints if name.startswith(("nvidia", "triton", "cuda"))] == []


def test_the_version_is_the_same_everywhere(project: dict[str, Any]):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert {project["version"], str(citation["version"]), newest[1]} == {sheepop.__version__}
    assert citation["license"] == project["license"]


@pytest.mark.system
@pytest.mark.timeout(1800)  # every kernel is compiled for every level
def test_a_wheel_works_outside_of_the_repository(text_folder: Path, tmp_path: Path):
    """It brings what is not Python too: pages, kernels, the configurations that commands read."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    source = ROOT / "src" / "sheepop"
    tracked = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    installed = tmp_path / "installed" / "sheepop"
    assert tracked <= {path.relative_to(installed) for path in installed.rglob("*")}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    where = [sys.executable, "-c", "import sheepop; print(sheepop.__file__)"]
    place = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert place.strip() == str(tmp_path / "installed" / "sheepop" / "__init__.py")
    if compiler_command() is not None:
        # Another machine has no compiler, and uses the kernels of the package.
        program = [sys.executable, "-c", "from sheepop.adapt.stored_weight import kernels_here as k; print(k().words)"]
        without = {**environment, "PATH": "", "CXX": "false", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        words = subprocess.check_output(program, cwd=tmp_path, env=without, text=True)
        assert words.strip() == f"{levels()[0].name}, built into the package"
    command = ["quickstart", "--data", str(text_folder), "--minutes", "0.1", "--output", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "sheepop", *command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
