"""Access to the hub through its library: the contents of a repository, its verified files, and clear errors."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, HfFileSystem, constants, get_session, get_token, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import HfHubHTTPError, build_hf_headers  # type: ignore[attr-defined, unused-ignore]

import sheepop
from sheepop.core.console import Progress
from sheepop.core.errors import CheckpointError, DataError, SheepOpError, UsageError

T = TypeVar("T")

MAIN, CONVERTED = "main", "refs/convert/parquet"
# Seconds before each further attempt.
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
TIMEOUT_SECONDS = 30.0
# Statuses worth another attempt; None means no answer. The library itself waits on status 429 during transfers.
_PASSING_STATUS = (None, 408, 500, 502, 503, 504)
# Bytes per request when only the beginning of a file is read.
_BLOCK = 2**20
_CHUNK = 2**16
# Seconds: the hub counts requests in windows of five minutes. The library waits as long as an answer says.
_LONGEST_WAIT = 300
# The base error of the HTTP client in the hub's library, which differs between versions.
_CLIENT_ERROR = next(
    kind for kind in HfHubHTTPError.__mro__ if issubclass(kind, Exception) and kind.__name__ == "HTTPError"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository: its path, size in bytes, expected hash, and what to download.

    Large files have `sha256` of the content, small ones `git_sha1` of the git object. `target` is the path in the
    folder. With `limit`, only the part within that many bytes is downloaded.
    """

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None
    split: str = ""
    target: str = ""
    limit: int | None = None

    @property
    def transfer(self) -> int:
        """The most bytes to transfer."""
        return self.size if self.limit is None else self.limit

    def damage(self, path: Path) -> str | None:
        """How the bytes at `path` differ from this file; None if size and hash are right."""
        size = path.stat().st_size
        if size != self.size:
            return f"it has {size:,} bytes instead of {self.size:,}"
        hasher = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with path.open("rb") as content:
            found = hashlib.file_digest(content, lambda: hasher).hexdigest()
        expected = self.sha256 or self.git_sha1
        return None if expected in (None, found) else f"its hash is {found} instead of {expected}"


@dataclass(frozen=True, slots=True)
class Contents:
    """A repository at one commit. `card` is the header of its README, written by the uploader."""

    repository: str
    revision: str
    files: tuple[HubFile, ...]
    card: dict[str, Any]


class _TooLongError(Exception):
    """The hub sends more bytes than the file has."""


