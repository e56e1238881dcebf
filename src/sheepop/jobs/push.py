"""Uploads an exported model or adapter to the hub, and refuses files that nobody should publish or load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sheepop.checkpoint.model_kind import ADAPTER_CONFIG
from sheepop.core.console import Console
from sheepop.core.errors import UsageError, first_few
from sheepop.core.files import CHECKSUMS, damaged_files
from sheepop.data.clean.secrets import find_secrets

# What a model consists of; nothing in these is run or unpickled.
_TEXTS = {".json", ".jinja", ".md", ".txt"}
_SAFE = {*_TEXTS, ".safetensors", ".gguf", ".model"}
_MOST_TEXT = 2**20  # characters of a file, of which a tokenizer's are its vocabulary


def push_model(
    source: str | Path,
    repository: str,
    *,
    public: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Uploads what `sheepop export` wrote to `source` as one commit of the repository, which is made if it is missing.

    A new repository is private unless it is `public`; one that exists stays as it is. The access token is HF_TOKEN or
    that of ``hf auth login``. Raises `UsageError` for what is no export, was changed after it, holds a secret, or has a
    file of a kind that a model has not, and `CheckpointError` for a failure of the hub.
    """
    from sheepop.core.hub import Hub  # loads huggingface_hub

    source, console = Path(source), console or Console.silent()
    files = [source] if source.is_file() else _files(source)
    if problems := [problem for file in files if (problem := _problem(file))]:
        raise UsageError(f"{source} is not uploaded: {first_few(problems, 3)}. Remove them, or export the model again.")
    total = sum(file.stat().st_size for file in files)
    root = source.parent if source.is_file() else source
    with console.progress("Uploading", total=1) as progress:
        address, is_private = Hub(kind="model").upload(
            repository, {file.relative_to(root).as_posix(): file for file in files}, private=not public
        )
        progress.advance()
    return {"url": address, "private": is_private, "files": len(files), "bytes": total}


def _files(directory: Path) -> list[Path]:
    is_export = (directory / "config.json").is_file() or (directory / ADAPTER_CONFIG).is_file()
    if not is_export or not (directory / CHECKSUMS).is_file():
        raise UsageError(f"{directory} is neither a GGUF file nor a directory that sheepop export or a run wrote.")
    found = sorted(path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    if problems := damaged_files(directory):
        raise UsageError(f"{directory} is not uploaded: {first_few(problems, 3)}.")
    # Tables are a cache that belongs to this program.
    return [path for path in found if path.name != CHECKSUMS and path.suffix != ".tables"]


def _problem(file: Path) -> str | None:
    if file.is_symlink() or any(part.startswith(".") for part in file.parts[-2:]):
        return f"{file} is hidden or a link"
    if file.suffix not in _SAFE:
        return f"{file} is not of a kind that a model needs ({', '.join(sorted(_SAFE))})"
    if file.suffix in _TEXTS and file.name != "tokenizer.json":
        with file.open(encoding="utf-8", errors="replace") as text:
            if found := find_secrets(text.read(_MOST_TEXT)):
                return f"{file} holds what looks like a secret ({found[0].kind})"
    return None
