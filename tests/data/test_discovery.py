from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sheepop.core.errors import DataError
from sheepop.data.discovery import Entry, Skipped, discover

Tree = Callable[..., Path]


def walk(*paths: Path, ignore: tuple[str, ...] = (), limit: int = 1000) -> tuple[list[str], dict[str, str]]:
    """The sources found, in order, and the reason of each source skipped (folders end in a slash)."""
    found, skipped = [], {}
    for item in discover([str(path) for path in paths], max_file_bytes=limit, ignore=ignore):
        if isinstance(item, Entry):
            found.append(item.source)
        else:
            skipped[item.as_record()["file"]] = item.reason
    return found, skipped


def test_files_come_in_the_order_of_their_names_at_every_level(tree: Tree) -> None:
    root = tree({"b.txt": "1", "a/z.txt": "2", "a/b/c.txt": "3", "c.txt": "4", "a.txt": "5", "B.txt": "6"})
    assert walk(root) == (["B.txt", "a/b/c.txt", "a/z.txt", "a.txt", "b.txt", "c.txt"], {})


def test_every_file_left_out_has_its_reason(tree: Tree) -> None:
    root = tree(
        {
            "kept.md": "text",
            ".secret": "x",
            ".git/config": "x",
            "empty.txt": b"",
            "big.txt": b"x" * 1001,
            "fits.txt": b"x" * 1000,
            "pkg/__pycache__/m.pyc": "x",
            "web/node_modules/a/index.js": "x",
        }
    )
    assert walk(root) == (
        ["fits.txt", "kept.md"],
        {
            ".git/": "hidden",
            ".secret": "hidden",
            "big.txt": "oversized",
            "empty.txt": "empty",
            "pkg/__pycache__/": "ignored",
            "web/node_modules/": "ignored",
        },
    )


def test_ignore_files_follow_git(tree: Tree) -> None:
    root = tree(
        {
            ".gitignore": "*.log\n/build/\n# comment\n!keep.log\ndocs/*.tmp\n",
            "a.log": "x",
            "keep.log": "x",
            "build/out.txt": "x",
            "sub/build/in.txt": "x",
            "docs/a.tmp": "x",
            "docs/deep/a.tmp": "x",
            "sub/.gitignore": "!a.log\n*.txt\n",
            "sub/a.log": "x",
            "sub/note.txt": "x",
            "other/.sheepopignore": "private*\n",
            "other/private.md": "x",
            "other/public.md": "x",
        }
    )
    found, skipped = walk(root)
    # The same tree asked with `git check-ignore`: a.log, build/, docs/a.tmp, sub/note.txt, sub/build/in.txt.
    assert found == ["docs/deep/a.tmp", "keep.log", "other/public.md", "sub/a.log"]
    ignored = {name for name, reason in skipped.items() if reason == "ignored"}
    assert ignored == {"a.log", "build/", "docs/a.tmp", "other/private.md", "sub/build/in.txt", "sub/note.txt"}


def test_configured_patterns_win_over_ignore_files(tree: Tree) -> None:
    root = tree({".gitignore": "!a.log\nb.txt\n", "a.log": "x", "b.txt": "x", "c/d.txt": "x", "c/e.txt": "x"})
    found, skipped = walk(root, ignore=("*.log", "!b.txt", "c/d.*"))
    assert found == ["b.txt", "c/e.txt"]
    assert skipped == {".gitignore": "hidden", "a.log": "ignored", "c/d.txt": "ignored"}


def test_a_file_named_by_the_user_is_taken_though_hidden(tree: Tree) -> None:
    root = tree({".hidden.txt": "x", "node_modules/a.js": "y"})
    assert walk(root / ".hidden.txt") == ([".hidden.txt"], {})
    assert walk(root / "node_modules", ignore=("node_modules",)) == (["a.js"], {})


def test_several_inputs_are_told_apart(tree: Tree) -> None:
    root = tree({"x/data/a.txt": "1", "y/data/a.txt": "2", "one.txt": "3"})
    found, _ = walk(root / "x/data", root / "y/data", root / "one.txt")
    assert found == ["data/a.txt", "data (2)/a.txt", "one.txt"]


