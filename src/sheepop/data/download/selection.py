"""Which files of a repository a request means: those of one dataset, one subset, and the splits asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from sheepop.core.errors import DataError, first_few
from sheepop.data.download.catalog import MOST_NAMES, Request, no_such
from sheepop.data.download.hub import CONVERTED, MAIN, Contents, Hub, HubFile

_TYPES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".arrow")
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# Files of these names speak about the data.
_ABOUT = re.compile(r"(readme|licen[cs]e|dataset_infos?|state|requirements|citation|notice)\b.*", re.IGNORECASE)
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SPLIT_WORD = re.compile(rf"(?<![A-Za-z])({'|'.join(_SPLIT_NAMES)})(?![A-Za-z])", re.IGNORECASE)
_PARTIAL = "partial-"
_NO_SPLITS: Mapping[HubFile, str] = {}


@dataclass(frozen=True, slots=True)
class Selection:
    """The `files` that a request means, those of the training split first, from one commit.

    `converted` when they are the hub's own conversion to Parquet; `partial` when that holds the beginning only.
    `column` is the one that holds the text, where that is known. `taken` are the files to transfer.
    """

    request: Request
    contents: Contents
    subset: str | None
    files: tuple[HubFile, ...]
    converted: bool = False
    partial: bool = False
    column: str | None = None
    taken: tuple[HubFile, ...] = ()

    @property
    def branch(self) -> str:
        """The branch of the repository that has the files."""
        return CONVERTED if self.converted else MAIN

    @property
    def transfer(self) -> int:
        """Bytes to transfer at most."""
        return sum(file.size if file.limit is None else file.limit for file in self.taken)

    @property
    def licence(self) -> str | None:
        """What the card of the dataset says, else what was known beforehand."""
        card = self.contents.card
        said = card.get("license")
        if isinstance(said, list):
            said = ", ".join(str(item) for item in said)
        named = card.get("license_name")
        said = named if said == "other" and isinstance(named, str) else said
        if isinstance(said, str) and said.strip() and said.strip().lower() not in ("unknown", "other"):
            return " ".join(said.split())[:200]
        return self.request.licence


def select(hub: Hub, request: Request) -> Selection:
    """The files that `request` means.

    Raises `DataError` when the repository holds no data that can be read, when it must be said which subset is meant,
    or when the subset or split asked for is not there. No other dataset ever takes its place.
    """
    contents = hub.contents(request.repository)
    if contents is None:
        raise DataError(f"{request.repository} on {hub.name} is empty.")
    if request.patterns:
        found = _matching(contents, request.patterns)
        selection = Selection(request, contents, request.subset, _in_order(found)) if found else None
    else:
        selection = _described(contents, request) or _listed(contents, request)
    selection = selection or _converted(contents, hub.contents(contents.repository, CONVERTED), request)
    splits = {file.split for file in selection.files}
    if request.split is None:
        return selection
    if request.split not in splits:
        raise DataError(no_such(contents.repository, "split", request.split, sorted(splits)))
    return replace(selection, files=tuple(file for file in selection.files if file.split == request.split))


def _matching(contents: Contents, patterns: Iterable[str]) -> list[HubFile]:
    """The files that the first pattern with any matches."""
    for pattern in patterns:
        compiled = glob_pattern(pattern)
        if found := [file for file in contents.files if compiled.fullmatch(file.path)]:
            return found
    return []


def _described(contents: Contents, request: Request) -> Selection | None:
    """The files that the header of the dataset's README lists for the subset; None where it lists none."""
    listed = contents.card.get("configs")
    configs = {
        str(config["config_name"]): config
        for config in (listed if isinstance(listed, list) else [])
        if isinstance(config, dict) and "config_name" in config and (config.get("data_files") or config.get("data_dir"))
    }
    if not configs:
        return None
    name = request.subset or _only_subset(contents.repository, configs)
    if name not in configs:
        raise DataError(no_such(contents.repository, "subset", name, sorted(configs)))
    splits: dict[HubFile, str] = {}
    for split, pattern in _data_files(configs[name].get("data_files") or f"{configs[name]['data_dir']}/**"):
        for file in _matching(contents, [pattern]):
            if data_type(file.path):
                splits.setdefault(file, split)
    if not splits:
        raise DataError(
            f"{contents.repository} has no files in its subset {name} that SheepOp can read ({', '.join(_TYPES)})."
        )
    return Selection(request, contents, name, _in_order(splits, splits))


