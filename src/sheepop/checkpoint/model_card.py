"""The card of a model, and scores that are put beside a finished one: into its provenance and into its card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sheepop.checkpoint.card_text import EVALUATIONS, model_card, renewed
from sheepop.checkpoint.model_directory import PROVENANCE, read_model_config
from sheepop.checkpoint.run_directory import CARD, damaged_model, resolve_model_directory
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

__all__ = ["model_card", "record_scores"]

_LOCK = ".scores.lock"


def record_scores(directory: Path, scores: Sequence[Mapping[str, Any]]) -> None:
    """Puts scores into ``provenance.json`` and the card of the model that `directory` means.

    A score has `kind`, `name`, `measure` and `value`, and what else is known of it; one of the same kind, name, measure
    and `settings` takes the place of an older one. Whoever reads the model meanwhile, or after a crash at any moment,
    finds it whole. Of the card only what SheepOp wrote, and nobody has changed, is written anew.

    Raises `CheckpointError` for a directory that is not a whole model or is in use, and `StorageError` where nothing
    can be written.
    """
    directory = resolve_model_directory(directory)
    config = read_model_config(directory)
    if problems := damaged_model(directory):
        raise CheckpointError(f"Scores of the model in {directory} cannot be recorded: {'; '.join(problems)}.")
    tokenizer, stored = load_tokenizer(directory), read_json(directory / "config.json")
    try:
        with _only_writer(directory):
            made = _with_scores(directory, scores)
            _replace(directory, made)
            _renew(directory / CARD, model_card(config, tokenizer, made, stored=stored))
    except FileNotFoundError:
        raise CheckpointError(f"{directory} was removed or moved while scores were being recorded.") from None


@contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    """Keeps other processes from recording scores here, and clears what a killed one left."""
    lock = directory / _LOCK
    refusal = CheckpointError(f"Another process is recording scores in {directory}. Do it again when it is done.")
    with storage_errors(directory), exclusive_lock(lock, refusal):
        try:
            remove_partial(directory)
            yield
        finally:
            lock.unlink(missing_ok=True)


def _with_scores(directory: Path, scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is known of the making of a model, with these scores."""
    made = read_json(directory / PROVENANCE)
    known = made.get(EVALUATIONS, []) if isinstance(made, dict) else None
    if not isinstance(known, list) or not all(isinstance(score, dict) for score in known):
        raise CheckpointError(f"{directory / PROVENANCE} is not the record of a model's making. Restore that file.")
    together = {_identity(score): score for score in [*known, *(finite(score) for score in scores)]}
    return {**finite(made), EVALUATIONS: list(together.values())}


def _identity(score: Mapping[str, Any]) -> str:
    """What two scores have in common of which the later one counts."""
    parts = [score.get(key) for key in ("kind", "name", "measure")]
    return json.dumps([*parts, score.get("settings") or {}], sort_keys=True)


def _replace(directory: Path, made: Mapping[str, Any]) -> None:
    """Without a checksum while it changes: at no moment does one file contradict the other."""
    record, changed = directory / CHECKSUMS, directory / PROVENANCE
    others = {name: value for name, value in read_json(record).items() if name not in (CARD, PROVENANCE)}
    write_json(record, others)
    write_json(changed, made)
    write_json(record, {**others, PROVENANCE: sha256_file(changed)})


def _renew(path: Path, card: str) -> None:
    """Writes the card, or the parts of it that are SheepOp's; what is no text or leads elsewhere is left alone."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return
    try:
        old = path.read_bytes().decode() if path.exists() else card
    except UnicodeDecodeError:
        return
    write_atomic(path, renewed(old, card))
