import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import CharTokenizer, load_tokenizer

ENCODABLE = st.characters(exclude_categories=("Cs",), exclude_characters="\x00\x01\x02\x03")


@given(st.text(ENCODABLE))
def test_text_it_was_trained_on_comes_back(text: str):
    tokenizer = CharTokenizer.train([text])
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode("utf-8")


@given(st.text(st.characters(), max_size=60), st.sets(st.sampled_from("éàœ€🐑\u0301\U0010ffff")))
def test_ids_equal_a_dictionary_look_up(text: str, extras: set[str]):
    table = {chr(i): i for i in range(4, 128)} | {c: 128 + i for i, c in enumerate(sorted(extras))}
    assert CharTokenizer(extras).encode(text) == [table.get(c, 1) for c in text]


@pytest.mark.parametrize("character", ["\x00", "\x01", "\x02", "\x03", "\u00e9", "\U0010ffff", "\ud800"])
def test_control_unknown_and_surrogate_characters_are_unk(character: str):
    tokenizer = CharTokenizer("\u20ac")
    assert tokenizer.encode(f"a{character}b") == [97, 1, 98]


def test_training_text_with_controls_and_surrogates_adds_neither():
    assert CharTokenizer.train(["\x00\x03\ud800\udfffa"]).vocab_size == 128


@pytest.mark.parametrize("character", ["ab", "", "\ud800", "\x00", "\x03"])
def test_extra_characters_that_cannot_be_held_are_refused(character: str):
    with pytest.raises(TokenizerError, match="cannot be in a character vocabulary"):
        CharTokenizer([character])


def test_repeated_and_ascii_extra_characters_change_nothing():
    assert CharTokenizer("aéé").fingerprint() == CharTokenizer("é").fingerprint()


def test_special_text_is_ordinary_unless_allowed():
    tokenizer = CharTokenizer()
    assert tokenizer.encode("<eos>") == [ord(c) for c in "<eos>"]
    assert tokenizer.encode("a<eos><bos>b<end>", allow_special=True) == [97, 3, 2, 98, *map(ord, "<end>")]
    assert tokenizer.encode_batch(["", "<pad>"], allow_special=True) == [[], [0]]


def test_decoding_special_tokens():
    tokenizer = CharTokenizer()
    assert tokenizer.decode([2, 72, 1, 105, 3]) == "Hi"
    assert tokenizer.decode([2, 72, 1, 105, 3], skip_special=False) == "<bos>H<unk>i<eos>"


def test_byte_lengths_count_utf8():
    tokenizer = CharTokenizer("é€🐑")
    lengths = tokenizer.byte_lengths()
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [0] * 4 + [1] * 124 + [2, 3, 4]
    assert tokenizer.token_bytes(129) == "€".encode()


@pytest.mark.parametrize("token_id", [-1, 128, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int):
    with pytest.raises(TokenizerError, match=rf"{token_id} is outside .* vocabulary of 128"):
        CharTokenizer().decode([token_id])


def test_save_and_load(tmp_path):
    tokenizer = CharTokenizer("é\u2028🐑\U0010ffff")
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, CharTokenizer)
    assert loaded.extra_characters == tokenizer.extra_characters
    assert loaded.fingerprint() == tokenizer.fingerprint() != CharTokenizer("é").fingerprint()
    assert copy.deepcopy(loaded).encode("é🐑") == tokenizer.encode("é🐑") == [128, 130]


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
def test_the_tokenizers_library_gives_the_same_ids(text: str):
    tokenizers = pytest.importorskip("tokenizers")
    ours = CharTokenizer.train([text[::2]])
    theirs = tokenizers.Tokenizer.from_str(ours.to_json())
    ids = theirs.encode(text).ids
    assert ids == ours.encode(text, allow_special=True)
    assert theirs.decode(ids) == ours.decode(ids)
    theirs.encode_special_tokens = True
    assert theirs.encode(text).ids == ours.encode(text)
