"""Oddities and formats of published tokenizers. transformers, tokenizers and tiktoken say what the ids are."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import ByteLevelBPE, load_tokenizer, tokenizer_from_json

from .test_added_tokens import END, VOCABULARY, ids, write_pair
from .test_files import FLAGS, gpt2_style

TEXTS = ["Hello it's", " Hello Hello", "naïve 🐑 été\n\n x", "<s>Hello</s> <mask> it", "", "Ünïcode 日本語 don't, ok?"]
SPECIAL = {**FLAGS, "special": True}


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


@pytest.mark.parametrize(("byte", "text"), [(0xF1, "a\U00040001"), (0xF2, "a\U00080001")])
def test_a_byte_that_no_assigned_character_needs_may_be_missing(byte: int, text: str):
    tokenizer = tokenizer_from_json(json.dumps(gpt2_style(lacking=chr(byte))))
    assert [f"lacks the byte 0x{byte:02X}" in note for note in tokenizer.notes] == [True]
    for whole in ("é🐑\U000e0041\U0010fffd", "\U0003ffff"):
        assert tokenizer.decode(tokenizer.encode(whole)) == whole
    with pytest.raises(TokenizerError, match=f"Text 2 of 2 has the character U\\+{ord(text[1]):X} at .* 1"):
        tokenizer.encode_batch(["a", text])


def test_control_characters_that_a_vocabulary_lacks_are_refused_in_texts():
    """Falcon's published vocabulary has no token for 14 of them, among these the vertical tab."""
    absent = [0x03, 0x04, 0x05, 0x0B, 0x11, 0x13, 0x14, 0x15, 0x16, 0x17, 0x19, 0x1C, 0x1D, 0x1E]
    # In the vocabulary a byte that is no printable character stands 256 characters further on.
    tokenizer = tokenizer_from_json(json.dumps(gpt2_style(lacking="".join(chr(256 + byte) for byte in absent))))
    assert tokenizer.notes[0].startswith("The vocabulary lacks the bytes 0x03, 0x04, 0x05, 0x0B, 0x11, 0x13")
    assert tokenizer.decode(tokenizer.encode("a\tb\r\n\x00\x7f\x1b[0m")) == "a\tb\r\n\x00\x7f\x1b[0m"
    with pytest.raises(TokenizerError, match=r"Text 1 of 1 has the character U\+000B at place 1, which this"):
        tokenizer.encode("a\vb")
    with pytest.raises(TokenizerError, match=r"lacks 1 of the bytes .* \(0x09 first\)"):
        tokenizer_from_json(json.dumps(gpt2_style(lacking=chr(256 + 9))))


@pytest.mark.parametrize("byte", [0xC2, 0xF0, 0xF3, 0xF4])
def test_a_byte_that_some_assigned_character_needs_may_not(byte: int):
    with pytest.raises(TokenizerError, match=f"lacks 1 of the bytes .* \\(0x{byte:02X} first\\)"):
        tokenizer_from_json(json.dumps(gpt2_style(lacking=chr(byte))))


def with_hole() -> dict[str, Any]:
    content = gpt2_style()
    content["added_tokens"].append({"id": 263, "content": "<|fim|>", **SPECIAL})
    return content


def test_ids_without_a_token_become_reserved_tokens(tmp_path: Path):
    tokenizer = tokenizer_from_json(json.dumps(with_hole()))
    reserved = {f"<|reserved_{token_id}|>": token_id for token_id in (258, 259, 260, 261, 262)}
    assert tokenizer.special_tokens == {END: 257, **reserved, "<|fim|>": 263}
    assert tokenizer.vocab_size == 264
    assert tokenizer.notes == ("5 ids have no token, 258 first; they are reserved special tokens now.",)
    assert tokenizer.encode("t<|fim|>", allow_special=True)[-1] == 263
    assert tokenizer.encode("<|reserved_258|>") == tokenizer_from_json(json.dumps(gpt2_style())).encode(
        "<|reserved_258|>"
    )
    # The library gives what is saved the same ids.
    tokenizer.save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert {text: library.token_to_id(text) for text in tokenizer.special_tokens} == tokenizer.special_tokens
    again = load_tokenizer(tmp_path)
    assert (again.fingerprint(), again.notes) == (tokenizer.fingerprint(), ())


def test_a_hole_that_is_too_large_and_a_name_that_is_taken_are_refused():
    far = with_hole()
    far["added_tokens"][-1]["id"] = 2**31
    with pytest.raises(TokenizerError, match=r"has 259 tokens, and one has the id 2,147,483,648"):
        tokenizer_from_json(json.dumps(far))
    taken = with_hole()
    taken["added_tokens"][-1]["content"] = "<|reserved_260|>"
    with pytest.raises(TokenizerError, match=r"no token with the id 260, but '<\|reserved_260\|>' has another id"):
        tokenizer_from_json(json.dumps(taken))


def test_dropout_is_for_training_and_text_is_encoded_without_it():
    content = gpt2_style()
    exact = tokenizer_from_json(json.dumps(content))
    content["model"]["dropout"] = 0.9
    tokenizer = tokenizer_from_json(json.dumps(content))
    assert "dropout 0.9" in tokenizer.notes[0]
    text = " t" * 3000  # enough for the library's way, too
    for _ in range(3):
        assert tokenizer.encode(text) == exact.encode(text)
    assert tokenizer.fingerprint() == exact.fingerprint()


