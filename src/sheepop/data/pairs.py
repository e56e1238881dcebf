"""Pairs of a source and a target, stored as documents with two marks, and the settings for reading them."""

from __future__ import annotations

from typing import Any, NamedTuple

from sheepop.core.errors import ConfigError, DataError
from sheepop.data.config import DataConfig
from sheepop.data.documents import Document
from sheepop.data.extract.template import SOURCE, TARGET, sides

# Pairs are labelled by hand or made by a rule: unusual prose is no fault, and nearly equal pairs may be intended. Equal
# pairs could land in both splits.
_STAGES = ("exact_duplicates",)


class Pair(NamedTuple):
    """The text to read and the text to write."""

    source: str
    target: str

    @classmethod
    def of(cls, document: Document) -> Pair:
        """The pair in a document; raises `DataError` if its marks do not separate source and target."""
        found = sides(document.text, document.marks)
        if found is None:
            raise DataError(f"{document.source}, {document.place}: it is not a pair of source and target.")
        return cls(*found)


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
        changes["clean"] = {**config.clean.model_dump(), "stages": _STAGES}
    return config.replace(**changes)
