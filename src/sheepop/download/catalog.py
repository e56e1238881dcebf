"""The datasets that can be downloaded by name, and the request that a name stands for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sheepop.core.errors import UsageError, first_few

HUB = "hub:"
# The most names in a message.
MOST_NAMES = 40
_REPOSITORY_PART = r"[A-Za-z0-9](?:[\w.-]{0,95})"
_HUB_NAME = re.compile(
    rf"(?P<repository>{_REPOSITORY_PART}/{_REPOSITORY_PART})(?:/(?P<subset>[^/:][^:]*))?"
    r"(?::(?P<split>[^:]*))?(?::(?P<column>.*))?",
    re.ASCII,
)
_OPTION = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a dataset, or a row of the catalogue, in which ``{}`` stands for the option described by `option`.

    `repository` and `subset` (a configuration of the dataset) are names on the hub. `patterns` match its data files; if
    empty, the repository describes them. `licence` is the one to state if the card has none. None means every split,
    an unambiguous column, and no limit (in bytes to transfer), respectively.
    """

    name: str
    repository: str
    subset: str | None
    patterns: tuple[str, ...] = ()
    licence: str | None = None
    note: str = ""
    option: str = ""
    default: str = ""
    split: str | None = None
    column: str | None = "text"
    limit: int | None = None

    @property
    def folder(self) -> str:
        """The name of the dataset's folder."""
        if not self.name.startswith(HUB):
            return self.name.replace(":", "-")
        parts = (*self.repository.split("/"), self.subset, self.split)
        return re.sub(r"[^\w.-]+", "-", "--".join(part for part in parts if part))


_WIKIPEDIA_LICENCE = "CC BY-SA 3.0 and GFDL"
_ROWS = (
    *(
        Request(
            f"wikitext-{size}",
            "Salesforce/wikitext",
            f"wikitext-{size}-raw-v1",
            (f"wikitext-{size}-raw-v1/*.parquet",),
            _WIKIPEDIA_LICENCE,
            "Good and featured articles of the English Wikipedia (Merity et al. 2016), unprocessed. A row is a line.",
        )
        for size in (2, 103)
    ),
    Request(
        "tinyshakespeare",
        "karpathy/tiny_shakespeare",
        "default",
        ("data/*.parquet",),
        None,
        "40,000 lines of Shakespeare's plays, which are in the public domain. A split is one row.",
    ),
    Request(
        "tinystories",
        "roneneldan/TinyStories",
        "default",
        ("data/*.parquet",),
        "CDLA-Sharing-1.0",
        "Short stories in the words of a small child, written by GPT-3.5 and GPT-4 (Eldan and Li 2023).",
    ),
    Request(
        "openwebtext",
        "Skylion007/openwebtext",
        "plain_text",
        ("plain_text/*.parquet", "data/*.parquet"),
        "CC0 1.0 for the collection",
        "Web pages that were linked on Reddit (Gokaslan and Cohen 2019). The pages belong to their authors.",
    ),
    Request(
        "fineweb-edu",
        "HuggingFaceFW/fineweb-edu",
        "sample-10BT",
        ("sample/10BT/*.parquet",),
        "ODC-By 1.0",
        "Educational web pages (Penedo et al. 2024): the sample of about 10 billion tokens.",
    ),
    Request(
        "wikipedia",
        "wikimedia/wikipedia",
        "20231101.{}",
        ("20231101.{}/*.parquet",),
        _WIKIPEDIA_LICENCE,
        "Articles as of 1 November 2023, without markup. wikipedia:de is the German edition, and so on.",
        option="a language, such as wikipedia:de",
        default="en",
    ),
    Request(
        "amazon-reviews",
        "McAuley-Lab/Amazon-Reviews-2023",
        "raw_review_{}",
        ("raw/review_categories/{}.jsonl",),
        None,
        "571 million reviews up to September 2023 (Hou et al. 2024). amazon-reviews:Books is one category.",
        option="a category, such as amazon-reviews:All_Beauty",
        default="*",
    ),
    Request(
        "bookcorpus",
        "bookcorpus/bookcorpus",
        "plain_text",
        ("plain_text/*.parquet", "data/*.parquet"),
        None,
        "Unpublished novels (Zhu et al. 2015), one sentence a row. Their authors were not asked.",
    ),
)
CATALOG = {row.name: row for row in _ROWS}


def find(name: str, limit: int | None = None) -> Request:
    """The request for `name`; raises `UsageError` with the nearest names if it is unknown."""
    name = name.strip()
    if name.startswith(HUB):
        return _from_hub(name, limit)
    key, colon, option = name.partition(":")
    row = CATALOG.get(key.lower())
    if row is None:
        close = difflib.get_close_matches(name.lower(), CATALOG, n=3, cutoff=0.5)
        close = [f"{HUB}{name}"] if "/" in name and _HUB_NAME.fullmatch(name) else close
        raise UsageError(
            f"There is no dataset {name!r} in the catalogue.{_meant(close)} It has {', '.join(CATALOG)}; for any other "
            "dataset on the hub, write hub:OWNER/DATASET."
        )
    if colon and not row.option:
        raise UsageError(f"{key} has no parts to choose from, but {name!r} names one. Ask for {row.name}.")
    if colon and not _OPTION.fullmatch(option):
        raise UsageError(f"{name!r} does not name {row.option}.")
    chosen = option or row.default
    return replace(
        row,
        name=row.name + colon + option,
        subset=row.subset.format(chosen) if row.subset is not None and chosen != "*" else None,
        patterns=tuple(pattern.format(chosen) for pattern in row.patterns),
        limit=limit,
    )


def _from_hub(name: str, limit: int | None) -> Request:
    match = _HUB_NAME.fullmatch(name.removeprefix(HUB))
    if match is None:
        raise UsageError(
            f"{name!r} is not the name of a dataset on the hub. Write hub:OWNER/DATASET, then /SUBSET, :SPLIT and "
            ":COLUMN where you want one, such as hub:allenai/c4/en:validation:text."
        )
    subset, split, column = (match[part] or None for part in ("subset", "split", "column"))
    return Request(name, match["repository"], subset, split=split, column=column, limit=limit)


def no_such(place: str, what: str, name: str, names: Sequence[str]) -> str:
    """The message that `place` has nothing of that name, with the nearest of `names`."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"{place} has no {what} {name!r}.{_meant(close)} It has: {first_few(names, MOST_NAMES)}."


def _meant(close: list[str]) -> str:
    return f" Did you mean {' or '.join(close)}?" if close else ""
