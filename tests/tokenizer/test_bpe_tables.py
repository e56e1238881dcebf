"""BPE with tables of its own gives the ids of the library, and its file is a copy that may be missing."""

import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_json
from sheepop.tokenizer import bpe as bpe_module
from sheepop.tokenizer.bpe_model import BpeModel
from sheepop.tokenizer.bpe_tables import TABLES_FILE, BpeTables

from .test_files import gpt2_style

LETTERS = "abé▁"
OPTIONS = {"dropout": None, "end_of_word_suffix": None}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """A BPE model over a few characters, with all that decides how it splits a word."""
    prefix = draw(st.sampled_from([None, "##"]))
    texts = ["?", *LETTERS[: draw(st.integers(1, len(LETTERS)))]]
    if prefix:
        texts += [prefix + letter for letter in texts[1:]]
    merges = []
    for _ in range(draw(st.integers(0, 12))):
        left = draw(st.sampled_from(texts[1:]))
        right = draw(st.sampled_from([text for text in texts[1:] if not prefix or text.startswith(prefix)]))
        merges.append([left, right])
        if (whole := left + right[len(prefix or "") :]) not in texts:
            texts.append(whole)
    texts += draw(st.sampled_from([[], ["<0xC3>"], ["<0xC3>", "<0xA9>"]]))
    return {
        **OPTIONS,
        "type": "BPE",
        "unk_token": draw(st.sampled_from([None, "?"])),
        "continuing_subword_prefix": prefix,
        "fuse_unk": draw(st.booleans()),
        "byte_fallback": draw(st.booleans()),
        "ignore_merges": draw(st.booleans()),
        "vocab": {text: token_id for token_id, text in enumerate(texts)},
        "merges": draw(st.permutations(merges)),
    }


@given(models(), st.lists(st.text(LETTERS + "x?é", max_size=12), max_size=8))
@settings(max_examples=300)
def test_a_word_has_the_ids_of_the_library(model: dict[str, Any], words: list[str]):
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    description = {"version": "1.0", "added_tokens": [], **parts, "model": model}
    library = tokenizers.Tokenizer.from_str(json.dumps(description)).model
    ours = BpeModel(BpeTables.of(description), model, frozenset())
    for word in words:
        assert ours.tokenize(word) == [token.id for token in library.tokenize(word)]


def with_added() -> dict[str, Any]:
    """Added tokens that overlap, that are found before and after normalization, and that end special ones."""
    content = gpt2_style()
    content["normalizer"] = {"type": "Lowercase"}
    texts = [
        ("<A", False, False),
        ("<A>", False, True),
        ("<B>", True, False),
        (">t", True, True),
        ("<A>b", False, False),
    ]
    first = len(content["model"]["vocab"]) + 1
    content["added_tokens"] += [
        {**FLAGS, "id": token_id, "content": text, "normalized": bool(normalized), "special": bool(special)}
        for token_id, (text, normalized, special) in enumerate(texts, first)
    ]
    return content


@given(st.lists(st.sampled_from(["<", "a", "A", ">", "b", "B", "t", " ", "<A>", "<|endoftext|>", "é"]), max_size=12))
@settings(max_examples=200)
def test_added_tokens_are_found_as_the_library_finds_them(pieces: list[str]):
    content = json.dumps(with_added())
    text = "".join(pieces)
    library = tokenizers.Tokenizer.from_str(content)
    library.no_truncation()
    ours = tokenizer_from_json(content)
    assert ours._splitter is not None
    for allow_special in (False, True):
        library.encode_special_tokens = not allow_special
        expected = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, allow_special=allow_special) == expected


def test_many_texts_are_left_to_the_library_and_have_the_same_ids(
    bpe: Tokenizer, source_texts: list[str], monkeypatch: pytest.MonkeyPatch
):
    for content in (bpe.to_json(), json.dumps(with_added())):
        text = source_texts[0][:5000] + " <A>b <eos> <|endoftext|>"
        with monkeypatch.context() as patch:
            patch.setattr(bpe_module, "_BEFORE_THE_LIBRARY", 100)
            alone = tokenizer_from_json(content)
            expected = [alone.encode(text, allow_special=allow) for allow in (False, True)]
            assert "_ordinary" not in vars(alone)
            patch.setattr(bpe_module, "_BEFORE_THE_LIBRARY", 0)
            late = tokenizer_from_json(content)
            assert [late.encode(text, allow_special=allow) for allow in (False, True)] == expected
            assert "_ordinary" in vars(late)


