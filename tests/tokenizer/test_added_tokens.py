"""What stands beside a vocabulary: tokens that were added to it, and settings. transformers says what the ids are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_json

END, START, NEXT = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MERGES = [("H", "e"), ("l", "l"), ("He", "ll"), ("Hell", "o"), ("i", "t")]
VOCABULARY = {
    text: number
    for number, text in enumerate((*sorted(ByteLevel.alphabet()), *(left + right for left, right in MERGES), END))
}
FIRST = len(VOCABULARY)
ROLES = {"tokenizer_class": "GPT2Tokenizer", "bos_token": END, "eos_token": END, "unk_token": END}
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
TEXT = f"Hello {START} Hello{END}it's {NEXT}"


def write_pair(directory: Path, settings: dict[str, Any], files: dict[str, Any]) -> None:
    contents = {"vocab.json": VOCABULARY, "tokenizer_config.json": settings, **files}
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in MERGES), ""]
    (directory / "merges.txt").write_text("\n".join(lines), encoding="utf-8")


def write_whole(directory: Path, settings: dict[str, Any], files: dict[str, Any]) -> None:
    """The same with a ``tokenizer.json``, which knows nothing of the settings."""
    write_pair(directory, {}, {})
    load_tokenizer(directory).save(directory)
    for name in ("vocab.json", "merges.txt"):
        (directory / name).unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.prefix_ids, *tokenizer.encode(text, allow_special=True), *tokenizer.suffix_ids]


ADDED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"added_tokens_decoder": {str(FIRST): {"content": START, **FLAGS}}}, {}),
    (
        {
            "added_tokens_decoder": {str(FIRST): {"content": START, **FLAGS, "rstrip": True}},
            "additional_special_tokens": [NEXT, START],
        },
        {},
    ),
    ({}, {"added_tokens.json": {NEXT: FIRST + 1, START: FIRST}}),
    ({}, {"special_tokens_map.json": {"additional_special_tokens": [NEXT, START]}}),
    ({"extra_special_tokens": [START]}, {}),
    ({"mask_token": "Hello"}, {}),
    ({"added_tokens_decoder": {str(VOCABULARY["Hello"]): {"content": "Hello", **FLAGS}}}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "files"), ADDED)
@pytest.mark.parametrize("write", [write_pair, write_whole])
def test_tokens_that_only_the_neighbours_name_have_the_ids_of_transformers(
    write: Any, settings: dict[str, Any], files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    write(tmp_path, ROLES | settings, files)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ids(ours, TEXT) == theirs(TEXT).input_ids
    assert ours.vocab_size == len(theirs)
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.fingerprint(), ids(again, TEXT)) == (ours.fingerprint(), ids(ours, TEXT))
    assert START not in ours.special_tokens or ours.special_tokens[START] not in ours.encode(TEXT)


@pytest.mark.parametrize("settings", [{"add_prefix_space": True}, {"add_bos_token": True}])
def test_a_pair_is_read_as_its_settings_say(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    write_pair(tmp_path, ROLES | settings, {})
    assert ids(load_tokenizer(tmp_path), TEXT) == transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids


def test_a_pair_of_another_class_is_refused_with_the_command_that_converts_it(tmp_path: Path):
    write_pair(tmp_path, ROLES | {"tokenizer_class": "Qwen2Tokenizer"}, {})
    with pytest.raises(TokenizerError, match=r"'Qwen2Tokenizer'.* does not say how that cuts text.*save_pretrained"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"added_tokens_decoder": {f"{FIRST + 3}": {"content": START}}}, f"the id {FIRST + 3}, .* next id is {FIRST}"),
        ({"added_tokens_decoder": {"5": {"content": START}}}, "has the id 5, .* does not have it"),
        ({"added_tokens_decoder": {"x": {"content": START}}}, "must be a table from id to token"),
        ({"added_tokens_decoder": {"-1": {"content": START}}}, "must be a table from id to token"),
        ({"added_tokens_decoder": {"5": {}}}, "must be a table from id to token"),
        ({"additional_special_tokens": [3]}, "must name tokens"),
    ],
)  # fmt: skip
def test_tokens_that_cannot_be_added_as_the_settings_say_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
):
    write_pair(tmp_path, {}, {})
    content = load_tokenizer(tmp_path).to_json()
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_json(content, settings)


def test_a_file_of_added_tokens_that_is_damaged_is_refused(tmp_path: Path):
    write_pair(tmp_path, {}, {"added_tokens.json": {START: "5"}})
    with pytest.raises(TokenizerError, match=r"added_tokens\.json is damaged"):
        load_tokenizer(tmp_path)
