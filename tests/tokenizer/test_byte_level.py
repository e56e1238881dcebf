import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import ByteLevelBPE, Tokenizer
from sheepop.tokenizer.backend import BackendTokenizer
from sheepop.tokenizer.byte_level import BYTE_ALPHABET, cut_text

UNICODE = st.characters(exclude_categories=("Cs",))
# Whole characters, and the fragments where cuts, white space and special tokens could go wrong.
FRAGMENTS = st.sampled_from(
    (
        *("\x00", "\x1b[0m", "\r\n", "\n    ", "\t", "  ", "\ufeff", "\u2028", "\u00a0x"),
        *("<eos>", "<pad", "def f(", "):\n", "12345", "_a.b", "don't"),
        *("e\u0301", "\u0301", "\U0001f469\u200d\U0001f4bb", "\uffff", "\U0010ffff", "日本語", "हिन्दी", "שלום"),
    )
)
TEXTS = st.lists(FRAGMENTS | st.text(UNICODE, max_size=8), max_size=12).map("".join)


@given(TEXTS)
@settings(max_examples=300)
def test_any_unicode_text_comes_back_exactly(bpe: Tokenizer, text: str):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert b"".join(map(bpe.token_bytes, ids)) == text.encode("utf-8")
    assert not set(ids) & {0, 1, 2, 3}


@given(TEXTS)
def test_the_library_decodes_the_same_text(bpe: Tokenizer, text: str):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_str(bpe.to_json())
    ids = bpe.encode(text, allow_special=True)
    assert ids == theirs.encode(text).ids
    assert theirs.decode(ids) == bpe.decode(ids)


def test_the_vocabulary_begins_with_special_tokens_and_the_256_bytes(bpe: Tokenizer):
    assert bpe.vocab_size == 700
    assert [bpe.token_bytes(i) for i in range(4)] == [b""] * 4
    assert sorted(bpe.token_bytes(i) for i in range(4, 260)) == [bytes([b]) for b in range(256)]
    assert all(len(bpe.token_bytes(i)) >= 2 for i in range(260, 700))


