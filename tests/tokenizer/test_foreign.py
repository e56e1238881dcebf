"""Files of the `tokenizers` library in the manner of well-known models: the library says what ids and text are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import StreamDecoder, Tokenizer, load_tokenizer, tokenizer_from_json
from sheepop.tokenizer.decoding import read_decoding

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
SPLIT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def bert(texts: list[str]) -> Library:
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    library.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    library.enable_truncation(6)
    library.enable_padding(length=20, pad_token="[PAD]")
    return library


def t5(texts: list[str]) -> Library:
    library = Library(models.Unigram())
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    library.train_from_iterator(texts, trainer)
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return library


def llama(texts: list[str], *, prefix: bool = True) -> Library:
    library = Library(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    # For training alone: the model merges over the whole text.
    library.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁"), behavior="isolated")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    library.train_from_iterator(texts, trainer)
    tree = json.loads(library.to_str())
    tree["added_tokens"] = tree["added_tokens"][:4]
    tree["pre_tokenizer"] = None
    library = Library.from_str(json.dumps(tree))
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return library


def gemma(texts: list[str]) -> Library:
    return llama(texts, prefix=False)


def llama3(texts: list[str]) -> Library:
    library = Library(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    library.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    start = library.token_to_id("<|begin_of_text|>")
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", start)]
    )
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return library


def roberta(texts: list[str]) -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    library.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return library


def words(texts: list[str]) -> Library:
    library = Library(models.WordLevel(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=300, special_tokens=SPECIAL))
    return library


MAKERS: dict[str, Callable[[list[str]], Library]] = {
    maker.__name__: maker for maker in (bert, t5, llama, gemma, llama3, roberta, words)
}
# Special tokens in text, as these files and as full-width letters that normalisation makes of them.
WRITTEN = ("<s>", "</s>", "<unk>", "[CLS]", "[UNK]", "<|eot_id|>", "\uff1cs\uff1e", "<0x0A>", "<tool>", "<to")
PIECES = (
    "return",
    " self",
    "  ",
    "\n",
    "Hello, World!",
    "don't",
    "x ' y",
    "é",
    "e\u0301",
    "日本",
    "\U0001f411",
    "12345",
    "\x00",
)
TEXTS = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=("Cs",)), max_size=6), max_size=7
).map("".join)

Pair = tuple[Library, Tokenizer]


@pytest.fixture(scope="module", params=list(MAKERS))
def pair(request: pytest.FixtureRequest, source_texts: list[str]) -> Pair:
    made = MAKERS[request.param](source_texts[1:])
    library = Library.from_str(made.to_str())
    library.no_truncation()
    library.no_padding()
    return library, tokenizer_from_json(made.to_str())


def test_ids_and_what_stands_around_them_are_those_of_the_library(pair: Pair):
    library, ours = pair

    @given(TEXTS)
    @settings(max_examples=80)
    def check(text: str) -> None:
        assume(not any(special in text for special in ours.special_tokens))
        ids = ours.encode(text)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert [*ours.prefix_ids, *ids, *ours.suffix_ids] == library.encode(text).ids

    check()


def test_decoding_gives_the_text_of_the_library(pair: Pair):
    library, ours = pair
    # A run of bytes that is no character is one sign there for every byte, here for every wrong beginning.
    texts = {i: ours.token_bytes(i) for i in range(ours.vocab_size)}
    characters = [i for i, text in texts.items() if text.decode("utf-8", "ignore").encode() == text]

    @given(st.lists(st.sampled_from(characters), max_size=9), st.booleans())
    @settings(max_examples=80)
    def check(ids: list[int], skip_special: bool) -> None:
        expected = library.decode(ids, skip_special_tokens=skip_special)
        found = ours.decode(ids, skip_special=skip_special)
        if isinstance(library.decoder, decoders.Metaspace):
            # There the first token loses all of its spaces, here the one that is put before every text.
            found, expected = found.lstrip(" "), expected.lstrip(" ")
        # A text that begins inside a word begins with the mark of that there.
        assert found == (expected.removeprefix("##") if ours.algorithm == "wordpiece" else expected)

    check()


def test_what_continues_a_text_and_what_comes_token_by_token_is_the_whole_text(pair: Pair):
    _, ours = pair
    ids = st.lists(st.integers(0, ours.vocab_size - 1), max_size=8)

    @given(ids, ids, st.booleans())
    @settings(max_examples=60)
    def check(before: list[int], after: list[int], skip_special: bool) -> None:
        has_text = any(ours.token_bytes(i) or not skip_special for i in before)
        joined = ours.decode_bytes(before, skip_special=skip_special)
        joined += ours.decode_bytes(after, skip_special=skip_special, continues=has_text)
        assert joined == ours.decode_bytes(before + after, skip_special=skip_special)
        stream = StreamDecoder(ours, skip_special=skip_special)
        pushed = "".join(map(stream.push, before + after)) + stream.finish()
        assert pushed == ours.decode(before + after, skip_special=skip_special)
        stream = StreamDecoder(ours, skip_special=skip_special, continues=True)
        pushed = "".join(map(stream.push, after)) + stream.finish()
        assert pushed == ours.decode(after, skip_special=skip_special, continues=True)

    check()


def test_text_written_like_a_special_token_is_ordinary_unless_allowed(pair: Pair):
    library, ours = pair
    special = set(ours.special_tokens.values())
    unknown = {ours.special_id("unk")}

    @given(st.lists(st.sampled_from(WRITTEN + PIECES), min_size=1, max_size=5).map("".join))
    @settings(max_examples=80)
    def check(text: str) -> None:
        assert not (set(ours.encode(text)) & special) - unknown
        if "<0x" not in text:
            expected = library.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, allow_special=True) == expected

    check()
    end = next(text for text in ours.special_tokens if text not in ("<unk>", "[UNK]"))
    assert ours.encode(f"return {end}", allow_special=True)[-1] == ours.special_tokens[end]


def test_saving_keeps_everything(pair: Pair, tmp_path: Path):
    _, ours = pair
    ours.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint() == ours.fingerprint() and loaded.algorithm == ours.algorithm
    assert (loaded.prefix_ids, loaded.suffix_ids) == (ours.prefix_ids, ours.suffix_ids)
    assert loaded.encode("Hello é") == ours.encode("Hello é")


def test_bytes_and_the_unknown_piece_of_a_unigram_model_are_not_taken_from_text():
    """The library looks text up among all pieces; SentencePiece does not."""
    pieces = [("<unk>", 0.0), *((byte, 0.0) for byte in BYTES), ("a", -1.0), ("<", -2.0), ("0", -2.0), ("x", -2.0)]
    library = Library(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ours = tokenizer_from_json(library.to_str())
    assert library.encode("<0x41>").ids == [1 + 0x41]
    assert (
        ours.encode("<0x41>")
        == ours.encode("<0x41>", allow_special=True)
        == [258, 259, 260, 1 + 0x34, 1 + 0x31, 1 + 0x3E]
    )
    assert ours.decode(ours.encode("a<0x41>é<unk>\x00")) == "a<0x41>é<unk>\x00"


# Roles, templates and further files of a directory


def minimal(**changes: Any) -> dict[str, Any]:
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<end>": 2, "?": 3}, "unk_token": "?"}
    return {"version": "1.0", "added_tokens": [], **dict.fromkeys(parts), "model": model, **changes}


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def test_a_token_that_only_the_settings_call_special_is_special(tmp_path: Path):
    settings_of = {"eos_token": "<end>", "unk_token": {"content": "?"}}
    tokenizer = load_tokenizer(write(tmp_path, tokenizer__json=minimal(), tokenizer_config__json=settings_of))
    assert tokenizer.special_tokens == {"<end>": 2, "?": 3}
    assert (tokenizer.eos_id, tokenizer.unk_id, tokenizer.vocab_size) == (2, 3, 4)
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.encode("<end>") == [3] and tokenizer.encode("<end>", allow_special=True) == [2]


def test_special_tokens_map_fills_in_the_roles_that_nothing_else_names(tmp_path: Path):
    write(tmp_path, tokenizer__json=minimal(), tokenizer_config__json={"unk_token": "?", "pad_token": "a"})
    write(tmp_path, special_tokens_map__json={"eos_token": {"content": "<end>"}, "pad_token": "b"})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id, tokenizer.special_id("bos")) == (2, 0, 3, None)


def test_a_role_that_names_no_token_is_refused(tmp_path: Path):
    write(tmp_path, tokenizer__json=minimal(), tokenizer_config__json={"pad_token": "[PAD]"})
    with pytest.raises(TokenizerError, match=r"names '\[PAD\]' as pad_token, but tokenizer\.json has no special token"):
        load_tokenizer(tmp_path)


def test_rows_are_filled_up_with_padding_or_else_the_end(tmp_path: Path):
    write(tmp_path, tokenizer__json=minimal())
    for named, filler in (({"pad_token": "b", "eos_token": "<end>"}, 1), ({"eos_token": "<end>"}, 2), ({}, 0)):
        write(tmp_path, tokenizer_config__json={**named, "unk_token": "?"})
        assert load_tokenizer(tmp_path).filler_id == filler


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"decoder": {"type": "CTC", "pad_token": "a", "word_delimiter_token": "|", "cleanup": True}},
            r"decoder \(CTC\)",
        ),
        ({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, r"decoder \(BPEDecoder\)"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}}, "ByteFallback"),
        ({"added_tokens": [{"id": 9, "content": "<x>", "special": True}]}, "cannot read it|out of place"),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_json(json.dumps(minimal(**changes)))


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ({"a": 0, "?": 1, "b": 1}, "out of place"),
        ({"a": -1, "?": 1}, "cannot read it"),
        ({"a": 2**40, "?": 1}, "out of place: it has 2 tokens, and one has the id 1,099,511,627,776"),
    ],
)
def test_ids_that_are_there_twice_or_impossible_are_refused(vocabulary: dict[str, int], message: str):
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_json(json.dumps(minimal(model=model)))


def test_a_piece_that_is_there_twice_is_refused():
    model = {"type": "Unigram", "vocab": [["?", 0.0], ["a", -1.0], ["a", -2.0]], "unk_id": 0}
    with pytest.raises(TokenizerError, match="out of place"):
        tokenizer_from_json(json.dumps(minimal(model=model)))


def test_a_file_of_any_size_is_refused_before_it_is_read(tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer.model", "r50k.tiktoken", "vocab.json"):
        (tmp_path / "merges.txt").touch()
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**40)  # takes no space
        with pytest.raises(TokenizerError, match=r"has 1,099,511,627,776 bytes, but such a file may have"):
            load_tokenizer(tmp_path / name)
        (tmp_path / name).unlink()


def test_a_pattern_for_a_file_that_needs_none_is_refused(tmp_path: Path):
    with pytest.raises(TokenizerError, match="a pattern is for tiktoken's rank files"):
        load_tokenizer(write(tmp_path, tokenizer__json=minimal()), pattern="cl100k")


def test_steps_of_a_decoder():
    strip = {"type": "Strip", "content": "_", "start": 1, "stop": 2}
    regex = {"type": "Replace", "pattern": {"Regex": "[0-9]+"}, "content": "N"}
    decoding = read_decoding({"type": "Sequence", "decoders": [strip, regex]})
    assert [decoding.entry(text) for text in ("__a___", "__", "_", "x12y3")] == [b"_a_", b"", b"", b"xNyN"]
    reference = decoders.Sequence([decoders.Strip("_", 1, 2), decoders.Replace(Regex("[0-9]+"), "N")])
    assert [reference.decode([text]) for text in ("__a___", "x12y3")] == ["_a_", "xNyN"]
