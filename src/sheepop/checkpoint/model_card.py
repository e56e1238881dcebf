"""Records scores of a finished model in its provenance and its model card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sheepop.checkpoint.card_text import EVALUATIONS, model_card, renewed
from sheepop.checkpoint.model_description import PROVENANCE, read_model_config
from sheepop.checkpoint.model_source import resolve_model_directory
from sheepop.checkpoint.run_directory import CARD, damaged_model
from sheepop.core.errors import CheckpointError
from sheepop.core.files import (
    CHECKSUMS,
    finite,
    read_json,
    remove_partial,
    sha256_file,
    storage_errors,
    write_atomic,
    write_json,
)
from sheepop.core.locks import exclusive_lock
from sheepop.tokenizer import load_tokenizer

_LOCK = ".scores.lock"


def record_scores(directory: Path, scores: Sequence[Mapping[str, Any]]) -> None:
    """Adds scores to ``provenance.json`` and to the card of the model at `directory` (see `resolve_model_directory`).

    A score has `kind`, `name`, `measure`, `value` and optional details; it replaces an older one with the same kind,
    name, measure and `settings`. The model stays readable throughout, also after a crash at any moment. Only the parts
    of the card that SheepOp wrote and nobody changed are rewritten.

    Raises `CheckpointError` for a directory that is not a complete model or is in use, and `StorageError` if the
    directory is not writable.
    """
    directory = resolve_model_directory(directory)
    config = read_model_config(directory)
    if problems := damaged_model(directory):
        raise CheckpointError(f"Scores cannot be recorded for the model in {directory}: {'; '.join(problems)}.")
    tokenizer, stored = load_tokenizer(directory), read_json(directory / "config.json")
    try:
        with only_writer(directory):
            made = _with_scores(directory, scores)
            _replace(directory, made)
            _renew(directory / CARD, model_card(config, tokenizer, made, stored=stored))
    except FileNotFoundError:
        raise CheckpointError(f"{directory} was removed or moved while scores were being recorded.") from None


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Locks out other processes that change a finished model directory, and removes the leftovers of a killed one."""
    lock = directory / _LOCK
    refusal = CheckpointError(f"Another process is writing to {directory}. Try again when it has finished.")
    with storage_errors(directory), exclusive_lock(lock, refusal):
        try:
            remove_partial(directory)
            yield
        finally:
            lock.unlink(missing_ok=True)


def _with_scores(directory: Path, scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the provenance of the model with these scores added."""
    made = read_json(directory / PROVENANCE)
    known = made.get(EVALUATIONS, []) if isinstance(made, dict) else None
    if not isinstance(known, list) or not all(isinstance(score, dict) for score in known):
        raise CheckpointError(f"{directory / PROVENANCE} is not a valid provenance record. Restore that file.")
    together = {_identity(score): score for score in [*known, *(finite(score) for score in scores)]}
    return {**finite(made), EVALUATIONS: list(together.values())}


def _identity(score: Mapping[str, Any]) -> str:
    """Returns the identity of a score: of two scores with the same identity the later one counts."""
    parts = [score.get(key) for key in ("kind", "name", "measure")]
    return json.dumps([*parts, score.get("settings") or {}], sort_keys=True)


def _replace(directory: Path, made: Mapping[str, Any]) -> None:
    """Writes the provenance; its checksum is removed meanwhile, so that the two files never contradict each other."""
    record, changed = directory / CHECKSUMS, directory / PROVENANCE
    others = {name: value for name, value in read_json(record).items() if name not in (CARD, PROVENANCE)}
    write_json(record, others)
    write_json(changed, made)
    write_json(record, {**others, PROVENANCE: sha256_file(changed)})


def _renew(path: Path, card: str) -> None:
    """Rewrites the parts of the card that SheepOp wrote, or a missing card; skips links and files that are no text."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return
    try:
        old = path.read_bytes().decode() if path.exists() else card
    except UnicodeDecodeError:
        return
    write_atomic(path, renewed(old, card))