def test_byte_alphabet_is_that_of_the_library():
    pre_tokenizers = pytest.importorskip("tokenizers.pre_tokenizers")
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert set(BYTE_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    for text in ["\x00\n !~\x7f", "é\u00ad\u07ff", "\u0800€\uffff", "🐑\U0010ffff"]:
        ((mapped, _),) = step.pre_tokenize_str(text)
        assert bytes(BYTE_ALPHABET[c] for c in mapped) == text.encode("utf-8")


def test_special_text_is_ordinary_unless_allowed(bpe: Tokenizer):
    text = "a<eos>b"
    ordinary = bpe.encode(text)
    assert 3 not in ordinary and bpe.decode(ordinary) == text
    special = bpe.encode(text, allow_special=True)
    assert special.count(3) == 1 and bpe.decode(special) == "ab"
    assert bpe.decode(special, skip_special=False) == text


def test_a_corpus_full_of_special_text_makes_no_token_of_it():
    tokenizer = ByteLevelBPE.train(["<eos> <eos><eos>x <pad>\n" * 50], 265)
    assert set(tokenizer.encode("<eos><pad> <eos>")).isdisjoint(range(4))
    assert all(tokenizer.token_bytes(i) not in (b"<eos>", b"<pad>") for i in range(260, 265))


def test_both_modes_at_once_from_many_threads(bpe: Tokenizer):
    text = "x<eos>" * 50
    expected = {flag: bpe.encode(text, allow_special=flag) for flag in (False, True)}
    wrong: list[bool] = []

    def work(flag: bool) -> None:
        wrong.extend(flag for _ in range(50) if bpe.encode(text, allow_special=flag) != expected[flag])

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and expected[True].count(3) == 50


def test_pickling_keeps_special_text_ordinary(bpe: Tokenizer):
    copy = pickle.loads(pickle.dumps(bpe))
    assert copy.encode("a<eos>") == bpe.encode("a<eos>")
    assert copy.fingerprint() == bpe.fingerprint()


@given(st.lists(TEXTS, max_size=6))
@settings(max_examples=50)
def test_a_batch_equals_its_texts_one_by_one(bpe: Tokenizer, texts: list[str]):
    assert bpe.encode_batch(texts) == [bpe.encode(text) for text in texts]


def test_long_texts_are_encoded_in_parts_with_the_same_ids(bpe: Tokenizer, source_texts: list[str]):
    tokenizers = pytest.importorskip("tokenizers")
    text = "".join(source_texts)
    assert len(list(cut_text(text))) > 3
    theirs = tokenizers.Tokenizer.from_str(bpe.to_json())
    expected = theirs.encode(text).ids
    assert bpe.encode(text) == expected
    # More than one group of parts, with short and empty texts between.
    batch = ["", text * 12, "x", text * 12, ""]
    assert bpe.encode_batch(batch) == [[], bpe.encode(text * 12), bpe.encode("x"), bpe.encode(text * 12), []]


@given(TEXTS, st.integers(1, 20))
@settings(max_examples=300)
def test_cuts_lose_nothing_and_change_no_id(bpe: Tokenizer, text: str, characters: int):
    parts = list(cut_text(text, characters))
    assert "".join(parts) == text
    assert [i for part in parts for i in bpe.encode(part)] == bpe.encode(text)


@pytest.mark.parametrize("pattern", ["sheepop", "gpt2"])
def test_long_texts_are_cut_before_the_library_sees_them_by_every_pattern(pattern: str, source_texts: list[str]):
    text = "".join(source_texts) * 2
    tokenizer = ByteLevelBPE.train([text], 600, pattern=pattern)
    groups = list(tokenizer._groups([text]))
    assert len(groups[0]) > 6
    theirs = pytest.importorskip("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    assert BackendTokenizer.encode_batch(tokenizer, [text]) == [theirs.encode(text).ids]


@pytest.mark.parametrize("text", ["\ud800", "abc\udfff"])
def test_a_lone_surrogate_is_refused(bpe: Tokenizer, text: str):
    with pytest.raises(TokenizerError, match=rf"lone surrogate .* at character {len(text) - 1}"):
        bpe.encode(text)
    with pytest.raises(TokenizerError, match="Text 2 of 3 contains the lone surrogate"):
        bpe.encode_batch(["a", text, "b"])
    with pytest.raises(TokenizerError, match="lone surrogate"):
        ByteLevelBPE.train([text], 260)


def test_what_is_not_text_is_a_type_error(bpe: Tokenizer):
    for wrong in (None, 3, b"bytes"):
        with pytest.raises(TypeError):
            bpe.encode(wrong)


@pytest.mark.parametrize("token_id", [-1, 700, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(bpe: Tokenizer, token_id: int):
    with pytest.raises(TokenizerError, match=rf"{token_id} is outside .* vocabulary of 700"):
        bpe.decode([5, token_id])


def test_ids_may_be_an_array_and_broken_characters_are_replaced(bpe: Tokenizer):
    ids = np.array(bpe.encode("\U0001f411"), dtype=np.int64)
    assert bpe.decode(ids) == "\U0001f411"
    assert bpe.decode(ids[:-1]) == "\ufffd"


def test_byte_lengths_sum_to_the_text(bpe: Tokenizer, source_texts: list[str]):
    ids = bpe.encode(source_texts[0])
    lengths = bpe.byte_lengths()
    assert lengths.shape == (700,) and lengths.dtype == np.int64
    assert lengths[ids].sum() == len(source_texts[0].encode("utf-8"))


@pytest.mark.parametrize(
    ("pattern", "text", "parts"),
    [
        ("llama3", "def f(self, x):\n        return x",
            ["def", " f", "(self", ",", " x", "):\n", "       ", " return", " x"]),
        ("llama3", "a_name.append(12345)", ["a", "_name", ".append", "(", "123", "45", ")"]),
        ("llama3", "word \n\n    word", ["word", " \n\n", "   ", " word"]),
        ("llama3", "don't STOP, it'LL", ["don", "'t", " STOP", ",", " it", "'LL"]),
        ("llama3", "'\u017false", ["'\u017false"]),
        ("llama3", "x  = 1", ["x", " ", " =", " ", "1"]),
        ("llama3", "<eos>", ["<eos", ">"]),
        ("sheepop", "def f(self, x):\n        return x",
            ["def", " f", "(self", ",", " x", "):\n        ", "return", " x"]),
        ("sheepop", "a_name.append(12345)", ["a", "_name", ".append", "(", "123", "45", ")"]),
        ("sheepop", "word\n\n    word", ["word", "\n\n    ", "word"]),
        ("sheepop", "don't stop", ["don", "'t", " stop"]),
        ("sheepop", "x  = 1", ["x", " ", " =", " ", "1"]),
        ("sheepop", "<eos>", ["<eos", ">"]),
        ("gpt2", "a_name.append(12345)", ["a", "_", "name", ".", "append", "(", "12345", ")"]),
        ("gpt2", "don't STOP", ["don", "'t", " STOP"]),
        ("gpt2", "):\n    x", ["):", "\n   ", " x"]),
        ("gpt2", "<eos>", ["<", "eos", ">"]),
    ],
)  # fmt: skip
def test_no_token_reaches_over_a_cut_of_the_pattern(pattern: str, text: str, parts: list[str]):
    tokenizer = ByteLevelBPE.train([text] * 3, 260, pattern=pattern)
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    found = [text[start:stop] for _, (start, stop) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == parts
