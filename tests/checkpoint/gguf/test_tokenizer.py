"""Tokenizers in GGUF files: exactly the one that was written, the same ids from a stranger's keys, or words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint.gguf.metadata import Value, f32s, i32s, texts, value_of
from sheepop.checkpoint.gguf.tokenizer import (
    end_ids_from_metadata,
    tokenizer_from_metadata,
    tokenizer_metadata,
)
from sheepop.core.errors import CheckpointError
from sheepop.tokenizer import ByteLevelBPE, CharTokenizer, Tokenizer, load_tokenizer, tokenizer_from_json

TEXT = "Hello, world! It's 12345 o'clock.\n  naïve café ä€漢 🐑 <|endoftext|> don't x=3.14"
PATH = Path("toy.gguf")
ROLES = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}


def byte_level(**changes: Any) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` of GPT-2's kind, trained on a little text, with some keys changed."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    return {**json.loads(backend.to_str()), **changes}


def tokenizer_of(description: dict[str, Any], **settings: Any) -> Tokenizer:
    return tokenizer_from_json(json.dumps(description), {**ROLES, **settings})


def sentencepiece(folder: Path, **options: Any) -> tuple[Any, Tokenizer]:
    """SentencePiece's own encoder, and ours of the same model."""
    package = pytest.importorskip("sentencepiece")
    (folder / "text.txt").write_text(TEXT * 5, encoding="utf-8")
    package.SentencePieceTrainer.train(**{
        "input": str(folder / "text.txt"), "model_prefix": str(folder / "toy"), "model_type": "bpe", "vocab_size": 330,
        "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "minloglevel": 2, "num_threads": 1, **options,
    })  # fmt: skip
    return package.SentencePieceProcessor(str(folder / "toy.model")), load_tokenizer(folder / "toy.model")


def written(tokenizer: Tokenizer, rows: int | None = None) -> dict[str, Value]:
    return tokenizer_metadata(tokenizer, rows or tokenizer.vocab_size)[0]


def stranger(tokenizer: Tokenizer, rows: int | None = None) -> dict[str, Value]:
    """The keys without the whole ``tokenizer.json``, which other programs do not write."""
    return {key: value for key, value in written(tokenizer, rows).items() if not key.endswith("huggingface.json")}


@pytest.mark.parametrize("make", [lambda: tokenizer_of(byte_level()), lambda: CharTokenizer("ä€漢é")])
@pytest.mark.parametrize("further", [0, 5])
def test_the_same_tokenizer_comes_back(make: Callable[[], Tokenizer], further: int) -> None:
    tokenizer = make()
    rows = tokenizer.vocab_size + further
    back = tokenizer_from_metadata(written(tokenizer, rows), rows, PATH)
    assert type(back) is type(tokenizer)
    assert back.fingerprint() == tokenizer.fingerprint()
    assert back.vocab_size == tokenizer.vocab_size
    assert back.special_tokens == tokenizer.special_tokens


@pytest.mark.parametrize("further", [0, 5])
def test_a_strangers_byte_level_keys_give_the_same_ids(further: int) -> None:
    tokenizer = tokenizer_of(byte_level())
    rows = tokenizer.vocab_size + further
    back = tokenizer_from_metadata(stranger(tokenizer, rows), rows, PATH)
    assert back.vocab_size == tokenizer.vocab_size
    assert back.encode(TEXT) == tokenizer.encode(TEXT)
    assert back.encode(TEXT, allow_special=True) == tokenizer.encode(TEXT, allow_special=True)
    assert back.special_id("eos") == tokenizer.special_id("eos")
    assert back.decode(back.encode(TEXT)) == TEXT


