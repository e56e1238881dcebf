from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import zstandard

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.interface import Content, Extracted, Refused

MIB = 2**20
FILES = {"a.txt": b"The first.\n", "src/b.py": b"def b():\n    return 2\n", "deep/er/c.md": b"# Third\n"}
TEXTS = [
    ("member a.txt", "The first.\n"),
    ("member src/b.py", "def b():\n    return 2\n"),
    ("member deep/er/c.md", "# Third\n"),
]


@pytest.fixture
def extract(tmp_path: Path) -> Callable[..., list[Extracted | Refused]]:
    """Extracts in this process and checks that no temporary file is left behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def run(data: bytes | Path, name: str = "archive", **settings: object) -> list[Extracted | Refused]:
        content = Content(name, path=data) if isinstance(data, Path) else Content(name, data=data)
        items = list(Dispatcher(ExtractConfig.model_validate(settings), scratch).documents(content))
        assert list(scratch.iterdir()) == []
        return items

    return run


def texts(items: list[Extracted | Refused]) -> list[tuple[str, str]]:
    return [(item.place, item.text) for item in items if isinstance(item, Extracted)]


def refusals(items: list[Extracted | Refused]) -> list[tuple[str, str]]:
    return [(item.place, item.reason) for item in items if isinstance(item, Refused)]


def zipped(files: Mapping[str, bytes], **options: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", options.get("compression", zipfile.ZIP_DEFLATED)) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return buffer.getvalue()


def tarred(files: Mapping[str, bytes], **options: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as file:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


# Archives that programs of the system made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    for name, data in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.mark.parametrize(
    "command",
    [
        "zip -q -r ../made a.txt src deep",
        "zip -q -0 -r ../made a.txt src deep",
        "tar -cf ../made a.txt src deep",
        "tar --format=v7 -cf ../made a.txt src deep",
        "tar --format=posix -cf ../made a.txt src deep",
        "tar -czf ../made a.txt src deep",
        "tar -cjf ../made a.txt src deep",
        "tar -cJf ../made a.txt src deep",
        "tar --zstd -cf ../made a.txt src deep",
        "tar -cf ../made ./a.txt ./src ./deep",
    ],
)
def test_archives_of_the_system_s_programs_give_their_files(command: str, folder: Path, extract):
    subprocess.run(command.split(), cwd=folder, check=True)
    made = next(path for path in (folder.parent / "made", folder.parent / "made.zip") if path.exists())
    items = extract(made)
    assert [(place.replace(" ./", " "), text) for place, text in texts(items)] == TEXTS
    assert [item.kind for item in items] == ["prose", "code", "prose"]
    assert [item.language for item in items] == ["", "python", ""]


@pytest.mark.parametrize("program", ["gzip", "bzip2", "xz", "zstd -q --rm"])
def test_a_compressed_file_is_the_file_in_it(program: str, folder: Path, extract):
    path = folder / "src/b.py"
    subprocess.run([*program.split(), str(path)], check=True)
    (packed,) = path.parent.iterdir()
    (document,) = extract(packed, packed.name)
    assert (document.place, document.text) == ("", "def b():\n    return 2\n")
    assert (document.kind, document.language) == ("code", "python"), "by the name without the last suffix"


def test_a_zip_with_a_password_names_each_member_that_is_encrypted(folder: Path, extract):
    subprocess.run(["zip", "-q", "-P", "secret", "../made", "a.txt", "src/b.py"], cwd=folder, check=True)
    subprocess.run(["zip", "-q", "../made", "deep/er/c.md"], cwd=folder, check=True)
    items = extract(folder.parent / "made.zip")
    assert refusals(items) == [("member a.txt", "encrypted"), ("member src/b.py", "encrypted")]
    assert texts(items) == TEXTS[2:]


def test_links_and_devices_that_tar_packed_are_refused(folder: Path, extract):
    (folder / "link").symlink_to("/etc/passwd")
    os.link(folder / "a.txt", folder / "zz-hard")
    os.mkfifo(folder / "pipe")
    subprocess.run(["tar", "-cf", "../made", "a.txt", "link", "zz-hard", "pipe"], cwd=folder, check=True)
    items = extract(folder.parent / "made")
    assert texts(items) == TEXTS[:1]
    assert refusals(items) == [("member link", "unsafe"), ("member zz-hard", "unsafe"), ("member pipe", "unsafe")]
    subprocess.run(["zip", "-q", "-y", "../links", "a.txt", "link"], cwd=folder, check=True)
    assert refusals(extract(folder.parent / "links.zip")) == [("member link", "unsafe")]


def test_a_sparse_file_is_refused(tmp_path: Path, extract):
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"text\n")
        file.truncate(100 * MIB)
    subprocess.run(["tar", "-cSf", "made", "sparse"], cwd=tmp_path, check=True)
    assert refusals(extract(tmp_path / "made")) == [("member sparse", "unsupported")]


# Hostile ones


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_names_that_lead_out_are_refused_and_nothing_is_written(pack, tmp_path: Path, extract):
    names = [
        "../up.txt",
        "/abs.txt",
        "a/../../up.txt",
        "C:/drive.txt",
        "..\\up.txt",
        "\\abs.txt",
        "ok..txt",
        "a/b..c/d.txt",
    ]
    items = extract(pack(dict.fromkeys(names, b"text\n")))
    assert refusals(items) == [(f"member {name}", "unsafe") for name in names[:6]]
    assert [place for place, _ in texts(items)] == ["member ok..txt", "member a/b..c/d.txt"]
    # The folder above this one is shared with other tests, which have thousands of files in folders of their own.
    places = [*tmp_path.rglob("*"), *tmp_path.parent.iterdir()]
    assert not {"up.txt", "abs.txt", "drive.txt"} & {path.name for path in places}
    assert not Path("/abs.txt").exists()


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_hidden_members_and_folders_that_discovery_skips_are_left_out(pack, extract):
    files = {
        ".git/config": b"x",
        ".git/HEAD": b"x",
        "a/.env": b"x",
        "node_modules/m/index.js": b"x",
        "node_modules/n/index.js": b"x",
        "__MACOSX/a.txt": b"x",
        "./kept.txt": b"kept\n",
    }
    items = extract(pack(files))
    assert refusals(items) == [
        ("member .git/", "hidden"),
        ("member a/.env", "hidden"),
        ("member node_modules/", "ignored"),
        ("member __MACOSX/", "ignored"),
    ]
    assert [text for _, text in texts(items)] == ["kept\n"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("make", ["zip", "tar"])
def test_members_of_the_same_name_are_both_kept(make: str, extract):
    buffer = io.BytesIO()
    if make == "zip":
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("a.txt", "one\n")
            file.writestr("a.txt", "two\n")
    else:
        buffer.write(tarred({"a.txt": b"one\n"})[:1024] + tarred({"a.txt": b"two\n"}))
    assert texts(extract(buffer.getvalue())) == [("member a.txt", "one\n"), ("member a.txt", "two\n")]


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_strange_names_are_kept_printable(pack, extract):
    names = ["new\nline.txt", "tab\t.txt", "漢字.txt", "emoji 🐑.txt"]
    assert [place for place, _ in texts(extract(pack(dict.fromkeys(names, b"text\n"))))] == [
        f"member {name}" for name in names
    ]


def test_a_name_that_is_not_utf8_is_shown_with_escapes(tmp_path: Path, extract):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("text\n")
    subprocess.run(["tar", "-cf", "made", b"caf\xe9.txt"], cwd=tmp_path, check=True)
    assert texts(extract(tmp_path / "made")) == [("member caf\\xe9.txt", "text\n")]


def test_a_bomb_of_one_file_is_refused(extract):
    items = extract(gzip.compress(bytes(70 * MIB)))
    assert refusals(items) == [("", "bomb")]
    assert "67,108,864 bytes" in items[-1].detail


@pytest.fixture
def little_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheepop.data.extract.unpacking.LEAST_EXPANSION_BYTES", 8 * MIB)


@pytest.mark.usefixtures("little_is_allowed")
@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_a_bomb_of_any_format_is_refused(compress, extract):
    assert refusals(extract(compress(bytes(9 * MIB)))) == [("", "bomb")]


@pytest.mark.usefixtures("little_is_allowed")
def test_a_zip_bomb_ends_where_the_limit_is_and_what_came_before_is_kept(extract):
    items = extract(zipped({"a.txt": b"first\n", **{f"{number}.txt": b" " * MIB for number in range(12)}}))
    assert texts(items)[0] == ("member a.txt", "first\n")
    assert len(texts(items)) == 8
    assert refusals(items) == [("", "bomb")]
    assert "8,388,608 bytes" in items[-1].detail


@pytest.mark.usefixtures("little_is_allowed")
def test_the_limit_grows_with_the_archive_and_with_the_setting(extract):
    data = random.Random(1).randbytes(MIB // 2).hex().encode()
    large = zipped({"a.txt": data, "b.txt": b" " * 9 * MIB})
    assert MIB // 2 < len(large) < MIB
    assert refusals(extract(large, max_expansion=1)) == [("", "bomb")]
    assert refusals(extract(large, max_expansion=40)) == []


@pytest.mark.usefixtures("little_is_allowed")
def test_an_archive_in_an_archive_counts_against_the_outermost(extract):
    inner = zipped({f"{number}.txt": b" " * MIB for number in range(4)})
    items = extract(zipped({f"{number}.zip": inner for number in range(4)}))
    assert refusals(items) == [("", "bomb")]
    assert len(texts(items)) == 7


def test_members_that_overlap_are_a_bomb(extract):
    data = bytearray(zipped({"a.txt": b"a" * 500, "b.txt": b"b" * 500}, compression=zipfile.ZIP_STORED))
    directory = data.find(b"PK\x01\x02")
    second = data.find(b"PK\x01\x02", directory + 1)
    # The directory's second entry is made to point at the first member.
    data[second + 42 : second + 46] = struct.pack("<I", 0)
    assert refusals(extract(bytes(data))) == [("", "bomb")]


def test_too_many_members_are_a_bomb(extract):
    for pack in (zipped, tarred):
        items = extract(pack({f"{number}.txt": b"x\n" for number in range(12)}), max_members=10)
        assert len(texts(items)) == 10
        assert refusals(items) == [("", "bomb")]


def test_a_member_beyond_its_limit_is_refused_and_the_next_is_read(extract):
    files = {"large.txt": b"x" * 3000, "small.txt": b"small\n"}
    for pack in (zipped, tarred):
        items = extract(pack(files), max_member_bytes=2000)
        assert refusals(items) == [("member large.txt", "oversized")]
        assert texts(items) == [("member small.txt", "small\n")]
    assert refusals(extract(gzip.compress(b"x" * 3000), max_member_bytes=2000)) == [("", "oversized")]


def test_archives_may_lie_in_each_other_only_so_deep(extract):
    data = b"innermost\n"
    name = "a.txt"
    for level in range(6):
        data, name = zipped({name: data}), f"{level}.zip"
    assert refusals(extract(data)) == [
        ("member 4.zip, member 3.zip, member 2.zip, member 1.zip, member 0.zip", "nested")
    ]
    ((place, text),) = texts(extract(data, max_depth=5))
    assert text == "innermost\n"
    assert place.endswith("member 0.zip, member a.txt")
    assert texts(extract(zipped({"a.txt": b"a\n"}), max_depth=0)) == [("member a.txt", "a\n")]
    assert refusals(extract(zipped({"a.zip": zipped({})}), max_depth=0)) == [("member a.zip", "nested")]


def test_a_zip_that_holds_itself_ends(extract):
    # A stand-in for the quine of R. Cox: every level is a gzip file of the same name.
    data = b"x\n"
    for _ in range(50):
        data = gzip.compress(data)
    assert refusals(extract(data)) == [("", "nested")]


# Damaged ones


def test_a_member_with_a_wrong_checksum_is_damaged_and_the_others_are_read(extract):
    data = bytearray(zipped(FILES, compression=zipfile.ZIP_STORED))
    data[data.find(b"The first.")] ^= 1
    items = extract(bytes(data))
    assert refusals(items) == [("member a.txt", "damaged")]
    assert texts(items) == TEXTS[1:]


def test_a_member_in_an_unknown_compression_is_unsupported(extract):
    data = bytearray(zipped(FILES, compression=zipfile.ZIP_STORED))
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = data.find(signature) + offset
        data[place : place + 2] = struct.pack("<H", 99)
    items = extract(bytes(data))
    assert refusals(items) == [("member a.txt", "unsupported")]
    assert texts(items) == TEXTS[1:]


def test_a_zip_without_its_end_is_damaged(extract):
    assert refusals(extract(zipped(FILES)[:-30])) == [("", "damaged")]


def test_a_tar_that_is_damaged_or_ends_in_the_middle_says_so_after_what_it_gave(extract):
    data = tarred(FILES, format=tarfile.USTAR_FORMAT)
    second = 1024
    broken = bytearray(data)
    broken[second + 20] ^= 0xFF
    for damaged in (bytes(broken), data[: second + 100], data[: second + 512], data[: 3 * 1024], data[:second]):
        items = extract(damaged)
        assert ("", "damaged") in refusals(items), len(damaged)
        assert texts(items) == TEXTS[: 3 if len(damaged) == 3 * 1024 else 1]
    assert refusals(extract(data + b"\0" * 5000)) == []
    assert refusals(extract(data + b"garbage" * 300)) == [("", "damaged")]


def test_tar_archives_behind_each_other_are_all_read(extract):
    data = tarred({"a.txt": b"one\n"}) + tarred({"b.txt": b"two\n"}) + tarred({"c.txt": b"three\n"})
    assert [text for _, text in texts(extract(data))] == ["one\n", "two\n", "three\n"]


def test_a_damaged_compressed_tar_keeps_what_came_before_the_damage(extract):
    files = {f"{number}.txt": random.Random(number).randbytes(50_000).hex().encode() + b"\n" for number in range(8)}
    data = gzip.compress(tarred(files))
    items = extract(data[: len(data) // 2])
    assert [place for place, _ in texts(items)] == [f"member {number}.txt" for number in range(len(texts(items)))]
    assert 2 <= len(texts(items)) <= 4
    assert refusals(items)[-1] in {("", "damaged"), (f"member {len(texts(items))}.txt", "damaged")}


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
@pytest.mark.parametrize("size", [-1024, 2**33, 2**60])
def test_a_tar_header_with_an_absurd_size_ends_the_archive(kind: bytes, size: int, extract):
    info = tarfile.TarInfo("a.txt")
    info.type, info.size = kind, size
    header = info.tobuf(tarfile.GNU_FORMAT)
    assert ("", "damaged") in refusals(extract(header + b"text\n" + bytes(4096), "a.tar"))


def test_a_chain_of_extended_headers_ends(extract):
    info = tarfile.TarInfo("x")
    info.type = tarfile.XHDTYPE
    assert refusals(extract(info.tobuf() * 5000 + bytes(1024), "a.tar")) == [("", "damaged")]


@pytest.mark.parametrize("make", ["zip", "tar", "tar.gz", "gz"])
def test_mutated_archives_neither_crash_nor_write_anything(make: str, extract):
    data = {
        "zip": lambda: zipped(FILES),
        "tar": lambda: tarred(FILES),
        "tar.gz": lambda: gzip.compress(tarred(FILES), mtime=0),
        "gz": lambda: gzip.compress(b"some text\n" * 50, mtime=0),
    }[make]()
    generator = random.Random(make)
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(generator.randrange(1, 6)):
            action, place = generator.randrange(3), generator.randrange(len(broken))
            if action == 0:
                broken[place] = generator.randrange(256)
            elif action == 1:
                del broken[place : place + generator.randrange(1, 40)]
            else:
                broken[place:place] = generator.randbytes(generator.randrange(1, 40))
            broken = broken or bytearray(b"x")
        for item in extract(bytes(broken), f"a.{make}"):
            assert isinstance(item, Extracted) or item.reason


def test_a_large_member_goes_to_a_temporary_file_and_comes_out_whole(extract):
    text = b"".join(b"line %d %s\n" % (number, b"of a large file " * 10) for number in range(105_000))
    assert len(text) > 2**24
    items = extract(zipped({"large.txt": text}), max_document_bytes=2**25)
    assert [(item.place, item.text.encode()) for item in items] == [("member large.txt", text)]


def test_stored_data_that_is_longer_than_the_directory_says_is_noticed(extract):
    data = bytearray(zipped({"a.txt": b"x" * 100}, compression=zipfile.ZIP_STORED))
    directory = data.find(b"PK\x01\x02")
    data[directory + 16 : directory + 20] = struct.pack("<I", zlib.crc32(b"x" * 50))
    data[directory + 20 : directory + 28] = struct.pack("<II", 50, 50)
    items = extract(bytes(data))
    assert [len(text) for _, text in texts(items)] in ([50], [])


def test_names_of_tens_of_thousands_of_folders_are_no_trouble(extract):
    items = extract(zipped({"a/" * 30_000 + f"{number}.txt": b"x\n" for number in range(50)}))
    assert len(texts(items)) == 50
