"""What a network does to a transfer, and that what has come is never lost, doubled or taken on trust."""

from __future__ import annotations

import hashlib
import io
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sheepop.core import hub as hub_module
from sheepop.core.console import Console
from sheepop.core.errors import DataError, StorageError
from sheepop.download.download import download_dataset

if TYPE_CHECKING:
    from tests.hub_server import LoopbackHub

DATA = b"".join(hashlib.sha256(b"%d" % i).hexdigest().encode() + b"\n" for i in range(20_000))
SMALL = b"a small file\n"


def downloaded(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "o--d"
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.suffix == ".txt"}


def workplace(tmp_path: Path) -> Path:
    return tmp_path / ".o--d.downloading"


@pytest.mark.parametrize(
    ("status", "place"),
    [
        (503, "/api/datasets/o/d/revision/main"),
        *((s, "/big.txt") for s in (408, 429, 500, 502, 503, 504)),
    ],
)
def test_an_overloaded_hub_is_asked_again(hub: LoopbackHub, fault: type, tmp_path: Path, status: int, place: str):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail(place, *(fault(status=status) for _ in range(4)))
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA}
    assert not any(hub.faults.values())


@pytest.mark.parametrize(("status", "message"), [(429, "asks for fewer requests"), (503, r"failed \(status 503\)")])
@pytest.mark.parametrize("place", ["/api/datasets/o/d/revision/main", "/big.txt"])
def test_the_hub_is_not_asked_for_ever(
    hub: LoopbackHub, fault: type, tmp_path: Path, status: int, message: str, place: str
):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail(place, *(fault(status=status) for _ in range(50)))
    with pytest.raises(DataError, match=message):
        download_dataset("hub:o/d", tmp_path)
    assert hub.faults[place]


def test_a_transfer_that_breaks_off_goes_on_where_it_was(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA, "small.txt": SMALL})
    hub.fail("/big.txt", *(fault(after=300_000) for _ in range(3)))
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA, "small.txt": SMALL}
    # Nothing was sent twice but the last piece of each attempt.
    assert hub.total_sent <= len(DATA) + len(SMALL) + 3 * 2**16


def test_progress_gives_all_attempts_again(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", *(fault(after=131_072) for _ in range(8)))
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA} and not hub.faults["/big.txt"]


