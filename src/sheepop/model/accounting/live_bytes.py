"""The bytes of live tensors, and their peak.

Works for real and fake tensors, on every device. It counts neither memory that the allocator caches nor the workspace
that a kernel allocates while it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts each storage from the first operation that reads or writes it until it is freed.

    Shared memory counts once. A resized storage, such as one that FSDP gathered and freed, counts with its current
    size.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._most = 0  # an upper bound: a storage emptied since it was last measured counts with its old size

    @property
    def now(self) -> int:
        """The live bytes now."""
        for place, known in list(self._storages.items()):
            if (storage := known()) is not None:
                self._measure(place, storage)
        return self._most

    def forget_peak(self) -> None:
        """Resets the peak to the live bytes now."""
        self.peak = self.now

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor, also before any operation uses it."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
        if tensor.device.type == "meta":
            return
        if tensor.is_sparse:  # it has no storage of its own, either
            self.add(tensor._indices())
            self.add(tensor._values())
            return
        storage = tensor.untyped_storage()
        place = storage._cdata
        known = self._storages.get(place)
        if known is None or known() is not storage:
            self._storages[place] = weakref.ref(storage, partial(self._forget, place))
        self._measure(place, storage)

    def _measure(self, place: int, storage: Any) -> None:
        size = storage.nbytes()
        self._most += size - self._sizes.get(place, 0)
        self._sizes[place] = size

    def _forget(self, place: int, gone: weakref.ref[Any]) -> None:
        if self._storages.get(place) is gone:
            del self._storages[place]
            self._most -= self._sizes.pop(place)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        found = operation(*arguments, **(settings or {}))
        for tensor in tensors_of((arguments, tuple((settings or {}).values()), found)):
            self.add(tensor)
        if self._most > self.peak:
            self.peak = max(self.peak, self.now)
        return found


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yields the tensors among the arguments or results of an operation, also those in lists, tuples, dataclasses."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list) or is_dataclass(values):
        for value in values if isinstance(values, tuple | list) else vars(values).values():
            yield from tensors_of(value)
