"""Encoding part by part gives the ids of the `tokenizers` library, whatever the text."""

from pathlib import Path

import pytest
import regex
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import ByteLevelBPE, Tokenizer, tokenizer_from_json
from sheepop.tokenizer import byte_level as parts_module
from sheepop.tokenizer.pattern import PATTERNS

PIECES = (
    *("<eos>", "<pad>", "<|endoftext|>", "<tool é>", "<eo", "s>"),
    *("'s", "'re", "'r", "'", "'ll've", "don't", "I'D", "''s", "we're", "they'll"),
    *("\r\n", "\r", "\n\n  ", "  \n   \n", "\t\t", "   "),
    *("\x0b", "\x0c", "\x1c\x1d\x1e\x1f", "\x85", "\u00a0", "\u2028", "\u3000"),
    *("12345", "٣٤٥", "Ⅷ½", "x²", "e\u0301", "\u0301", "日本語。", "हिन्दी", "\U0001f469\u200d\U0001f4bb", "🐑🐑"),
    *("):\n        return", "a_b.c", "/" * 40, " " * 70, "x" * 90, "\ufeff", "\u200b"),
)
FRAGMENTS = st.sampled_from(PIECES)
# In the training text, so that a part cut in the wrong place is not merged as it should be.
ODD_TEXT = "".join(a + b for a in PIECES for b in PIECES)
ANY = st.text(st.characters(exclude_categories=("Cs",)), max_size=10)
ASCII = st.text(st.characters(max_codepoint=127), max_size=30)
TEXTS = st.lists(FRAGMENTS | ASCII | ANY, max_size=12).map("".join)


def trained(pre_tokenizer: pre_tokenizers.PreTokenizer, texts: list[str], size: int) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


@pytest.fixture(scope="module")
def llama3(source_texts: list[str]) -> Tokenizer:
    return ByteLevelBPE.train([*source_texts, ODD_TEXT], 2000)


@pytest.fixture(scope="module")
def ours(source_texts: list[str]) -> Tokenizer:
    return ByteLevelBPE.train([*source_texts, ODD_TEXT], 2000, pattern="sheepop")


@pytest.fixture(scope="module")
def gpt2(source_texts: list[str]) -> Tokenizer:
    """A vocabulary that the library trained with the pattern it has built in, and an added token that is text."""
    library = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), [*source_texts, ODD_TEXT], 2000)
    library.add_tokens(["<tool é>"])
    return tokenizer_from_json(library.to_str())


def ids_of_the_library(tokenizer: Tokenizer, text: str, allow_special: bool) -> list[int]:
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    library.encode_special_tokens = not allow_special
    return library.encode(text, add_special_tokens=False).ids