def test_crumbs_do_not(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", *(fault(after=10) for _ in range(50)))
    with pytest.raises(DataError, match=r"cannot be reached, or keeps breaking off: .* keeps what has"):
        download_dataset("hub:o/d", tmp_path)
    assert hub.faults["/big.txt"]


def test_a_server_that_stalls_is_not_waited_for(
    hub: LoopbackHub, fault: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    hub.repository("o/d", {"big.txt": DATA})
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(hub_module, "WAITS", (0.0,))
    hub.fail("/big.txt", *(fault(after=100, stall=True) for _ in range(50)))
    with pytest.raises(DataError, match="keeps breaking off"):
        download_dataset("hub:o/d", tmp_path)
    assert hub.faults["/big.txt"]


def test_a_hub_that_is_not_there_is_one_paragraph(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9 cannot be reached.*Check the network") as raised:
        download_dataset("wikitext-2", tmp_path)
    assert "\n" not in str(raised.value) and not any(tmp_path.iterdir())


def test_offline_mode_is_named(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        download_dataset("wikitext-2", tmp_path)


@pytest.mark.parametrize(
    "content", [b"<html>welcome</html>", b"{}", b"[]", b'{"id": "o/d"}', b'{"id": "o/d", "sha": 3}']
)
def test_a_page_that_is_no_hub_is_named(hub: LoopbackHub, tmp_path: Path, content: bytes):
    from http.server import BaseHTTPRequestHandler

    handler = hub.server.RequestHandlerClass
    assert issubclass(handler, BaseHTTPRequestHandler)
    handler.answer = lambda self, body: self.simple(200, content)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"does not (answer like a hub|say which commit)"):
        download_dataset("hub:o/d", tmp_path)


def test_wrong_bytes_are_fetched_once_more(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA, "small.txt": SMALL})
    hub.fail("/big.txt", fault(change=lambda data: data[:-1] + b"!"))
    hub.fail("/small.txt", fault(change=lambda data: data.upper()))
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA, "small.txt": SMALL}


@pytest.mark.parametrize("name", ["big.txt", "small.txt"])
def test_bytes_that_stay_wrong_are_refused(hub: LoopbackHub, fault: type, tmp_path: Path, name: str):
    hub.repository("o/d", {"big.txt": DATA, "small.txt": SMALL})
    hub.fail(f"/{name}", *(fault(change=lambda data: data[:-1] + b"!") for _ in range(2)))
    with pytest.raises(
        DataError, match=rf"for {name} of o/d is not the file that it lists: its hash is .* happened twice"
    ):
        download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {}
    # Nothing wrong is left to go on with.
    assert download_dataset("hub:o/d", tmp_path)["complete"] is True
    assert downloaded(tmp_path) == {"big.txt": DATA, "small.txt": SMALL}


@pytest.mark.parametrize("ignore_range", [False, True])
@pytest.mark.parametrize("change", [lambda data: data + b"more", lambda data: data[:-5]])
def test_another_size_than_listed_is_refused(
    hub: LoopbackHub, fault: type, tmp_path: Path, change: object, ignore_range: bool
):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", *(fault(change=change, ignore_range=ignore_range) for _ in range(20)))
    with pytest.raises(DataError, match=r"not the file that it lists: it has 1,\d+,\d+ bytes instead of 1,300,000"):
        download_dataset("hub:o/d", tmp_path)


def test_a_server_without_ranges_sends_it_from_the_beginning(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", fault(after=700_000), fault(ignore_range=True))
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA}
    assert 700_000 + len(DATA) <= hub.total_sent < 750_000 + len(DATA)


def test_a_server_without_ranges_cannot_serve_the_middle_of_a_file(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"a.parquet": b"PAR1" + DATA + b"PAR1"})
    hub.fail("/a.parquet", fault(ignore_range=True))
    with pytest.raises(DataError, match="sends only whole files, so neither Parquet nor a limit"):
        download_dataset("hub:o/d", tmp_path)
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", fault(ignore_range=True))
    with pytest.raises(DataError, match="sends only whole files, so neither Parquet nor a limit"):
        download_dataset("hub:o/d", tmp_path, limit=10_000)


def test_a_partial_file_longer_than_the_file_is_begun_anew(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    stopped(hub, fault, tmp_path)
    part = workplace(tmp_path) / "files" / "big.txt.part"
    part.write_bytes(DATA + b"more")
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA}


def test_a_partial_file_with_wrong_bytes_is_found_out(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    stopped(hub, fault, tmp_path)
    (workplace(tmp_path) / "files" / "big.txt.part").write_bytes(bytes(500_000))
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA}


def stopped(hub: LoopbackHub, fault: type, tmp_path: Path, after: int = 500_000) -> None:
    """A download that gave up in the middle of the first file."""
    hub.fail("/big.txt", fault(after=after), *(fault(status=503) for _ in range(50)))
    with pytest.raises(DataError):
        download_dataset("hub:o/d", tmp_path)
    hub.faults.clear()
    hub.sent.clear()


def test_a_change_on_the_hub_does_not_mix_two_commits(hub: LoopbackHub, fault: type, tmp_path: Path):
    repository = hub.repository("o/d", {"big.txt": DATA, "small.txt": SMALL})
    first = repository.branches["main"]
    stopped(hub, fault, tmp_path)
    repository.commit({"big.txt": DATA[::-1], "small.txt": b"changed\n"})
    screen = io.StringIO()
    record = download_dataset("hub:o/d", tmp_path, console=Console(file=screen))
    assert downloaded(tmp_path) == {"big.txt": DATA, "small.txt": SMALL}
    assert record["revision"] == first
    assert f"continues with the commit it began with, {first[:12]}" in screen.getvalue()
    assert hub.total_sent <= len(DATA) - 430_000 + len(SMALL)


