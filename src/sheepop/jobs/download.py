"""Downloads a public dataset."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.interrupts import interrupts_advise
from sheepop.data.download.download import download_dataset

_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,9})?) ?(?P<unit>[A-Za-z]*)", re.ASCII)
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{rest}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for rest, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def download(
    name: str,
    output: str | Path,
    limit: str | int | None = None,
    token: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Downloads the dataset `name` to a folder below `output`; returns the content of its ``download.json``.

    `limit` bounds the transfer: bytes, or a size such as ``100MB``. `token` is an access token of the Hugging Face hub;
    None uses ``HF_TOKEN`` or a saved login. The result also has the folder as `path`, and as `next` the command that
    builds a corpus from it.
    """
    num_bytes = limit if limit is None or isinstance(limit, int) else parse_size(limit)
    if num_bytes is not None and num_bytes <= 0:
        raise UsageError(f"A limit of {num_bytes} bytes downloads nothing. Give a size such as 100MB.")
    with interrupts_advise("What was downloaded is kept; run the same command again to resume."):
        return download_dataset(name, Path(output), limit=num_bytes, token=token, console=console)


def parse_size(text: str) -> int:
    """A size such as ``100MB``, ``1.5 GiB`` or ``4096`` in bytes; raises `UsageError` for anything else."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match["unit"].lower()) if match is not None else None
    if match is None or factor is None:
        raise UsageError(f"{text!r} is not a size. Write it as 100MB, 1.5GB, 64MiB or a number of bytes.")
    return round(float(match["number"]) * factor)
