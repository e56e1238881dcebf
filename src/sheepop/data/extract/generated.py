"""What in a repository nobody wrote there by hand: copies of other projects, lock files, the output of programs."""

from __future__ import annotations

import re

_VENDORED_FOLDERS = frozenset(
    {
        *("vendor", "vendored", "_vendor", "_vendored", "third_party", "third-party", "thirdparty", "3rdparty"),
        *("node_modules", "bower_components", "jspm_packages", "godeps", "pods", "dist"),
    }
)
_LOCK_FILES = frozenset(
    {
        *("package-lock.json", "npm-shrinkwrap.json", "yarn.lock", "pnpm-lock.yaml", "bun.lockb", "bun.lock"),
        *("poetry.lock", "pipfile.lock", "uv.lock", "pdm.lock", "conda-lock.yml", "cargo.lock", "go.sum"),
        *("composer.lock", "gemfile.lock", "podfile.lock", "mix.lock", "flake.lock", "pubspec.lock"),
        *("packages.lock.json", "gradle.lockfile", "package.resolved", "deno.lock"),
    }
)
_GENERATED_NAME = re.compile(
    r"\.(?:min|bundle)\.(?:m?js|css)$|\.(?:js|css)\.map$|_pb2(?:_grpc)?\.pyi?$|\.pb\.(?:go|cc|h|swift)$"
    r"|\.(?:g|freezed)\.dart$|\.designer\.(?:cs|vb)$|\.generated\.[a-z]+$|\.snap$",
    re.IGNORECASE,
)
# Go's rule (https://go.dev/s/generatedcode), the mark that Facebook began, and the usual sentences.
_GENERATED_HEADER = re.compile(
    r"code generated .{0,80}do not edit|(?<![\w@])@generated\b|\bdo not (?:edit|modify)\b"
    r"|\b(?:auto-?|automatically |machine[- ])generated (?:by|from|file|code|with|using)\b"
    r"|\bthis (?:file|code|module) (?:is|was|has been) (?:auto-?|automatically |machine[- ])?generated\b"
    r"|^\W{1,8}generated (?:by|from)\b",
    re.IGNORECASE | re.MULTILINE,
)
_HEADER_LINES = 20
_HEADER_CHARACTERS = 2000


def vendored_folder(parts: list[str]) -> int:
    """How many of the leading folders in `parts` of a path name a folder of foreign code, 0 when none does."""
    return next((number for number, part in enumerate(parts, 1) if part.lower() in _VENDORED_FOLDERS), 0)


def is_generated_name(name: str) -> bool:
    """Whether files of this name are written by programs."""
    return name.lower() in _LOCK_FILES or _GENERATED_NAME.search(name) is not None


def is_generated_text(beginning: str) -> bool:
    """Whether the first lines of source code say that a program wrote it."""
    header = "\n".join(beginning[:_HEADER_CHARACTERS].splitlines()[:_HEADER_LINES])
    return _GENERATED_HEADER.search(header) is not None
