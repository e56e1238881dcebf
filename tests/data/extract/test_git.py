from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from sheepop.core.errors import DataError
from sheepop.data.discovery import Entry, Skipped
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.extraction import Extraction
from sheepop.data.extract.git import BlobReader, parse_spec, repository_entries
from sheepop.data.extract.interface import Extracted, ExtractionError, Refused

MIT = (
    "MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy of this software.\n"
    "The above copyright notice and this permission notice shall be included in all copies.\n"
)


def listed(spec: str, **settings: object) -> list[Entry | Skipped]:
    return list(repository_entries(spec, **{"max_file_bytes": 2**40, **settings}))


def kept(spec: str) -> dict[str, Entry]:
    """The files to read, by their path in the repository."""
    return {each.source.partition("/")[2]: each for each in listed(spec) if isinstance(each, Entry)}


def fact(spec: str, name: str) -> str:
    return next(dict(entry.facts).get(name, "") for entry in kept(spec).values())


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=Dolly", "-c", "user.email=dolly@farm.example", "-c", "protocol.file.allow=always"]
    command = ["git", *who, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, files: Mapping[str, bytes | str]) -> str:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "-q", "-m", "work")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    return folder


@pytest.fixture
def read() -> Iterator[Callable[[str], dict[str, list[Extracted | Refused]]]]:
    """Reads every file of a repository, by its path in it."""
    with closing(Extraction(ExtractConfig())) as extraction:

        def run(spec: str) -> dict[str, list[Extracted | Refused]]:
            return {
                name: list(extraction.blob(Path(file.path), file.revision, name)) for name, file in kept(spec).items()
            }

        yield run


def skipped(spec: str, **settings: object) -> dict[str, str]:
    left_out = [each for each in listed(spec, **settings) if isinstance(each, Skipped)]
    return {each.as_record()["file"].partition("/")[2]: each.reason for each in left_out}


def test_tracked_files_are_listed_in_the_order_of_their_paths_with_what_git_knows_of_them(repository: Path):
    head = commit(repository, {"b.py": "x = 1\n", "a/z.md": "# Z\n", "a.txt": "text\n", "é/ü.txt": "text\n"})
    (repository / "untracked.txt").write_text("no\n")
    (repository / "a.txt").write_text("changed since\n")
    found = kept(f"git+{repository}")
    assert fact(f"git+{repository}", "revision") == head
    assert {name: file.size for name, file in found.items()} == {"a.txt": 5, "a/z.md": 4, "b.py": 6, "é/ü.txt": 5}
    assert list(found) == ["a.txt", "a/z.md", "b.py", "é/ü.txt"]
    assert found["a.txt"].revision == git(repository, "rev-parse", "HEAD:a.txt")


def test_the_files_of_a_revision_are_read_as_they_were_then(repository: Path, read):
    first = commit(repository, {"a.py": "first = 1\n"})
    git(repository, "tag", "v1")
    commit(repository, {"a.py": "second = 2\n", "b.txt": "new\n"})
    for revision in ("v1", first, first[:10], "HEAD~1", "main~1", "HEAD@{1}"):
        ((document,),) = read(f"git+{repository}@{revision}").values()
        assert document == Extracted("first = 1\n", "code", "python", metadata={"encoding": "utf_8"}), revision
    assert sorted(read(f"git+{repository}")) == ["a.py", "b.txt"]
    assert fact(f"git+{repository}@v1", "revision") == first


def test_a_bare_repository_and_one_with_an_at_sign_in_its_path_are_read(repository: Path, tmp_path: Path, read):
    commit(repository, {"a.txt": "text\n"})
    git(tmp_path, "clone", "-q", "--bare", str(repository), "bare@home.git")
    assert list(read(f"git+{tmp_path}/bare@home.git")) == ["a.txt"]
    assert list(read(f"git+{tmp_path}/bare@home.git@main")) == ["a.txt"]
    assert parse_spec(f"git+{tmp_path}/bare@home.git@HEAD@{{0}}") == (tmp_path / "bare@home.git", "HEAD@{0}")


def test_entries_carry_the_revision_and_the_licence(repository: Path):
    head = commit(repository, {"a.txt": "text\n", "LICENSE": MIT})
    entries = listed(f"git+{repository}")
    facts = (("revision", head), ("license", "MIT"), ("license_file", "LICENSE"))
    assert entries[1] == Entry(
        "git",
        str(repository),
        f"project@{head[:12]}/a.txt",
        5,
        revision=git(repository, "rev-parse", "HEAD:a.txt"),
        facts=facts,
    )


