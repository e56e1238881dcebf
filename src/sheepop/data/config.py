"""The settings under ``data``: which text to read, how to clean and split it, and how to cut it into sequences."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config, PathText
from sheepop.core.errors import ConfigError
from sheepop.core.keys import MayChange
from sheepop.data.clean.config import CleanConfig
from sheepop.data.discovery import ignore_spec
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.template import SOURCE, TARGET
from sheepop.data.mixing import MixedSource

DocumentMode = Literal["file", "line", "blank_line"]
SplitMode = Literal["document", "tail"]

# Pairs are labelled by hand or made by a rule: unusual prose is no fault, and nearly equal pairs may be intended. Equal
# pairs could land in both splits.
_STAGES_OF_PAIRS = ("exact_duplicates",)


class FimConfig(Config):
    """Fill-in-the-middle for documents of code (Bavarian et al. 2022)."""

    rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """The share of code documents that is reordered; 0 reorders none."""
    spm_rate: float = Field(default=0.5, ge=0.0, le=1.0)
    """The share of reordered documents in which the suffix comes before the prefix."""


class DataConfig(Config):
    """The source of the text, and how it is cut into documents, cleaned, split and cut into sequences."""

    paths: MayChange[tuple[PathText, ...]] = ()
    """Files, folders, git repositories (`git+PATH@REVISION`), or one finished corpus directory. A resumed run accepts
    a corpus that was moved, and refuses different text."""
    documents: DocumentMode = "file"
    """How running text is cut into documents: one per `file`, per `line`, or per block between blank lines
    (`blank_line`); pages, tables and records stay whole."""
    split: SplitMode = "document"
    """How the validation split is made: by `document`, or from the contiguous `tail` of the text. With fewer than 20
    documents it is always a tail."""
    validation_fraction: float = Field(default=0.05, ge=0.0, lt=1.0)
    """The share of the text that is held out; 0 holds nothing out."""
    packing: bool = True
    """Join documents into full rows; `false` cuts each document into padded chunks of its own."""
    max_length: int | None = Field(default=None, ge=1)
    """Tokens in a row, at most `model.max_seq_len`, which is also the value for `null`."""
    stride: int | None = Field(default=None, ge=1)
    """Tokens from the start of one chunk to the start of the next, with `packing: false`; `null` is `max_length`."""
    long_pairs: Literal["refuse", "leave_out"] = "refuse"
    """Pairs for an encoder-decoder with a side of more than `max_length` tokens: `refuse` the run, or `leave_out`
    these pairs and report how many."""
    num_workers: MayChange[int] = Field(default=0, ge=0)
    """Worker processes; 0 uses only the main process. The result is the same. `data build` uses one per core by
    default."""
    max_file_bytes: int = Field(default=2**40, ge=1)
    """Largest file to read, in bytes; larger files are skipped and listed."""
    ignore: tuple[str, ...] = ()
    """Files to skip, as `.gitignore` patterns."""
    follow_links: bool = False
    """Read what symbolic links that lead out of the given paths lead to."""
    extract: ExtractConfig = ExtractConfig()
    """What is read from a file, and the limits."""
    clean: CleanConfig = CleanConfig()
    """The cleaning stages, their order, and how strict each is."""
    mix: tuple[MixedSource, ...] = ()
    """How often documents of certain files occur in the training text. A file belongs to the first source whose
    pattern matches it."""
    infilling: FimConfig = FimConfig()
    """Reordering of code documents, so that a model learns to fill in the middle."""

    @field_validator("paths")
    @classmethod
    def _no_empty_path(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        if any(not path.strip() for path in paths):
            raise ValueError("a path is empty; give files or folders, or leave the list empty")
        return paths

    @field_validator("ignore")
    @classmethod
    def _patterns_compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        ignore_spec(patterns)
        return patterns

    @field_validator("mix")
    @classmethod
    def _one_measure(cls, mix: tuple[MixedSource, ...]) -> tuple[MixedSource, ...]:
        if len({source.epochs is None for source in mix}) > 1:
            raise ValueError("some sources have epochs and others a weight; use one of the two for all")
        return mix

    @model_validator(mode="after")
    def _stride_fits(self) -> DataConfig:
        if self.stride is not None and self.packing:
            raise ValueError(
                f"stride = {self.stride} is for padded chunks, but packing is on. Set data.packing=false to cut "
                "each document into chunks, or leave stride out"
            )
        if self.stride is not None and self.max_length is not None and self.stride > self.max_length:
            raise ValueError(
                f"stride = {self.stride} is greater than max_length = {self.max_length}, so tokens between chunks "
                "would be lost; choose a stride of at most max_length"
            )
        return self


def pair_settings(config: DataConfig, given: DataConfig) -> DataConfig:
    """`config` with the defaults for pairs, except where `given`, the config before anything was derived, sets a value.

    By default pairs come from the fields ``source`` and ``target``, are not packed, and go through the stage for exact
    duplicates only. Raises `ConfigError` if `given` has a setting that pairs do not support.
    """
    refused = {
        "packing=true": "packing" in given.model_fields_set and given.packing,
        "stride": given.stride is not None,
        "infilling.rate": given.infilling.rate > 0,
        "extract.column": given.extract.column is not None,
        "extract.template": given.extract.template is not None,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ConfigError(f"data.{name} is for text, but an encoder-decoder learns from pairs. Leave it out.")
    changes: dict[str, Any] = {"packing": False}
    if config.extract.pair is None:
        changes["extract"] = {**config.extract.model_dump(), "pair": (SOURCE, TARGET)}
    if not given.clean.model_fields_set & {"stages", "preset"}:
        changes["clean"] = {**config.clean.model_dump(), "stages": _STAGES_OF_PAIRS}
    return config.replace(**changes)
