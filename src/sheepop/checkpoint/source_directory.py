"""Reads files of an untrusted directory: only files that are inside it, and JSON only up to a size limit."""

from __future__ import annotations

import json
import shlex
import stat
from pathlib import Path
from typing import Any

from sheepop.core.errors import CheckpointError

CONFIG = "config.json"
_LARGEST_JSON = 64 * 2**20
# The directory of additional chat templates, and the suffixes of tokenizer files.
_TEMPLATES = "additional_chat_templates"
_OF_TOKENIZERS = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".bpe")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def source_file(directory: Path, name: str) -> Path | None:
    """Returns the path of the file `name` in `directory`, or None if it does not exist.

    Raises `CheckpointError` if the name, or a link with that name, leads out of the directory. The only exception is
    the blob store of a Hugging Face cache, to which the links of a snapshot lead.
    """
    if not name or name != Path(name).name or name in (".", "..") or "\0" in name:
        raise CheckpointError(
            f"{directory}: {name[:200]!r} is not the name of a file in this directory, and SheepOp opens no file "
            "outside it. Correct the index of the weights, or download the model again."
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
    home = directory.resolve()
    snapshot = home.parent if home.name == _TEMPLATES else home
    blobs = snapshot.parent.parent / "blobs" if snapshot.parent.name == "snapshots" else home
    if real.parent not in (home, blobs):
        raise CheckpointError(
            f"{path} is a link that leads out of the directory, to {real}. Replace it with the file itself."
        )
    return real


def read_table(directory: Path, name: str) -> dict[str, Any] | None:
    """Returns the JSON object in the file `name`, or None if there is no such file.

    NaN and Infinity, which are no JSON but which Python programs write, are read as floats.
    Raises `CheckpointError` if the file is too large, not JSON, not an object, or has a duplicate key.
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
        table = json.loads(text, object_pairs_hook=_unique)
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
    """Raises `CheckpointError` if a tokenizer file is not an ordinary file, or is a link out of the directory.

    The target of such a link would become part of the model.
    """
    further = directory / _TEMPLATES
    if further.is_symlink():
        raise CheckpointError(f"{further} is a link. Replace it with the directory itself.")
    for place in (directory, further):
        for path in _entries(place) if place.is_dir() else ():
            if path.suffix in _OF_TOKENIZERS and (path.is_symlink() or not path.is_dir()):
                source_file(place, path.name)


def _entries(directory: Path) -> list[Path]:
    """The sorted contents of a directory; raises `CheckpointError` if there is none, as while another replaces it."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{directory} is no directory any more. If another program replaces it, try again."
        ) from None


def refuse_pickles(directory: Path) -> None:
    """Raises `CheckpointError` if the directory has pickled weights, with a command that converts them."""
    found = [path.name for path in _entries(directory) if path.suffix in _PICKLES]
    if not found:
        return
    program = (
        f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; s = {json.dumps(str(directory))}; "
        'M.from_pretrained(s, dtype="auto").save_pretrained("converted"); '
        'T.from_pretrained(s).save_pretrained("converted")'
    )
    raise CheckpointError(
        f"{directory} has its weights in {found[0]}, a pickle, which can run code when it is read, so SheepOp never "
        "opens it. If you trust it, convert it with transformers, and import the result: python -c "
        f"{shlex.quote(program)}"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table
