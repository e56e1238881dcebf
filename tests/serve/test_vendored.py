"""The libraries of other projects in the page: they are what npm's registry has, and their licences are with them."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "sheepop" / "serve" / "page" / "vendor"
PACKAGES: dict[str, Any] = json.loads((FOLDER / "packages.json").read_text(encoding="utf-8"))
# The licences allow use for any purpose, and each has words that its text must contain.
WORDS = {
    "MIT": "Permission is hereby granted, free of charge",
    "BSD-2-Clause": "Redistributions in binary form",
    "BSD-3-Clause": "Redistributions in binary form",
    "Apache-2.0 OR MPL-2.0": "Apache License",
}


def test_every_file_is_listed_and_has_its_sum() -> None:
    listed = dict(pair for about in PACKAGES.values() for pair in about["files"].values())
    found = {
        path.relative_to(FOLDER).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in FOLDER.rglob("*")
        if path.is_file() and path.name != "packages.json"
    }
    assert found == listed


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_its_licence(package: str) -> None:
    about = PACKAGES[package]
    (place,) = (to for to, _ in about["files"].values() if to.endswith("licence.txt"))
    assert WORDS[about["licence"]] in (FOLDER / place).read_text(encoding="utf-8")


def test_the_script_fetches_only_what_is_missing_or_changed(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "site" / "assets.py"))
    script["main"]("page")  # everything is there, so that it asks nobody
    files = {"dist/a.js": ["a.js", hashlib.sha256(b"one").hexdigest()], "LICENSE": ["b/licence.txt", "0" * 64]}
    (tmp_path / "a.js").write_bytes(b"one")
    assert script["wrong"](tmp_path, files) == ["b/licence.txt"]
    (tmp_path / "a.js").write_bytes(b"two")
    assert script["wrong"](tmp_path, files) == ["a.js", "b/licence.txt"]


def test_the_documentation_names_each_with_its_size() -> None:
    rows = re.findall(r"^\| (\S+) (\S+) \| (.+?) \| (\d+) KB \|", (ROOT / "docs/page.md").read_text("utf-8"), re.M)
    told = {f"{name}@{version}": (licence, int(size)) for name, version, licence, size in rows}
    loaded = {
        package: (about["licence"], round(sum((FOLDER / to).stat().st_size for to, _ in about["files"].values()) / 1e3))
        for package, about in PACKAGES.items()
        if len(about["files"]) > 1  # of the others only the licences are here, since markdown-it contains them
    }
    assert told == loaded
