"""Bits per byte of general compressors on the held-out text, which a language model should beat."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from threading import Event, Lock

from sheepop.core.console import Console
from sheepop.data import Corpus
from sheepop.data.split import SplitName

_GZIP_WINDOW = 31  # zlib's window of 2^15 bytes with a gzip header
_XZ_WINDOW = 2**26  # bytes in the dictionary of xz -9


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of compressors on the held-out documents, compressed as one stream of `bytes` bytes.

    `warm_xz` is ``xz -9`` after it has read `training_bytes` of training text, so that it knows that text as the model
    does; None if there is no training text. The other two start cold.
    """

    warm_xz: float | None
    xz: float
    gzip: float
    bytes: int
    training_bytes: int

    @property
    def named(self) -> dict[str, float]:
        """Bits per byte by display name, the fairest comparison first."""
        warm = {} if self.warm_xz is None else {"xz -9 that has read the training text": self.warm_xz}
        return {**warm, "xz -9": self.xz, "gzip -9": self.gzip}


@dataclass(frozen=True)
class Texts:
    """Texts that can be read several times, and their total size in bytes."""

    num_bytes: int
    read: Callable[[], Iterator[bytes]]

    @classmethod
    def of(cls, corpus: Corpus, split: SplitName) -> Texts:
        """The documents of a split."""
        size = (corpus.train if split == "train" else corpus.validation).num_bytes
        return cls(size, lambda: (document.text.encode("utf-8") for document in corpus.documents(split)))


def compress_validation(corpus: Corpus, console: Console) -> Baselines:
    """Compresses the held-out documents of a corpus, cold and after its training documents."""
    return compress(Texts.of(corpus, "validation"), Texts.of(corpus, "train"), console)


def compress(held_out: Texts, training: Texts | None, console: Console) -> Baselines:
    """Compresses `held_out` as a stream, in constant memory, on two cores.

    The size for warm xz is that of training and held-out text together, minus that of the training text alone. Only
    the end of a long training text is read, as much as the dictionary of xz holds.
    """
    skipped = 0 if training is None else max(0, training.num_bytes - _XZ_WINDOW)
    known = 0 if training is None else training.num_bytes - skipped
    work = (2 if training is None else 3) * held_out.num_bytes + 2 * known
    lock, is_stopped = Lock(), Event()
    with console.progress("Compressing for comparison", work / 1e6, "MB") as progress, ThreadPoolExecutor(2) as threads:

        def size(compress: Callable[[bytes], bytes], flush: Callable[[], bytes], texts: Iterator[bytes]) -> int:
            found = 0
            for text in texts:
                if is_stopped.is_set():
                    break
                found += len(compress(text))
                with lock:
                    progress.advance(len(text) / 1e6)
            return found + len(flush())

        def xz(texts: Iterator[bytes]) -> int:
            compressor = lzma.LZMACompressor(preset=9)
            return size(compressor.compress, compressor.flush, texts)

        gzip = zlib.compressobj(level=9, wbits=_GZIP_WINDOW)
        longest = []  # first, so that both threads end at about the same time
        if training is not None:
            longest.append(threads.submit(xz, chain(_end_of(training.read(), skipped), held_out.read())))
            longest.append(threads.submit(xz, _end_of(training.read(), skipped)))
        others = threads.submit(xz, held_out.read()), threads.submit(size, gzip.compress, gzip.flush, held_out.read())
        try:
            sizes = [each.result() for each in others]
            if longest:
                both, alone = (each.result() for each in longest)
                sizes.append(both - alone)
        except BaseException:  # a signal, too, must not wait for the threads
            is_stopped.set()
            raise
    cold, quick, *warm = (8 * found / held_out.num_bytes for found in sizes)
    return Baselines(next(iter(warm), None), cold, quick, held_out.num_bytes, known)


def _end_of(texts: Iterator[bytes], skipped: int) -> Iterator[bytes]:
    """`texts` without their first `skipped` bytes."""
    for text in texts:
        if skipped < len(text):
            yield text[skipped:]
        skipped = max(0, skipped - len(text))
