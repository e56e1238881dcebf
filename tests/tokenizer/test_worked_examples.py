"""The rows of the worked examples that speak of characters and special ids."""

import pytest

from sheepop.tokenizer import CharTokenizer, Tokenizer


def test_characters_of_hi():
    assert CharTokenizer().encode("Hi") == [72, 105]


def test_characters_of_hello_world():
    assert CharTokenizer().encode("Hello World") == [72, 101, 108, 108, 111, 32, 87, 111, 114, 108, 100]


def test_vocabulary_without_extra_characters():
    assert CharTokenizer().vocab_size == 128


def test_ids_of_the_chunk_example():
    assert CharTokenizer().encode("Hi, world") == [72, 105, 44, 32, 119, 111, 114, 108, 100]


@pytest.mark.parametrize("algorithm", ["bpe", "wordpiece", "unigram", "char"])
def test_special_ids_of_every_trained_tokenizer(algorithm: str, trained: dict[str, Tokenizer]):
    tokenizer = trained[algorithm]
    assert tokenizer.special_tokens == {"<pad>": 0, "<unk>": 1, "<bos>": 2, "<eos>": 3}
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2, 3)


def test_other_characters_follow_from_128_in_code_point_order():
    # U+00E9, U+20AC, U+1F411 in this order, whatever the order of the text.
    tokenizer = CharTokenizer.train(["\U0001f411 \u20ac", "caf\u00e9"])
    assert tokenizer.encode("\u00e9\u20ac\U0001f411") == [128, 129, 130]
    assert tokenizer.vocab_size == 131