def _only_subset(repository: str, configs: dict[str, Any]) -> str:
    """The subset that is meant when none is named: the only one, or the one marked as the default."""
    default = [name for name, config in configs.items() if config.get("default") is True]
    for names in (list(configs), default, [name for name in configs if name == "default"]):
        if len(names) == 1:
            return names[0]
    raise DataError(
        f"{repository} has several subsets; name one, such as hub:{repository}/{min(configs)}. They are: "
        f"{first_few(sorted(configs), MOST_NAMES)}."
    )


def _data_files(listed: Any) -> list[tuple[str, str]]:
    """Pairs of split and pattern, in each form that a README may use; the split is empty where none is named."""
    if isinstance(listed, str):
        return [("", listed)]
    if isinstance(listed, dict):
        listed = [{"split": split, "path": path} for split, path in listed.items()]
    pairs = []
    for item in listed if isinstance(listed, list) else []:
        split, paths = (item.get("split"), item.get("path")) if isinstance(item, dict) else ("", item)
        pairs += [(str(split or ""), str(path)) for path in (paths if isinstance(paths, list) else [paths]) if path]
    return pairs


def _listed(contents: Contents, request: Request) -> Selection | None:
    """The data files of a repository that says nothing about them; None where a script would have to make them."""
    if _has_script(contents):
        return None
    found = [
        file
        for file in contents.files
        if data_type(file.path) and (request.subset is None or request.subset in PurePosixPath(file.path).parts[:-1])
    ]
    if not found:
        return None
    sizes: Counter[str] = Counter()
    for file in found:
        sizes[data_type(file.path)] += file.size
    # A dataset that comes in several forms is taken once.
    form = ".parquet" if ".parquet" in sizes else max(sorted(sizes), key=lambda name: sizes[name])
    in_form = [file for file in found if data_type(file.path) == form]
    return Selection(request, contents, request.subset, _in_order(in_form))


def _converted(contents: Contents, converted: Contents | None, request: Request) -> Selection:
    """The hub's conversion to Parquet, which it makes of datasets that are otherwise made by running a script."""
    repository = contents.repository
    files = [file for file in converted.files if file.path.endswith(".parquet")] if converted is not None else []
    subsets = sorted({file.path.split("/")[0] for file in files if file.path.count("/") == 2})
    if converted is None or not subsets:
        why = f"has no files of a type that SheepOp can read ({', '.join(_TYPES)})"
        if request.patterns:
            why = f"has no files that match {' or '.join(request.patterns)}"
        if _has_script(contents):
            why = "is made by a script, which SheepOp does not run"
        raise DataError(
            f"{repository} {why}, and the hub has no conversion of it to Parquet (branch {CONVERTED}). So it cannot "
            "be downloaded; no other dataset is used in its place."
        )
    subset = request.subset or _only_subset(repository, {name: {} for name in subsets})
    if subset not in subsets:
        raise DataError(no_such(repository, "subset", subset, subsets))
    folders = {file: file.path.split("/")[1] for file in files if file.path.split("/")[0] == subset}
    splits = {file: folder.removeprefix(_PARTIAL) for file, folder in folders.items()}
    partial = splits != folders
    return Selection(request, converted, subset, _in_order(splits, splits), converted=True, partial=partial)


def _in_order(files: Iterable[HubFile], splits: Mapping[HubFile, str] = _NO_SPLITS) -> tuple[HubFile, ...]:
    """`files`, each with its split: that of `splits`, or where there is none, the one that its path names."""
    named = [replace(file, split=splits.get(file) or split_of(file.path)) for file in files]
    return tuple(sorted(named, key=lambda file: (file.split != "train", file.split, file.path)))


def split_of(path: str) -> str:
    """The split that the last word of its kind in `path` names; ``train`` where none does."""
    words = _SPLIT_WORD.findall(path)
    return _SPLIT_NAMES[words[-1].lower()] if words else "train"


def data_type(path: str) -> str:
    """The suffix that says how the data in a file is written, without that of a compression; empty for other files."""
    name = PurePosixPath(path).name
    if _ABOUT.fullmatch(name) or name.startswith("."):
        return ""
    for compression in _COMPRESSIONS:
        name = name.removesuffix(compression)
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix in _TYPES else ""


def _has_script(contents: Contents) -> bool:
    """Whether the repository has a Python file of its own name, which makes the dataset when it is run."""
    script = f"{contents.repository.split('/')[-1]}.py"
    return any(file.path == script for file in contents.files)


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern of paths compiled: ``*`` and ``?`` stay within a folder, ``**`` does not."""
    translated = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern):
        translated += {"**/": r"(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token) or re.escape(token)
    return re.compile(translated)