OPT = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>", "add_bos_token": True}
ROBERTA_VOCABULARY = {
    text: number for number, text in enumerate(("<s>", "<pad>", "</s>", "<unk>", *VOCABULARY, "<mask>"))
}


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "GPT2Tokenizer", **OPT},
        {"tokenizer_class": "RobertaTokenizer"},
        {"tokenizer_class": "RobertaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"},
    ],
)
def test_special_tokens_of_opt_and_roberta_are_those_of_their_files(
    settings: dict[str, Any], tmp_path: Path, transformers: Any
):
    write_pair(tmp_path, settings, {"vocab.json": ROBERTA_VOCABULARY})
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert END not in ours.special_tokens
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        assert ids(ours, text) == theirs(text).input_ids
    ours.save(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [again(text).input_ids for text in TEXTS] == [ids(ours, text) for text in TEXTS]


def test_a_roberta_whose_vocabulary_lacks_what_stands_around_texts_is_refused(tmp_path: Path):
    write_pair(tmp_path, {"tokenizer_class": "RobertaTokenizer"}, {})
    with pytest.raises(TokenizerError, match=r"the cls_token around a text, but the vocabulary does not have '<s>'"):
        load_tokenizer(tmp_path)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "it", "'", "s", "##s", "x", "un", "##ico", "##de", "日"]
WORDS += ["Hello", "ete", "été", ",", "don", "t", "na", "##ive", "naïve", "ok", "?", "<", ">", "/"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    ],
)
def test_berts_list_of_words_is_read_as_transformers_reads_it(
    settings: dict[str, Any], tmp_path: Path, transformers: Any
):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs, ours = transformers.BertTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert ours.special_tokens == {text: number for number, text in enumerate(WORDS[:5])}
    assert (ours.special_id("pad"), ours.special_id("unk"), ours.special_id("eos")) == (0, 1, None)
    for text in [*TEXTS, "Hello [MASK] it's été Unicodes", "na\u0308ive\u00a0x\t日x"]:
        assert ids(ours, text) == theirs(text).input_ids


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("", {}, "it has no lines"),
        ("a\n\nb\n", {}, "a line is empty"),
        ("[UNK]\na\nb\na\n", {}, "line 4 repeats the entry 'a' of line 2"),
        ("a\n", {}, "cannot read it|unknown token"),
        ("[UNK]\n", {"do_lower_case": 3}, "do_lower_case = 3 is neither true nor false"),
        ("[UNK]\n", {"tokenizer_class": "BertJapaneseTokenizer"}, "does not say how that cuts text"),
        ("[UNK]\n", {"do_basic_tokenize": False}, "turns off do_basic_tokenize"),
    ],
)
def test_a_list_of_words_that_is_damaged_or_of_another_kind_is_refused(
    content: str, settings: dict[str, Any], message: str, tmp_path: Path
):
    (tmp_path / "vocab.txt").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tekken(tokens: list[bytes], *, num_special: int, size: int, **further: Any) -> dict[str, Any]:
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": size,
        "default_num_special_tokens": num_special,
        "version": "v3",
    }
    return {"config": config, "vocab": vocabulary, **further}


@pytest.fixture(scope="module")
def learned(source_texts: list[str]) -> list[bytes]:
    """The bytes and 300 longer tokens, in the order in which they were learned."""
    tokenizer = ByteLevelBPE.train([*source_texts, *TEXTS], 560)
    return [tokenizer.token_bytes(token_id) for token_id in range(4, tokenizer.vocab_size)]


def test_mistrals_ranks_have_the_ids_of_tiktoken_behind_the_special_tokens(
    learned: list[bytes], source_texts: list[str], tmp_path: Path
):
    tiktoken = pytest.importorskip("tiktoken")
    used = 450  # the file has more ranks than the vocabulary has room for
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(learned, num_special=30, size=30 + used)))
    ours = load_tokenizer(tmp_path)
    ranks = {token: rank for rank, token in enumerate(learned[:used])}
    theirs = tiktoken.Encoding("tekken", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in (*TEXTS, source_texts[0][:3000]):
        assert ours.encode(text) == [30 + rank for rank in theirs.encode(text, disallowed_special=())]
        assert ours.decode(ours.encode(text)) == text
    assert (ours.vocab_size, ours.prefix_ids, ours.suffix_ids) == (480, (1,), ())
    assert [ours.special_id(role) for role in ("unk", "bos", "eos", "pad")] == [0, 1, 2, 11]
    assert [ours.special_tokens[text] for text in ("[INST]", "[TOOL_CONTENT]", "<SPECIAL_29>")] == [3, 19, 29]


def test_mistrals_special_tokens_are_those_that_the_file_lists(learned: list[bytes], tmp_path: Path):
    listed = [{"rank": number, "token_str": text, "is_control": True} for number, text in enumerate(("<unk>", "<s>"))]
    content = tekken(learned[:256], num_special=3, size=259, special_tokens=listed)
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).special_tokens == {"<unk>": 0, "<s>": 1, "<SPECIAL_2>": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {}}, "damaged or not a tekken.json"),
        ({"vocab": []}, "does not have 259 tokens, 3 of them special"),
        ({"vocab": [{"rank": 0, "token_bytes": "!"}]}, "damaged or not a tekken.json"),
        (
            {"special_tokens": [{"rank": 0, "token_str": "a"}, {"rank": 1, "token_str": "a"}]},
            "does not have 259 tokens",
        ),
        ({"special_tokens": [{"rank": 0, "token_str": "a"}]}, "has the text of a special token"),
    ],
)
def test_a_file_of_mistral_that_is_damaged_is_refused(
    change: dict[str, Any], message: str, learned: list[bytes], tmp_path: Path
):
    content = tekken(learned[:256], num_special=3, size=259) | change
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)
