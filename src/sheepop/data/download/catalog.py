"""The datasets that can be downloaded by name, and what a name asks for."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from sheepop.core.errors import UsageError

HUB = "hub:"
_REPOSITORY_PART = r"[A-Za-z0-9](?:[\w.-]{0,95})"
_HUB_NAME = re.compile(
    rf"(?P<repository>{_REPOSITORY_PART}/{_REPOSITORY_PART})(?:/(?P<subset>[^/:][^:]*))?"
    r"(?::(?P<split>[^:]*))?(?::(?P<column>.*))?",
    re.ASCII,
)
_OPTION = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Request:
    """What one name asks for.

    `repository` and `subset` (a configuration of the dataset) are names on the hub; `patterns` are those of its files
    that hold the data, none when the repository itself must say. `split` null takes every split, `column` null the
    one that can only be meant. `licence` is what is known of it beforehand.
    """

    name: str
    folder: str
    repository: str
    subset: str | None
    split: str | None = None
    column: str | None = None
    patterns: tuple[str, ...] = ()
    licence: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the catalogue. ``{}`` in `subset` and `patterns` stands for the option, which `option` describes."""

    repository: str
    subset: str
    patterns: tuple[str, ...]
    licence: str | None
    note: str
    column: str = "text"
    option: str = ""
    default: str = ""


_WIKIPEDIA_LICENCE = "CC BY-SA 3.0 and GFDL"
_WIKITEXT = "Good and featured articles of the English Wikipedia (Merity et al. 2016), unprocessed. A row is a line."

CATALOG: dict[str, Entry] = {
    "wikitext-2": Entry(
        "Salesforce/wikitext", "wikitext-2-raw-v1", ("wikitext-2-raw-v1/*.parquet",), _WIKIPEDIA_LICENCE, _WIKITEXT
    ),
    "wikitext-103": Entry(
        "Salesforce/wikitext", "wikitext-103-raw-v1", ("wikitext-103-raw-v1/*.parquet",), _WIKIPEDIA_LICENCE, _WIKITEXT
    ),
    "tinyshakespeare": Entry(
        "karpathy/tiny_shakespeare",
        "default",
        ("data/*.parquet",),
        None,
        "40,000 lines of Shakespeare's plays, which are in the public domain. A split is one row.",
    ),
    "tinystories": Entry(
        "roneneldan/TinyStories",
        "default",
        ("data/*.parquet",),
        "CDLA-Sharing-1.0",
        "Short stories in the words of a small child, written by GPT-3.5 and GPT-4 (Eldan and Li 2023).",
    ),
    "openwebtext": Entry(
        "Skylion007/openwebtext",
        "plain_text",
        ("plain_text/*.parquet", "data/*.parquet"),
        "CC0 1.0 for the collection",
        "Web pages that were linked on Reddit (Gokaslan and Cohen 2019). The pages belong to their authors.",
    ),
    "fineweb-edu": Entry(
        "HuggingFaceFW/fineweb-edu",
        "sample-10BT",
        ("sample/10BT/*.parquet",),
        "ODC-By 1.0",
        "Educational web pages (Penedo et al. 2024): the sample of about 10 billion tokens.",
    ),
    "wikipedia": Entry(
        "wikimedia/wikipedia",
        "20231101.{}",
        ("20231101.{}/*.parquet",),
        _WIKIPEDIA_LICENCE,
        "Articles as of 1 November 2023, without markup. wikipedia:de is the German edition, and so on.",
        option="a language, such as wikipedia:de",
        default="en",
    ),
    "amazon-reviews": Entry(
        "McAuley-Lab/Amazon-Reviews-2023",
        "raw_review_{}",
        ("raw/review_categories/{}.jsonl",),
        None,
        "571 million reviews up to September 2023 (Hou et al. 2024). amazon-reviews:Books is one category.",
        option="a category, such as amazon-reviews:All_Beauty",
        default="*",
    ),
    "bookcorpus": Entry(
        "bookcorpus/bookcorpus",
        "plain_text",
        ("plain_text/*.parquet", "data/*.parquet"),
        None,
        "Unpublished novels (Zhu et al. 2015), one sentence a row. Their authors were not asked.",
    ),
}


def find(name: str) -> Request:
    """What `name` asks for; raises `UsageError` with the nearest names when nothing of that name is known."""
    name = name.strip()
    if name.startswith(HUB):
        return _from_hub(name)
    key, colon, option = name.partition(":")
    entry = CATALOG.get(key.lower())
    if entry is None:
        raise UsageError(_unknown(name))
    if colon and not entry.option:
        raise UsageError(f"{key} has no parts to choose from, but {name!r} names one. Ask for {key.lower()}.")
    if colon and not _OPTION.fullmatch(option):
        raise UsageError(f"{name!r} does not name {entry.option}.")
    chosen = option or entry.default
    return Request(
        name=key.lower() + colon + option,
        folder=f"{key.lower()}-{option}" if colon else key.lower(),
        repository=entry.repository,
        subset=entry.subset.format(chosen) if chosen != "*" else None,
        column=entry.column,
        patterns=tuple(pattern.format(chosen) for pattern in entry.patterns),
        licence=entry.licence,
        note=entry.note,
    )


def _from_hub(name: str) -> Request:
    match = _HUB_NAME.fullmatch(name.removeprefix(HUB))
    if match is None:
        raise UsageError(
            f"{name!r} is not the name of a dataset on the hub. Write hub:OWNER/DATASET, then /SUBSET, :SPLIT and "
            ":COLUMN where you want one, such as hub:allenai/c4/en:validation:text."
        )
    parts = [match[part] or None for part in ("repository", "subset", "split", "column")]
    repository, subset, split, column = parts
    assert repository is not None
    folder = re.sub(r"[^\w.-]+", "-", "--".join(part for part in (*repository.split("/"), subset, split) if part))
    return Request(name, folder, repository, subset, split, column)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), CATALOG, n=3, cutoff=0.5)
    if _HUB_NAME.fullmatch(name) and "/" in name:
        close = [f"{HUB}{name}"]
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"There is no dataset {name!r} in the catalogue.{meant} It has {', '.join(CATALOG)}; for any other dataset "
        "on the hub, write hub:OWNER/DATASET."
    )
