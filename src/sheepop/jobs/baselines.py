"""How well general compressors do on the held-out text: the marks a language model should beat."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from sheepop.core.console import Console
from sheepop.data import Corpus
from sheepop.data.split import SplitName

_GZIP_WINDOW = 31  # zlib's window of 2^15 bytes with a gzip header
_XZ_WINDOW = 2**26  # the bytes that xz -9 looks back on


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of compressors on all `bytes` of the held-out documents, one after the other.

    `warm_xz` is ``xz -9`` once it has read the `training_bytes` that come before: as the model, it knows the training
    text. The other two begin with nothing.
    """

    warm_xz: float
    xz: float
    gzip: float
    bytes: int
    training_bytes: int

    @property
    def named(self) -> dict[str, float]:
        """Bits per byte by what a reader calls it, the fairest one first."""
        return {"xz -9 that has read the training text": self.warm_xz, "xz -9": self.xz, "gzip -9": self.gzip}


def compress_validation(corpus: Corpus, console: Console) -> Baselines:
    """Streams the held-out documents through the compressors; memory does not grow with the text.

    What warm xz needs is the difference of two sizes: training and held-out text together, and training text alone.
    Of a long training text it reads the end, all that its window holds.
    """
    held_out, skipped = corpus.validation.num_bytes, max(0, corpus.train.num_bytes - _XZ_WINDOW)
    training = corpus.train.num_bytes - skipped
    with console.progress("Compressing for comparison", (3 * held_out + 2 * training) / 1e6, "MB") as progress:

        def size(compress: Callable[[bytes], bytes], flush: Callable[[], bytes], texts: Iterator[bytes]) -> int:
            found = 0
            for text in texts:
                found += len(compress(text))
                progress.advance(len(text) / 1e6)
            return found + len(flush())

        def xz(texts: Iterator[bytes]) -> int:
            compressor = lzma.LZMACompressor(preset=9)
            return size(compressor.compress, compressor.flush, texts)

        def read() -> Iterator[bytes]:
            return _end_of(_texts(corpus, "train"), skipped)

        gzip = zlib.compressobj(level=9, wbits=_GZIP_WINDOW)
        gzip_size = size(gzip.compress, gzip.flush, _texts(corpus, "validation"))
        xz_size = xz(_texts(corpus, "validation"))
        warm_size = xz(chain(read(), _texts(corpus, "validation"))) - xz(read())
    warm, cold, quick = (8 * found / held_out for found in (warm_size, xz_size, gzip_size))
    return Baselines(warm_xz=warm, xz=cold, gzip=quick, bytes=held_out, training_bytes=training)


def _texts(corpus: Corpus, split: SplitName) -> Iterator[bytes]:
    return (document.text.encode("utf-8") for document in corpus.documents(split))


def _end_of(texts: Iterator[bytes], skipped: int) -> Iterator[bytes]:
    """`texts` without their first `skipped` bytes."""
    for text in texts:
        if skipped < len(text):
            yield text[skipped:]
        skipped = max(0, skipped - len(text))