def test_a_vocabulary_with_a_list_of_merges_gives_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    """As converters write Gemma 4's."""
    package, tokenizer = sentencepiece(tmp_path, add_dummy_prefix=False)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_json())["model"]["merges"]]
    metadata = stranger(tokenizer) | {
        "tokenizer.ggml.model": value_of("gemma4"), "tokenizer.ggml.merges": texts(merges),
    }  # fmt: skip
    for key in ("scores", "pre", "add_bos_token"):
        del metadata[f"tokenizer.ggml.{key}"]
    back = tokenizer_from_metadata(metadata, tokenizer.vocab_size, PATH)
    for line in (TEXT, "", " ", "a", "  two  spaces ", "unseen: ğ🦊\t\n\n"):
        assert back.encode(line) == package.encode(line), line
        assert back.decode(back.encode(line)) == line
    assert back.prefix_ids == (package.bos_id(),)


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}])
def test_a_strangers_sentencepiece_keys_give_the_ids_of_sentencepiece(tmp_path: Path, options: dict[str, Any]) -> None:
    package, tokenizer = sentencepiece(tmp_path, **options)
    metadata = stranger(tokenizer)
    assert metadata["tokenizer.ggml.model"] == value_of("llama")
    assert metadata["tokenizer.ggml.add_space_prefix"] == value_of(not options)
    # The scores that SentencePiece itself has: minus the rank.
    pieces = [package.id_to_piece(token_id) for token_id in range(package.vocab_size())]
    assert metadata["tokenizer.ggml.tokens"] == texts(pieces)
    back = tokenizer_from_metadata(metadata, tokenizer.vocab_size, PATH)
    for line in (TEXT, "", " ", "a", "  two  spaces ", "▁sign", "unseen: ğ🦊\t\n"):
        assert back.encode(line) == package.encode(line), line
        assert back.decode(back.encode(line)) == line.replace("▁", " ")
    assert (back.special_id("bos"), back.special_id("eos"), back.special_id("unk")) == (1, 2, 0)
    del metadata["tokenizer.ggml.eos_token_id"]
    # As llama.cpp counts where nothing is said.
    assert tokenizer_from_metadata(metadata, tokenizer.vocab_size, PATH).special_id("eos") == 2


def test_the_unknown_token_may_be_named_only_by_its_key(tmp_path: Path) -> None:
    """In Phi-3's and Gemma's files it is an ordinary or a control token."""
    package, tokenizer = sentencepiece(tmp_path)
    metadata = stranger(tokenizer)
    for kind in (1, 3):
        metadata["tokenizer.ggml.token_type"] = i32s([kind, 3, 3, *[6] * 256, *[1] * 71])
        back = tokenizer_from_metadata(metadata, tokenizer.vocab_size, PATH)
        assert back.special_id("unk") == 0
        assert back.encode(TEXT) == package.encode(TEXT)


def test_scores_may_be_those_of_sentencepiece(tmp_path: Path) -> None:
    package, tokenizer = sentencepiece(tmp_path)
    scores = [package.get_score(token_id) for token_id in range(package.vocab_size())]
    metadata = {**stranger(tokenizer), "tokenizer.ggml.scores": f32s(scores)}
    back = tokenizer_from_metadata(metadata, tokenizer.vocab_size, PATH)
    assert back.encode(TEXT) == package.encode(TEXT)


def test_what_is_put_around_a_text_and_the_template_come_along() -> None:
    around = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    tokenizer = tokenizer_of(byte_level(post_processor=around), chat_template="{{ messages[0].content }}")
    metadata = stranger(tokenizer)
    assert metadata["tokenizer.ggml.add_bos_token"] == value_of(True)
    assert metadata["tokenizer.ggml.add_eos_token"] == value_of(False)
    assert metadata["tokenizer.chat_template"] == value_of("{{ messages[0].content }}")
    back = tokenizer_from_metadata(metadata, tokenizer.vocab_size, PATH)
    assert back.prefix_ids == tokenizer.prefix_ids == (0,)
    assert back.suffix_ids == ()
    assert back.settings()["chat_template"] == "{{ messages[0].content }}"


def test_of_several_templates_the_default_is_written() -> None:
    named = [{"name": "default", "template": "one"}, {"name": "tools", "template": "two"}]
    assert written(tokenizer_of(byte_level(), chat_template=named))["tokenizer.chat_template"] == value_of("one")
    with pytest.raises(CheckpointError, match="chat templates called tools, but none called default"):
        written(tokenizer_of(byte_level(), chat_template=named[1:]))


