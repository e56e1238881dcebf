"""A directory that somebody else wrote: its files are opened only when they lie inside it, and only up to a size."""

from __future__ import annotations

import json
import shlex
import stat
from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError

CONFIG = "config.json"
_LARGEST_JSON = 64 * 2**20
# The directory of further chat templates, and the endings of the files that a tokenizer consists of.
_TEMPLATES = "additional_chat_templates"
_OF_TOKENIZERS = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".bpe")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def source_file(directory: Path, name: str) -> Path | None:
    """The file `name` of `directory`; None when there is none.

    Raises `CheckpointError` when the name, or a link of that name, leads out of the directory. The one place outside
    that is allowed is the store of a Hugging Face cache, whose snapshots are directories of links into it.
    """
    if not name or name != Path(name).name or name in (".", "..") or "\0" in name:
        raise CheckpointError(
            f"{directory}: {name[:200]!r} is not the name of a file in this directory, and nothing outside it is "
            "opened. Correct the index of the weights, or download the model again."
        )
    path = directory / name
    try:
        if not path.exists() and not path.is_symlink():
            return None
        real = path.resolve(strict=True)
        kind = real.stat().st_mode
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    if not stat.S_ISREG(kind):
        raise CheckpointError(f"{path} is not an ordinary file.")
    if real.parent not in _allowed(directory.resolve()):
        raise CheckpointError(
            f"{path} is a link that leads out of the directory, to {real}. Put the file itself there."
        )
    return real


def read_table(directory: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in the file `name`; None when there is no such file.

    Raises `CheckpointError` when it is too large, no JSON, no object, or names a key twice.
    """
    path = source_file(directory, name)
    if path is None:
        return None
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(
                f"{directory / name} is larger than {_LARGEST_JSON // 2**20} MiB; it is not a {name}."
            )
        text = path.read_text(encoding="utf-8")
        table = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{directory / name} is damaged: it is not valid JSON ({error}). Copy or download it again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{directory / name} cannot be read: {error.strerror}.") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{directory / name} is not a table of keys and values. Copy or download it again.")
    return table


def check_tokenizer_files(directory: Path) -> None:
    """Raises `CheckpointError` for a file that a tokenizer may be read from and that is none, or a link out of here.

    What such a link led to would become a part of the model.
    """
    further = directory / _TEMPLATES
    if further.is_symlink():
        raise CheckpointError(f"{further} is a link. Put the directory itself there.")
    for place in (directory, further):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.suffix in _OF_TOKENIZERS and (path.is_symlink() or not path.is_dir()):
                source_file(place, path.name)


def refuse_pickles(directory: Path) -> None:
    """Raises `CheckpointError` with the command that converts them, when the weights are there as pickles only."""
    found = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES)
    if not found:
        return
    program = (
        f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; s = {json.dumps(str(directory))}; "
        'M.from_pretrained(s, dtype="auto").save_pretrained("converted"); '
        'T.from_pretrained(s).save_pretrained("converted")'
    )
    raise CheckpointError(
        f"{directory} holds its weights as {found[0]}, a pickle, which runs program code when it is read. SheepOp "
        "never opens one. If you trust it, convert it with transformers, and import the result: python -c "
        f"{shlex.quote(program)}"
    )


def _allowed(directory: Path) -> tuple[Path, ...]:
    snapshot = directory.parent if directory.name == _TEMPLATES else directory
    if snapshot.parent.name == "snapshots":
        return directory, snapshot.parent.parent / "blobs"
    return (directory,)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
