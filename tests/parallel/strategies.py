"""Every way to share a run: what is proven of one of them is proven of all. A new one is a new row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Strategy:
    """How many ranks, their layout as `parallel` has it, and what it needs of the network and of the data."""

    ranks: int
    layout: Mapping[str, Any]
    network: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shares_rows_only(self) -> bool:
        """Whether ranks have whole passes of their own: data ranks alone."""
        return self.layout.keys() <= {"zero", "shard"}

    @property
    def puts_off_weights(self) -> bool:
        """Whether it goes without compiled blocks and activation checkpointing; see `sheepop.jobs.run.resolve`."""
        return self.layout.get("schedule") == "zero_bubble"

    @property
    def compiles(self) -> bool:
        """Whether blocks may be compiled."""
        return not self.puts_off_weights

    @property
    def options(self) -> list[str]:
        """The same on the command line, the rest of the layout as it is by itself."""
        layout = [f"parallel.{name}={value}" for name, value in {**_USUAL, **self.layout}.items()]
        return [*layout, *self.needs]

    @property
    def needs(self) -> list[str]:
        """What it needs of network and data, on the command line."""
        # Loads are evened out within a micro-batch, so those of experts have one size in every layout.
        rows = ["training.micro_batch_size=2"] if "experts" in self.network else []
        trees = {"model": self.network, "data": self.data}
        return [*(f"{tree}.{name}={value}" for tree, needs in trees.items() for name, value in needs.items()), *rows]


_USUAL = {
    "zero": 0, "shard": "null", "tensor": 1, "context": 1, "context_method": "ulysses", "expert": 1, "pipeline": 1,
    "schedule": "1f1b",
}  # fmt: skip
_EXPERTS = {"experts": {"count": 4, "per_token": 2, "shared": 1, "d_ff": 32}}
_RING, _ONE_DOCUMENT = {"context_method": "ring"}, {"packing": "false"}

STRATEGIES = {
    "zero 0": Strategy(2, {"zero": 0}),
    "zero 1": Strategy(2, {"zero": 1}),
    "zero 2": Strategy(2, {"zero": 2}),
    "zero 3": Strategy(2, {"zero": 3}),
    "HSDP": Strategy(4, {"zero": 3, "shard": 2}),
    "tensor": Strategy(2, {"tensor": 2}),
    "context": Strategy(2, {"context": 2}),
    "ring": Strategy(2, {"context": 2, **_RING}, data=_ONE_DOCUMENT),
    "expert": Strategy(2, {"expert": 2, "zero": 1}, _EXPERTS),
    "gpipe": Strategy(2, {"pipeline": 2, "schedule": "gpipe"}),
    "1f1b": Strategy(2, {"pipeline": 2}),
    "interleaved": Strategy(2, {"pipeline": 2, "schedule": "interleaved"}),
    "zero bubble": Strategy(2, {"pipeline": 2, "schedule": "zero_bubble"}),
    "data x tensor": Strategy(4, {"zero": 3, "tensor": 2}),
    "data x context": Strategy(4, {"zero": 2, "context": 2}),
    "data x pipeline": Strategy(4, {"zero": 1, "pipeline": 2}),
    "ring x data": Strategy(4, {"zero": 2, "context": 2, **_RING}, data=_ONE_DOCUMENT),
    "context x tensor": Strategy(4, {"zero": 3, "context": 2, "tensor": 2}),
    "expert x context x tensor": Strategy(4, {"expert": 4, "context": 2, "tensor": 2}, _EXPERTS),
    "expert x pipeline": Strategy(4, {"expert": 2, "pipeline": 2}, _EXPERTS),
    "tensor x pipeline": Strategy(4, {"tensor": 2, "pipeline": 2, "schedule": "zero_bubble"}),
    "context x pipeline": Strategy(4, {"context": 2, "pipeline": 2, "schedule": "interleaved"}),
}
