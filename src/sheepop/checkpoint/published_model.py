"""Fetches a published model or adapter from a hub into the cache: only the files it consists of, each verified."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from sheepop.checkpoint.generation_settings import GENERATION
from sheepop.checkpoint.linked_weights import LinkedWeights
from sheepop.checkpoint.model_cache import (
    CachedModel,
    cached_models,
    entry_for,
    filling,
    models_directory,
    open_source,
    require_space,
)
from sheepop.checkpoint.model_kind import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PublishedName,
    gguf_parts,
    is_gguf_path,
    is_model,
)
from sheepop.checkpoint.source_directory import CONFIG, read_table
from sheepop.checkpoint.weight_files import INDEX, WEIGHTS
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, first_few
from sheepop.core.files import (
    atomic_directory,
    link_or_copy,
    make_directory,
    remove_tree,
    storage_errors,
    sync_directory,
)
from sheepop.core.hub import Contents, Hub, HubFile

_TOKENIZER = "tokenizer.json"
_PROVENANCE = "provenance.json"  # of SheepOp's models
_OF_TOKENIZER = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
# The vocabularies of tokenizers without tokenizer.json.
_VOCABULARIES = ("vocab.json", "merges.txt", "vocab.bpe", "encoder.json")
_VOCABULARY_SUFFIXES = (".model", ".tiktoken")
_TEMPLATE = re.compile(r"additional_chat_templates/[A-Za-z0-9_][\w.-]*\.jinja", re.A)
_SHARD = re.compile(r"[^/]+-\d{5}-of-\d{5}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MOST_NAMES = 20
# No reader accepts a larger file of settings or of a tokenizer.
_LARGEST_DESCRIPTION = 2**27

Bring = Callable[[HubFile], Path]


class _AbsentError(Exception):
    """A file of a model is not where it is looked for, or is damaged there."""


def pull(name: PublishedName, console: Console, *, weights: bool = True) -> CachedModel:
    """Fetches the newest commit of `name` into the cache, unless it is there already.

    Without `weights` it fetches the configuration and the tokenizer alone, unless a GGUF file has both.
    Its files come from the cache of Hugging Face's library if all are there, where its weights stay, else from the hub.
    Raises `CheckpointError` for a model that does not exist, cannot be read or was damaged on the
    way, and `StorageError` for a full disk.
    """
    hub = Hub(kind="model")
    contents, stored, is_whole = _contents(name, hub, console)
    model = _Published(name, contents, is_whole=is_whole, has_weights=weights)
    part = [] if model.has_weights else ["tokenizer"]
    entry = entry_for(contents.repository, contents.revision, name.file, model.checksums, *part)
    with filling(entry, str(name), console):
        if not entry.is_finished:
            _fill(entry, model, hub, stored, console)
        record = dict(entry.record)
        if name.key not in record["names"]:
            entry.write_record({**record, "names": [*record["names"], name.key]})
    for other in cached_models():
        if other.path == entry.path or name.key not in other.record.get("names", ()):
            continue
        if model.has_weights and not other.has_weights:
            with suppress(CheckpointError):  # another process fetches it
                other.remove()
        elif model.has_weights or not other.has_weights:  # of an older commit
            other.write_record({**other.record, "names": [key for key in other.record["names"] if key != name.key]})
    return entry


class _Published:
    """A published model at one commit, and which of the repository's files it consists of.

    `is_whole` tells whether `contents` are all files of the commit. Without `has_weights` only the configuration and
    the tokenizer are wanted.
    """

    def __init__(self, name: PublishedName, contents: Contents, *, is_whole: bool, has_weights: bool = True) -> None:
        self.name, self.contents, self.is_whole = name, contents, is_whole
        self._files = {file.path: file for file in contents.files}
        has_tokenizer = CONFIG in self._files and name.file is None
        self.has_weights = has_weights or not has_tokenizer or self.is_adapter
        self.gguf = self._chosen_gguf() if self.has_weights else []

    @property
    def checksums(self) -> list[list[str | None]]:
        """The checksums of the files that may be needed."""
        return [[file.path, file.sha256 or file.git_sha1] for file in self.candidates]

    @property
    def candidates(self) -> list[HubFile]:
        """The files that may be needed; for weights in several files, all files in the folder of their index."""
        if self.gguf or not self.has_weights:
            return self.gguf or self.description
        weights = [WEIGHTS] if WEIGHTS in self._files else [path for path in self._files if _SHARD.fullmatch(path)]
        if self.is_adapter:
            weights = [ADAPTER_WEIGHTS]
        return [*self.description, *(self._files[path] for path in weights)]

    @property
    def is_adapter(self) -> bool:
        """Whether the repository holds an adapter in PEFT's format, and no model."""
        is_model = self.name.file is not None or WEIGHTS in self._files or INDEX in self._files
        return not is_model and ADAPTER_CONFIG in self._files and ADAPTER_WEIGHTS in self._files

    @property
    def description(self) -> list[HubFile]:
        """All files except the weights, the configuration first.

        They are those of a model in Hugging Face's format, of a model of SheepOp, or of an adapter.
        """
        first = [ADAPTER_CONFIG] if self.is_adapter else [CONFIG, GENERATION, _PROVENANCE]
        wanted = [*first, *_OF_TOKENIZER]
        if _TOKENIZER in self._files:
            wanted.append(_TOKENIZER)
        else:
            wanted += [*_VOCABULARIES, *(path for path in self._files if path.endswith(_VOCABULARY_SUFFIXES))]
        wanted += [path for path in self._files if _TEMPLATE.fullmatch(path)]
        if WEIGHTS not in self._files and not self.is_adapter and self.has_weights:
            wanted.append(INDEX)
        return [self._files[path] for path in wanted if path in self._files and _is_below(path)]

    def weights(self, place: Path) -> list[HubFile]:
        """The weight files, as the index in `place` lists them if there are several."""
        if not self.has_weights:
            return []
        if self.is_adapter:
            return [self._files[ADAPTER_WEIGHTS]]
        if WEIGHTS in self._files:
            return [self._files[WEIGHTS]]
        index = read_table(place, INDEX) or {}
        shards = index.get("weight_map")
        names = sorted({str(shard) for shard in shards.values()}) if isinstance(shards, dict) else []
        if missing := [shard for shard in names if shard not in self._files or PurePosixPath(shard).name != shard]:
            raise _AbsentError(missing[0][:200])
        return [self._files[shard] for shard in names]

    def collect(self, place: Path, bring: Bring) -> Path:
        """Brings all files of the model and returns its path, in `place`; refuses what cannot be read early."""
        if self.gguf:
            paths = [bring(file) for file in self.gguf]
            return paths[0]
        for file in self.description:
            if file.size > _LARGEST_DESCRIPTION:
                raise CheckpointError(
                    f"{file.path} of {self.name} is larger than {_LARGEST_DESCRIPTION // 2**20} MiB, so it is not what "
                    "its name says. The repository is damaged: ask its owner, or give another revision."
                )
            bring(file)
            if file.path == CONFIG and self.has_weights and not is_model(place):
                from sheepop.checkpoint.exchange.reader import language_model  # loads torch

                language_model(read_table(place, CONFIG) or {}, place)  # refuses an unknown family before the weights
        for file in self.weights(place):
            bring(file)
        return place

    def _chosen_gguf(self) -> list[HubFile]:
        """The parts of the GGUF file that is meant, usually one; empty for a model in Hugging Face's format."""
        found = sorted({gguf_parts(path)[0] for path in self._files if is_gguf_path(path)})
        wanted, repository = self.name.file, self.contents.repository
        listed = f"It has {first_few(found, _MOST_NAMES)}." if found else "It has no GGUF files."
        if wanted is None:
            if self.is_adapter or (CONFIG in self._files and (WEIGHTS in self._files or INDEX in self._files)):
                return []
            if not found and not self.is_whole:
                what = CONFIG if CONFIG not in self._files else f"{WEIGHTS} or {INDEX}"
                raise CheckpointError(_missing(self.name, what))
            if not found:
                raise CheckpointError(self._refusal())
            if len(found) > 1:
                raise CheckpointError(
                    f"{repository} has several GGUF files. Name one, such as {repository}/{found[0]}. {listed}"
                )
            wanted = found[0]
        parts = gguf_parts(wanted)
        if missing := [part for part in parts if part not in self._files]:
            if not self.is_whole:
                raise CheckpointError(_missing(self.name, missing[0]))
            raise CheckpointError(f"{repository} has no file {missing[0]}. {listed}")
        return [self._files[part] for part in parts]

    def _refusal(self) -> str:
        repository, pickles = self.contents.repository, [path for path in self._files if path.endswith(_PICKLES)]
        if pickles:
            return (
                f"{repository} has its weights only in {pickles[0]}, a pickle, which can run code when it is "
                "read, so SheepOp never opens it. Look for a repository or revision with safetensors; if you trust it, "
                "convert it with transformers (save_pretrained) and give the directory."
            )
        return (
            f"{repository} is not a model that SheepOp reads: it has neither {CONFIG} with {WEIGHTS} or {INDEX}, nor a "
            "GGUF file."
        )


