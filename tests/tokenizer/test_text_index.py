"""Many texts as one array: found by their hashes, and put in order, as Python finds and sorts each."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.tokenizer.text_index import TextIndex, Texts, joined

LETTERS = st.text("ab\0é🐑", max_size=20)


@given(st.lists(LETTERS, max_size=30))
@settings(max_examples=200)
def test_texts_are_in_the_order_of_their_bytes(found: list[str]):
    encoded = [text.encode() for text in found]
    order = Texts.of(encoded).in_order().tolist()
    assert sorted(order) == list(range(len(found)))
    assert [encoded[number] for number in order] == sorted(encoded)


@given(st.lists(LETTERS, unique=True, min_size=1, max_size=30), st.lists(LETTERS, max_size=10))
@settings(max_examples=200)
def test_every_part_and_every_pair_of_texts_is_found(known: list[str], others: list[str]):
    texts, number_of = Texts.of([text.encode() for text in known]), {text: n for n, text in enumerate(known) if text}
    assert texts.index.equal is None
    wanted = [*known, *others]
    assert texts.index.find(Texts.of([text.encode() for text in wanted]).of_all).tolist() == [
        number_of.get(text, -1) for text in wanted
    ]
    cuts, whole = texts.cuts(0, len(texts))
    heads = texts.index.find(texts.hashes(texts.starts[whole], cuts)).tolist()
    tails = texts.index.find(texts.hashes(cuts, texts.starts[whole + 1])).tolist()
    parts = [(text[:cut], text[cut:]) for text in known for cut in range(1, len(text))]
    assert list(zip(heads, tails, strict=True)) == [
        (number_of.get(head, -1), number_of.get(tail, -1)) for head, tail in parts
    ]
    left, right = (each.ravel() for each in np.meshgrid(np.arange(len(known)), np.arange(len(known))))
    assert texts.index.find(joined(texts, left, right)).tolist() == [
        number_of.get(known[one] + known[other], -1) for one, other in zip(left, right, strict=True)
    ]


def test_only_the_chosen_texts_are_found_and_equal_ones_are_told():
    texts = Texts.of([b"a", b"bc", b"a", b""])
    assert set(texts.index.equal or ()) == {0, 2}
    chosen = TextIndex(texts, np.array([1, 2]))
    assert chosen.equal is None
    assert chosen.find(texts.of_all).tolist() == [2, 1, 2, -1]


def test_sums_of_long_texts_have_no_seams():
    long = bytes(range(256)) * 200  # longer than what is summed at a time
    texts = Texts.of([long, b"x", long[1000:40000]])
    part = texts.hashes(np.array([1000]), np.array([40000]))
    assert texts.index.find(part).tolist() == [2]