@pytest.fixture(params=["llama3", "ours", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("allow_special", [False, True])
@pytest.mark.parametrize("name", ["llama3", "ours", "gpt2"])
def test_any_text_has_the_ids_of_the_library(request: pytest.FixtureRequest, name: str, allow_special: bool):
    tokenizer = request.getfixturevalue(name)
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    library.encode_special_tokens = not allow_special

    @given(TEXTS)
    @settings(max_examples=400)
    def check(text: str) -> None:
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, allow_special=allow_special) == expected

    check()


@pytest.mark.parametrize("name", ["llama3", "ours", "gpt2"])
def test_text_is_cut_alike_wherever_a_window_ends(
    request: pytest.FixtureRequest, name: str, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = request.getfixturevalue(name)
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    library.encode_special_tokens = True

    @given(TEXTS, st.integers(4, 40))
    @example("a\n  \n    \nb", 10)  # white space that ends with the window, and behind it one more line end
    @settings(max_examples=400)
    def check(text: str, window: int) -> None:
        monkeypatch.setattr(parts_module, "_WINDOW", window)
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids

    check()


def test_every_ascii_character_is_of_the_same_class_beside_every_other(tokenizer: Tokenizer):
    characters = [chr(code) for code in range(128)]
    # Every pair stands in the text, and most triples' kinds.
    text = "".join(a + b for a in characters for b in characters)
    text += "".join(a + a + b + "'" for a in characters for b in characters)
    assert tokenizer.encode(text) == ids_of_the_library(tokenizer, text, allow_special=False)


@pytest.mark.parametrize("pattern", ["llama3", "sheepop"])
def test_a_character_that_the_two_libraries_class_differently_is_left_to_the_tokenizers_library(pattern: str):
    def theirs(text: str) -> list[str]:
        return [text[start:stop] for _, (start, stop) in library.pre_tokenizer.pre_tokenize_str(text)]

    library = tokenizers.Tokenizer.from_str(ByteLevelBPE.train(["ab"], 260, pattern=pattern).to_json())
    # Unassigned in one version of Unicode, a letter in the next.
    codes = (*range(0x530, 0x600), *range(0x860, 0x8A0), *range(0xB50, 0xC60), *range(0xA7C0, 0xA800))
    ours = regex.compile(PATTERNS[pattern].regex).findall
    disputed = [c for c in map(chr, codes) if any(theirs(n + c) != ours(n + c) for n in "a1!")]
    if not disputed:
        pytest.skip("the installed regex and tokenizers libraries know the same version of Unicode")
    texts = [f"word{character}word 12{character} -{character}\n" for character in disputed]
    tokenizer = ByteLevelBPE.train([text * 9 for text in texts], 265 + 2 * len(texts), pattern=pattern)
    for text in texts:
        assert tokenizer.encode(text) == ids_of_the_library(tokenizer, text, allow_special=False)


def test_the_memory_of_parts_is_bounded_and_emptying_it_changes_no_id(
    source_texts: list[str], monkeypatch: pytest.MonkeyPatch
):
    tokenizer = ByteLevelBPE.train(source_texts[:1], 500)
    expected = ids_of_the_library(tokenizer, source_texts[1], allow_special=False)
    monkeypatch.setattr(parts_module, "_ENTRIES", 7)
    assert tokenizer.encode(source_texts[1]) == expected
    memo = tokenizer._part_encoder._ids_of.__self__
    assert 0 < len(memo) <= 7


def test_long_parts_are_not_remembered(bpe: Tokenizer):
    text = "x" * 3000 + " " + "y" * 63
    assert bpe.encode(text) == ids_of_the_library(bpe, text, allow_special=False)
    memo = bpe._part_encoder._ids_of.__self__
    assert max(map(len, memo)) <= 64


def test_a_part_longer_than_any_window_is_found_whole(tokenizer: Tokenizer):
    spaces = " " * 10_001 + "x" + "\n" + " " * 9_000 + "\n" + " " * 3_000
    for text in ("é" * 10_000, spaces, "-" * 9_999 + "\n" * 5_000, "日" * 5_000 + "a" * 5_000):
        assert tokenizer.encode(text) == ids_of_the_library(tokenizer, text, allow_special=False)


@pytest.mark.parametrize("change", ["normalizer", "prefix space", "another pattern"])
def test_what_is_cut_or_rewritten_another_way_is_left_to_the_library(source_texts: list[str], change: str):
    step: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=change == "prefix space")
    if change == "another pattern":
        split = pre_tokenizers.Split(tokenizers.Regex(r"\w+|\W"), behavior="isolated")
        step = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library = trained(step, source_texts[:1], 400)
    if change == "normalizer":
        library.normalizer = tokenizers.normalizers.NFC()
    tokenizer = tokenizer_from_json(library.to_str())
    for text in ("cafe\u0301 is 12 o'clock\n  don't", source_texts[1][:3000]):
        assert tokenizer.encode(text) == ids_of_the_library(tokenizer, text, allow_special=False)


def test_an_error_names_the_place_in_the_whole_batch(gpt2: Tokenizer):
    with pytest.raises(TokenizerError, match="Text 3 of 4 contains the lone surrogate"):
        gpt2.encode_batch(["a", "<tool é>", "b\ud800", "c"])


def test_a_batch_with_texts_for_the_library_between_keeps_its_order(gpt2: Tokenizer):
    texts = ["plain", "a <tool é> b", "", "é plain", "<tool é>"]
    assert gpt2.encode_batch(texts) == [ids_of_the_library(gpt2, text, allow_special=False) for text in texts]


def test_the_pattern_of_a_file_is_recognised_as_it_was_saved(tokenizer: Tokenizer, tmp_path: Path):
    # Should a later version of the library write the pre-tokenizer in other words, the fast way would be lost unseen.
    tokenizer.save(tmp_path)
    saved = tokenizer_from_json((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved._part_encoder is not None
