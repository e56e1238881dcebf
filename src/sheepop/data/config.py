"""The settings under ``data``: which text, cut how, and how batches are drawn from it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config, PathText
from sheepop.data.clean.config import CleanConfig
from sheepop.data.discovery import ignore_spec
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.infilling_config import FimConfig
from sheepop.data.mixing import MixedSource, require_one_measure

DocumentMode = Literal["file", "line", "blank_line"]
SplitMode = Literal["document", "tail"]


class DataConfig(Config):
    """Where text comes from, what a document is, how it is split and cut into sequences.

    `paths` are files, folders or a finished corpus directory. `documents` says what one document is: a file, a
    line, or a block between blank lines. `split` is by document or by a contiguous tail; `validation_fraction`
    is the share held out (0 holds nothing out). `packing` joins documents into full sequences; without it every
    document is cut into chunks of `max_length` that begin `stride` tokens apart. `max_length` null means the
    model's `max_seq_len`, `stride` null means `max_length`. Of pairs for an encoder-decoder neither side may be longer
    than `max_length`; `long_pairs` says whether others are refused, or left out and counted. `num_workers` counts
    worker processes, 0 works in this one; it never changes the result. Files over `max_file_bytes` are skipped.
    `ignore` are patterns as in a ``.gitignore``. `extract` says how files become documents, `clean` which stages
    documents go through, `mix` how often the documents of which files occur in the training text, `infilling` which
    code is re-ordered for fill-in-the-middle.
    """

    paths: tuple[PathText, ...] = ()
    documents: DocumentMode = "file"
    split: SplitMode = "document"
    validation_fraction: float = Field(default=0.05, ge=0.0, lt=1.0)
    packing: bool = True
    max_length: int | None = Field(default=None, ge=1)
    stride: int | None = Field(default=None, ge=1)
    long_pairs: Literal["refuse", "leave_out"] = "refuse"
    num_workers: int = Field(default=0, ge=0)
    max_file_bytes: int = Field(default=2**40, ge=1)
    ignore: tuple[str, ...] = ()
    extract: ExtractConfig = ExtractConfig()
    clean: CleanConfig = CleanConfig()
    mix: tuple[MixedSource, ...] = ()
    infilling: FimConfig = FimConfig()

    @field_validator("paths")
    @classmethod
    def _no_empty_path(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        if any(not path.strip() for path in paths):
            raise ValueError("a path is empty; give files or folders, or leave the list empty")
        return paths

    @field_validator("ignore")
    @classmethod
    def _patterns_compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            ignore_spec([pattern])
        return patterns

    @field_validator("mix")
    @classmethod
    def _one_measure(cls, mix: tuple[MixedSource, ...]) -> tuple[MixedSource, ...]:
        require_one_measure(mix)
        return mix

    @model_validator(mode="after")
    def _stride_fits(self) -> DataConfig:
        if self.stride is not None and self.packing:
            raise ValueError(
                f"stride = {self.stride} is for padded chunks, and packing is on. Set data.packing=false to cut each "
                "document into chunks, or leave stride out"
            )
        if self.stride is not None and self.max_length is not None and self.stride > self.max_length:
            raise ValueError(
                f"stride = {self.stride} is greater than max_length = {self.max_length}, so tokens between chunks "
                "would be lost; choose a stride of at most max_length"
            )
        return self