@pytest.mark.parametrize(
    ("files", "license_name", "names"),
    [
        ({"COPYING": "GNU GENERAL PUBLIC LICENSE\nVersion 3\n"}, "GPL-3.0", "COPYING"),
        (
            {"LICENSE-APACHE": "Apache License\nVersion 2.0\n", "LICENSE-MIT": MIT},
            "Apache-2.0, MIT",
            "LICENSE-APACHE, LICENSE-MIT",
        ),
        ({"LICENCE.md": "Ask first.\n"}, "", "LICENCE.md"),
        ({"sub/LICENSE": MIT}, "", ""),
    ],
)
def test_the_licence_is_found_at_the_top(repository: Path, files: Mapping[str, str], license_name: str, names: str):
    commit(repository, files)
    spec = f"git+{repository}"
    assert (fact(spec, "license"), fact(spec, "license_file")) == (license_name, names)


def test_what_nobody_wrote_there_is_left_out_with_its_reason(repository: Path, read):
    commit(
        repository,
        {
            "src/main.py": "x = 1\n",
            "src/a_pb2.py": "x = 1\n",
            "src/made.py": "# This file is automatically generated by make.\nx = 1\n",
            "src/notes.md": "This file is automatically generated by nobody.\n",
            "vendor/lib/a.go": "package a\n",
            "vendor/lib/b.go": "package a\n",
            "web/node_modules/m/i.js": "x\n",
            "web/app.min.js": "x\n",
            "package-lock.json": "{}\n",
            ".github/workflows/ci.yml": "a: 1\n",
            ".editorconfig": "root = true\n",
            "empty.py": "",
        },
    )
    spec = f"git+{repository}"
    assert skipped(spec) == {
        ".editorconfig": "hidden",
        ".github/": "hidden",
        "empty.py": "empty",
        "package-lock.json": "generated",
        "src/a_pb2.py": "generated",
        "vendor/": "vendored",
        "web/app.min.js": "generated",
        "web/node_modules/": "vendored",
    }
    items = read(spec)
    assert list(items) == ["src/made.py", "src/main.py", "src/notes.md"]
    assert items["src/made.py"] == [Refused("", "generated", "its first lines say that a program wrote it")]
    assert isinstance(items["src/notes.md"][0], Extracted)


def test_folders_of_foreign_code_are_named_where_they_begin(repository: Path):
    folders = ("vendor/a", "src/third_party/b", "web/node_modules", "Vendor", "pip/_vendor/rich", "src/vendors")
    commit(repository, {f"{folder}/x.py": "x = 1\n" for folder in folders})
    foreign = ("vendor/", "src/third_party/", "web/node_modules/", "Vendor/", "pip/_vendor/")
    assert skipped(f"git+{repository}") == dict.fromkeys(foreign, "vendored")


def test_git_attributes_count_as_git_reads_them_at_that_revision(repository: Path):
    commit(
        repository,
        {
            ".gitattributes": "*.gen.py linguist-generated\nlib/** linguist-vendored=true\n"
            "kept.gen.py -linguist-generated\n",
            "sub/.gitattributes": "data.py linguist-generated=true\n*.gen.py !linguist-generated\n",
            "a.gen.py": "x = 1\n",
            "kept.gen.py": "x = 1\n",
            "lib/deep/b.py": "x = 1\n",
            "sub/data.py": "x = 1\n",
            "sub/c.gen.py": "x = 1\n",
            "data.py": "x = 1\n",
        },
    )
    commit(repository, {".gitattributes": ""})
    names = {"a.gen.py": "generated", "lib/deep/b.py": "vendored", "sub/data.py": "generated"}
    found = skipped(f"git+{repository}@HEAD~1")
    assert {name: reason for name, reason in found.items() if not name.endswith(".gitattributes")} == names
    assert list(kept(f"git+{repository}@HEAD~1")) == ["data.py", "kept.gen.py", "sub/c.gen.py"]
    assert "a.gen.py" in kept(f"git+{repository}")


def test_links_and_submodules_are_refused(repository: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    commit(other, {"a.txt": "text\n"})
    (repository / "link").symlink_to("/etc/passwd")
    git(repository, "submodule", "--quiet", "add", str(other), "sub")
    commit(repository, {"a.txt": "text\n"})
    assert skipped(f"git+{repository}") == {".gitmodules": "hidden", "link": "unsafe", "sub": "unsupported"}


def test_size_limit_and_ignore_patterns_apply(repository: Path):
    commit(repository, {"large.txt": "x" * 1000, "small.txt": "x\n", "logs/a.log": "x\n"})
    settings = {"max_file_bytes": 100, "ignore": ["*.log"]}
    assert skipped(f"git+{repository}", **settings) == {"large.txt": "oversized", "logs/a.log": "ignored"}


def test_names_with_newlines_and_bytes_that_are_not_utf8_are_read(repository: Path, read):
    Path(os.fsdecode(os.fsencode(repository) + b"/caf\xe9\n.txt")).write_text("text\n")
    commit(repository, {})
    ((name, (document,)),) = read(f"git+{repository}").items()
    assert name == "caf\\xe9\n.txt"
    assert document.text == "text\n"


def test_large_and_binary_blobs_are_read_by_their_type(repository: Path, read):
    large = "".join(f"line {number} {'of many words ' * 10}\n" for number in range(120_000))
    assert len(large) > 2**24
    commit(repository, {"large.txt": large, "program": b"\x7fELF" + bytes(5000), "a.csv": "name\nDolly\n"})
    items = read(f"git+{repository}")
    assert "".join(item.text for item in items["large.txt"]) == large
    assert [item.reason for item in items["program"]] == ["binary"]
    assert "Dolly" in items["a.csv"][0].text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("git+{0}@no-such-branch", "has no revision no-such-branch"),
        ("git+{0}@--upload-pack=touch /tmp/x", "has no revision --upload-pack"),
        ("git+{0}@HEAD:a.txt", "has no revision HEAD:a.txt"),
        ("git+{0}/sub", "not a git repository"),
        ("git+{0}/none", "is not a folder"),
        ("git+", "is not a folder"),
        ("git+@HEAD", "is not a folder"),
    ],
)
def test_what_is_no_repository_or_revision_is_one_clear_error(repository: Path, spec: str, message: str):
    commit(repository, {"a.txt": "text\n", "sub/b.txt": "text\n"})
    with pytest.raises(DataError, match=message):
        listed(spec.format(repository))


