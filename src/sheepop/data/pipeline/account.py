"""The account of a build: what every stage was given, kept, changed and removed, added up over the parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sheepop.data.clean.ledger import Samples, SourceAccount, StageAccount


@dataclass
class Flow:
    """Documents and bytes between two stages."""

    documents: int = 0
    num_bytes: int = 0


class Account:
    """The parts' accounts added up; `stages` is the order in which documents went through them."""

    def __init__(self, stages: Iterable[str]) -> None:
        self.source = SourceAccount()
        self.stages = {name: StageAccount() for name in stages}
        self._samples = Samples()
        self.written = Flow()

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds the account of a part of the first pass or of a later one."""
        if record.get("source"):
            self.source.add(record["source"])
        for name, stage in record["stages"].items():
            self.stages[name].add(stage)
        for sample in record["removed_samples"]:
            self._samples.offer(sample["key"], {k: v for k, v in sample.items() if k != "key"})

    def removed_samples(self) -> list[dict[str, Any]]:
        """Removed documents chosen at random, with their excerpts."""
        return self._samples.as_record()

    def flows(self) -> list[dict[str, Any]]:
        """One record per stage: documents and bytes in and out, removed and changed by reason.

        Raises AssertionError unless what went in equals what came out plus what was removed.
        """
        flow = Flow(self.source.documents, self.source.num_bytes)
        records = []
        for name, stage in self.stages.items():
            removed, removed_bytes = stage.removed.total(), stage.removed_bytes.total()
            out = Flow(flow.documents - removed, flow.num_bytes - removed_bytes + stage.added_bytes)
            records.append(
                {
                    "stage": name,
                    "documents_in": flow.documents,
                    "bytes_in": flow.num_bytes,
                    "documents_out": out.documents,
                    "bytes_out": out.num_bytes,
                    **stage.as_record(),
                }
            )
            flow = out
        assert (flow.documents, flow.num_bytes) == (self.written.documents, self.written.num_bytes), (
            f"{flow} after the stages, {self.written} written"
        )
        return records
