"""Turns files into documents, documents into tokens, and tokens into batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.data.batch_schedule import BatchSchedule, RowSource, SampleOrder, Stages
    from sheepop.data.batches import Batch, Batches, PackedBatches, PaddedBatches, PairBatches, TextBatches, batch_hash
    from sheepop.data.build import build_corpus
    from sheepop.data.config import DataConfig
    from sheepop.data.corpus import Corpus
    from sheepop.data.documents import Document
    from sheepop.data.manifest import is_corpus
    from sheepop.data.pipeline.engine import Engine, LocalEngine, RayEngine
    from sheepop.data.pipeline.workplace import Query
    from sheepop.data.shards import TokenSplit
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "Batch",
    "BatchSchedule",
    "Batches",
    "Corpus",
    "DataConfig",
    "Document",
    "Engine",
    "LocalEngine",
    "PackedBatches",
    "PaddedBatches",
    "PairBatches",
    "Query",
    "RayEngine",
    "RowSource",
    "SampleOrder",
    "Stages",
    "TextBatches",
    "TokenSplit",
    "batch_hash",
    "build_corpus",
    "is_corpus",
]
