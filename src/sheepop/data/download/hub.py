"""The hub: what a dataset's repository holds, and the bytes of its files, asked for through the hub's own client."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sheepop
from sheepop.core.errors import DataError, SheepOpError, UsageError
from sheepop.data.download.network import (
    TIMEOUT_SECONDS,
    BrokenOff,
    client_errors,
    not_stalled,
    retried,
    status_of,
)

CONVERTED = "refs/convert/parquet"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_LONGEST_ERROR_PAGE = 10**6


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository: its path, size in bytes, and the hash it must have.

    `sha256` is that of its content for a large file; a small one has `git_sha1`, that of its git object.
    """

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True, slots=True)
class Contents:
    """A repository at one commit. `card` is the header of its README, which whoever uploaded it has written."""

    repository: str
    revision: str
    files: tuple[HubFile, ...]
    card: dict[str, Any]


class Hub:
    """A hub, at ``HF_ENDPOINT`` or where the hub's library finds it, asked with `token` or the one stored for it.

    `fetched` counts the bytes that `fetch` gave. Raises `DataError` in plain words for whatever the hub or the network
    refuses.
    """

    def __init__(self, token: str | None = None) -> None:
        from huggingface_hub import constants

        # The library would otherwise fetch a list of programs to report on, and store it in the home folder.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", self.endpoint):
            raise UsageError(f"HF_ENDPOINT = {self.endpoint!r} is not the address of a hub, such as https://host.")
        # As it is shown and recorded: without a password.
        self.name = re.sub(r"//[^/@]*@", "//", self.endpoint)
        self._token = token or None
        self.fetched = 0

    def contents(self, repository: str, revision: str | None = None) -> Contents | None:
        """What `repository` holds at its newest commit, or that of the branch `revision`; None without that branch.

        Raises `DataError` when there is no such repository for this user.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

        api = HfApi(endpoint=self.endpoint, token=self._token)
        with self.explained(repository):
            try:
                info = retried(
                    lambda: api.dataset_info(
                        repository, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS
                    )
                )
            except RevisionNotFoundError:
                return None
            except HFValidationError as error:
                raise UsageError(f"{repository!r} is not the name of a dataset on the hub: {error}") from None
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise DataError(f"{self.name} does not answer like a hub ({error}). See HF_ENDPOINT.") from None
        return self._checked(repository, info)

    def fetch(self, contents: Contents, file: HubFile, start: int, stop: int) -> bytes:
        """The bytes `start` to `stop` of a file, in one request."""

        def request() -> bytes:
            received = bytearray()
            with self.stream(contents, file, start, stop) as (offset, chunks):
                if offset != start:
                    raise DataError(
                        f"{self.name} sends only whole files, so neither Parquet nor a limit works with it."
                    )
                for chunk in chunks:
                    received += chunk
                    if len(received) > stop - start:
                        break
            if len(received) != stop - start:
                raise BrokenOff(f"{len(received):,} of {stop - start:,} bytes arrived")
            return bytes(received)

        with self.explained(contents.repository):
            received = retried(request)
        self.fetched += len(received)
        return received

    @contextmanager
    def stream(
        self, contents: Contents, file: HubFile, start: int, stop: int | None = None
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The place in the file where the answer begins, `start` unless the server ignores it, and its bytes.

        Raises what the HTTP client raises, so that the caller can try again; see `explained`.
        """
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined, unused-ignore]

        url = hf_hub_url(
            contents.repository, file.path, repo_type="dataset", revision=contents.revision, endpoint=self.endpoint
        )
        headers = build_hf_headers(token=self._token, library_name="sheepop", library_version=sheepop.__version__) | {
            "Accept-Encoding": "identity",
            "Range": f"bytes={start}-{'' if stop is None else stop - 1}",
        }
        with get_session().stream(
            "GET", url, headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True
        ) as response:
            if response.status_code >= 400:
                length = response.headers.get("Content-Length", "")
                if length.isdecimal() and int(length) < _LONGEST_ERROR_PAGE:
                    response.read()
                hf_raise_for_status(response)
            yield _beginning(response, file, start), not_stalled(response.iter_raw())

    @contextmanager
    def explained(self, repository: str) -> Iterator[None]:
        """Faults of network and hub within the block become a `DataError` that says what to do."""
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            yield
        except SheepOpError:
            raise
        except OfflineModeIsEnabled:
            raise DataError("HF_HUB_OFFLINE is set, so nothing is downloaded. Unset it to download.") from None
        except (client_errors(), BrokenOff, ConnectionError, TimeoutError) as error:
            raise self._error(repository, error) from error

    def _error(self, repository: str, error: BaseException) -> DataError:
        status, code = status_of(error), _header(error, "X-Error-Code")
        if code == "GatedRepo" or type(error).__name__ == "GatedRepoError":
            return DataError(
                f"{repository} is available only to those who accept its terms. Accept them on "
                f"{self.name}/datasets/{repository} while logged in, create an access token at "
                f"{self.name}/settings/tokens, set it as HF_TOKEN and run the command again."
            )
        if status in (401, 403, 404):
            token = "the token in use may not read it" if self._uses_token() else "it is private; then set HF_TOKEN"
            what = "the file" if code == "EntryNotFound" else "the commit" if code == "RevisionNotFound" else ""
            if what:
                return DataError(
                    f"{self.name} no longer has {what} of {repository} that this download began with (status "
                    f"{status}). Remove the hidden folder of this download and run it again."
                )
            return DataError(f"There is no dataset {repository} on {self.name} (status {status}), or {token}.")
        if status == 429:
            return DataError(
                f"{self.name} asks for fewer requests (status 429). Run the same command again in a few minutes; "
                "with an access token in HF_TOKEN it allows more."
            )
        if status is not None:
            return DataError(f"{self.name} failed (status {status}): {_first_line(error)}. Run the command again.")
        return DataError(
            f"{self.name} cannot be reached, or keeps breaking off: {_first_line(error)}. Check the network (and "
            "HF_ENDPOINT, if set), then run the same command again: it keeps what has arrived."
        )

    def _uses_token(self) -> bool:
        from huggingface_hub import get_token

        return bool(self._token or get_token())

    def _checked(self, repository: str, info: Any) -> Contents:
        """`info` as ours; raises `DataError` when the hub speaks of another dataset than it was asked for."""
        if str(info.id).lower() != repository.lower():
            raise DataError(
                f"{self.name} answers with {info.id} for {repository}, so it was renamed or replaced. If that is "
                f"what you want, ask for it by name: hub:{info.id}"
            )
        if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
            raise DataError(f"{self.name} does not say which commit of {repository} it has. See HF_ENDPOINT.")
        card = info.card_data.to_dict() if info.card_data is not None else {}
        return Contents(info.id, info.sha, tuple(_file(sibling) for sibling in info.siblings or ()), card)


def _file(sibling: Any) -> HubFile:
    if not isinstance(sibling.size, int) or sibling.size < 0:
        raise DataError(f"The hub does not say how large {sibling.rfilename!r} is. Run the command again later.")
    large = sibling.lfs is not None
    return HubFile(
        sibling.rfilename,
        sibling.size,
        sibling.lfs.sha256 if large else None,
        None if large else sibling.blob_id,
    )


def _beginning(response: Any, file: HubFile, start: int) -> int:
    """Where in the file the body of `response` begins; raises `DataError` when it is of another file."""
    if response.status_code == 200:
        return 0
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if response.status_code != 206 or match is None:
        raise BrokenOff(f"status {response.status_code} without a range")
    if int(match[1]) != start or int(match[3]) != file.size:
        raise DataError(
            f"The hub lists {file.path} with {file.size:,} bytes, but sends bytes {match[1]} to {match[2]} of "
            f"{match[3]}. Run the command again later."
        )
    return start


def _header(error: BaseException, name: str) -> str:
    headers: Any = getattr(getattr(error, "response", None), "headers", {})
    return str(headers.get(name, ""))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:300]
