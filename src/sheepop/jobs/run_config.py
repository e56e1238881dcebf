"""``config.yaml`` of a run: its resolved configuration, which stays what the run wrote."""

from __future__ import annotations

import hashlib
import shlex

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import dump_config, parse_config, validate
from sheepop.core.errors import CheckpointError
from sheepop.core.files import write_atomic
from sheepop.jobs.config import SheepOpConfig

# The first line, a comment. Runs of before do not have it.
_SEAL = "# Written by the run; checksum of what follows: "


def write_run_config(run: RunDirectory, config: SheepOpConfig) -> None:
    """Writes the resolved configuration into the run, and its checksum with it."""
    text = dump_config(config)
    write_atomic(run.config_file, f"{_SEAL}{_checksum(text)}\n{text}")


def read_run_config(run: RunDirectory) -> SheepOpConfig:
    """Reads it back for the run to go on with; raises `CheckpointError` when it is not what the run wrote."""
    file = run.config_file
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is damaged: it is no text. Restore that file.") from None
    first, _, rest = text.partition("\n")
    if first.startswith(_SEAL) and first.removeprefix(_SEAL) != _checksum(rest):
        raise CheckpointError(
            f"{file} is not what the run wrote: it was edited or damaged. A run keeps its settings, so undo that; what "
            "may change is given on the command line, such as training.max_steps=2000. To train with other settings, "
            f"start a new run with another --output and --config {shlex.quote(str(file))}."
        )
    config = validate(SheepOpConfig, parse_config(text, where=str(file)))
    try:
        config.training.resolved()
    except ValueError as error:
        raise CheckpointError(
            f"{file} is not what a run writes, for it holds settings that are {error}. Restore that file."
        ) from None
    return config


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