def test_links_out_of_the_input_are_followed_only_when_asked(tree: Tree, tmp_path: Path) -> None:
    root = tree({"a/text.txt": "x", "b/inside.txt": "x"})
    other = tree({"secret.txt": "x"}, "other")
    (root / "folder").symlink_to(other)
    (root / "file.txt").symlink_to(other / "secret.txt")
    (root / "again.txt").symlink_to(root / "a/text.txt")
    found = list(discover([str(root)], max_file_bytes=100))
    assert [item.source for item in found if isinstance(item, Entry)] == ["a/text.txt", "again.txt", "b/inside.txt"]
    skipped = [item for item in found if isinstance(item, Skipped)]
    assert [(item.source, item.reason, item.is_directory) for item in skipped] == [
        ("file.txt", "link", False),
        ("folder", "link", True),
    ]
    followed = discover([str(root)], max_file_bytes=100, follow_links=True)
    assert [item.source for item in followed if isinstance(item, Entry)] == [
        "a/text.txt",
        "again.txt",
        "b/inside.txt",
        "file.txt",
        "folder/secret.txt",
    ]
    both = discover([str(root), str(other)], max_file_bytes=100)
    assert sum(isinstance(item, Entry) for item in both) == 6


def test_link_loops_end_and_every_folder_is_read_once(tree: Tree) -> None:
    root = tree({"a/text.txt": "x", "b/more.txt": "y"})
    (root / "a/up").symlink_to(root)
    (root / "a/self").symlink_to(root / "a")
    (root / "b/sibling").symlink_to(root / "a")
    (root / "b/broken").symlink_to(root / "nowhere")
    (root / "b/circle").symlink_to(root / "b/circle")
    (root / "link.txt").symlink_to(root / "b/more.txt")
    assert walk(root) == (
        ["a/text.txt", "b/more.txt", "link.txt"],
        {
            "a/self/": "repeated",
            "a/up/": "repeated",
            "b/broken": "unreadable",
            "b/circle": "unreadable",
            "b/sibling/": "repeated",
        },
    )


def test_pipes_and_sockets_are_not_opened(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree({"a.txt": "x"})
    os.mkfifo(root / "pipe")
    monkeypatch.chdir(root)  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert walk(root) == (["a.txt"], {"pipe": "special", "socket": "special"})
    assert walk(root / "pipe") == ([], {"pipe": "special"})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything, so nothing is unreadable")
def test_unreadable_folders_are_listed(tree: Tree) -> None:
    root = tree({"a/x.txt": "x", "b.txt": "y"})
    (root / "a").chmod(0)
    try:
        assert walk(root) == (["b.txt"], {"a/": "unreadable"})
    finally:
        (root / "a").chmod(0o700)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS file systems refuse names that are not UTF-8")
def test_names_with_newlines_and_foreign_bytes_become_printable(tree: Tree) -> None:
    root = tree({"two\nlines.txt": "x"})
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.txt")).write_text("y")
    found = [item for item in discover([str(root)], max_file_bytes=1000) if isinstance(item, Entry)]
    assert [item.source for item in found] == ["caf\\xe9.txt", "two\nlines.txt"]
    assert [Path(item.path).read_text() for item in found] == ["y", "x"]


def test_depth_is_not_limited_by_recursion(tmp_path: Path) -> None:
    depth = sys.getrecursionlimit() + 200
    home = Path.cwd()
    os.chdir(tmp_path)
    try:
        for _ in range(depth):
            Path("d").mkdir()
            os.chdir("d")
        Path("t.txt").write_text("deep")
        os.chdir(home)
        items = list(discover([str(tmp_path)], max_file_bytes=10))
    finally:
        os.chdir(home)
        # Taken apart from its top: deeper than what the removal of temporary folders can follow.
        for number in range(depth):
            (tmp_path / "d").rename(tmp_path / f"{number}")
            if (tmp_path / f"{number}" / "d").exists():
                (tmp_path / f"{number}" / "d").rename(tmp_path / "d")
    assert len(items) == 1
    # Systems limit the length of a path: the file is either found, or its folder is listed as unreadable.
    assert isinstance(items[0], Entry) or items[0].reason == "unreadable"


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing-folder does not exist"):
        list(discover([str(tmp_path / "missing-folder")], max_file_bytes=10))


def test_an_ignore_rule_that_is_no_pattern_matches_nothing(tree: Tree) -> None:
    root = tree({".gitignore": "[z-a]\n!\nb.txt\n", "a.txt": "x", "b.txt": "y"})
    found, skipped = walk(root)
    assert found == ["a.txt"]
    assert skipped["b.txt"] == "ignored"


def test_a_rule_file_that_is_a_folder_is_listed(tree: Tree) -> None:
    root = tree({".gitignore/inside.txt": "x", "a.txt": "y"})
    items = list(discover([str(root)], max_file_bytes=10))
    assert [item.source for item in items] == [".gitignore", "a.txt"]
    assert isinstance(items[0], Skipped) and items[0].detail.startswith("ignore rules:")
