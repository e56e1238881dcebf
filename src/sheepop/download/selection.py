"""Selects the files of a request in a repository: those of one subset and of the requested splits."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from sheepop.core.errors import DataError, first_few
from sheepop.core.hub import CONVERTED, Contents, Hub, HubFile
from sheepop.download.catalog import MOST_NAMES, Request, no_such

_TYPES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".arrow")
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# Files with these names describe the data.
_ABOUT = re.compile(r"(readme|licen[cs]e|dataset_infos?|state|requirements|citation|notice)\b.*", re.IGNORECASE)
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SPLIT_WORD = re.compile(rf"(?<![A-Za-z])({'|'.join(_SPLIT_NAMES)})(?![A-Za-z])", re.IGNORECASE)
_PARTIAL = "partial-"
_CONVERTED_FILE = re.compile(rf"(?P<subset>[^/]+)/(?:{_PARTIAL})?(?P<split>[^/]+)/[^/]+\.parquet")


@dataclass(frozen=True, slots=True)
class Selection:
    """The `files` of a request at one commit, with those of the training split first.

    `converted` is true for the hub's own conversion to Parquet, `partial` if that has only the beginning. `column` is
    the text column, if known. `taken` are the files to transfer.
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
    def transfer(self) -> int:
        """The most bytes to transfer."""
        return sum(file.transfer for file in self.taken)

    @property
    def licence(self) -> str | None:
        """The licence on the card of the dataset, else the one in the request."""
        said = self.contents.card.get("license")
        if isinstance(said, list):
            said = ", ".join(str(item) for item in said)
        if said == "other":
            said = self.contents.card.get("license_name")
        if isinstance(said, str) and said.strip().lower() not in ("", "unknown", "other"):
            return " ".join(said.split())[:200]
        return self.request.licence


