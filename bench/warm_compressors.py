"""Compressors that have read the training text: what each needs for the held-out text after it.

The size of both texts as one file, minus that of the training text alone. PPMd comes from the package ``pyppmd``, zpaq
from the program of that name (``apt-get install zpaq``); one that is missing is skipped, with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from sheepop.data import Corpus
from sheepop.data.split import SplitName

ORDER, BYTES_OF_MODEL = 8, 1 << 30
Size = Callable[[bytes], int]


def ppmd_size(content: bytes) -> int:
    """The bytes of PPMd, variant H."""
    import pyppmd  # type: ignore[import-not-found]

    return len(pyppmd.compress(content, max_order=ORDER, mem_size=BYTES_OF_MODEL, variant="H"))


def zpaq_size(content: bytes) -> int:
    """The bytes of an archive of zpaq's strongest method, a mixture of predictions by contexts."""
    with tempfile.TemporaryDirectory() as place:
        file, archive = Path(place) / "text", Path(place) / "text.zpaq"
        file.write_bytes(content)
        subprocess.run(["zpaq", "add", archive, file, "-m5"], check=True, capture_output=True)
        return archive.stat().st_size


def warm_compressors(corpus: Corpus) -> tuple[dict[str, float], dict[str, str]]:
    """Bits per byte of the held-out text by compressor, and the reasons why others are missing."""
    training, held_out = (_text(corpus, split) for split in ("train", "validation"))
    found: dict[str, float] = {}
    missing: dict[str, str] = {}
    sizes: dict[str, tuple[Size, str | None]] = {
        f"PPMd order {ORDER} that has read the training text": (ppmd_size, _without_package()),
        "zpaq -m5 that has read the training text": (zpaq_size, _without_program()),
    }
    for name, (size, reason) in sizes.items():
        if reason is None:
            found[name] = 8 * (size(training + held_out) - size(training)) / len(held_out)
        else:
            missing[name] = reason
    return found, missing


def _text(corpus: Corpus, split: SplitName) -> bytes:
    return b"".join(document.text.encode("utf-8") for document in corpus.documents(split))


def _without_package() -> str | None:
    try:
        import pyppmd  # noqa: F401
    except ImportError:
        return "the package pyppmd is not installed"
    return None


def _without_program() -> str | None:
    return None if shutil.which("zpaq") else "the program zpaq is not installed"