def test_a_commit_that_is_gone_is_named(hub: LoopbackHub, fault: type, tmp_path: Path):
    repository = hub.repository("o/d", {"big.txt": DATA})
    stopped(hub, fault, tmp_path)
    del repository.commits[repository.branches["main"]]
    repository.commit({"big.txt": DATA[::-1]})
    with pytest.raises(DataError, match=r"no longer has the commit of o/d .* Remove the hidden folder"):
        download_dataset("hub:o/d", tmp_path)


def test_a_stopped_download_is_not_gone_on_with_as_another(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    stopped(hub, fault, tmp_path)
    with pytest.raises(DataError, match=r"holds a stopped download of hub:o/d, whole, from"):
        download_dataset("hub:o/d", tmp_path, limit=600_000)
    (workplace(tmp_path) / "begun.json").write_text("damaged")
    download_dataset("hub:o/d", tmp_path, limit=600_000)
    assert DATA.startswith((tmp_path / "o--d" / "big.excerpt.txt").read_bytes())


def test_a_disk_that_takes_no_more_is_named_and_room_made_is_gone_on_with(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="the file would be larger than"):
            download_dataset("hub:o/d", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    hub.sent.clear()
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA}
    assert hub.total_sent < len(DATA) - 200_000


PROGRAM = """
import json, sys
from sheepop.core.console import Console
from sheepop.jobs.data import download
print(json.dumps(download(sys.argv[1], sys.argv[2], console=Console(quiet=True))))
"""


def test_a_killed_download_goes_on_and_writes_nowhere_else(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA, "small.txt": SMALL})
    places = {name: tmp_path / name for name in ("home", "cwd", "output")}
    for place in places.values():
        place.mkdir()
    command = [sys.executable, "-c", PROGRAM, "hub:o/d", str(places["output"])]
    options = {"env": hub.environment(places["home"]), "cwd": places["cwd"]}
    hub.pause = 0.01
    for target in (0.05, 0.5):
        process = subprocess.Popen(command, **options, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # type: ignore[call-overload]
        wait_until(lambda target=target: hub.sent["big.txt"] > target * len(DATA), process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (places["output"] / "o--d").exists()
    hub.pause = 0.0
    hub.requests.clear()
    part = places["output"] / ".o--d.downloading" / "files" / "big.txt.part"
    there = part.stat().st_size
    assert 0.3 * len(DATA) < there < len(DATA)
    done = subprocess.run(command, **options, capture_output=True, text=True, check=False)  # type: ignore[call-overload]
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["complete"] is True
    assert downloaded(places["output"]) == {"big.txt": DATA, "small.txt": SMALL}
    asked = [headers["range"] for _, path, headers in hub.requests if path.endswith("/big.txt")]
    assert asked == [f"bytes={there}-"] and there > 0
    assert list(places["home"].rglob("*")) == list(places["cwd"].rglob("*")) == []
    assert [entry.name for entry in places["output"].iterdir()] == ["o--d"]


def wait_until(reached: object, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not reached():  # type: ignore[operator]
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_two_processes_do_not_write_the_same_folder(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    hub.pause = 0.01
    command = [sys.executable, "-c", PROGRAM, "hub:o/d", str(tmp_path)]
    process = subprocess.Popen(command, env=hub.environment(tmp_path), stderr=subprocess.PIPE)
    try:
        wait_until(lambda: hub.sent["big.txt"] > 0, process)
        with pytest.raises(DataError, match="Another process is downloading"):
            download_dataset("hub:o/d", tmp_path)
    finally:
        process.kill()
        process.communicate()