def select(hub: Hub, request: Request) -> Selection:
    """Selects the files of `request`; never substitutes another dataset.

    Raises `DataError` if the repository has no readable data, if the subset is ambiguous, or if the requested subset or
    split does not exist.
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
    if request.split is None or (request.split == "train" and splits == {""}):  # which the hub calls that, too
        return selection
    if request.split not in splits:
        raise DataError(no_such(contents.repository, "split", request.split, sorted(splits)))
    return replace(selection, files=tuple(file for file in selection.files if file.split == request.split))


def _matching(contents: Contents, patterns: Iterable[str]) -> list[HubFile]:
    """The files that match the first pattern with any match."""
    for pattern in patterns:
        compiled = glob_pattern(pattern)
        if found := [file for file in contents.files if compiled.fullmatch(file.path)]:
            return found
    return []


def _described(contents: Contents, request: Request) -> Selection | None:
    """The files that the header of the README lists for the subset; None if it lists no subsets."""
    listed = contents.card.get("configs")
    configs = {
        str(config["config_name"]): config
        for config in (listed if isinstance(listed, list) else [])
        if isinstance(config, dict) and "config_name" in config and (config.get("data_files") or config.get("data_dir"))
    }
    if not configs:
        return None
    name = _subset(contents.repository, request.subset, configs)
    chosen: dict[str, HubFile] = {}
    for split, pattern in _data_files(configs[name].get("data_files") or f"{configs[name]['data_dir']}/**"):
        for file in _matching(contents, [pattern]):
            if data_type(file.path):
                chosen.setdefault(file.path, replace(file, split=split))
    if not chosen:
        raise DataError(
            f"{contents.repository} has no files in its subset {name} that SheepOp can read ({', '.join(_TYPES)})."
        )
    return Selection(request, contents, name, _in_order(chosen.values()))


def _subset(repository: str, wanted: str | None, configs: Mapping[str, Any]) -> str:
    """The subset to use: the one `wanted`, else the only one, else the default one; raises `DataError` if none."""
    if wanted is not None and wanted not in configs:
        raise DataError(no_such(repository, "subset", wanted, sorted(configs)))
    default = [name for name, config in configs.items() if config.get("default") is True]
    for names in ([wanted] if wanted else [], list(configs), default, [name for name in configs if name == "default"]):
        if len(names) == 1:
            return names[0]
    raise DataError(
        f"{repository} has several subsets; name one, such as hub:{repository}/{min(configs)}. They are: "
        f"{first_few(sorted(configs), MOST_NAMES)}."
    )


def _data_files(listed: Any) -> list[tuple[str, str]]:
    """Pairs of split and pattern, from any form that a README may use; the split is empty if none is named."""
    if isinstance(listed, dict):
        listed = [{"split": split, "path": path} for split, path in listed.items()]
    pairs = []
    for item in listed if isinstance(listed, list) else [listed]:
        split, paths = (item.get("split"), item.get("path")) if isinstance(item, dict) else ("", item)
        pairs += [(str(split or ""), str(path)) for path in (paths if isinstance(paths, list) else [paths]) if path]
    return pairs


def _listed(contents: Contents, request: Request) -> Selection | None:
    """The data files of a repository that does not list them; None if there are none or a script makes the data."""
    forms: defaultdict[str, list[HubFile]] = defaultdict(list)
    for file in contents.files:
        kind = data_type(file.path)
        if kind and (request.subset is None or request.subset in PurePosixPath(file.path).parts[:-1]):
            forms[kind].append(file)
    if not forms or _has_script(contents):
        return None
    # Of a dataset in several formats only one is used: Parquet, or the largest.
    form = max(sorted(forms), key=lambda kind: (kind == ".parquet", sum(file.size for file in forms[kind])))
    return Selection(request, contents, request.subset, _in_order(forms[form]))


def _converted(contents: Contents, converted: Contents | None, request: Request) -> Selection:
    """The files of the hub's own conversion to Parquet, for datasets that would need a script."""
    subsets: defaultdict[str, list[HubFile]] = defaultdict(list)
    for file in converted.files if converted is not None else ():
        if match := _CONVERTED_FILE.fullmatch(file.path):
            subsets[match["subset"]].append(replace(file, split=match["split"]))
    if converted is None or not subsets:
        why = f"has no files of a type that SheepOp can read ({', '.join(_TYPES)})"
        if request.patterns:
            why = f"has no files that match {' or '.join(request.patterns)}"
        if _has_script(contents):
            why = "is made by a script, which SheepOp does not run"
        raise DataError(
            f"{contents.repository} {why}, and the hub has no conversion of it to Parquet (branch {CONVERTED}). So it "
            "cannot be downloaded; no other dataset is used in its place."
        )
    subset = _subset(contents.repository, request.subset, {name: {} for name in subsets})
    partial = any(file.path.startswith(f"{subset}/{_PARTIAL}") for file in subsets[subset])
    return Selection(request, converted, subset, _in_order(subsets[subset]), converted=True, partial=partial)


def _in_order(files: Iterable[HubFile]) -> tuple[HubFile, ...]:
    """The files sorted with the training split first; files without a split get the one that their path names."""
    named = [replace(file, split=file.split or split_of(file.path)) for file in files]
    return tuple(sorted(named, key=lambda file: (file.split != "train", file.split, file.path)))


def split_of(path: str) -> str:
    """The split named by the last such word in `path`, or ``train``."""
    words = _SPLIT_WORD.findall(path)
    return _SPLIT_NAMES[words[-1].lower()] if words else "train"


def data_type(path: str) -> str:
    """The suffix of a data file's format, without the compression; empty for other files."""
    name = PurePosixPath(path).name
    if _ABOUT.fullmatch(name) or name.startswith("."):
        return ""
    for compression in _COMPRESSIONS:
        name = name.removesuffix(compression)
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix in _TYPES else ""


def _has_script(contents: Contents) -> bool:
    """Whether the repository has a Python file of its own name, a script that makes the dataset."""
    script = f"{contents.repository.split('/')[-1]}.py"
    return any(file.path == script for file in contents.files)


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a path pattern: ``*`` and ``?`` stay within a folder, ``**`` does not."""
    translated = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern):
        translated += {"**/": r"(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token) or re.escape(token)
    return re.compile(translated)