def test_further_tokens_that_end_a_text_come_along() -> None:
    tokenizer = tokenizer_of(byte_level())
    metadata, notes = tokenizer_metadata(tokenizer, 300, [0, 7, 8, 9])
    assert metadata["tokenizer.ggml.eot_token_id"] == value_of(7)
    assert metadata["tokenizer.ggml.eom_token_id"] == value_of(8)
    assert notes == ["Unlike SheepOp, llama.cpp does not end a text at the token 9."]
    assert end_ids_from_metadata(metadata, 300, PATH) == [0, 7, 8]
    assert end_ids_from_metadata(metadata, 8, PATH) == [0, 7]
    assert end_ids_from_metadata(written(tokenizer), 300, PATH) == [0]
    assert tokenizer_from_metadata(metadata, 300, PATH).fingerprint() == tokenizer.fingerprint()


def test_none_is_written_as_none() -> None:
    metadata, notes = tokenizer_metadata(None, 7)
    assert metadata == {"tokenizer.ggml.model": value_of("no_vocab")}
    assert notes == []
    with pytest.raises(CheckpointError, match=r"has no tokenizer.*--tokenizer"):
        tokenizer_from_metadata(metadata, 7, PATH)


def test_characters_are_spelled_in_bytes() -> None:
    metadata, notes = tokenizer_metadata(CharTokenizer("€ä"), 131)
    tokens, merges = metadata["tokenizer.ggml.tokens"].plain, metadata["tokenizer.ggml.merges"].plain
    # U+00E4 is C3 A4 in UTF-8 and U+20AC is E2 82 AC; printable bytes stand for themselves, 82 is the 95th that is not.
    assert tokens[128:] == ["Ã¤", "âĤ¬", "[PAD130]"]
    assert merges == ["Ã ¤", "â Ĥ", "âĤ ¬"]
    assert tokens[:4] == ["<pad>", "<unk>", "<bos>", "<eos>"]
    assert tokens[ord(" ")] == "Ġ" and tokens[ord("A")] == "A" and tokens[ord("\n")] == "Ċ"
    assert "skips characters that are not in the vocabulary" in notes[0]


@pytest.mark.parametrize(("pattern", "name"), [("llama3", "smaug-bpe"), ("gpt2", "gpt-2")])
def test_tokenizers_that_are_trained_here_have_a_name_there(pattern: str, name: str) -> None:
    tokenizer = ByteLevelBPE.train([TEXT] * 9, 300, pattern=pattern)
    metadata = written(tokenizer)
    assert metadata["tokenizer.ggml.pre"] == value_of(name)
    assert tokenizer_from_metadata(metadata, 300, PATH).fingerprint() == tokenizer.fingerprint()
    back = tokenizer_from_metadata(stranger(tokenizer), 300, PATH)
    assert back.encode(TEXT) == tokenizer.encode(TEXT)
    assert back.special_tokens == tokenizer.special_tokens


def test_a_cut_that_llama_cpp_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot split text like this tokenizer"):
        written(ByteLevelBPE.train([TEXT] * 9, 300, pattern="sheepop"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, r"changes text before it splits it \(Lowercase\)"),
        ({"pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
        }}, "llama.cpp cannot split text"),
        ({"added_tokens": [
            {"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True},
            {"id": 300, "content": "<mark>", "single_word": False, "lstrip": True, "rstrip": False,
             "normalized": False, "special": False},
        ]}, "'<mark>' matches depends on the text around it"),
    ],
)  # fmt: skip
def test_what_llama_cpp_does_not_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        written(tokenizer_of(byte_level(**changes)))


def test_composed_characters_are_a_remark() -> None:
    _, notes = tokenizer_metadata(tokenizer_of(byte_level(normalizer={"type": "NFC"})), 300)
    assert "composed form (NFC)" in notes[0]


def test_a_tokenizer_that_ends_nothing_is_refused() -> None:
    tokenizer = tokenizer_from_json(json.dumps(byte_level()), {"bos_token": "<|endoftext|>"})
    with pytest.raises(CheckpointError, match=r"no eos_token, so llama\.cpp would choose one itself"):
        written(tokenizer)


