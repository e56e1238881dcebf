"""How well general compressors do on the held-out text: the mark a language model should beat."""

from __future__ import annotations

import lzma
import zlib
from dataclasses import dataclass

from sheepop.core.console import Console
from sheepop.data import Corpus

_GZIP_WINDOW = 31  # zlib's window of 2^15 bytes with a gzip header


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of ``gzip -9`` and ``xz -9`` on all held-out documents, one after the other."""

    gzip: float
    xz: float
    bytes: int


def compress_validation(corpus: Corpus, console: Console) -> Baselines:
    """Streams the held-out documents through both compressors; memory does not grow with the text."""
    gzip = zlib.compressobj(level=9, wbits=_GZIP_WINDOW)
    xz = lzma.LZMACompressor(preset=9)
    size = gzip_size = xz_size = 0
    with console.progress("Compressing for comparison", corpus.validation.num_bytes / 1e6, "MB") as progress:
        for document in corpus.documents("validation"):
            text = document.text.encode("utf-8")
            size += len(text)
            gzip_size += len(gzip.compress(text))
            xz_size += len(xz.compress(text))
            progress.advance(len(text) / 1e6)
    gzip_size += len(gzip.flush())
    xz_size += len(xz.flush())
    return Baselines(gzip=8 * gzip_size / size, xz=8 * xz_size / size, bytes=size)
