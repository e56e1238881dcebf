"""Uploads to a hub on loopback: what arrives, and what is never sent."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from huggingface_hub import constants

from sheepop.checkpoint import save_model
from sheepop.core.errors import CheckpointError, SheepOpError, UsageError
from sheepop.core.files import write_checksums
from sheepop.jobs.exchange import export_model
from sheepop.jobs.push import push_model
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer

from ..hub_server import LoopbackHub, client, hub  # noqa: F401

SECRET = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF3h"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("push")
    config = ModelConfig(
        vocab_size=128, d_model=32, num_layers=1, num_heads=2, d_ff=48, max_seq_len=16, position_encoding="rope",
        activation="swiglu", norm="rmsnorm", bias=False,
    )  # fmt: skip
    save_model(place / "model", build_model(config, seed=1), CharTokenizer(), {})
    export_model(place / "model", place / "hf")
    return place / "hf"


def test_an_export_becomes_a_commit_of_a_private_repository(
    hub: LoopbackHub,  # noqa: F811
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # that protocol has a server of its own
    with pytest.raises(CheckpointError, match="needs an access token with permission to write"):
        push_model(exported, "me/sheep")
    assert not hub.requests
    monkeypatch.setenv("HF_TOKEN", hub.token)
    result = push_model(exported, "me/sheep")
    assert result["private"] and result["url"] == f"{hub.address}/me/sheep"
    repository = hub.repositories["me/sheep"]
    found = repository.commits[repository.branches["main"]]
    here = {path.name: path.read_bytes() for path in exported.iterdir() if path.name != "checksums.json"}
    assert found == here and "model.safetensors" in found
    assert repository.private
    assert push_model(exported, "me/sheep", public=True)["private"], "an existing repository stays as it is"
    assert not push_model(exported, "me/open", public=True)["private"]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(CheckpointError, match="status 403"):
        push_model(exported, "me/sheep")
    with pytest.raises(UsageError, match="cannot be the name of a repository"):
        push_model(exported, "me/sheep/too/long")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("notes.md", f"token: {SECRET}".encode(), "holds what looks like a secret"),
        ("pytorch_model.bin", pickle.dumps([1]), "not of a kind that a model needs"),
        ("modeling.py", b"print(1)", "not of a kind that a model needs"),
        (".netrc", b"x", "is hidden or a link"),
        ("config.json", b"{}", "checksum differs"),
    ],
)
def test_what_nobody_should_publish_is_not_sent(
    hub: LoopbackHub,  # noqa: F811
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    words: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_bytes(content)
    if name == "notes.md":
        write_checksums(tmp_path)
    with pytest.raises(UsageError, match=words):
        push_model(tmp_path, "me/sheep")
    assert not hub.requests


def test_a_link_and_a_folder_that_is_no_export_are_refused(
    hub: LoopbackHub,  # noqa: F811
    exported: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="neither a GGUF file nor a directory"):
        push_model(tmp_path, "me/sheep")
    (tmp_path / "export").mkdir()
    for path in exported.iterdir():
        (tmp_path / "export" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "export" / "shadow.txt").symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match="is hidden or a link"):
        push_model(tmp_path / "export", "me/sheep")
    assert not hub.requests


def test_merging_needs_an_adapter(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(SheepOpError, match="has no LoRA adapter"):
        export_model(exported.parent / "model", tmp_path / "out", merge=True)
    with pytest.raises(UsageError, match="merge is for formats hf and gguf"):
        export_model(exported.parent / "model", tmp_path / "out", format="peft", merge=True)
