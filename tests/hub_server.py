"""A hub on loopback: repositories in memory, the endpoints that the hub's client uses, and faults on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

from sheepop.core import hub as hub_module

LARGE = 256
CONVERTED = "refs/convert/parquet"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    """Commits by hash, branches by name. `token` is needed to read it where it is private or gated."""

    name: str
    card: dict[str, object]
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    moved_to: str = ""

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        listing = json.dumps([[path, git_sha1(data)] for path, data in sorted(files.items())] + [len(self.commits)])
        sha = hashlib.sha1(listing.encode()).hexdigest()
        self.commits[sha], self.branches[branch] = dict(files), sha
        return sha


@dataclass
class Fault:
    """What happens to one request: a status, an answer that ends or stalls after `after` bytes, or wrong bytes."""

    status: int = 0
    after: int | None = None
    stall: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[bytes], bytes] | None = None
    ignore_range: bool = False


class LoopbackHub:
    """The server. `sent` counts the bytes of file content sent; `requests` are (method, path, headers)."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent: dict[str, int] = defaultdict(int)
        self.uploaded: dict[str, bytes] = {}
        self.token = "hf_right"
        self.cdn = ""
        self.pause = 0.0
        self.released = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # a client that left
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def repository(self, name: str, files: Mapping[str, bytes] | None = None, **about: object) -> Repository:
        card = about.pop("card", {})
        repository = Repository(name, card, **about)  # type: ignore[arg-type]
        self.repositories[name] = repository
        if files is not None:
            repository.commit(files)
        return repository

    def fail(self, path_ending: str, *faults: Fault) -> None:
        """The next requests whose path ends like this meet these faults, one each."""
        self.faults[path_ending].extend(faults)

    def environment(self, home: Path) -> dict[str, str]:
        """That of a process which turns to this hub and is at home in `home`."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "XDG_"))}
        return {**kept, "HF_ENDPOINT": self.address, "HF_HUB_OFFLINE": "0", "HOME": str(home), "NO_PROXY": "*"}

    @property
    def total_sent(self) -> int:
        return sum(self.sent.values())

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append(("POST", path, {key.lower(): value for key, value in self.headers.items()}))
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.simple(403, b"You have no permission to write")
        elif path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(data)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            known = name in self.hub.repositories
            if not known:
                is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
                self.hub.repository(name, {}, private=is_private)
            self.json({"url": f"{self.hub.address}/{name}", "id": name}, 409 if known else 200)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = json.loads(data)["files"]
            modes = [{"path": file["path"], "shouldIgnore": False} for file in files]
            kinds = ["lfs" if file["size"] >= LARGE else "regular" for file in files]
            self.json({"files": [{**mode, "uploadMode": kind} for mode, kind in zip(modes, kinds, strict=True)]})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            actions = [
                {**each, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{each['oid']}"}}}
                for each in json.loads(data)["objects"]
            ]
            self.json({"transfer": "basic", "objects": actions})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            made: dict[str, bytes] = {}
            for line in map(json.loads, data.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    made[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    made[value["path"]] = self.hub.uploaded[value["oid"]]
            sha = self.hub.repositories[match[1]].commit(made)
            self.json({"commitUrl": f"{self.hub.address}/{match[1]}/commit/{sha}", "commitOid": sha, "success": True})
        else:
            self.simple(404, b"no such page")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
        self.hub.uploaded[self.path.rpartition("/")[2]] = data
        self.simple(200, b"")

    def json(self, answer: object, status: int = 200) -> None:
        self.simple(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, {key.lower(): value for key, value in self.headers.items()}))
        fault = next((queue.popleft() for end, queue in self.hub.faults.items() if queue and path.endswith(end)), None)
        if fault is not None and fault.status:
            self.simple(fault.status, b"sorry", fault.headers)
        elif match := re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.describe(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([0-9a-f]{40})/?(.*)", path):
            self.list_folder(match[1], match[2], match[3])
        elif match := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
            self.resolve(match[1], match[2], match[3], fault or Fault(), body)
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            self.content(self.hub.repositories[match[1]].commits[match[2]][match[3]], path, fault or Fault(), body)
        else:
            self.simple(404, b"no such page")

    def describe(self, name: str, branch: str) -> None:
        repository = self.permitted(name)
        if repository is None:
            return
        sha = branch if branch in repository.commits else repository.branches.get(branch)
        if sha is None:
            self.simple(404, b"Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = []
        for path, data in repository.commits[sha].items():
            sibling: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
            if len(data) >= LARGE:
                sha256 = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
            siblings.append(sibling)
        record = {"id": repository.name, "sha": sha, "siblings": siblings, "cardData": repository.card}
        record |= {"private": repository.private, "gated": "auto" if repository.gated else False, "tags": []}
        self.simple(200, json.dumps(record).encode(), {"Content-Type": "application/json"})

    def list_folder(self, name: str, sha: str, folder: str) -> None:
        repository = self.permitted(name)
        if repository is None:
            return
        files = {PurePosixPath(path): data for path, data in repository.commits[sha].items()}
        listed = [
            {"type": "file", "path": str(path), "size": len(data), "oid": git_sha1(data)}
            for path, data in files.items()
            if path.parent == PurePosixPath(folder)
        ]
        self.simple(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def permitted(self, name: str, content: bool = False) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is not None and repository.moved_to:
            self.simple(307, b"", {"Location": f"{self.path.partition(name)[0]}{repository.moved_to}?blobs=True"})
            return None
        known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repository is None or (repository.private and not known):
            self.simple(401, b"Repository not found", {"X-Error-Code": "RepoNotFound"})
            return None
        if content and repository.gated and not known:
            self.simple(403, b"Access is restricted", {"X-Error-Code": "GatedRepo"})
            return None
        return repository

    def resolve(self, name: str, sha: str, path: str, fault: Fault, body: bool) -> None:
        repository = self.permitted(name, content=True)
        if repository is None:
            return
        if sha not in repository.commits:
            self.simple(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path not in repository.commits[sha]:
            self.simple(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif self.hub.cdn:
            self.simple(302, b"", {"Location": f"{self.hub.cdn}/cdn/{name}/{sha}/{path}", "X-Repo-Commit": sha})
        else:
            self.content(repository.commits[sha][path], path, fault, body, {"X-Repo-Commit": sha})

    def content(
        self, data: bytes, path: str, fault: Fault, body: bool, headers: Mapping[str, str] | None = None
    ) -> None:
        etag = hashlib.sha256(data).hexdigest() if len(data) >= LARGE else git_sha1(data)
        data = fault.change(data) if fault.change else data
        status, start, stop = 200, 0, len(data)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and not fault.ignore_range:
            status, start = 206, int(asked[1])
            stop = min(int(asked[2]) + 1, len(data)) if asked[2] else len(data)
            if start >= len(data):
                self.simple(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.send(data[start:stop], path, fault)

    def send(self, data: bytes, path: str, fault: Fault) -> None:
        end = len(data) if fault.after is None else min(fault.after, len(data))
        try:
            for at in range(0, end, 2**14):
                piece = data[at : min(at + 2**14, end)]
                self.wfile.write(piece)
                self.wfile.flush()
                self.hub.sent[path] += len(piece)
                if self.hub.pause:
                    time.sleep(self.hub.pause)
        except OSError:
            self.close_connection = True
            return
        if end < len(data):
            if fault.stall:
                self.hub.released.wait(30)
            self.close_connection = True

    def simple(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def fault() -> type[Fault]:
    return Fault


@pytest.fixture(scope="session")
def client() -> Iterator[None]:
    """One HTTP client for all tests, that goes through no proxy: it takes longer to make than a test to run."""
    import huggingface_hub

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "*")
        huggingface_hub.close_session()
        huggingface_hub.get_session()
        yield
        huggingface_hub.close_session()


@pytest.fixture
def hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, client: None
) -> Iterator[LoopbackHub]:
    """A hub to which everything in this process turns; nobody is logged in, and nothing waits between attempts."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    server = LoopbackHub()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", constants.HF_HUB_DISABLE_TELEMETRY)
    monkeypatch.setattr(hub_module, "WAITS", (0.0,) * len(hub_module.WAITS))
    for module in (file_download, _http):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    yield server
    server.close()