def test_the_tables_are_a_copy_that_may_be_missing_or_of_another_tokenizer(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    text = "def f(x):\n    return 'é🐑' <eos>"
    with_tables = load_tokenizer(tmp_path)
    changed = gpt2_style()
    stored = (tmp_path / TABLES_FILE).read_bytes()
    (tmp_path / TABLES_FILE).unlink()
    without = load_tokenizer(tmp_path)
    for loaded in (with_tables, without, pickle.loads(pickle.dumps(with_tables))):
        assert loaded.encode(text) == bpe.encode(text)
        assert loaded.fingerprint() == bpe.fingerprint()
        assert loaded.to_json() == bpe.to_json()
        assert [loaded.token_bytes(i) for i in range(loaded.vocab_size)] == [
            bpe.token_bytes(i) for i in range(bpe.vocab_size)
        ]
    (tmp_path / TABLES_FILE).write_bytes(stored)
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).fingerprint() == tokenizer_from_json(json.dumps(changed)).fingerprint()


def test_tables_that_stand_alone_are_the_whole_tokenizer(bpe: Tokenizer, tmp_path: Path):
    text = "def f(x):\n    return 'é🐑' <eos>"
    for number, made in enumerate((bpe, tokenizer_from_json(json.dumps(with_added())))):
        place = tmp_path / str(number)
        made.save(place, only_tables=True)
        assert sorted(path.name for path in place.iterdir()) == [TABLES_FILE, "tokenizer_config.json"]
        alone = load_tokenizer(place)
        for back in (alone, tokenizer_from_json(alone.to_json(), alone.settings()), pickle.loads(pickle.dumps(alone))):
            assert back.fingerprint() == made.fingerprint()
            assert back.encode(text, allow_special=True) == made.encode(text, allow_special=True)


def test_tables_that_belong_to_a_missing_file_are_no_tokenizer(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"not complete without the tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_files_for_other_programs_have_no_tables(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path, tables=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_published_vocabulary_has_the_ids_of_the_library(source_texts: list[str], tmp_path: Path):
    folder = Path(os.environ.get("SHEEPOP_TEST_MODEL", "/nowhere"))
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("SHEEPOP_TEST_MODEL names no folder with a tokenizer.json")
    load_tokenizer(folder).save(tmp_path)
    ours, library = load_tokenizer(tmp_path), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    for text in (source_texts[0][:3000], "Größe 日本語\t\t<b>🐑👨‍👩‍👧 e\u0301\n\n\n  12345 <eos>"):
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text)) == text
    assert "_ordinary" not in vars(ours)


def test_damaged_tables_are_refused(bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    file = tmp_path / TABLES_FILE
    content = file.read_bytes()
    places = [*range(0, len(content), len(content) // 40), len(content) - 1]
    for place in places:
        file.write_bytes(content[:place] + bytes((content[place] ^ 1,)) + content[place + 1 :])
        try:
            loaded = load_tokenizer(tmp_path)
        except TokenizerError as error:
            assert "tokenizer.tables is damaged. Remove it" in str(error)
        else:  # the name of its format or of its tokenizer was damaged
            assert loaded.fingerprint() == bpe.fingerprint()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(TokenizerError, match=r"tokenizer\.tables is damaged"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "outline",
    [
        [],
        {},
        {"model": {"type": "WordLevel"}},
        {"model": {"type": "BPE"}, "added_tokens": [{"id": 999, "content": "<eos>"}]},
        {"model": {"type": "BPE"}, "added_tokens": [{"id": 0, "content": "<eos>"}]},
    ],
)
def test_tables_whose_parts_do_not_fit_each_other_are_refused(outline: Any, bpe: Tokenizer, tmp_path: Path):
    bpe.save(tmp_path)
    content = (tmp_path / "tokenizer.json").read_bytes()
    tables = BpeTables.of(json.loads(content))
    dataclasses.replace(tables, outline=outline).save(tmp_path, content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.tables is damaged"):
        load_tokenizer(tmp_path)
    beyond = tables.merged.copy()
    beyond[-1] = len(tables)
    dataclasses.replace(tables, merged=beyond).save(tmp_path, content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.tables is damaged"):
        load_tokenizer(tmp_path)
