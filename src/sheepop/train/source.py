"""Where the data of each step comes from: a corpus that is read ahead, or whatever is made while training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from sheepop.data import Batch, StepPlan, batch_hash
from sheepop.parallel.layout import Layout
from sheepop.parallel.parts import SharingRanks
from sheepop.train.objective import Objective
from sheepop.train.tensor_batch import TensorBatch


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """The micro-batches of a step in host memory, and three counts of its tokens.

    `num_tokens` normalises the objective: what counts in the whole step, on all ranks, tokens or pairs. `num_reported`
    is what the step adds to the tokens that a run was trained on. `num_computed` is what the network computes with,
    padding too, and what speed is measured by. `measured` is what the source has to say of the data, for the log. Where
    ranks share the step, these micro-batches are those of one rank, from number `first` of the step on, and rows
    may be one of `parts_of_rows` each.
    """

    micro_batches: Sequence[TensorBatch]
    num_tokens: int
    num_reported: int
    num_computed: int
    batch_hash: str | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    first: int = 0
    parts_of_rows: int = 1

    def part(self, numbers: range) -> PreparedStep:
        """The same step with the micro-batches of these numbers only."""
        return replace(self, micro_batches=self.micro_batches[numbers.start : numbers.stop], first=numbers.start)

    def padded(self, multiple: int, *, evenly: bool) -> PreparedStep:
        """The same step with rows filled up to a multiple of some tokens, and `evenly` to the longest of these."""
        least = max(batch.labels.shape[-1] for batch in self.micro_batches) if evenly else 0
        return replace(self, micro_batches=[batch.padded(multiple, least=least) for batch in self.micro_batches])

    def columns(self, ranks: SharingRanks) -> PreparedStep:
        """The same step with this rank's tokens of every row."""
        batches = [batch.columns(ranks.columns(batch.labels.shape[-1])) for batch in self.micro_batches]
        return replace(self, micro_batches=batches, parts_of_rows=ranks.size)

    @property
    def row_length(self) -> int:
        """The tokens of a row, the same in all of them, or of pairs those of the first micro-batch."""
        return self.micro_batches[0].labels.shape[-1] * self.parts_of_rows

    @classmethod
    def of(
        cls, batch: Batch, micro_batch_size: int, objective: Objective, *, device: str, hashed: bool = False
    ) -> PreparedStep:
        """Cuts `batch` into micro-batches of at most `micro_batch_size` rows; the last one may be smaller."""
        starts = range(0, len(batch.input_ids), micro_batch_size)
        pieces = [batch.rows(slice(start, start + micro_batch_size)) for start in starts]
        num_tokens = sum(objective.supervised(piece) for piece in pieces)
        return cls(
            [TensorBatch.on_host(piece, pin=device == "cuda") for piece in pieces],
            num_tokens=num_tokens,
            num_reported=batch.num_labels,
            num_computed=sum(piece.labels.size for piece in pieces),
            batch_hash=batch_hash(batch) if hashed else None,
        )


class StepSource(Protocol):
    """Gives every step its data by number. The number is that of the batch: batches may be left out."""

    @property
    def ahead(self) -> int:
        """How many steps may be prepared before they are taken; 0 for data that the weights themselves make.

        Above 0 `prepare` runs on a thread of its own and must be a function of the number alone.
        """

    def prepare(self, number: int) -> PreparedStep:
        """The data of batch `number`."""

    def describe(self, number: int) -> list[str]:
        """The names of the documents that batch `number` is made of, as far as they are known."""

    def state(self) -> dict[str, Tensor]:
        """What it must be given back to go on as it would have; nothing where data depends on the number alone."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave."""
        return


@dataclass(frozen=True, eq=False)
class SharedSource(StepSource):
    """This rank's part of every step of `whole`: as many micro-batches as each other rank has."""

    whole: StepSource
    layout: Layout
    context: SharingRanks | None = None

    @property
    def ahead(self) -> int:
        """As many as of the whole."""
        return self.whole.ahead

    def prepare(self, number: int) -> PreparedStep:
        """The part of that batch, with the counts of all of it."""
        step = self.whole.prepare(number)
        step = step.part(self.layout.share(len(step.micro_batches)))
        step = step.padded(self.layout.parts_of_rows, evenly=self.layout.config.pipeline > 1)
        return step if self.context is None else step.columns(self.context)

    def describe(self, number: int) -> list[str]:
        """The documents of all of it."""
        return self.whole.describe(number)

    def state(self) -> dict[str, Tensor]:
        """That of the whole."""
        return self.whole.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Gives it to the whole."""
        self.whole.restore(state)


@dataclass(frozen=True, eq=False)
class PlannedSource(StepSource):
    """The batches of a plan, cut into micro-batches of `micro_batch_size` whole rows.

    `documents` names those of a batch; with `hashed` every step carries the hash of its batch.
    """

    plan: StepPlan
    objective: Objective
    micro_batch_size: int
    device: str
    ahead: int = 0
    hashed: bool = False
    documents: Callable[[int], list[str]] = lambda number: []

    def prepare(self, number: int) -> PreparedStep:
        """The batch as micro-batches; those of shorter rows have more of them, and as many tokens."""
        rows = self.micro_batch_size * self.plan.pieces(number)
        return PreparedStep.of(self.plan.batch(number), rows, self.objective, device=self.device, hashed=self.hashed)

    def describe(self, number: int) -> list[str]:
        """The names that `documents` gives."""
        return self.documents(number)
