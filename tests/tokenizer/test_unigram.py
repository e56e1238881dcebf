import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import Tokenizer
from sheepop.tokenizer.unigram import WordLattice, _candidates, _digamma, learn_pieces, train_unigram

FRAGMENTS = st.sampled_from(
    ("<eos>", "<unk>", "<0x41>", "\u2581", "  ", "\r\n", "\x00", "日本語", "e\u0301", "🐑", "return")
)
TEXTS = st.lists(FRAGMENTS | st.text(st.characters(exclude_categories=("Cs",)), max_size=8), max_size=8).map("".join)

_TRAIN = """
import hashlib, pathlib, sysconfig
from sheepop.tokenizer.unigram import train_unigram
folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
texts = [(folder / name).read_text(encoding="utf-8") for name in ("argparse.py", "heapq.py")]
print(hashlib.sha256(train_unigram(texts, 900).to_json().encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def unigram(trained: dict[str, Tokenizer]) -> Tokenizer:
    return trained["unigram"]


@given(TEXTS)
@settings(max_examples=300)
def test_any_unicode_text_comes_back_exactly(unigram: Tokenizer, text: str):
    ids = unigram.encode(text)
    assert unigram.decode(ids) == text
    assert b"".join(map(unigram.token_bytes, ids)) == text.encode("utf-8")
    assert not set(ids) & {0, 1, 2, 3}


@pytest.fixture(scope="module")
def library(unigram: Tokenizer) -> tokenizers.Tokenizer:
    """What the library makes of the file."""
    library = tokenizers.Tokenizer.from_str(unigram.to_json())
    library.encode_special_tokens = True
    return library


@given(TEXTS)
@settings(max_examples=150)
def test_the_library_reads_the_file_with_the_same_ids(unigram: Tokenizer, library: tokenizers.Tokenizer, text: str):
    assert library.encode(text).ids == unigram.encode(text)
    assert library.decode(unigram.encode(text)) == text


def segmentations(word: str, pieces: dict[str, float]) -> list[tuple[str, ...]]:
    """Every way to cut a word into pieces."""
    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, len(word)), n) for n in range(len(word)))
    parts = (tuple(word[a:b] for a, b in itertools.pairwise((0, *cut, len(word)))) for cut in cuts)
    return [segmentation for segmentation in parts if all(piece in pieces for piece in segmentation)]


@given(st.text("abc", min_size=1, max_size=8), st.lists(st.text("abc", min_size=2, max_size=4), max_size=6), st.data())
@settings(max_examples=60)
def test_expected_counts_and_best_segmentations_are_those_of_all_segmentations(
    word: str, others: list[str], data: st.DataObject
):
    texts = sorted({*"abc", *others})
    chances = np.array([data.draw(st.floats(0.01, 1.0)) for _ in texts])
    pieces = dict(zip(texts, chances.tolist(), strict=True))
    every = [(cut, math.prod(pieces[piece] for piece in cut)) for cut in segmentations(word, pieces)]
    total = sum(chance for _, chance in every)
    expected = Counter()
    for cut, chance in every:
        for piece in cut:
            expected[piece] += 3 * chance / total
    lattice = WordLattice([word], {text: number for number, text in enumerate(texts)})
    found = lattice.expected_counts(chances, np.array([3.0]))
    np.testing.assert_allclose(found, [expected[text] for text in texts], rtol=1e-9, atol=1e-12)

    best = max((chance for cut, chance in every if len(cut) > 1), default=0.0)
    found_best = lattice.best_without_itself(np.log(chances))[0]
    assert found_best == pytest.approx(math.log(best)) if best else found_best == -np.inf


@given(st.dictionaries(st.text("ab日🐑", min_size=1, max_size=9), st.integers(1, 5), max_size=6))
@settings(max_examples=60)
def test_candidates_are_the_repeated_substrings_that_stand_for_most_text(words: dict[str, int]):
    counted = Counter()
    for word, count in words.items():
        for start, end in itertools.combinations(range(len(word) + 1), 2):
            counted[word[start:end]] += count
    repeated = {text: count * len(text) for text, count in counted.items() if len(text) > 1 and count > 1}
    found = _candidates(list(words), np.array(list(words.values()), dtype=float), 10_000)
    assert sorted(found) == sorted(repeated)
    assert [repeated[text] for text in found] == sorted(repeated.values(), reverse=True)


def test_digamma_is_that_of_torch():
    x = np.array([0.5, 0.73, 1.0, 3.2, 17.0, 1e6])
    np.testing.assert_allclose(_digamma(x), torch.digamma(torch.from_numpy(x)).numpy(), rtol=1e-9, atol=1e-9)


def test_pieces_that_build_the_text_are_found():
    syllables = ["ka", "mo", "shi", "tsu", "re"]
    words = Counter("".join(parts) for parts in itertools.product(syllables, repeat=3))
    pieces = dict(learn_pieces(words, sorted(set("kamoshitsure")), len(set("kamoshitsure")) + 5))
    assert set(syllables) <= pieces.keys()
    # The five syllables are equally likely and make up all of the text.
    assert all(pieces[syllable] == pytest.approx(math.log(1 / 5), abs=0.05) for syllable in syllables)


def test_text_is_cut_at_least_as_well_as_by_sentencepiece(source_texts: list[str], tmp_path: Path):
    sentencepiece = pytest.importorskip("sentencepiece")
    text = " ".join(" ".join(source_texts).split())
    (tmp_path / "text.txt").write_text(text.replace(". ", ".\n"), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "theirs"),
        vocab_size=1000,
        byte_fallback=True,
        minloglevel=2,
        num_threads=1,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "theirs.model"))
    ours = train_unigram([text], 1000)
    assert len(ours.encode(text)) < 1.02 * len(theirs.encode(text))


def test_the_same_texts_give_the_same_file_in_every_process():
    def digest(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", _TRAIN], env=environment, capture_output=True, text=True, check=True
        )
        return result.stdout.strip()

    assert digest("0") == digest("1")


def test_special_text_is_ordinary_unless_allowed(unigram: Tokenizer):
    assert 3 not in unigram.encode("a<eos>")
    assert unigram.encode("a<eos>", allow_special=True) == [*unigram.encode("a"), 3]
    assert unigram.encode("日<unk>", allow_special=True) == [*unigram.encode("日"), 1]


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("ab ab", 400, "gives 35[5-9] tokens at most"),
        ("ab", 354, r"at least 355 tokens \(4 special tokens, 256 bytes and 95 characters\)"),
        (
            "".join(map(chr, range(0x4E00, 0x4F00))),
            500,
            r"351 frequent characters.* Set tokenizer\.vocab_size=611 or more",
        ),
    ],
)
def test_a_size_that_does_not_fit_the_text_is_refused(text: str, size: int, message: str):
    with pytest.raises(TokenizerError, match=message):
        train_unigram([text], size)


def test_further_special_tokens_are_last(source_texts: list[str]):
    tokenizer = train_unigram(source_texts, 400, ("<|tool|>",))
    assert tokenizer.special_tokens["<|tool|>"] == 399 == tokenizer.vocab_size - 1
    assert tokenizer.encode("x<|tool|>", allow_special=True)[-1] == 399
