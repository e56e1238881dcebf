"""Fetches scripts of other projects from npm's registry: those of the site, or those in the page of a model.

Each list has packages, their licences, and which of their files go where with which SHA-256.

Example:  python docs/site/assets.py            # the site's, into build/site-assets
          python docs/site/assets.py page       # the page's, which are kept in the repository
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "sheepop" / "serve" / "page" / "vendor"
# Name: the list, and the folder that its files go to.
LISTS = {
    "site": (Path(__file__).with_name("packages.json"), ROOT / "build" / "site-assets"),
    "page": (PAGE / "packages.json", PAGE),
}


def main(name: str = "site") -> None:
    """Fetches the packages of a list, except those whose files are all there."""
    listed, target = LISTS[name]
    for package, about in json.loads(listed.read_text(encoding="utf-8")).items():
        if wrong(target, about["files"]):
            _fetch(package, about["files"], target)


def wrong(target: Path, files: dict[str, list[str]]) -> list[str]:
    """The files that are missing in `target`, or have another SHA-256 than their list says."""
    return [to for to, digest in files.values() if not (target / to).is_file() or _sum(target / to) != digest]


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fetch(package: str, files: dict[str, list[str]], target: Path) -> None:
    if shutil.which("npm") is None:
        sys.exit("npm is missing, with which scripts are fetched. Install it: apt-get install npm")
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(place).glob("*.tgz")
        with tarfile.open(archive) as opened:
            opened.extractall(place, filter="data")
        for source, (_, digest) in files.items():
            found = _sum(Path(place, "package", source))
            if found != digest:
                sys.exit(f"{source} of {package} has the SHA-256 {found} instead of {digest}. Nothing of it was used.")
        for source, (to, _) in files.items():
            (target / to).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(place, "package", source), target / to)


if __name__ == "__main__":
    main(*sys.argv[1:])
