import hashlib
import os
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import Tokenizer
from sheepop.tokenizer.training import train_wordpiece

ANY = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
WORDS = st.lists(st.sampled_from(("parser", "help", "return", "xyzzy", "don't", "a.b", "日本", "é", "I", "self")))

_TRAIN = """
import hashlib, pathlib, sys, sysconfig
from sheepop.tokenizer.training import train_wordpiece
folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
texts = [(folder / name).read_text(encoding="utf-8") for name in ("argparse.py", "heapq.py")]
print(hashlib.sha256(train_wordpiece(texts, 900).to_json().encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def wordpiece(trained: dict[str, Tokenizer]) -> Tokenizer:
    return trained["wordpiece"]


def longest_pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    """Greedy longest match first (Devlin et al. 2019), written out."""
    ids, start = [], 0
    while start < len(word):
        pieces = [("##" if start else "") + word[start:end] for end in range(len(word), start, -1)]
        found = next((piece for piece in pieces if piece in vocabulary), None)
        if found is None:
            return [1]
        ids.append(vocabulary[found])
        start += len(found.removeprefix("##") if start else found)
    return ids


@pytest.fixture(scope="module")
def library(wordpiece: Tokenizer) -> tokenizers.Tokenizer:
    """What the library makes of the file."""
    library = tokenizers.Tokenizer.from_str(wordpiece.to_json())
    library.encode_special_tokens = True
    return library


@given(st.from_regex(r"[A-Za-z]{1,20}", fullmatch=True))
@settings(max_examples=200)
def test_a_word_is_cut_into_the_longest_pieces_from_left_to_right(
    wordpiece: Tokenizer, library: tokenizers.Tokenizer, word: str
):
    assert wordpiece.encode(word) == longest_pieces(word, library.get_vocab())


@given(ANY | WORDS.map(" ".join))
@settings(max_examples=150)
def test_the_library_gives_the_same_ids_and_the_same_text(
    wordpiece: Tokenizer, library: tokenizers.Tokenizer, text: str
):
    ids = library.encode(text, add_special_tokens=False).ids
    assert wordpiece.encode(text) == ids
    assert wordpiece.decode(ids) == library.decode(ids)


@given(st.lists(st.sampled_from(("parser", "help", "return", "Argument", "self", "42")), min_size=1))
def test_words_with_one_space_between_come_back(wordpiece: Tokenizer, words: list[str]):
    assert wordpiece.decode(wordpiece.encode(" ".join(words))) == " ".join(words)


def test_what_is_lost_is_white_space_and_words_without_pieces(wordpiece: Tokenizer):
    ids = wordpiece.encode("return  self\n\thelp\u200b 日x" + "y" * 101)
    assert wordpiece.decode(ids) == "return self help"
    assert ids[-2:] == [1, 1]


def test_special_text_is_ordinary_unless_allowed(wordpiece: Tokenizer):
    assert 3 not in wordpiece.encode("help<eos>") and 3 not in wordpiece.encode("<eos>")
    assert wordpiece.encode("help<eos>", allow_special=True) == [*wordpiece.encode("help"), 3]


def test_the_same_texts_give_the_same_file_in_every_process():
    def digest(hash_seed: str, threads: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads}
        result = subprocess.run(
            [sys.executable, "-c", _TRAIN], env=environment, capture_output=True, text=True, check=True
        )
        return result.stdout.strip()

    assert digest("0", "1") == digest("1", "2") != hashlib.sha256(b"").hexdigest()


def test_pairs_of_a_hand_worked_corpus():
    # Words: "ab" x4, "abc" x1. The pair a, ##b occurs 5 times, then ab, ##c once.
    tokenizer = train_wordpiece(["ab ab ab ab abc"], 162)
    assert [tokenizer.token_bytes(i) for i in (160, 161)] == [b" ab", b" abc"]
    assert tokenizer.encode("abc ab") == [161, 160]


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("ab ab", 162, "gives 161 tokens at most"),
        ("ab", 159, "at least 160 tokens"),
        (
            "".join(map(chr, range(0x4E00, 0x4F00))),
            300,
            "so many frequent characters that the smallest vocabulary is 416",
        ),
    ],
)
def test_a_size_that_does_not_fit_the_text_is_refused(text: str, size: int, message: str):
    with pytest.raises(TokenizerError, match=message):
        train_wordpiece([text], size)