class Hub:
    """A hub at ``HF_ENDPOINT`` or at the library's default address, used with `token` or the stored one.

    `kind` is the kind of its repositories. `commits` maps each branch to the commit in use, from the first use on.
    Failures of the hub or the network raise an error with an explanation: `DataError` for datasets, `CheckpointError`
    for models.
    """

    def __init__(self, token: str | None = None, kind: Literal["dataset", "model"] = "dataset") -> None:
        # Otherwise the library fetches a list of programs for its telemetry and stores it in the home folder.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        # With the library's 10 MiB, a stopped transfer would lose the last chunk.
        constants.DOWNLOAD_CHUNK_SIZE = _CHUNK
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", self.endpoint):
            raise UsageError(f"HF_ENDPOINT = {self.endpoint!r} is not the address of a hub, such as https://host.")
        # The address to print and record, without a password.
        self.name = re.sub(r"//[^/@]*@", "//", self.endpoint)
        self.commits: dict[str, str] = {}
        self._token, self._kind = token or None, kind
        self.is_reached = False
        """Whether the hub has answered."""
        self.failure: type[SheepOpError] = DataError if kind == "dataset" else CheckpointError
        self._pages, self._prefix = ("/datasets", "hub:") if kind == "dataset" else ("", "")

    def contents(self, repository: str, branch: str = MAIN) -> Contents | None:
        """The contents at the commit in `commits`, or at the newest of the branch; None if there is no such branch.

        Raises `failure` if this user has no access to such a repository, or the commit is gone.
        """
        contents = self._at(repository, self.commits.get(branch, branch))
        if contents is not None:
            self.commits[branch] = contents.revision
        return contents

    def newer(self, repository: str, revision: str, *, converted: bool) -> str | None:
        """The newest commit if it is not `revision`; None if there is none or the hub does not answer."""
        try:
            newest = self._at(repository, CONVERTED if converted else MAIN)
        except self.failure:
            return None
        return newest.revision if newest is not None and newest.revision != revision else None

    def _at(self, repository: str, revision: str) -> Contents | None:
        if constants.HF_HUB_OFFLINE:
            raise self.failure("HF_HUB_OFFLINE is set, so nothing is downloaded. Unset it to download.")
        api = HfApi(endpoint=self.endpoint, token=self._token)
        options: dict[str, Any] = {"revision": revision, "files_metadata": True, "timeout": TIMEOUT_SECONDS}
        with self._explained(repository):
            try:
                ask = api.dataset_info if self._kind == "dataset" else api.model_info
                info: Any = retried(partial(ask, repository, **options))
            except RevisionNotFoundError:
                if _COMMIT.fullmatch(revision):
                    raise
                return None
            except HFValidationError as error:
                raise UsageError(f"{repository!r} is not the name of a {self._kind} on the hub: {error}") from None
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise self.failure(f"{self.name} does not answer like a hub ({error}). See HF_ENDPOINT.") from None
        self.is_reached = True
        if str(info.id).lower() != repository.lower():
            raise self.failure(
                f"{self.name} answers with {info.id} for {repository}, so it was renamed or replaced. If that is "
                f"what you want, ask for it by name: {self._prefix}{info.id}"
            )
        if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
            raise self.failure(f"{self.name} does not say which commit of {repository} it has. See HF_ENDPOINT.")
        card = info.card_data.to_dict() if info.card_data is not None else {}
        return Contents(info.id, info.sha, tuple(map(self._file, info.siblings or ())), card)

    def _file(self, sibling: Any) -> HubFile:
        if not isinstance(sibling.size, int) or sibling.size < 0:
            raise self.failure(f"The hub does not say how large {sibling.rfilename!r} is. Run the command again later.")
        sha256 = sibling.lfs.sha256 if sibling.lfs is not None else None
        return HubFile(sibling.rfilename, sibling.size, sha256, None if sha256 else sibling.blob_id)

    def bring(self, contents: Contents, file: HubFile, part: Path, progress: Progress) -> None:
        """Downloads a file to `part`, resuming an earlier transfer; raises `failure` if size or hash are wrong twice.

        Advances `progress` by megabytes.
        """
        for _ in range(2):
            self.download(contents, file, part, progress)
            problem = file.damage(part)
            if problem is None:
                return
            progress.advance(-part.stat().st_size / 1e6)
            part.unlink()
        raise self.failure(
            f"What {self.name} sends for {file.path} of {contents.repository} is not the file that it lists: "
            f"{problem}. This happened twice. Run the command again later, or ask the owner."
        )

    def download(self, contents: Contents, file: HubFile, part: Path, progress: Progress) -> None:
        """Appends the missing bytes of the file to `part`, or little more than those if the hub sends more.

        Advances `progress` by megabytes.
        """
        url = hf_hub_url(
            contents.repository, file.path, repo_type=self._kind, revision=contents.revision, endpoint=self.endpoint
        )
        headers = build_hf_headers(token=self._token, library_name="sheepop", library_version=sheepop.__version__)

        def update(count: int) -> None:
            if output.tell() > file.size:
                raise _TooLongError
            progress.advance(count / 1e6)

        @contextmanager
        def counted(**options: Any) -> Iterator[Any]:
            yield SimpleNamespace(update=update)

        options: dict[str, Any] = {"headers": {**headers, "Accept-Encoding": "identity"}, "tqdm_class": counted}
        with part.open("ab") as output, self._explained(contents.repository):
            if output.tell() > file.size:
                output.seek(0)
                output.truncate()
            progress.advance(output.tell() / 1e6)
            if output.tell() < file.size:
                _limit_waits()
                with suppress(_TooLongError):
                    retried(lambda: http_get(url, output, resume_size=output.tell(), **options), output.tell)
            output.flush()
            os.fsync(output.fileno())

    def open(self, contents: Contents, file: HubFile, size: int | None = None) -> Any:
        """Opens a remote file for random access, or with `size`, its first bytes for sequential reading."""
        system = HfFileSystem(endpoint=self.endpoint, token=self._token, skip_instance_cache=True)
        path = f"{self._pages[1:]}/{contents.repository}@{contents.revision}/{file.path}"
        cache, size = ("none", file.size) if size is None else ("readahead", min(size, file.size))
        _limit_waits()
        with self._explained(contents.repository):
            opened = system.open(path, "rb", block_size=_BLOCK, cache_type=cache, size=size)
        fetch = opened.cache.fetcher

        def checked(start: int, stop: int) -> bytes:
            with self._explained(contents.repository):
                received: bytes = fetch(start, stop)
            if len(received) != stop - start:
                raise self.failure(f"{self.name} sends only whole files, so neither Parquet nor a limit works with it.")
            return received

        opened.cache.fetcher = checked
        return opened

    def upload(self, repository: str, files: Mapping[str, Path], *, private: bool) -> tuple[str, bool]:
        """Uploads files by their paths in the repository as one commit, and makes the repository if it is missing.

        Returns its address and whether it is private, which for an existing one `private` does not change. Raises
        `failure` without a token or permission.
        """
        if constants.HF_HUB_OFFLINE:
            raise self.failure("HF_HUB_OFFLINE is set, so nothing is uploaded. Unset it to upload.")
        if not (self._token or get_token()):
            raise self.failure(
                f"Uploading needs an access token with permission to write. Create one at {self.name}/settings/tokens "
                "and set it as HF_TOKEN."
            )
        api = HfApi(endpoint=self.endpoint, token=self._token)
        changes = [CommitOperationAdd(path, str(file)) for path, file in files.items()]
        with self._explained(repository):
            try:
                api.create_repo(repository, repo_type=self._kind, private=private, exist_ok=True)
                api.create_commit(
                    repository, changes, repo_type=self._kind, commit_message="Upload a model from SheepOp"
                )
                found = api.repo_info(repository, repo_type=self._kind, timeout=TIMEOUT_SECONDS)
            except HFValidationError as error:
                raise UsageError(f"{repository!r} cannot be the name of a repository: {error}") from None
        return f"{self.name}{self._pages}/{repository}", bool(found.private)

    @contextmanager
    def _explained(self, repository: str) -> Iterator[None]:
        """Turns errors of the network and the hub into a `failure` that says what to do."""
        try:
            yield
        except (_CLIENT_ERROR, ConnectionError, TimeoutError) as error:
            raise self._error(repository, error) from error

    def _error(self, repository: str, error: Exception) -> SheepOpError:
        return self.failure(self._words(repository, error))

    def _words(self, repository: str, error: Exception) -> str:
        status = _status_of(error)
        self.is_reached = self.is_reached or status is not None
        if isinstance(error, GatedRepoError):
            return (
                f"{repository} is available only to those who accept its terms. Accept them on "
                f"{self.name}{self._pages}/{repository} while logged in, create an access token at "
                f"{self.name}/settings/tokens, set it as HF_TOKEN and run the command again."
            )
        if isinstance(error, (EntryNotFoundError, RevisionNotFoundError)):
            what = "file" if isinstance(error, EntryNotFoundError) else "commit"
            if self._kind == "model":
                return f"{self.name} no longer has this {what} of {repository}. Run the command again."
            return (
                f"{self.name} no longer has the {what} of {repository} that this download began with. Remove the "
                "hidden folder of this download and run it again."
            )
        if status in (401, 403, 404):
            has_token = self._token or get_token()
            token = "the token in use may not read it" if has_token else "it is private; then set HF_TOKEN"
            return f"There is no {self._kind} {repository} on {self.name} (status {status}), or {token}."
        if status == 429:
            return (
                f"{self.name} asks for fewer requests (status 429). Run the same command again in a few minutes; "
                "with an access token in HF_TOKEN it allows more."
            )
        words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:300]
        if status is not None:
            return f"{self.name} failed (status {status}): {words}. Run the command again."
        return (
            f"{self.name} cannot be reached, or keeps breaking off: {words}. Check the network (and HF_ENDPOINT, if "
            "set), then run the same command again: it keeps what has arrived."
        )


def retried(work: Callable[[], T], reached: Callable[[], int] = lambda: 0) -> T:
    """Calls `work`, again after passing failures; their count restarts after an attempt that increased `reached()`."""
    failures, before = 0, reached()
    while True:
        try:
            return work()
        except _CLIENT_ERROR as error:
            failures, before = failures if reached() == before else 0, reached()
            if _status_of(error) not in _PASSING_STATUS or failures == len(WAITS):
                raise
        time.sleep(WAITS[failures])
        failures += 1


def _limit_waits() -> None:
    """Makes the library refuse an answer of status 429 that asks for a longer wait than `_LONGEST_WAIT`."""
    hooks = get_session().event_hooks
    if _refuse_long_wait not in hooks["response"]:
        get_session().event_hooks = {**hooks, "response": [*hooks["response"], _refuse_long_wait]}


def _refuse_long_wait(response: Any) -> None:
    asked = [response.headers.get("Retry-After", ""), *re.findall(r"\bt=(\d+)", response.headers.get("RateLimit", ""))]
    if response.status_code == 429 and max(int(each) for each in [*filter(str.isdecimal, asked), "0"]) > _LONGEST_WAIT:
        raise HfHubHTTPError("The hub asks for a long wait.", response=response)


def _status_of(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
