"""The name of a published model: a repository on a hub, a revision, and for GGUF a file in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from sheepop.checkpoint.model_kind import GGUF
from sheepop.core.errors import UsageError

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
