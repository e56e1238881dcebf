"""What a traced model predicts at each position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from torch import Tensor

_SHOWN = 10  # likeliest tokens


@dataclass(frozen=True)
class Prediction:
    """The prediction, at `position`, of the token at ``position + 1``.

    `token_id` is the actual token there, None after the last; `logprob` is in nats and `rank` counts from 1. `top` are
    the likeliest tokens with their probabilities.
    """

    position: int
    token_id: int | None
    logprob: float | None
    rank: int | None
    entropy: float
    top: list[tuple[int, float]]

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data."""
        return asdict(self)


class Predictions(Sequence[Prediction]):
    """The predictions at all positions. One is computed when it is first read, since a large vocabulary makes it dear.

    `log_probabilities` yields slices of given positions, counted from the first of them, with log-probabilities (t, V).
    """

    def __init__(
        self, token_ids: Sequence[int], log_probabilities: Callable[[slice], Iterator[tuple[slice, Tensor]]]
    ) -> None:
        self._follows: list[int | None] = [*token_ids[1:], None]
        self._log_probabilities = log_probabilities
        self._found: dict[int, Prediction] = {}

    def __len__(self) -> int:
        return len(self._follows)

    @overload
    def __getitem__(self, place: int) -> Prediction: ...

    @overload
    def __getitem__(self, place: slice) -> list[Prediction]: ...

    def __getitem__(self, place: int | slice) -> Prediction | list[Prediction]:
        if isinstance(place, slice):
            return list(self)[place]
        position = range(len(self))[place]
        if position not in self._found:
            self._read(position, position + 1)
        return self._found[position]

    def __iter__(self) -> Iterator[Prediction]:
        if len(self._found) < len(self):
            self._read(0, len(self))
        return (self._found[position] for position in range(len(self)))

    def _read(self, begin: int, end: int) -> None:
        for places, log_p in self._log_probabilities(slice(begin, end)):
            p = log_p.exp()
            entropy = -(p * log_p.clamp(min=-1e4)).sum(-1)
            best, ids = p.topk(min(_SHOWN, p.shape[-1]))
            for row, position in enumerate(range(begin + places.start, begin + places.stop)):
                actual = self._follows[position]
                own = None if actual is None else float(log_p[row, actual])
                rank = None if actual is None else int((log_p[row] > log_p[row, actual]).sum()) + 1
                top = [(int(i), float(x)) for i, x in zip(ids[row], best[row], strict=True)]
                self._found[position] = Prediction(position, actual, own, rank, float(entropy[row]), top)