def test_a_repository_without_a_commit_has_no_revision(repository: Path):
    with pytest.raises(DataError, match="has no revision HEAD"):
        listed(f"git+{repository}")


def test_nothing_that_the_repository_configures_is_executed_or_written(repository: Path, tmp_path: Path, read):
    commit(repository, {"a.txt": "text\n", ".gitattributes": "*.txt filter=bad diff=bad linguist-generated=false\n"})
    mark = tmp_path / "executed"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    script.chmod(0o755)
    for name in (
        *("core.fsmonitor", "core.pager", "core.editor", "core.sshCommand", "core.askPass", "core.gitProxy"),
        *("filter.bad.smudge", "filter.bad.clean", "filter.bad.process", "diff.bad.textconv", "diff.external"),
        *("alias.ls-tree", "alias.cat-file", "credential.helper", "uploadpack.packObjectsHook"),
    ):
        git(repository, "config", name, f"!{script}" if name.startswith("alias") else str(script))
    hooks = repository / ".git/hooks"
    for name in ("post-index-change", "post-checkout", "reference-transaction", "pre-auto-gc"):
        (hooks / name).write_text(script.read_text())
        (hooks / name).chmod(0o755)
    before = sorted(path.relative_to(repository) for path in repository.rglob("*"))
    ((document,),) = read(f"git+{repository}").values()
    assert document.text == "text\n"
    assert not mark.exists()
    assert sorted(path.relative_to(repository) for path in repository.rglob("*")) == before


def test_the_environment_of_the_caller_does_not_lead_git_elsewhere(repository: Path, tmp_path: Path, monkeypatch, read):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    commit(other, {"other.txt": "text\n"})
    commit(repository, {"a.txt": "text\n"})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(other / ".git/objects"))
    assert list(read(f"git+{repository}")) == ["a.txt"]


@pytest.mark.skipif(os.getuid() != 0, reason="giving files to somebody else needs root")
def test_a_repository_that_belongs_to_somebody_else_is_read(repository: Path, read):
    commit(repository, {"a.txt": "text\n"})
    for path in (repository, *repository.rglob("*")):
        os.chown(path, 12345, 12345, follow_symlinks=False)
    assert list(read(f"git+{repository}")) == ["a.txt"]


def test_a_blob_that_is_gone_or_damaged_is_refused_and_the_next_is_read(repository: Path):
    commit(repository, {"a.txt": "one\n", "b.txt": "two\n", "c.txt": "three\n"})
    found = kept(f"git+{repository}")
    objects = {
        name: repository / ".git/objects" / file.revision[:2] / file.revision[2:] for name, file in found.items()
    }
    objects["a.txt"].unlink()
    objects["b.txt"].chmod(0o644)
    objects["b.txt"].write_bytes(b"garbage")
    with closing(Extraction(ExtractConfig())) as extraction:
        items = [list(extraction.blob(repository, file.revision, name)) for name, file in found.items()]
    assert [type(item[0]) for item in items] == [Refused, Refused, Extracted]
    assert items[0][0].reason == "missing"
    assert items[1][0].reason in {"missing", "damaged"}, "git says the same of both"
    assert items[2][0].text == "three\n"


def test_a_git_that_says_nothing_is_not_waited_for(repository: Path, tmp_path: Path):
    commit(repository, {"a.txt": "one\n"})
    blob = kept(f"git+{repository}")["a.txt"].revision
    path = repository / ".git/objects" / blob[:2] / blob[2:]
    path.unlink()
    os.mkfifo(path)
    reader = BlobReader(repository, seconds=0.5)
    with pytest.raises(ExtractionError) as caught, reader.content(blob, "a.txt", tmp_path):
        pass
    assert caught.value.reason in {"timeout", "damaged", "missing"}
    reader.close()


def test_without_git_the_error_says_what_is_missing(repository: Path, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(DataError, match="needs the program git"):
        listed(f"git+{repository}")
