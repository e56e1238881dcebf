"""The sources of the data of steps: a corpus, or data that is generated during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from sheepop.data import Batch, BatchSchedule, batch_hash
from sheepop.parallel.layout import Layout
from sheepop.train.objective import Objective
from sheepop.train.tensor_batch import TensorBatch

if TYPE_CHECKING:  # at run time it would load DTensor, which a single process does not need
    from sheepop.parallel.parts import SharingRanks


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """The micro-batches of a step in host memory, and three counts of its tokens.

    The objective is divided by `num_tokens`, the supervised tokens (or pairs) of the whole step on all ranks. The step
    adds `num_reported` tokens to those that the run was trained on. Speed is measured by `num_computed`, all tokens
    that the network computes, including padding. `measured` are metrics of the data, and `samples` texts in them, for
    the logs. If ranks share the step, these are the micro-batches of one rank, the first of which has number `first` in
    the step, and each row may be one of `parts_of_rows` parts.
    """

    micro_batches: Sequence[TensorBatch]
    num_tokens: int
    num_reported: int
    num_computed: int
    batch_hash: str | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    first: int = 0
    parts_of_rows: int = 1

    def part(self, numbers: range) -> PreparedStep:
        """The same step with only the micro-batches of these numbers."""
        return replace(self, micro_batches=self.micro_batches[numbers.start : numbers.stop], first=numbers.start)

    def padded(self, multiple: int, *, evenly: bool) -> PreparedStep:
        """The same step with rows padded to a multiple of tokens; with `evenly`, all to the length of the longest."""
        least = max(batch.labels.shape[-1] for batch in self.micro_batches) if evenly else 0
        return replace(self, micro_batches=[batch.padded(multiple, least=least) for batch in self.micro_batches])

    def columns(self, ranks: SharingRanks) -> PreparedStep:
        """The same step with this rank's tokens of every row."""
        batches = [batch.columns(ranks.columns(batch.labels.shape[-1])) for batch in self.micro_batches]
        return replace(self, micro_batches=batches, parts_of_rows=ranks.size)

    @property
    def row_length(self) -> int:
        """The tokens of a row, which all rows share; for pairs, those of the first micro-batch."""
        return self.micro_batches[0].labels.shape[-1] * self.parts_of_rows

    @classmethod
    def of(
        cls, batch: Batch, micro_batch_size: int, objective: Objective, *, device: str, hashed: bool = False
    ) -> PreparedStep:
        """Cuts `batch` into micro-batches of at most `micro_batch_size` rows; the last one may be smaller."""
        starts = range(0, len(batch.input_ids), micro_batch_size)
        pieces = [batch.rows(slice(start, start + micro_batch_size)) for start in starts]
        return cls.of_pieces(batch, pieces, objective, device=device, hashed=hashed)

    @classmethod
    def of_pieces(
        cls, batch: Batch, pieces: Sequence[Batch], objective: Objective, *, device: str, hashed: bool = False
    ) -> PreparedStep:
        """The step of `batch`, whose micro-batches are `pieces`."""
        num_tokens = sum(objective.supervised(piece) for piece in pieces)
        return cls(
            [TensorBatch.on_host(piece, pin=device == "cuda") for piece in pieces],
            num_tokens=num_tokens,
            num_reported=batch.num_labels,
            num_computed=sum(piece.labels.size for piece in pieces),
            batch_hash=batch_hash(batch) if hashed else None,
        )


class StepSource(Protocol):
    """Returns the data of each step by the number of its batch; a run may skip batches."""

    @property
    def ahead(self) -> int:
        """How many steps may be prepared in advance; 0 for data that depends on the current weights.

        Above 0, `prepare` runs in a thread of its own and must depend on nothing but the number.
        """

    def prepare(self, number: int) -> PreparedStep:
        """The data of batch `number`."""

    def describe(self, number: int) -> list[str]:
        """The names of the documents in batch `number`, as far as they are known."""

    def state(self) -> dict[str, Tensor]:
        """The state that a resumed run must restore; empty if the data depends only on the number."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state` returned."""
        return


@dataclass(frozen=True, eq=False)
class SharedSource(StepSource):
    """This rank's part of every step of `whole`; all ranks get equally many micro-batches."""

    whole: StepSource
    layout: Layout
    context: SharingRanks | None = None

    @property
    def ahead(self) -> int:
        """The limit of `whole`."""
        return self.whole.ahead

    def prepare(self, number: int) -> PreparedStep:
        """This rank's part of the batch, with the counts of the whole batch."""
        step = self.whole.prepare(number)
        step = step.part(self.layout.share(len(step.micro_batches)))
        step = step.padded(self.layout.parts_of_rows, evenly=self.layout.config.pipeline > 1)
        return step if self.context is None else step.columns(self.context)

    def describe(self, number: int) -> list[str]:
        """The documents of the whole batch."""
        return self.whole.describe(number)

    def state(self) -> dict[str, Tensor]:
        """The state of `whole`."""
        return self.whole.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores the state of `whole`."""
        self.whole.restore(state)


@dataclass(frozen=True, eq=False)
class ScheduledSource(StepSource):
    """The batches of a schedule, cut into micro-batches of `micro_batch_size` whole rows.

    `documents` returns the names of the documents of a batch; with `hashed`, each step has the hash of its batch.
    """

    schedule: BatchSchedule
    objective: Objective
    micro_batch_size: int
    device: str
    ahead: int = 0
    hashed: bool = False
    documents: Callable[[int], list[str]] = lambda number: []

    def prepare(self, number: int) -> PreparedStep:
        """The batch as micro-batches; those of shorter rows have more rows, so that all have equally many tokens."""
        rows = self.micro_batch_size * self.schedule.pieces(number)
        return PreparedStep.of(
            self.schedule.batch(number), rows, self.objective, device=self.device, hashed=self.hashed
        )

    def describe(self, number: int) -> list[str]:
        """The names that `documents` returns."""
        return self.documents(number)
