import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import ByteLevelBPE, CharTokenizer, Tokenizer, load_tokenizer, tokenizer_from_json

SAMPLE = "def f(x):\n    return 'é🐑' <eos>\r\n"


FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
WORD_PIECE = {
    "type": "WordPiece",
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 100,
}


def gpt2_style(*, lacking: str = "") -> dict[str, Any]:
    """A small file as GPT-2's: bytes, one merge, <|endoftext|> last, the pattern built into the library."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    vocabulary = {c: i for i, c in enumerate([c for c in alphabet if c not in lacking] + ["Ġt"])}
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": len(vocabulary), "content": "<|endoftext|>", "special": True}
    return {
        "version": "1.0",
        "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": [{**end, **FLAGS}],
        "normalizer": None,
        "pre_tokenizer": step,
        "post_processor": step,
        "decoder": step,
        "model": {"vocab": vocabulary, "merges": ["Ġ t"]},
    }


def write(directory: Path, content: object, settings: object = None) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    if settings is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


@pytest.fixture(params=["bpe", "wordpiece", "unigram", "char"])
def tokenizer(request: pytest.FixtureRequest, trained: dict[str, Tokenizer]) -> Tokenizer:
    return CharTokenizer("é🐑") if request.param == "char" else trained[request.param]


def test_save_and_load_give_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "a" / "b", model_max_length=77)
    for path in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.algorithm == tokenizer.algorithm
        assert loaded.encode(SAMPLE) == tokenizer.encode(SAMPLE)
        assert loaded.special_tokens == tokenizer.special_tokens
        assert loaded.fingerprint() == tokenizer.fingerprint()
    settings = json.loads((tmp_path / "a" / "b" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 77 and settings["eos_token"] == "<eos>"


def test_saving_twice_gives_the_same_bytes(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path / "first")
    load_tokenizer(tmp_path / "first").save(tmp_path / "second")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_the_fingerprint_does_not_see_the_formatting(tokenizer: Tokenizer, tmp_path: Path):
    content = json.loads(tokenizer.to_json())
    reordered = dict(reversed(content.items()))
    (tmp_path / "tokenizer.json").write_text(json.dumps(reordered, indent=7, ensure_ascii=True))
    assert load_tokenizer(tmp_path).fingerprint() == tokenizer.fingerprint()


def test_fingerprints_differ_with_the_vocabulary(bpe: Tokenizer, source_texts: list[str]):
    others = [ByteLevelBPE.train(source_texts, 699), ByteLevelBPE.train(source_texts[1:], 700), CharTokenizer()]
    assert len({t.fingerprint() for t in [bpe, *others]}) == 4


def test_a_gpt2_style_file_is_read(tmp_path: Path):
    tokenizer = load_tokenizer(write(tmp_path, gpt2_style()))
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_tokens == {"<|endoftext|>": 257}
    assert tokenizer.eos_id == tokenizer.bos_id == 257
    # No more than the truncation of 3 that the file asks for would be silent loss.
    assert tokenizer.encode("a tt") == [64, 256, 83]
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE
    assert 257 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.encode("a<|endoftext|>", allow_special=True) == [64, 257]


def test_a_role_that_a_foreign_tokenizer_lacks_is_an_error_where_it_is_needed(tmp_path: Path):
    settings = {"eos_token": {"content": "<|endoftext|>"}, "pad_token": None, "chat_template": "kept"}
    tokenizer = load_tokenizer(write(tmp_path, gpt2_style(), settings))
    assert tokenizer.eos_id == 257 and tokenizer.special_id("pad") is None
    with pytest.raises(TokenizerError, match="no pad_token"):
        _ = tokenizer.pad_id
    tokenizer.save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text()) == settings


def test_an_added_token_that_is_not_special_stands_for_its_text(tmp_path: Path):
    content = gpt2_style()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"].append({"id": 258, "content": "<tool é>", **flags})
    tokenizer = load_tokenizer(write(tmp_path, content))
    assert tokenizer.encode("a<tool é>") == [64, 258]
    assert tokenizer.token_bytes(258) == "<tool é>".encode()
    assert tokenizer.decode([64, 258]) == "a<tool é>"


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"no tokenizer in .* reads tokenizer\.json, SentencePiece"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"no tokenizer at .*absent"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"3", b"{}", b'{"model": 1}', b"[" * 100_000, b'{"model": {"type": "BPE"}}'],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_truncated_file_is_refused_at_every_length(bpe: Tokenizer, tmp_path: Path):
    content = bpe.to_json()
    for length in range(0, len(content), len(content) // 20):
        (tmp_path / "tokenizer.json").write_text(content[:length], encoding="utf-8")
        with pytest.raises(TokenizerError, match="damaged"):
            load_tokenizer(tmp_path)


def sentencepiece_style() -> dict[str, Any]:
    """A small file as of a Unigram model with bytes, a special token and one that stands around texts."""
    pieces = [
        ["<unk>", 0.0],
        ["</s>", 0.0],
        *([f"<0x{byte:02X}>", 0.0] for byte in range(256)),
        ["▁t", -1.0],
        ["a", -2.0],
    ]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    special = [{"id": i, "content": pieces[i][0], **FLAGS, "special": True} for i in (0, 1)]
    after = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": after,
            "pair": after,
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": pieces},
    }


def bert_style() -> dict[str, Any]:
    """A small file as of a WordPiece model."""
    special = [{"id": i, "content": text, **FLAGS, "special": True} for i, text in enumerate(("[PAD]", "[UNK]"))]
    vocabulary = {text: i for i, text in enumerate(("[PAD]", "[UNK]", "t", "##a", "a"))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {**WORD_PIECE, "vocab": vocabulary},
    }


@pytest.mark.parametrize("style", [gpt2_style, sentencepiece_style, bert_style])
def test_a_hostile_file_is_refused_or_works(style: Callable[[], dict[str, Any]]):
    """Any value anywhere in the tree may be replaced; the result is a TokenizerError or a tokenizer that encodes."""

    @given(st.data())
    @settings(max_examples=150)
    def check(data: st.DataObject) -> None:
        tree = style()
        node, key = tree, data.draw(st.sampled_from(sorted(tree)))
        while isinstance(node[key], dict | list) and node[key] and data.draw(st.integers(0, 3)):
            node = node[key]
            key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node[key] = data.draw(
            st.sampled_from([None, -1, 0, 3, 2**40, 0.5, "", "x", "Ġ", True, [], {}, [0], {"type": "BPE"}])
        )
        try:
            tokenizer = tokenizer_from_json(json.dumps(tree))
            around = (*tokenizer.prefix_ids, *tokenizer.suffix_ids)
            ids = tokenizer.encode("t a <|endoftext|></s>é", allow_special=True)
        except TokenizerError:
            return
        assert all(0 <= i < tokenizer.vocab_size for i in (*around, *ids))
        assert len(tokenizer.byte_lengths()) == tokenizer.vocab_size
        assert len(tokenizer.fingerprint()) == 64
        tokenizer.decode(ids, skip_special=False)

    check()


@pytest.mark.parametrize("content", ["[]", "{", '{"eos_token": 3}', '{"added_tokens_decoder": 3}'])
def test_damaged_settings_are_refused(bpe: Tokenizer, tmp_path: Path, content: str):
    bpe.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match="tokenizer_config"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({**WORD_PIECE, "vocab": {"a": 0}}, r"names '\[UNK\]' .* does not have that token"),
        ({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}, r"names '\?' .* does not have that token"),
        ({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}, "without a token for unknown characters"),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": []}, "drops unknown characters"),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "?"}, r"names '\?'"),
        (
            {"type": "Bytes", "vocab": {"a": 0}},
            "of the type 'Bytes', but the known types are BPE, WordPiece, Unigram, WordLevel",
        ),
    ],
)
def test_models_that_lose_text_or_are_of_another_kind_are_refused(model: dict[str, Any], message: str, tmp_path: Path):
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    content = {"version": "1.0", "added_tokens": [], **dict.fromkeys(parts), "model": model}
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(write(tmp_path, content))


def test_a_vocabulary_that_would_lose_bytes_is_refused(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"lacks 2 of the bytes .* \(0xC3 first\)"):
        load_tokenizer(write(tmp_path, gpt2_style(lacking="Ãæ")))


@pytest.mark.parametrize("option", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_options_of_the_model_that_would_change_text_are_refused(option: str, tmp_path: Path):
    content = gpt2_style()
    content["model"][option] = ""
    if option == "end_of_word_suffix":
        content["model"][option] = "</w>"
    if option == "continuing_subword_prefix":
        content["model"]["merges"], content["model"][option] = [], "##"
    with pytest.raises(TokenizerError, match=option):
        load_tokenizer(write(tmp_path, content))


def test_ids_that_are_out_of_place_are_refused(bpe: Tokenizer, tmp_path: Path):
    content = json.loads(bpe.to_json())
    content["added_tokens"][3]["id"] = 2
    with pytest.raises(TokenizerError, match="out of place"):
        load_tokenizer(write(tmp_path, content))

    twice = gpt2_style()
    twice["model"]["vocab"]["Ġt"] = 9
    with pytest.raises(TokenizerError, match="out of place"):
        load_tokenizer(write(tmp_path, twice))


def test_characters_that_are_out_of_place_are_refused(tmp_path: Path):
    content = json.loads(CharTokenizer("é🐑").to_json())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    with pytest.raises(TokenizerError, match="out of place: 'a' has the id 98"):
        load_tokenizer(write(tmp_path, content))


def test_special_ids_that_the_settings_contradict_are_refused(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    moved = {**settings, "added_tokens_decoder": {"5": {"content": "<eos>"}}}
    file.write_text(json.dumps(moved))
    with pytest.raises(TokenizerError, match=r"'<eos>' has the id 5, but tokenizer\.json gives it 3"):
        load_tokenizer(tmp_path)
    file.write_text(json.dumps({**settings, "eos_token": "<end>"}))
    with pytest.raises(TokenizerError, match="names '<end>' as eos_token"):
        load_tokenizer(tmp_path)


def test_roles_of_a_character_tokenizer_cannot_be_moved(tmp_path: Path):
    CharTokenizer().save(tmp_path)
    write(tmp_path, json.loads(CharTokenizer().to_json()), {"eos_token": "<bos>"})
    with pytest.raises(TokenizerError, match="names '<bos>' as eos_token"):
        load_tokenizer(tmp_path)


def test_settings_that_others_wrote_are_kept(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{{ messages }}"}))
    load_tokenizer(tmp_path).save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / file.name).read_text())["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("content", [b"plain words", b"\xff\xfe\x00 bytes", b""])
def test_a_file_that_is_no_tokenizer_is_not_called_a_damaged_one(tmp_path: Path, content: bytes):
    (tmp_path / "notes.txt").write_bytes(content)
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(tmp_path / "notes.txt")
    said = str(refused.value)
    assert said.startswith(f"Cannot use the tokenizer {tmp_path / 'notes.txt'}: it is not a tokenizer. SheepOp reads ")
    assert "damaged" not in said
