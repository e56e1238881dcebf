"""From a name to a finished folder, against a hub on loopback; faults of the network are in test_faults.py."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sheepop.core.console import Console
from sheepop.core.errors import DataError, StorageError, UsageError
from sheepop.download import download as module
from sheepop.download.download import download_dataset

if TYPE_CHECKING:
    from tests.hub_server import LoopbackHub

CONVERTED = "refs/convert/parquet"


def rows(start: int, count: int) -> pa.Table:
    texts = [
        "".join(hashlib.sha256(b"%d %d" % (i, k)).hexdigest() for k in range(3)) for i in range(start, start + count)
    ]
    return pa.table({"title": [text[:5] for text in texts], "text": texts})


def parquet(table: pa.Table, row_group_size: int = 200) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=row_group_size, use_dictionary=False)
    return buffer.getvalue()


TRAIN = [parquet(rows(0, 2000)), parquet(rows(2000, 2000))]
TEST = parquet(rows(4000, 20))
WIKITEXT = {
    "README.md": b"---\nlicense: cc\n---\n",
    "wikitext-103-raw-v1/train-00000-of-00002.parquet": TRAIN[0],
    "wikitext-103-raw-v1/train-00001-of-00002.parquet": TRAIN[1],
    "wikitext-103-raw-v1/test-00000-of-00001.parquet": TEST,
    "wikitext-2-raw-v1/train-00000-of-00001.parquet": TEST,
}
LINES = "".join(json.dumps({"text": hashlib.sha256(str(i).encode()).hexdigest()}) + "\n" for i in range(3000)).encode()


def files_below(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_served_hub_is_one_to_the_hubs_own_client(hub: LoopbackHub, tmp_path: Path):
    """Whatever the other tests show, they show it against a hub that the library itself can download from."""
    from huggingface_hub import HfApi, hf_hub_download

    sha = hub.repository("Salesforce/wikitext", WIKITEXT).branches["main"]
    name = "wikitext-103-raw-v1/train-00000-of-00002.parquet"
    info = HfApi(endpoint=hub.address).dataset_info("Salesforce/wikitext", files_metadata=True)
    assert info.sha == sha and {s.rfilename: s.size for s in info.siblings or ()} == {
        path: len(data) for path, data in WIKITEXT.items()
    }
    path = hf_hub_download(
        "Salesforce/wikitext", name, repo_type="dataset", revision=sha, endpoint=hub.address, local_dir=tmp_path
    )
    assert Path(path).read_bytes() == TRAIN[0]


def test_a_whole_dataset_comes_with_a_record_of_what_it_is(hub: LoopbackHub, tmp_path: Path):
    sha = hub.repository("Salesforce/wikitext", WIKITEXT, card={"license": ["cc-by-sa-3.0", "gfdl"]}).branches["main"]
    screen = io.StringIO()
    result = download_dataset("wikitext-103", tmp_path / "data", console=Console(file=screen))
    folder = tmp_path / "data" / "wikitext-103"
    found = files_below(folder)
    record = json.loads(found.pop("download.json"))
    assert found.pop(".sheepopignore") == b"/download.json\n"
    assert found == {path: data for path, data in WIKITEXT.items() if path.startswith("wikitext-103-raw-v1/")}
    assert [entry.name for entry in (tmp_path / "data").iterdir()] == ["wikitext-103"]

    expected = {"path": str(folder), **record}
    next_command = result.pop("next")
    assert result == expected
    assert {key: record[key] for key in ("name", "repository", "revision", "subset", "column", "limit")} == {
        "name": "wikitext-103",
        "repository": "Salesforce/wikitext",
        "revision": sha,
        "subset": "wikitext-103-raw-v1",
        "column": "text",
        "limit": None,
    }
    assert record["licence"] == "cc-by-sa-3.0, gfdl" and record["hub"] == hub.address
    assert record["complete"] is True and record["bytes"] == sum(map(len, found.values()))
    assert [(file["file"], file["split"], file["whole"]) for file in record["files"]] == [
        ("wikitext-103-raw-v1/train-00000-of-00002.parquet", "train", True),
        ("wikitext-103-raw-v1/train-00001-of-00002.parquet", "train", True),
        ("wikitext-103-raw-v1/test-00000-of-00001.parquet", "test", True),
    ]
    for file in record["files"]:
        assert file["sha256"] == hashlib.sha256(found[file["file"]]).hexdigest()
        assert file["bytes"] == len(found[file["file"]])
    training = f"{folder}/wikitext-103-raw-v1/train-0000*"
    assert next_command == f"sheepop data build {training} --output corpora/wikitext-103 data.extract.column=text"
    said = screen.getvalue()
    assert f"commit {sha[:12]}: 3 files, {record['bytes'] / 1e3:.0f} kB; " in said
    assert "is free. Licence: cc-by-sa-3.0, gfdl." in said


def test_a_second_download_transfers_nothing_and_says_when_the_hub_has_another(hub: LoopbackHub, tmp_path: Path):
    repository = hub.repository("Salesforce/wikitext", WIKITEXT)
    first = download_dataset("wikitext-2", tmp_path)
    hub.sent.clear()
    screen = io.StringIO()
    assert download_dataset("wikitext-2", tmp_path, console=Console(file=screen)) == first
    assert hub.total_sent == 0 and "already holds wikitext-2 at commit" in screen.getvalue()
    assert "The hub now has" not in screen.getvalue()

    newest = repository.commit({**WIKITEXT, "wikitext-2-raw-v1/train-00000-of-00001.parquet": TRAIN[0]})
    assert download_dataset("wikitext-2", tmp_path, console=Console(file=screen)) == first
    assert hub.total_sent == 0
    assert f"The hub now has {newest[:12]}; remove the folder to download that commit." in screen.getvalue()


def test_a_finished_download_needs_no_hub(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub.repository("Salesforce/wikitext", WIKITEXT)
    first = download_dataset("wikitext-2", tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert download_dataset("wikitext-2", tmp_path) == first


@pytest.mark.parametrize("limit", [250_000, 400_000, 1_100_000])
def test_a_limit_stops_the_transfer_and_not_the_file(hub: LoopbackHub, tmp_path: Path, limit: int):
    hub.repository("Salesforce/wikitext", WIKITEXT)
    assert len(TRAIN[0]) > 400_000 and 2 * len(TRAIN[0]) < 1_100_000
    record = download_dataset("wikitext-103", tmp_path, limit=limit)
    # Beside the rows it reads the end of the file, once for its columns and once with them.
    assert hub.total_sent <= limit + 2**18
    if limit == 1_100_000:
        # Everything comes within it.
        assert record["complete"] is True and all(file["whole"] for file in record["files"])
        return
    assert record["complete"] is False and record["limit"] == limit
    *whole, last = record["files"]
    assert whole == [] and last["file"] == "wikitext-103-raw-v1/train-00000-of-00002.excerpt.parquet"
    assert last["origin"] == "wikitext-103-raw-v1/train-00000-of-00002.parquet" and last["whole"] is False
    found = pq.read_table(tmp_path / "wikitext-103" / last["file"])
    assert found.num_rows > (limit - 200_000) // 230 and found.equals(rows(0, found.num_rows))


def test_a_limit_between_two_files_takes_the_first_whole_and_the_beginning_of_the_next(
    hub: LoopbackHub, tmp_path: Path
):
    hub.repository("o/d", {"a.jsonl": LINES, "b.jsonl": LINES, "c.jsonl": LINES})
    limit = len(LINES) + len(LINES) // 2
    record = download_dataset("hub:o/d", tmp_path, limit=limit)
    # Beside the two files, the names of the columns.
    assert limit - 2**17 < hub.total_sent <= limit + 2**15
    found = files_below(tmp_path / "o--d")
    assert [file["file"] for file in record["files"]] == ["a.jsonl", "b.excerpt.jsonl"]
    assert found["a.jsonl"] == LINES
    assert LINES.startswith(found["b.excerpt.jsonl"]) and found["b.excerpt.jsonl"].endswith(b"\n")
    assert len(LINES) // 2 - 100 < len(found["b.excerpt.jsonl"]) <= len(LINES) // 2
    assert record["column"] == "text"


def test_a_limit_that_leaves_too_little_for_the_next_file_ends_before_it(hub: LoopbackHub, tmp_path: Path):
    hub.repository("Salesforce/wikitext", WIKITEXT)
    record = download_dataset("wikitext-103", tmp_path, limit=len(TRAIN[0]) + 1000)
    assert [file["file"] for file in record["files"]] == ["wikitext-103-raw-v1/train-00000-of-00002.parquet"]
    assert record["complete"] is False and hub.total_sent <= len(TRAIN[0]) + 2**17


def test_a_limit_that_is_of_no_use_is_refused(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"a.arrow": LINES})
    with pytest.raises(DataError, match=r"limit of 9,000 bytes is too small for a\.arrow, which cannot be cut"):
        download_dataset("hub:o/d", tmp_path, limit=9000)
    hub.repository("o/e", {"a.jsonl": LINES})
    with pytest.raises(DataError, match=r"limit of 500 bytes is too small.* raise the limit"):
        download_dataset("hub:o/e", tmp_path, limit=500)
    assert not any(tmp_path.iterdir())


def test_another_extent_of_what_is_there_is_refused(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"a.jsonl": LINES})
    download_dataset("hub:o/d", tmp_path, limit=100_000)
    with pytest.raises(DataError, match=r"downloaded with a limit of 100,000 bytes, but you asked for hub:o/d, whole"):
        download_dataset("hub:o/d", tmp_path)


@pytest.mark.parametrize("damage", ["missing", "shorter", "no record", "not a download", "a file"])
def test_a_folder_in_the_way_is_left_alone(hub: LoopbackHub, tmp_path: Path, damage: str):
    hub.repository("o/d", {"a.jsonl": LINES})
    target = tmp_path / "o--d"
    if damage == "a file":
        target.write_text("mine")
    elif damage == "not a download":
        target.mkdir()
        (target / "mine.txt").write_text("mine")
    else:
        download_dataset("hub:o/d", tmp_path)
        file = target / "a.jsonl"
        if damage == "missing":
            file.unlink()
        elif damage == "shorter":
            file.write_bytes(LINES[:10])
        else:
            (target / "download.json").write_text("[]")
    before = files_below(tmp_path)
    with pytest.raises(DataError, match=r"(Choose another output directory|to download it again)\.$"):
        download_dataset("hub:o/d", tmp_path)
    assert files_below(tmp_path) == before


def test_an_empty_folder_is_filled(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"a.jsonl": LINES})
    (tmp_path / "o--d").mkdir()
    assert download_dataset("hub:o/d", tmp_path)["complete"] is True
    assert (tmp_path / "o--d" / "a.jsonl").read_bytes() == LINES


def test_a_dataset_made_by_a_script_comes_from_the_conversion_and_its_commit(hub: LoopbackHub, tmp_path: Path):
    repository = hub.repository("bookcorpus/bookcorpus", {"bookcorpus.py": b"x", "README.md": b"y"})
    converted = repository.commit({"plain_text/train/0000.parquet": TRAIN[0]}, branch=CONVERTED)
    record = download_dataset("bookcorpus", tmp_path)
    assert (record["revision"], record["converted"], record["licence"]) == (converted, True, None)
    assert (tmp_path / "bookcorpus" / "plain_text/train/0000.parquet").read_bytes() == TRAIN[0]


def test_the_beginning_of_a_dataset_is_not_given_for_the_whole(hub: LoopbackHub, tmp_path: Path):
    repository = hub.repository("o/d", {"d.py": b"x"})
    repository.commit({"default/partial-train/0000.parquet": TRAIN[0]}, branch=CONVERTED)
    with pytest.raises(DataError, match="converted only the beginning of o/d to Parquet"):
        download_dataset("hub:o/d", tmp_path)
    assert download_dataset("hub:o/d", tmp_path, limit=10**6)["files"][0]["bytes"] == len(TRAIN[0])


def test_the_readme_on_the_hub_says_which_files_a_subset_has(hub: LoopbackHub, tmp_path: Path):
    configs = [
        {"config_name": "en", "data_files": [{"split": "train", "path": "x/*.txt"}]},
        {"config_name": "de", "data_files": [{"split": "all", "path": "y/*.txt"}]},
    ]
    hub.repository("o/d", {"x/1.txt": b"one\n", "y/2.txt": b"zwei\n"}, card={"configs": configs, "license": "other"})
    with pytest.raises(DataError, match="several subsets"):
        download_dataset("hub:o/d", tmp_path)
    record = download_dataset("hub:o/d/de:all", tmp_path)
    assert [(file["file"], file["split"]) for file in record["files"]] == [("y/2.txt", "all")]
    assert (record["subset"], record["split"], record["licence"]) == ("de", "all", None)
    assert record["path"] == str(tmp_path / "o--d--de--all")


@pytest.mark.parametrize(
    ("name", "files", "column"),
    [
        ("hub:o/d", {"a.parquet": TRAIN[0]}, "text"),
        ("hub:o/d::title", {"a.parquet": TRAIN[0]}, "title"),
        ("hub:o/d", {"a.jsonl": b'{"id": 1, "body": "x"}\n'}, "body"),
        ("hub:o/d", {"a.csv": b"text,label\nx,1\n"}, "text"),
        ("hub:o/d::body", {"a.tsv": b"id\tbody\n1\tx\n"}, "body"),
        ("hub:o/d", {"a.json": b'[{"n": 1, "said": "x"}]'}, "said"),
        ("hub:o/d", {"a.txt": b"plain text\n"}, None),
        ("hub:o/d", {"a.jsonl": b'{"q": "x", "a": "y"}\n'}, None),
        ("hub:o/d", {"a.jsonl": b"not json\n"}, None),
    ],
)
def test_the_column_of_the_text_is_recorded(
    hub: LoopbackHub, tmp_path: Path, name: str, files: dict[str, bytes], column: str | None
):
    hub.repository("o/d", files)
    screen = io.StringIO()
    record = download_dataset(name, tmp_path, console=Console(file=screen))
    assert record["column"] == column
    assert ("data.extract.column" in record["next"]) is (column is not None)
    # Where the column has to be chosen, the user is told between which.
    assert ("has q, a: set data.extract.column" in screen.getvalue()) is (b'"q"' in next(iter(files.values())))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:o/d::txet", r"a\.parquet has no column 'txet'\. Did you mean text\? It has: title, text\."),
        ("hub:o/d:test", "no split 'test'"),
        ("hub:o/d/en", "has no files of a type"),
        ("hub:o/other", r"There is no dataset o/other on http://127.* or it is private; then set HF_TOKEN"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_transferred(
    hub: LoopbackHub, tmp_path: Path, name: str, message: str
):
    hub.repository("o/d", {"a.parquet": TRAIN[0]})
    with pytest.raises(DataError, match=message):
        download_dataset(name, tmp_path)
    assert hub.total_sent < 2**17 and not any(tmp_path.iterdir())


def test_a_repository_that_moved_is_not_taken_for_the_one_that_was_asked_for(hub: LoopbackHub, tmp_path: Path):
    hub.repository("new/place", {"a.txt": b"x"})
    hub.repository("o/d", moved_to="new/place")
    with pytest.raises(DataError, match=r"answers with new/place for o/d, .* hub:new/place"):
        download_dataset("hub:o/d", tmp_path)


def test_names_are_compared_without_regard_to_case_as_on_the_hub(hub: LoopbackHub, tmp_path: Path):
    hub.repository("O/Data", {"a.txt": b"x"})
    hub.repositories["o/data"] = hub.repositories["O/Data"]
    assert download_dataset("hub:o/data", tmp_path)["repository"] == "O/Data"


def test_a_gated_dataset_says_where_to_accept_its_terms(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"a.jsonl": LINES}, gated=True)
    for token in (None, "hf_wrong"):
        with pytest.raises(DataError, match=r"accept its terms.*/datasets/o/d .* set it as HF_TOKEN"):
            download_dataset("hub:o/d", tmp_path, token=token)
    assert download_dataset("hub:o/d", tmp_path, token="hf_right")["complete"] is True


def test_a_private_dataset_is_read_with_the_token_of_the_environment(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub.repository("o/d", {"a.jsonl": LINES}, private=True)
    with pytest.raises(DataError, match="it is private; then set HF_TOKEN"):
        download_dataset("hub:o/d", tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(DataError, match="the token in use may not read it"):
        download_dataset("hub:o/d", tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert download_dataset("hub:o/d", tmp_path)["complete"] is True
    assert b"hf_right" not in b"".join(files_below(tmp_path).values())


def test_a_token_goes_to_the_hub_and_not_to_the_store_that_it_redirects_to(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"a.jsonl": LINES}, private=True)
    # Another name of the same machine is another origin.
    hub.cdn = hub.address.replace("127.0.0.1", "localhost")
    assert download_dataset("hub:o/d", tmp_path, token="hf_right")["complete"] is True
    assert (tmp_path / "o--d" / "a.jsonl").read_bytes() == LINES
    sent_to = {path.split("/")[1]: "authorization" in headers for _, path, headers in hub.requests}
    assert sent_to == {"api": True, "datasets": True, "cdn": False}


def test_a_disk_without_room_is_said_before_the_transfer(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub.repository("o/d", {"a.jsonl": LINES})
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=2**24 + 100_000))
    with pytest.raises(StorageError, match=r"needs 2\d\d kB more on .*, where 16\.9 MB is free.*set a limit"):
        download_dataset("hub:o/d", tmp_path)
    assert hub.total_sent <= 2**15
    assert download_dataset("hub:o/d", tmp_path / "part", limit=90_000)["complete"] is False


@pytest.mark.parametrize(
    "name",
    [
        "../outside.txt",
        "/etc/outside.txt",
        "a/../../outside.txt",
        "a\\..\\b.txt",
        ".git/a.txt",
        "a\nb.txt",
        "x" * 300 + ".txt",
    ],
)
def test_no_file_is_written_outside_the_folder(hub: LoopbackHub, tmp_path: Path, name: str):
    hub.repository("o/d", {name: b"text\n"})
    with pytest.raises(DataError, match=r"has a file (named|whose name)"):
        download_dataset("hub:o/d", tmp_path / "inside")
    assert list(tmp_path.rglob("*outside*")) == []


def test_files_that_would_take_each_others_place_are_refused(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"A.txt": b"1", "a.txt": b"2"})
    with pytest.raises(DataError, match=r"'a\.txt' would overwrite 'A\.txt'"):
        download_dataset("hub:o/d", tmp_path)
    hub.repository("o/e", {"download.json": b"{}"})
    with pytest.raises(DataError, match=r"would overwrite 'download\.json'"):
        download_dataset("hub:o/e", tmp_path)


def test_the_same_download_gives_the_same_bytes(hub: LoopbackHub, tmp_path: Path):
    hub.repository("Salesforce/wikitext", WIKITEXT)
    for limit in (None, 300_000, 550_000):
        for name in ("one", "two"):
            download_dataset("wikitext-103", tmp_path / str(limit) / name, limit=limit)
        assert files_below(tmp_path / str(limit) / "one") == files_below(tmp_path / str(limit) / "two")


def test_an_address_that_is_none_is_refused(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")
    with pytest.raises(UsageError, match=r"HF_ENDPOINT = 'hub\.example' is not the address of a hub"):
        download_dataset("wikitext-2", tmp_path)


def test_a_password_in_the_address_is_not_recorded(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub.repository("o/d", {"a.txt": b"x"})
    monkeypatch.setenv("HF_ENDPOINT", hub.address.replace("//", "//me:secret@"))
    assert download_dataset("hub:o/d", tmp_path)["hub"] == hub.address
    assert b"secret" not in b"".join(files_below(tmp_path).values())


def test_a_corpus_is_built_of_the_data_and_not_of_the_record(hub: LoopbackHub, tmp_path: Path):
    from sheepop.data.discovery import Entry, discover

    hub.repository("o/d", {"train.txt": b"hello\n", "x/test.txt": b"world\n"})
    download_dataset("hub:o/d", tmp_path)
    found = list(discover([str(tmp_path / "o--d")], max_file_bytes=10**6))
    assert [item.source for item in found if isinstance(item, Entry)] == ["train.txt", "x/test.txt"]


def test_the_command_says_where_the_files_are_and_what_to_run_next(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"a.jsonl": LINES})
    command = [sys.executable, "-m", "sheepop", "data", "download", "hub:o/d", "--output", "out"]
    done = subprocess.run(
        command, cwd=tmp_path, env=hub.environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    following = "sheepop data build out/o--d --output corpora/o--d data.extract.column=text"
    assert done.stdout.splitlines() == ["out/o--d", f"Next: {following}"]
