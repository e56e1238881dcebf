"""Fetches the fonts of the page from the npm registry, checks them, and writes them with their licences.

The table names each package with its version and the SHA-512 of its archive; npm itself refuses an archive that
differs. The page loads these files from its own server, so nothing is fetched when it is used.

python deploy/vendor_page.py           writes the files anew; needs npm
python deploy/vendor_page.py --check   compares those here with the check sums, without a network
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / "src" / "sheepop" / "serve" / "page"
TABLE = Path(__file__).with_name("vendored.json")


def archive_of(package: str, integrity: str) -> bytes:
    """The archive of a package such as ``name@1.2.3``; raises `SystemExit` if it is not the one in the table."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).iterdir()
        content = file.read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != integrity:
        raise SystemExit(f"{package}: the archive has the check sum {found}, and {TABLE.name} has {integrity}.")
    return content


def main() -> None:
    """Writes or checks every file of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the files here with their check sums")
    only_check = parser.parse_args().check
    wrong = []
    for package, entry in json.loads(TABLE.read_text(encoding="utf-8")).items():
        if not only_check:
            with tarfile.open(fileobj=io.BytesIO(archive_of(package, entry["integrity"]))) as archive:
                for name, file in entry["files"].items():
                    member = archive.extractfile(f"package/{file['from']}")
                    assert member is not None
                    (PAGE / name).write_bytes(member.read())
        for name, file in entry["files"].items():
            found = hashlib.sha256((PAGE / name).read_bytes()).hexdigest()
            if found != file["sha256"]:
                wrong.append(f"{name} has the SHA-256 {found}, and {TABLE.name} has {file['sha256']}.")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
