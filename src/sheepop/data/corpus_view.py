"""Looks into a corpus: what became of a file, and how two builds differ."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import zstandard

from sheepop.core.errors import DataError
from sheepop.data.clean.account import Account
from sheepop.data.config import DataConfig
from sheepop.data.corpus import QUARANTINE, REMOVED, Corpus
from sheepop.data.documents import Document, Draft
from sheepop.data.extract.extraction import Extraction
from sheepop.data.extract.interface import Refused
from sheepop.data.pipeline.passes import GLOBAL_STAGES, local_stages
from sheepop.data.split import SPLITS

_EXAMPLES = 5
_NUMBER = re.compile(r"\d[\d,]*")


def file_record(corpus: Corpus, name: str) -> list[dict[str, Any]]:
    """What is recorded of the file `name`, in its order: its documents, and what was removed or left out, and why.

    If there is a file at the path `name`, it is read again as for this corpus, and what each stage does to its
    documents is added. Raises `DataError` with similar names if the corpus does not know the file.
    """
    names: set[str] = set()
    found: list[dict[str, Any]] = []
    for record in _everything(corpus):
        names.add(record["file"])
        if f"/{name}".endswith(f"/{record['file']}") or Path(record["file"]).name == name:
            found.append(record)
    found.sort(key=_order)
    path = Path(name)
    if not found and not path.is_file():
        close = get_close_matches(name, names, n=3, cutoff=0.3)
        raise DataError(
            f"{corpus.directory} has nothing of a file {name!r}."
            + (f" Did you mean {', or '.join(close)}?" if close else "")
        )
    return found + (list(_again(corpus, path)) if path.is_file() else [])


def _order(record: dict[str, Any]) -> tuple[str, list[int], int]:
    """Orders records by file, the numbers in their places, and the numbers of their documents in the file."""
    numbers = [int(number.replace(",", "")) for number in _NUMBER.findall(record["place"])]
    return record["file"], numbers, record.get("part", 0)


def _everything(corpus: Corpus) -> Iterator[dict[str, Any]]:
    """Yields a record for each document of the corpus, each removed one, and all that was left out."""
    for split in SPLITS:
        for document in corpus.documents(split):
            about = {"file": document.source, "part": document.part, "place": document.place}
            detail = f"{document.kind}, {document.num_bytes:,} bytes"
            yield {**about, "what": f"kept in {split}", "detail": detail, "text": document.text}
    yield from lost_records(corpus)


def lost_records(corpus: Corpus) -> Iterator[dict[str, Any]]:
    """Yields a record for all that was left out, and each removed document: its `file` and `place`, and why."""
    for line in (corpus.directory / QUARANTINE).read_bytes().splitlines():
        record = json.loads(line)
        detail = f"{record['reason']}: {record['detail']}"
        yield {"file": record["file"], "place": record.get("place", ""), "what": "left out", "detail": detail}
    with (corpus.directory / REMOVED).open("rb") as file, zstandard.open(file, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            detail = ": ".join(filter(None, (record["reason"], record["detail"])))
            what = f"removed by {record['stage']}"
            about = {"file": record["file"], "part": record["part"], "place": record["place"]}
            yield {**about, "what": what, "detail": detail}


def _again(corpus: Corpus, path: Path) -> Iterator[dict[str, Any]]:
    """Yields what is read from a file now, and what each stage that judges one document at a time does to it."""
    config = DataConfig.model_validate(corpus.manifest["config"]["data"])
    names = [name for name in config.clean.stages if name not in GLOBAL_STAGES]
    account = Account(corpus.manifest["config"]["seed"])
    stages = list(zip(names, local_stages(config.clean, names, account, account.seed), strict=True))
    with closing(Extraction(config.extract)) as extraction:
        for item in extraction.documents(path, path.name):
            about = {"file": path.name, "place": item.place}
            if isinstance(item, Refused):
                yield {**about, "what": "cannot be read now", "detail": f"{item.reason}: {item.detail}"}
                continue
            yield {
                **about,
                "what": "read now",
                "detail": f"{item.kind}, {len(item.text):,} characters",
                "text": item.text,
            }
            draft: Draft | None = Draft(item.text, path.name, 0, item.kind, item.language, item.place, list(item.marks))
            for name, stage in stages:
                if draft is None:
                    break
                before, removed = draft.text, account.stage(name).removed.copy()
                draft = next(stage.run(iter([draft])), None)
                if draft is None:
                    reasons = ", ".join(account.stage(name).removed - removed)
                    yield {**about, "what": f"{name} would remove it", "detail": reasons}
                elif draft.text != before:
                    detail = f"{len(before):,} to {len(draft.text):,} characters"
                    yield {**about, "what": f"{name} changes it", "detail": detail, "text": draft.text}


def difference(old: Corpus, new: Corpus) -> dict[str, Any]:
    """Counts the documents of `old` that are the same, changed or lost in `new`, and the new ones, with examples.

    A document that stands at the same place of the same file with another text is changed.
    """
    before, after = (_by_place(corpus) for corpus in (old, new))
    texts = {identity for identities in after.values() for identity in identities}
    counts: Counter[str] = Counter()
    examples: dict[str, list[str]] = {"changed": [], "lost": [], "new": []}
    for place, identities in before.items():
        for identity in identities:
            kind = "kept" if identity in texts else "changed" if place in after else "lost"
            counts[kind] += 1
            _example(examples.get(kind), place)
    for place, identities in after.items():
        if place not in before:
            counts["new"] += len(identities)
            _example(examples["new"], place)
    return {"counts": {kind: counts[kind] for kind in ("kept", *examples)}, "examples": examples}


def _example(examples: list[str] | None, place: tuple[str, str]) -> None:
    if examples is not None and len(examples) < _EXAMPLES:
        examples.append(", ".join(filter(None, place)))


def _by_place(corpus: Corpus) -> dict[tuple[str, str], list[str]]:
    """The ids of the documents by file and place; a text at several places of a mixture is listed once."""
    found: dict[tuple[str, str], list[str]] = {}
    documents: Iterator[Document] = (document for split in SPLITS for document in corpus.documents(split))
    for document in documents:
        found.setdefault((document.source, document.place), []).append(document.id)
    return found
