"""What a path or a name means: a model of SheepOp, one in Hugging Face's format, a GGUF file, or a published model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sheepop.checkpoint.source_directory import CONFIG
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import read_json

FORMAT = "sheepop-model"
# The files of an adapter in the format of Hugging Face's PEFT.
BASE = "trained_on"
"""The key, in provenance and in the metadata of an exported adapter, of the weights that an adapter fits."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GGUF = ".gguf"
_GGUF_MAGIC = b"GGUF"
_PART_OF_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)


def is_model(directory: Path) -> bool:
    """Whether a directory is a SheepOp model."""
    return _config(directory).get("format") == FORMAT


def is_hugging_face(directory: Path) -> bool:
    """Whether a directory is a model in Hugging Face's format, of any family."""
    return "model_type" in _config(directory) and not is_model(directory)


def is_gguf(path: Path) -> bool:
    """Whether a file starts with the magic number of GGUF."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def gguf_parts(path: str) -> list[str]:
    """Returns the paths of all files of a GGUF model, given one: several for a name like NAME-00001-of-00003.gguf."""
    match = _PART_OF_GGUF.fullmatch(path)
    if match is None:
        return [path]
    return [f"{match[1]}-{number:05}-of-{match[2]}{GGUF}" for number in range(1, int(match[2]) + 1)]


def _config(directory: Path) -> dict[str, Any]:
    """The content of ``config.json``; empty if there is no such file, or no table in it."""
    try:
        found = read_json(directory / CONFIG) if (directory / CONFIG).is_file() else None
    except CheckpointError:
        return {}
    return found if isinstance(found, dict) else {}


MAIN = "main"
_PREFIX = "hf:"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<repository>{_PART}/{_PART})(?:/(?P<file>[^@]+))?(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.A
)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True)
class PublishedName:
    """``[hf:]OWNER/NAME[/FILE.gguf][@REVISION]``; the revision is a branch, a tag or a commit, by default ``main``."""

    repository: str
    revision: str = MAIN
    file: str | None = None

    def __str__(self) -> str:
        file = "" if self.file is None else f"/{self.file}"
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repository}{file}{revision}"

    @classmethod
    def parse(cls, text: str) -> PublishedName | None:
        """Returns the name in `text`, or None if it cannot be one.

        Raises `UsageError` for a text that begins with ``hf:`` but has another form.
        """
        match = _NAME.fullmatch(text.removeprefix(_PREFIX))
        file = match["file"] if match is not None else None
        is_safe = match is not None and ".." not in text and "--" not in match["repository"]
        if match is None or not is_safe or (file is not None and not is_gguf_path(file)):
            if text.startswith(_PREFIX):
                raise UsageError(
                    f"{text} is not the name of a published model. Write hf:OWNER/NAME, hf:OWNER/NAME@REVISION, or "
                    "hf:OWNER/NAME/FILE.gguf for one GGUF file."
                )
            return None
        return cls(match["repository"], match["revision"] or MAIN, file)

    @property
    def key(self) -> str:
        """The name as it is compared: hubs ignore the case of repositories."""
        return str(PublishedName(self.repository.lower(), self.revision, self.file))

    @property
    def commit(self) -> str | None:
        """The revision if it looks like a commit or its first digits, else None."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None


def is_gguf_path(path: str) -> bool:
    """Whether a path in a repository can be that of a GGUF file: it stays below the repository and is not hidden."""
    parts = PurePosixPath(path).parts
    return (
        path.lower().endswith(GGUF)
        and path == "/".join(parts)
        and path.isprintable()
        and not any(part.startswith((".", "/")) or "\\" in part for part in parts)
    )


def require_free(output: Path, overwrite: bool, what: str, may_replace: Callable[[Path], bool]) -> None:
    """Raises `UsageError` if `output` exists, unless `overwrite` is true and `may_replace` accepts it.

    An empty directory is free. `what` names in the message what may be replaced.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not may_replace(output):
        raise UsageError(f"{output} already exists and is not {what}. Choose another place.")
    if not overwrite:
        raise UsageError(f"{output} already exists. Choose another place, or replace it with --overwrite.")


def require_apart(source: Path, output: Path) -> None:
    """Raises `UsageError` if `output` is `source`, is inside it or contains it: the source must not change."""
    here, there = source.resolve(), output.resolve()
    if source.is_dir() and (here == there or here in there.parents):
        raise UsageError(f"{output} is inside {source}, which must not change. Choose a place outside it.")
    if there in here.parents:
        raise UsageError(f"{output} contains {source}, which must not change. Choose another place.")