def _contents(name: PublishedName, hub: Hub, console: Console) -> tuple[Contents, Path | None, bool]:
    """The files of a repository at one commit, and their folder in the cache of Hugging Face's library, if any.

    Without a network, these are the files in that cache; the last value tells whether they are all files.
    """
    if not constants.HF_HUB_OFFLINE:
        console.info(f"Looking for {name} on {hub.name}.")
        try:
            contents = hub.contents(name.repository, name.revision)
        except CheckpointError as error:
            stored = _stored(name)
            if hub.is_reached or stored is None:
                raise CheckpointError(f"{name} is neither a path here nor in the cache, and {error}") from None
            console.warn(f"{error} The files that are already here are used.")
            return _stored_contents(name, stored), stored, False
        if contents is None:
            raise CheckpointError(f"{name.repository} on {hub.name} has no revision {name.revision}.")
        return contents, _stored(PublishedName(contents.repository, contents.revision)), True
    stored = _stored(name)
    if stored is None:
        raise CheckpointError(_missing(name, "it"))
    return _stored_contents(name, stored), stored, False


def _stored(name: PublishedName) -> Path | None:
    """The folder of a revision in the cache of Hugging Face's library, or None."""
    home = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type="model")
    try:
        commit = (home / "refs" / name.revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = name.revision
    folder = home / "snapshots" / commit
    return folder if re.fullmatch(r"[0-9a-f]{40}", commit) and folder.is_dir() else None


def _stored_contents(name: PublishedName, folder: Path) -> Contents:
    """The files in a folder of that cache, whose blobs are named after their checksums."""
    files = []
    for path in sorted(folder.rglob("*")):
        blob = path.resolve()
        if path.is_file() and blob.parent.name == "blobs":
            is_large = len(blob.name) == 64
            checksums = (blob.name, None) if is_large else (None, blob.name)
            files.append(HubFile(path.relative_to(folder).as_posix(), blob.stat().st_size, *checksums))
    return Contents(name.repository, folder.name, tuple(files), {})


def _missing(name: PublishedName, what: str) -> str:
    return (
        f"{name} is neither a path here nor complete in a cache: {what} is missing in {models_directory()} and in "
        f"{constants.HF_HUB_CACHE}, and {'HF_HUB_OFFLINE is set' if constants.HF_HUB_OFFLINE else 'no hub answers'}. "
        f"Run 'sheepop models pull {name}' with a network, here or on another machine whose cache you copy."
    )


def _fill(entry: CachedModel, model: _Published, hub: Hub, stored: Path | None, console: Console) -> None:
    """Fetches and imports a model, and writes the record of its entry."""
    contents, name = model.contents, model.name
    source = None
    if stored is not None:
        try:
            source = model.collect(stored, partial(_checked, stored))
        except _AbsentError as error:
            if not model.is_whole:
                raise CheckpointError(_missing(name, str(error))) from None
    source = source or _download(entry, model, hub, console)
    record: dict[str, Any] = {
        "name": str(PublishedName(contents.repository, file=name.file)),
        "hub": hub.name,
        "repository": contents.repository,
        "revision": contents.revision,
        "file": name.file,
        "names": [name.key],
    }
    origin = {key: record[key] for key in ("hub", "repository", "revision")}
    if not model.has_weights:
        record["tokenizer"] = True
    if model.is_adapter or not model.has_weights or is_model(source):  # kept as it is
        bring = link_or_copy if source == entry.source else shutil.copyfile  # files of another program stay apart
        with atomic_directory(entry.directory, replace=True) as place:
            for file in [*model.description, *model.weights(source)]:
                make_directory((place / file.path).parent)
                bring(source / file.path, place / file.path)
    else:
        licence = contents.card.get("license")
        licensed = {"license": licence} if isinstance(licence, str) else {}
        record["stored"] = open_source(entry, source, origin | licensed, console)
    entry.write_record({**record, "checksums": model.checksums})
    if LinkedWeights.read(entry.directory) is None:
        remove_tree(entry.source)


def _checked(folder: Path, file: HubFile) -> Path:
    """The path of a file in `folder`; raises `_AbsentError` if it is not there, or has other bytes."""
    path = folder / file.path
    if not path.is_file():
        raise _AbsentError(file.path)
    if file.damage(path) is not None:
        raise _AbsentError(f"{file.path}, undamaged,")
    return path


def _download(entry: CachedModel, model: _Published, hub: Hub, console: Console) -> Path:
    """Downloads the files of a model that are not there yet into the source folder of its entry."""
    place, name = entry.source, str(model.name)
    with storage_errors(place):
        make_directory(place)
    sizes = [file.size for file in model.candidates]
    there = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    require_space(sum(sizes) - there, name)
    with console.progress(f"Downloading {name}", sum(sizes) / 1e6, "MB") as progress:

        def bring(file: HubFile) -> Path:
            folder = PurePosixPath(file.path).parent.name if _TEMPLATE.fullmatch(file.path) else ""
            target = place / folder / PurePosixPath(file.path).name
            progress.describe(target.name)
            if target.is_file() and file.damage(target) is None:
                progress.advance(file.size / 1e6)
                return target
            with storage_errors(target):
                make_directory(target.parent)
                part = target.with_name(f"{target.name}.part")
                hub.bring(model.contents, file, part, progress)
                part.replace(target)
                sync_directory(target.parent)
            return target

        try:
            return model.collect(place, bring)
        except _AbsentError as error:
            raise CheckpointError(
                f"{INDEX} of {name} lists {str(error)!r}, which is not a file beside it. The repository is damaged: "
                "ask its owner, or give another revision."
            ) from None


def _is_below(path: str) -> bool:
    return PurePosixPath(path).name == path or _TEMPLATE.fullmatch(path) is not None
