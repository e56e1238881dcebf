"""The bytes of the tensors that are alive, and the most there were at a time.

Counted on tensors with numbers and on fake ones alike, and on every device: what a program holds, whatever its
allocator keeps beside it. What a kernel takes for itself while it runs is not a tensor, and is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it all storages that an operation reads or writes are counted from then on until they are freed.

    Memory that is shared counts once. A storage that is emptied, as FSDP does with what it has gathered, counts as what
    it has.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._most = 0  # that may be alive: a storage that was emptied since it was last looked at counts as full

    @property
    def now(self) -> int:
        """What is alive now."""
        for place, known in list(self._storages.items()):
            if (storage := known()) is not None:
                self._measure(place, storage)
        return self._most

    def forget_peak(self) -> None:
        """Begins anew with what is alive now."""
        self.peak = self.now

    def add(self, tensor: Tensor) -> None:
        """Counts a tensor that no operation has touched yet."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, which has no memory of its own
        if tensor.device.type == "meta":
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

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
    ) -> Any:
        found = operation(*arguments, **(settings or {}))
        for tensor in tensors_of((arguments, tuple((settings or {}).values()), found)):
            self.add(tensor)
        if self._most > self.peak:
            self.peak = max(self.peak, self.now)
        return found


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation, those in lists included."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_of(value)
