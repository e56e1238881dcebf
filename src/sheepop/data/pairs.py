"""Pairs of a source and a target: as documents with two marks, and the settings that follow from reading them."""

from __future__ import annotations

from typing import Any, NamedTuple

from sheepop.core.errors import ConfigError, DataError
from sheepop.data.config import DataConfig
from sheepop.data.documents import Document
from sheepop.data.extract.template import SOURCE, TARGET, sides

# Pairs are labelled by hand or made by a rule: what is unusual prose is no fault of theirs, and nearly equal ones may
# be what they teach. Equal ones would be held out and trained on.
_STAGES = ("exact_duplicates",)


class Pair(NamedTuple):
    """What is read and what is to be written."""

    source: str
    target: str

    @classmethod
    def of(cls, document: Document) -> Pair:
        """The pair that a document of this kind holds; raises `DataError` when its marks do not say so."""
        found = sides(document.text, document.marks)
        if found is None:
            raise DataError(f"{document.source}, {document.place}: it is not a pair of source and target.")
        return cls(*found)


def pair_settings(config: DataConfig, given: DataConfig) -> DataConfig:
    """`config` with what reading pairs implies, where `given`, the same before anything was derived, does not say it.

    Pairs are read from the fields ``source`` and ``target``, are not packed, and pass no cleaning stage but that of
    exact duplicates. Raises `ConfigError` for a setting that was given and that pairs cannot have.
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
        changes["clean"] = {**config.clean.model_dump(), "stages": _STAGES}
    return config.replace(**changes)
