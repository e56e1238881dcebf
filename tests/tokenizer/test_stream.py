from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.tokenizer import CharTokenizer, StreamDecoder, Tokenizer

# Random ids are mostly broken UTF-8; the first 260 are single bytes and special tokens.
IDS = st.lists(st.integers(0, 699) | st.integers(0, 259), max_size=40)


@given(IDS, st.booleans())
@settings(max_examples=300)
def test_pushes_and_finish_are_the_decoded_text(bpe: Tokenizer, ids: list[int], skip_special: bool):
    stream = StreamDecoder(bpe, skip_special=skip_special)
    text = "".join([*map(stream.push, ids), stream.finish()])
    assert text == bpe.decode(ids, skip_special=skip_special)


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=30))
def test_no_push_shows_half_a_character(bpe: Tokenizer, text: str):
    stream = StreamDecoder(bpe)
    shown = ""
    for token_id in bpe.encode(text):
        shown += stream.push(token_id)
        assert text.startswith(shown)
    assert stream.finish() == "" and shown == text


def test_a_character_appears_with_the_token_that_completes_it(bpe: Tokenizer):
    ids = bpe.encode("\U0001f411")
    stream = StreamDecoder(bpe)
    assert [stream.push(i) for i in ids] == [""] * (len(ids) - 1) + ["\U0001f411"]


def test_finish_shows_what_stayed_broken_and_starts_anew(bpe: Tokenizer):
    ids = bpe.encode("\U0001f411")
    stream = StreamDecoder(bpe)
    assert [stream.push(i) for i in ids[:2]] == ["", ""]
    assert stream.finish() == "\ufffd" and stream.finish() == ""
    assert "".join(map(stream.push, ids)) == "\U0001f411"


def test_characters_stream_one_by_one():
    stream = StreamDecoder(CharTokenizer("é"), skip_special=False)
    assert [stream.push(i) for i in (72, 128, 3)] == ["H", "é", "<eos>"]
