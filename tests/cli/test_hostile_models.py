"""What a hub, a repository or a file of a model may do wrong, as the user of a command sees it: one paragraph."""

from __future__ import annotations

import json
import re
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from sheepop.checkpoint import published_model
from sheepop.checkpoint.model_cache import cached_models
from sheepop.core import hub as hub_module

from ..checkpoint.gguf.conftest import make_toy
from ..checkpoint.gguf.test_container import change, place_behind
from ..command_line import COMMAND, Ended, Launcher, Started
from ..hub_server import Fault, LoopbackHub, client, hub
from .conftest import Run
from .test_models import files

__all__ = ["client", "files", "hub"]

NAME = "org/toy"
ASK = ("generate", NAME, "one", "--greedy", "--max-new-tokens", "1")


@pytest.fixture(autouse=True)
def place(hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hub.repository(NAME, files)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHEEPOP_MODELS", str(tmp_path / "cache"))
    return tmp_path


def refused(done: Ended, *words: str, code: int = 3) -> None:
    """Given a command that failed: it said why in one paragraph, after what it reported, and left no model."""
    *reported, error = done.err.splitlines()
    assert (done.code, done.out) == (code, ""), done
    assert error.startswith("Error: ") and not any(line.startswith(("Error", "Traceback", " ")) for line in reported)
    assert all(word in error for word in words), error
    assert not [entry for entry in cached_models() if entry.is_finished]


def contents(hub: LoopbackHub) -> list[str]:
    """The files that were asked for."""
    return [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


# The hub


@pytest.mark.parametrize("where", ["/toy/revision/main", "config.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "set HF_TOKEN"),
        (403, "set HF_TOKEN"),
        (404, "There is no model"),
        (429, "fewer requests"),
        (500, "status 500"),
    ],
)
def test_a_status_of_the_hub_is_explained(run: Run, hub: LoopbackHub, where: str, status: int, words: str) -> None:
    hub.fail(where, *[Fault(status=status)] * 40)
    refused(run(*ASK), words)
    hub.faults.clear()
    assert run(*ASK).code == 0


@pytest.mark.parametrize("where", ["/toy/revision/main", "model.safetensors"])
def test_a_wait_that_is_too_long_is_not_waited_for(run: Run, hub: LoopbackHub, where: str) -> None:
    hub.fail(where, *[Fault(status=429, headers={"Retry-After": "86400"})] * 40)
    refused(run(*ASK), "fewer requests (status 429)")
    assert sum(path.endswith(where) for _, path, _ in hub.requests) == 1
    hub.faults.clear()
    hub.fail(where, Fault(status=429, headers={"Retry-After": "2"}))
    done = run(*ASK)
    assert (done.code == 0) == (where == "model.safetensors"), done.err


@pytest.mark.parametrize("after", [0, 300])
def test_a_hub_that_hangs_is_given_up(run: Run, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    monkeypatch.setattr(hub_module, "WAITS", ())
    hub.fail("model.safetensors", *[Fault(after=after, stall=True)] * 9)
    refused(run(*ASK), "keeps breaking off", "run the same command again")
    hub.faults.clear()
    assert run(*ASK).code == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "bytes instead of"),
        (lambda data: data + b"more" * 10_000_000, "bytes instead of"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its hash is"),
        (lambda data: b"", "bytes instead of"),
    ],
    ids=["short", "long", "other", "empty"],
)
def test_other_bytes_than_listed_are_refused(
    run: Run, hub: LoopbackHub, change: Callable[[bytes], bytes], words: str
) -> None:
    hub.fail("model.safetensors", *[Fault(change=change)] * 9)
    refused(
        run(*ASK), "model.safetensors of org/toy is not the file that it lists", words, "Run the command again later"
    )
    assert hub.total_sent < 20_000_000  # twice what the buffers of a connection take, of 40 MB
    hub.faults.clear()
    assert run(*ASK).code == 0


def test_a_range_that_is_ignored_is_no_damage(run: Run, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "WAITS", ())
    hub.fail("model.safetensors", Fault(after=5000), *[Fault(status=500)] * 9)
    refused(run(*ASK), "status 500")
    hub.faults.clear()
    hub.fail("model.safetensors", Fault(ignore_range=True))
    assert run(*ASK).code == 0


def test_a_redirection_to_another_host_gets_no_token(
    run: Run, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME].private = True
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.cdn = hub.address.replace("127.0.0.1", "localhost")
    assert run(*ASK).code == 0
    assert {path.split("/")[1]: "authorization" in headers for _, path, headers in hub.requests} == {
        "api": True, "org": True, "cdn": False,
    }  # fmt: skip


@pytest.mark.parametrize("location", ["file:///etc/passwd", "http://127.0.0.1:9/x", "", "gopher://x"])
def test_a_redirection_to_nowhere_is_refused(
    run: Run, hub: LoopbackHub, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "WAITS", ())
    hub.fail("config.json", *[Fault(status=302, headers={"Location": location})] * 40)
    refused(run(*ASK), hub.address)


# The cache


def pull(launcher: Launcher, hub: LoopbackHub, place: Path, program: str = COMMAND) -> Started:
    environment = hub.environment(place) | {"SHEEPOP_MODELS": str(place / "cache")}
    return launcher.start("models", "pull", NAME, "--json", program=program, environment=environment)


def open_files(pid: int) -> list[str]:
    """The names of the files that a process has open."""
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(file.readlink().name)
    return found


def test_a_pull_that_is_killed_leaves_the_rest_to_one_that_waits(
    hub: LoopbackHub, launcher: Launcher, place: Path
) -> None:
    hub.fail("model.safetensors", *[Fault(after=1000, stall=True)] * 99)
    first = pull(launcher, hub, place)
    while not any(path.endswith("model.safetensors") for path in hub.sent):
        assert first.poll() is None, first.poll()
        time.sleep(0.005)
    second = pull(launcher, hub, place)
    while ".lock" not in open_files(second.pid):
        assert second.poll() is None, second.poll()
        time.sleep(0.01)
    hub.faults.clear()
    first.send_signal(signal.SIGKILL)
    assert first.wait().code == -signal.SIGKILL
    done = second.wait()
    assert done.code == 0, done.err
    (entry,) = cached_models()
    assert str(entry.directory) == json.loads(done.out)["path"]
    # What the first one had fetched was not fetched again.
    asked = contents(hub)
    assert asked.count("config.json") == asked.count("tokenizer.json") == 1


def test_a_disk_that_fills_up_is_named_and_what_has_arrived_is_kept(
    hub: LoopbackHub, launcher: Launcher, place: Path
) -> None:
    """The process may write files of 40 KB at most, as if the disk were full."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); " + COMMAND
    done = pull(launcher, hub, place, limited).wait()
    assert done.code == 1 and done.out == ""
    error = done.err.splitlines()[-1]
    assert error.startswith("Error: Cannot write ") and "would be larger than" in error, done.err
    (entry,) = cached_models()
    assert not entry.is_finished
    hub.sent.clear()
    assert pull(launcher, hub, place).wait().code == 0
    assert hub.total_sent < 40_000


def test_links_in_the_cache_lead_nowhere(run: Run, hub: LoopbackHub, place: Path) -> None:
    precious = place / "precious"
    precious.mkdir()
    (precious / "diary.txt").write_text("dear diary")
    (place / "cache").mkdir()
    (place / "cache" / "evil").symlink_to(precious, target_is_directory=True)
    assert run(*ASK).code == 0
    done = run("models", "rm", "evil", NAME, "--yes")
    assert done.code == 0, done.err
    assert (precious / "diary.txt").read_text() == "dear diary"
    assert not list((place / "cache").iterdir())


# Names


@pytest.mark.parametrize("name", ["hf:org/..", "hf:../toy", "hf:org/toy@../../x", "hf:org/toy/../../x.gguf"])
@pytest.mark.parametrize("command", [("generate",), ("models", "pull"), ("models", "rm", "--yes")])
def test_a_name_that_leads_out_is_refused(run: Run, hub: LoopbackHub, command: tuple[str, ...], name: str) -> None:
    done = run(*command, name, *(["one"] if command == ("generate",) else []))
    assert done.code == 2 and done.err.count("\n") == 1 and name in done.err
    assert hub.requests == []


# The repository


def published(hub: LoopbackHub, files: dict[str, bytes], **changes: bytes) -> None:
    hub.repositories[NAME].commit(files | {name.replace("__", "."): data for name, data in changes.items()})


def config_of(files: dict[str, bytes], **changes: Any) -> bytes:
    return json.dumps(json.loads(files["config.json"]) | changes).encode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "has shape"),
        ({"num_hidden_layers": 2}, "model.layers.1"),
        ({"vocab_size": 131}, "has shape"),
        ({"num_attention_heads": 3}, "head"),
        ({"hidden_size": 2**40}, "hidden_size = 1099511627776 is more than any model has"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": -32}, "d_model = -32"),
    ],
)
def test_sizes_that_disagree_with_the_tensors(
    run: Run, hub: LoopbackHub, files: dict[str, bytes], changes: dict[str, Any], words: str
) -> None:
    published(hub, files, config__json=config_of(files, **changes))
    refused(run(*ASK), words)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_table_of_any_size_is_not_fetched(
    run: Run, hub: LoopbackHub, files: dict[str, bytes], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_model, "_LARGEST_DESCRIPTION", 2**15)
    kept = {key: data for key, data in files.items() if "index" not in name or key != "model.safetensors"}
    hub.repositories[NAME].commit(kept | {name: b" " * 2**15 + kept.get(name, b"{}")})
    refused(run(*ASK), name, "is larger than")
    assert name not in contents(hub)


@pytest.mark.parametrize("shard", ["../../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_that_leads_out_is_refused(run: Run, hub: LoopbackHub, files: dict[str, bytes], shard: str) -> None:
    kept = {name: data for name, data in files.items() if name != "model.safetensors"}
    index = json.dumps({"weight_map": {"model.norm.weight": shard}}).encode()
    hub.repositories[NAME].commit(kept | {"model.safetensors.index.json": index, "../../x.safetensors": b"x"})
    refused(run(*ASK), repr(shard), "is not a file beside it")


def test_a_template_that_imports_runs_nothing(run: Run, hub: LoopbackHub, files: dict[str, bytes], place: Path) -> None:
    command = f"touch {place / 'broken-in'}"
    templates = (
        "{% import 'os' as os %}{{ os.system(COMMAND) }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__.os.system(COMMAND) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__.__builtins__.__import__('os').system(COMMAND) }}",
        "{{ ('%(x).__class__' | format(x=messages)) }}{{ messages.append.__self__.__class__ }}",
    )
    for number, template in enumerate(templates):
        name = f"org/toy-{number}"
        hub.repository(name, files | {"chat_template.jinja": template.replace("COMMAND", repr(command)).encode()})
        done = run("chat", name, "--max-new-tokens", "1", stdin="Hello\n")
        said = done.err.splitlines()[-1]
        assert done.out == "" and re.match("Warning: The chat template .* (failed|the sandbox forbids) ", said), said
        assert "root:" not in done.err
    assert not (place / "broken-in").exists()


# GGUF


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make_toy("llama").write(tmp_path_factory.mktemp("gguf") / "toy.gguf", dtype="q8_0").read_bytes()


def resized(path: Path, tensor: str, *, width: int | None = None, kind: int | None = None, place: int | None = None):
    """Changes the width, type or place of a matrix in the list of tensors."""
    start = place_behind(path, tensor)
    for at, form, value in ((4, "<Q", width), (20, "<I", kind), (24, "<Q", place)):
        if value is not None:
            change(path, at=start + at, to=struct.pack(form, value))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: resized(path, "blk.0.attn_q.weight", place=0), "overlap"),
        (lambda path: resized(path, "blk.0.attn_q.weight", width=33), "cannot have the type q8_0"),
        (lambda path: resized(path, "blk.0.attn_q.weight", kind=12), "cannot have the type q4_k"),
        (lambda path: resized(path, "blk.0.attn_q.weight", kind=2), "differs"),
        (lambda path: resized(path, "blk.0.attn_q.weight", kind=99), "number 99"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5000]), "would end at byte"),
    ],
    ids=["overlap", "rows that do not divide", "blocks longer than rows", "smaller blocks", "no type", "truncated"],
)
def test_a_gguf_file_that_contradicts_itself(
    run: Run, hub: LoopbackHub, gguf: bytes, place: Path, damage: Callable[[Path], object], words: str
) -> None:
    path = place / "toy.gguf"
    path.write_bytes(gguf)
    damage(path)
    refused(run("generate", path, "one"), words)
    hub.repository("org/toy-GGUF", {"toy.gguf": path.read_bytes()})
    refused(run("generate", "org/toy-GGUF", "one"), words)


def test_a_split_file_of_which_a_part_is_cut_or_missing(run: Run, hub: LoopbackHub, place: Path) -> None:
    gguf = pytest.importorskip("gguf")
    assert gguf
    from ..checkpoint.gguf.test_split import split

    parts = split(make_toy("llama").write(place / "whole.gguf"), place / "parts")
    contents = {part.name: part.read_bytes() for part in parts}
    last = parts[-1].name
    hub.repository("org/cut", contents | {last: contents[last][:-100]})
    refused(run("generate", "org/cut", "one"), last, "would end at byte")
    hub.repository("org/missing", {name: data for name, data in contents.items() if name != last})
    refused(run("generate", "org/missing", "one"), f"has no file {last}")
    hub.repository("org/whole", contents)
    assert run("generate", "org/whole", "one", "--max-new-tokens", "1").code == 0
