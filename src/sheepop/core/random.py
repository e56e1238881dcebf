"""Counter-based randomness: every random choice is a pure function of (seed, purpose, index).

No stream is ever advanced, so nothing has to be saved to resume: the seed of step 731's dropout is computed, not
remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

_ROUNDS = 6
_LARGEST_TABLE = 4096


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Returns a 63-bit seed for one purpose, for example ``derive_seed(seed, "dropout", step, micro_batch)``.

    Different purposes give independent seeds (BLAKE2b of an unambiguous encoding).
    """
    parts = tuple(str(part) if isinstance(part, str) else int(part) for part in purpose)
    encoded = repr((int(seed), *parts)).encode("utf-8")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little") >> 1


def derive_seeds(seeds: Iterable[int], purpose: str, indices: Iterable[int]) -> list[int]:
    """Returns ``derive_seed(seed, purpose, index)`` of every pair, for loops in which each call counts."""
    name, blake2b, read = repr(purpose).encode("utf-8"), hashlib.blake2b, int.from_bytes
    return [
        read(blake2b(b"(%d, %b, %d)" % (seed, name, index), digest_size=8).digest(), "little") >> 1
        for seed, index in zip(seeds, indices, strict=True)
    ]


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """Returns a NumPy generator (Philox, counter-based) for one purpose."""
    return np.random.Generator(np.random.Philox(key=derive_seed(seed, *purpose)))


def torch_generator(seed: int, *purpose: str | int, device: str = "cpu") -> torch.Generator:
    """Returns a torch generator for one purpose on `device`."""
    import torch

    return torch.Generator(device=device).manual_seed(derive_seed(seed, *purpose))


def seed_torch(seed: int, *purpose: str | int) -> None:
    """Seeds torch's global generators, which dropout uses, for one purpose.

    It replaces ``torch.manual_seed``, which takes milliseconds in every step because it records a stack trace for each
    kind of accelerator that is absent.
    """
    import torch

    derived = derive_seed(seed, *purpose)
    torch.default_generator.manual_seed(derived)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        getattr(module, "manual_seed_all", module.manual_seed)(derived)


class Permutation:
    """A keyed bijection of ``range(size)`` computed index by index, in constant memory.

    It is a balanced Feistel network over the next even number of bits, with cycle walking back into the range (Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains"), so the order of a billion samples is one integer key.
    Such a network is biased on a handful of values; a small range is sorted by random keys instead.
    """

    def __init__(self, size: int, key: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size
        self._table: NDArray[np.int64] | None = None
        if size <= _LARGEST_TABLE:
            sort_keys = np.random.Philox(key=derive_seed(key, "permutation table")).random_raw(size)
            self._table = np.argsort(sort_keys, kind="stable")
        self._half_bits = ((size - 1).bit_length() + 1) // 2
        self._round_keys = [np.uint64(derive_seed(key, "permutation round", number)) for number in range(_ROUNDS)]

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Maps an array of indices, each in ``[0, size)``, to their positions in the permuted order."""
        values = np.asarray(indices, dtype=np.int64)
        if values.size and (values.min() < 0 or values.max() >= self.size):
            raise IndexError(f"index out of range for a permutation of {self.size}")
        if self._table is not None:
            return self._table[values]
        result = self._encrypt(values.astype(np.uint64).ravel())
        outside = result >= self.size
        while outside.any():
            result[outside] = self._encrypt(result[outside])
            outside = result >= self.size
        return result.astype(np.int64).reshape(values.shape)

    def __getitem__(self, index: int) -> int:
        return int(self(np.array([index], dtype=np.int64))[0])

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> half, values & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << half) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finaliser of SplitMix64 (Steele, Lea and Flood 2014): each input bit affects each output bit."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
