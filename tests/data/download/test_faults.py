"""What a network does to a transfer, and that what has come is never lost, doubled or taken on trust."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sheepop.core.console import Console
from sheepop.core.errors import DataError, StorageError
from sheepop.data.download import network, transfer
from sheepop.data.download.download import download_dataset

if TYPE_CHECKING:
    from tests.data.download.conftest import LoopbackHub

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
        (429, "/api/datasets/o/d"),
        (503, "/api/datasets/o/d"),
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
@pytest.mark.parametrize("place", ["/api/datasets/o/d", "/big.txt"])
def test_the_hub_is_not_asked_for_ever(
    hub: LoopbackHub, fault: type, tmp_path: Path, status: int, message: str, place: str
):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail(place, *(fault(status=status) for _ in range(50)))
    with pytest.raises(DataError, match=message):
        download_dataset("hub:o/d", tmp_path)
    assert len(hub.faults[place]) == 50 - 1 - len(network.WAITS)


def test_a_wait_that_the_hub_asks_for_is_kept_unless_it_is_too_long(
    hub: LoopbackHub, fault: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    waited: list[float] = []
    monkeypatch.setattr(network.time, "sleep", waited.append)
    monkeypatch.setattr(network, "WAITS", (1.0, 2.0, 4.0))
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", fault(status=429, headers={"Retry-After": "7"}), fault(status=503))
    download_dataset("hub:o/d", tmp_path)
    assert waited == [7.0, 2.0]
    hub.fail("/api/datasets/o/d", fault(status=429, headers={"RateLimit": '"api";r=0;t=55'}))
    download_dataset("hub:o/d", tmp_path / "again")
    assert waited == [7.0, 2.0, 55.0]
    hub.fail("/api/datasets/o/e", fault(status=429, headers={"Retry-After": "86400"}))
    with pytest.raises(DataError, match="asks for fewer requests"):
        download_dataset("hub:o/e", tmp_path)
    assert waited == [7.0, 2.0, 55.0]


def test_a_transfer_that_breaks_off_goes_on_where_it_was(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA, "small.txt": SMALL})
    hub.fail("/big.txt", *(fault(after=300_000) for _ in range(3)))
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA, "small.txt": SMALL}
    # Not one byte was sent twice.
    assert hub.total_sent == len(DATA) + len(SMALL)


def test_progress_gives_all_attempts_again(
    hub: LoopbackHub, fault: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transfer, "_PROGRESS_BYTES", 50_000)
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", *(fault(after=65_536) for _ in range(4 * len(network.WAITS))))
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA} and hub.total_sent == len(DATA)


def test_crumbs_do_not(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", *(fault(after=10) for _ in range(50)))
    with pytest.raises(DataError, match=r"cannot be reached, or keeps breaking off: .* keeps what has"):
        download_dataset("hub:o/d", tmp_path)
    assert len(hub.faults["/big.txt"]) == 50 - 1 - len(network.WAITS)


@pytest.mark.parametrize("drip", [False, True])
def test_a_server_that_stalls_is_not_waited_for(
    hub: LoopbackHub, fault: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drip: bool
):
    from sheepop.data.download import hub as hub_module

    hub.repository("o/d", {"big.txt": DATA})
    for module in (network, hub_module):
        monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.3)
    if drip:
        # Never silent for long, and never done.
        monkeypatch.setattr(network, "_LEAST_BYTES", 2**30)
        hub.pause = 0.05
    else:
        hub.fail("/big.txt", *(fault(after=100, stall=True) for _ in range(50)))
    began = time.monotonic()
    with pytest.raises(DataError, match="keeps breaking off"):
        download_dataset("hub:o/d", tmp_path)
    assert time.monotonic() - began < 20


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


def test_offline_mode_is_not_waited_for():
    from huggingface_hub.errors import OfflineModeIsEnabled

    assert not network.passing_fault(OfflineModeIsEnabled("offline"))
    assert network.passing_fault(ConnectionError("refused"))


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


@pytest.mark.parametrize("change", [lambda data: data + b"more", lambda data: data[:-5]])
def test_another_size_than_listed_is_refused(hub: LoopbackHub, fault: type, tmp_path: Path, change: object):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", *(fault(change=change) for _ in range(20)))
    with pytest.raises(DataError, match=r"The hub lists big\.txt with 1,300,000 bytes, but sends bytes 0 to"):
        download_dataset("hub:o/d", tmp_path)
    hub.faults.clear()
    hub.fail("/big.txt", *(fault(change=change, ignore_range=True) for _ in range(20)))
    with pytest.raises(DataError, match=r"sends more than .* for big\.txt|keeps breaking off"):
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
    # The beginning is the beginning of the whole as well, and no more than it is read.
    hub.repository("o/d", {"big.txt": DATA * 20})
    hub.fail("/big.txt", fault(ignore_range=True))
    assert download_dataset("hub:o/d", tmp_path, limit=10_000)["bytes"] <= 10_000
    assert hub.sent["big.txt"] < 10 * len(DATA)


def test_a_partial_file_longer_than_the_file_is_begun_anew(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", *(fault(after=10) for _ in range(6)))
    with pytest.raises(DataError):
        download_dataset("hub:o/d", tmp_path)
    part = workplace(tmp_path) / "files" / "big.txt.part"
    part.write_bytes(DATA + b"more")
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA}


def test_a_partial_file_with_wrong_bytes_is_found_out(hub: LoopbackHub, fault: type, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA})
    hub.fail("/big.txt", *(fault(after=10) for _ in range(6)))
    with pytest.raises(DataError):
        download_dataset("hub:o/d", tmp_path)
    (workplace(tmp_path) / "files" / "big.txt.part").write_bytes(bytes(500_000))
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA}


def stopped(hub: LoopbackHub, fault: type, tmp_path: Path, after: int = 500_000) -> None:
    """A download that gave up in the middle of the first file."""
    hub.fail("/big.txt", fault(after=after), *(fault(status=503) for _ in range(6)))
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
    assert hub.total_sent <= len(DATA) - 480_000 + len(SMALL)


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
    (workplace(tmp_path) / "plan.json").write_text("damaged")
    download_dataset("hub:o/d", tmp_path, limit=600_000)
    assert DATA.startswith((tmp_path / "o--d" / "big.excerpt.txt").read_bytes())


def test_a_full_disk_is_named_and_freed_room_is_gone_on_with(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import errno

    hub.repository("o/d", {"big.txt": DATA})
    write = transfer._write
    written = 0

    def full(output: io.FileIO, chunk: bytes) -> None:
        nonlocal written
        written += len(chunk)
        if written > 400_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(output, chunk)

    monkeypatch.setattr(transfer, "_write", full)
    with pytest.raises(StorageError, match="the disk is full"):
        download_dataset("hub:o/d", tmp_path)
    monkeypatch.setattr(transfer, "_write", write)
    hub.sent.clear()
    download_dataset("hub:o/d", tmp_path)
    assert downloaded(tmp_path) == {"big.txt": DATA}
    assert hub.total_sent < len(DATA) - 200_000


PROGRAM = """
import json, sys
from sheepop.core.console import Console
from sheepop.jobs.download import download
print(json.dumps(download(sys.argv[1], sys.argv[2], console=Console(quiet=True))))
"""


def environment(hub: LoopbackHub, home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "XDG_"))}
    return {**kept, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HOME": str(home), "NO_PROXY": "*"}


def test_a_killed_download_goes_on_and_writes_nowhere_else(hub: LoopbackHub, tmp_path: Path):
    hub.repository("o/d", {"big.txt": DATA, "small.txt": SMALL})
    places = {name: tmp_path / name for name in ("home", "cwd", "output")}
    for place in places.values():
        place.mkdir()
    command = [sys.executable, "-c", PROGRAM, "hub:o/d", str(places["output"])]
    options = {"env": environment(hub, places["home"]), "cwd": places["cwd"]}
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
    assert asked == [f"bytes={there}-"]
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
    process = subprocess.Popen(command, env=environment(hub, tmp_path), stderr=subprocess.PIPE)
    try:
        wait_until(lambda: hub.sent["big.txt"] > 0, process)
        with pytest.raises(DataError, match="Another process is downloading"):
            download_dataset("hub:o/d", tmp_path)
    finally:
        process.kill()
        process.communicate()