def test_other_algorithms_are_refused() -> None:
    import tokenizers
    from tokenizers import models

    words = models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")
    unigram = models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0, byte_fallback=False)
    for name, model in {"WordPiece": words, "Unigram": unigram}.items():
        tokenizer = tokenizer_from_json(tokenizers.Tokenizer(model).to_str(), {})
        with pytest.raises(CheckpointError, match=f"A GGUF file cannot store a {name} tokenizer"):
            written(tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "changes text before it looks for tokens"),
        ({"remove_extra_whitespaces": True}, "changes text before it looks for tokens"),
        ({"byte_fallback": False, "vocab_size": 60}, "no tokens for the 256 bytes"),
        ({"user_defined_symbols": ["<code>"]}, "changes text before it looks for tokens"),
    ],
)
def test_what_llama_cpp_does_not_do_of_sentencepiece_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    _, tokenizer = sentencepiece(tmp_path, **options)
    with pytest.raises(CheckpointError, match=message):
        written(tokenizer)


def test_merges_of_another_kind_are_refused(tmp_path: Path) -> None:
    _, tokenizer = sentencepiece(tmp_path)
    description = json.loads(tokenizer.to_json())
    description["model"]["merges"].pop()
    other = tokenizer_from_json(json.dumps(description), tokenizer.settings())
    with pytest.raises(CheckpointError, match="list of merges differs from that of SentencePiece"):
        written(other)


GPT2: dict[str, Value] = {
    "tokenizer.ggml.model": value_of("gpt2"),
    "tokenizer.ggml.pre": value_of("gpt-2"),
    "tokenizer.ggml.tokens": texts(["<|endoftext|>", "a", "b", "ab"]),
    "tokenizer.ggml.token_type": i32s([3, 1, 1, 1]),
    "tokenizer.ggml.merges": texts(["a b"]),
    "tokenizer.ggml.eos_token_id": value_of(0),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": value_of("bert")},
            "'bert' is a tokenizer model that SheepOp does not read; it reads gpt2 and",
        ),
        ({"model": value_of(3)}, "is not text"),
        ({"pre": value_of("poetry")}, "'poetry' is a way to split text that SheepOp does not know; it knows gpt-2"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": i32s([1])}, "is not a list of texts"),
        ({"tokens": texts(["a"] * 3)}, "has 3 tokens for 4 rows of the embedding"),
        ({"tokens": texts(["<|endoftext|>", "a", "a", "ab"])}, "cannot be used"),
        ({"token_type": i32s([3, 1])}, "has 2 entries for 4 tokens"),
        ({"token_type": i32s([3, 1, 1, 77])}, "has the unknown kind 77"),
        ({"token_type": f32s([1.0] * 4)}, "is not a list of whole numbers"),
        ({"merges": texts(["a b c"])}, "has the entry 'a b c', which does not have two parts"),
        ({"merges": texts(["a x"])}, "cannot be used"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"eos_token_id": value_of(9)}, "is not one of the 4 tokens"),
        ({}, "lacks .* of the bytes that UTF-8 text is made of"),
    ],
)
def test_what_is_wrong_with_a_vocabulary_is_said(changes: dict[str, Value | None], message: str) -> None:
    found = {**GPT2, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_metadata({key: value for key, value in found.items() if value is not None}, 4, PATH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": f32s([0.0])}, "has 1 entries for"),
        ({"scores": f32s([float("nan")] * 330)}, "has entries that are not finite"),
        ({"token_type": i32s([1] * 330), "unknown_token_id": None}, "has 0 unknown tokens, and tokenizer.ggml.unknown"),
        ({"unknown_token_id": value_of(330)}, "is not one of the 330 tokens"),
        ({"tokens": texts([f"t{index}" for index in range(330)])}, "a token for each of the 256 bytes"),
        ({"add_space_prefix": value_of("yes")}, "is not true or false"),
    ],
)
def test_what_is_wrong_with_scored_tokens_is_said(
    tmp_path: Path, changes: dict[str, Value | None], message: str
) -> None:
    _, tokenizer = sentencepiece(tmp_path)
    assert tokenizer.vocab_size == 330
    found = {**stranger(tokenizer), **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    present = {key: value for key, value in found.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_metadata(present, 330, PATH)


def test_a_whole_tokenizer_that_the_keys_contradict_is_not_believed() -> None:
    tokenizer = tokenizer_of(byte_level())
    metadata = written(tokenizer)
    for content in ("{", "[" * 100_000, json.dumps(byte_level(normalizer={"type": "Lowercase"}))):
        back = tokenizer_from_metadata({**metadata, "tokenizer.huggingface.json": value_of(content)}, 300, PATH)
        assert back.encode(TEXT) == tokenizer.encode(TEXT)
