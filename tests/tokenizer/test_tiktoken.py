"""tiktoken itself says what the ids of its ranks and of GPT-2's files are."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer import ByteLevelBPE, Tokenizer, load_tokenizer

tiktoken = pytest.importorskip("tiktoken")

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"  # beside the checkout, where there is one
GPT2 = SHARED / "gpt2-bpe"
END = "<|endoftext|>"

ANY = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
PIECES = (
    *(
        "'s",
        "'S",
        "'\u017f",
        "'LL",
        "'ll",
        "don't",
        "DON'T",
        "we'Ve",
        "''re",
        "camelCaseABCdef",
        "ÉÀé",
        "ǅ",
        "ʰ",
        "日本",
        "A漢b字's々",
    ),
    *(" ", "  ", "\n", "\r\n", "\n\n  \n", " \n", "\t", "\u00a0", "\u3000", "\x85", "\u2028", "\x1c", "\x0b"),
    *("1234567", "٣٤٥", "Ⅷ½", "e\u0301", "\u0301", "हिन्दी", "...", "//", "/\n/", "!?\r\n", "🐑", "aaaaaaa", "abababab"),
    *("<|endoftext|>", "<|endofprompt|>", "\x00", "\ufeff", "\U0010ffff", "the ", " return"),
)
TEXTS = st.lists(st.sampled_from(PIECES) | ANY | st.text("ab ", max_size=9), max_size=8).map("".join)


@pytest.fixture(scope="module")
def published() -> dict[str, dict[str, Any]]:
    """The patterns and special tokens that the package has for its encodings, which it would download the ranks of."""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    patched = pytest.MonkeyPatch()
    patched.setattr(public, "load_tiktoken_bpe", lambda *arguments, **options: {})
    found = {name: getattr(public, f"{name}_base")() for name in ("r50k", "p50k", "cl100k", "o200k")}
    patched.undo()
    # As in the program code of Kimi K2.
    words = [r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"]
    found["kimi"] = {
        "pat_str": "|".join(
            (
                r"[\p{Han}]+",
                *(
                    rf"[^\r\n\p{{L}}\p{{N}}]?{words[0]}{first}{words[1]}{second}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                    for first, second in ("*+", "+*")
                ),
                *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
            )
        )
    }
    return found


@pytest.fixture(scope="module")
def ranks(source_texts: list[str]) -> dict[bytes, int]:
    """A small vocabulary: tokens of one that was trained, in the order in which they were learned."""
    odd = " ".join(PIECES) * 3
    tokenizer = ByteLevelBPE.train([*source_texts, odd, "a" * 9, "ab" * 9, "b a" * 9], 1500)
    return {tokenizer.token_bytes(token_id): token_id - 4 for token_id in range(4, tokenizer.vocab_size)}


def write(path: Path, ranks: Mapping[bytes, int]) -> Path:
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize("name", ["r50k", "p50k", "cl100k", "o200k", "kimi"])
def test_any_text_has_the_ids_of_tiktoken(
    name: str, published: dict[str, dict[str, Any]], ranks: dict[bytes, int], tmp_path: Path
):
    theirs = tiktoken.Encoding(
        name, pat_str=published[name]["pat_str"], mergeable_ranks=ranks, special_tokens={END: len(ranks)}
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {str(len(ranks)): {"content": END}}})
    )
    # Lines may stand in any order: the rank of a token is the number behind it.
    shuffled = dict(random.Random(0).sample(list(ranks.items()), len(ranks)))
    ours = load_tokenizer(write(tmp_path / f"{name}_base.tiktoken", shuffled))
    assert (ours.vocab_size, ours.eos_id) == (theirs.n_vocab, theirs.eot_token)

    @given(TEXTS)
    @settings(max_examples=200)
    def check(text: str) -> None:
        ids = theirs.encode_ordinary(text)
        assert ours.encode(text) == ids
        assert ours.decode_bytes(ids) == theirs.decode_bytes(ids)
        assert ours.encode(text, allow_special=True) == theirs.encode(text, allowed_special="all")

    check()


def test_special_tokens_of_a_known_encoding_and_the_ids_between(published: dict[str, dict[str, Any]], tmp_path: Path):
    ranks = {bytes((byte,)): byte for byte in range(256)}
    ranks |= {number.to_bytes(4, "big"): number for number in range(256, 100_256)}
    ours = load_tokenizer(write(tmp_path / "cl100k_base.tiktoken", ranks))
    special = published["cl100k"]["special_tokens"]
    assert special.items() <= ours.special_tokens.items()
    assert ours.vocab_size == max(special.values()) + 1
    between = set(range(100_256, ours.vocab_size)) - set(special.values())
    assert {ours.special_tokens[f"<|reserved_{token_id}|>"] for token_id in between} == between
    assert ours.eos_id == special[END] and ours.special_id("pad") is None


def test_the_program_code_of_a_model_tells_the_pattern_of_its_rank_file(ranks: dict[bytes, int], tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TikTokenTokenizer"}))
    read = load_tokenizer(write(tmp_path / "tiktoken.model", ranks))
    text = "Don't 漢字the 1234\n"
    assert read.encode(text) == load_tokenizer(tmp_path / "tiktoken.model", pattern="kimi").encode(text)


def test_a_rank_file_needs_a_pattern(ranks: dict[bytes, int], tmp_path: Path):
    path = write(tmp_path / "mine.tiktoken", ranks)
    with pytest.raises(
        TokenizerError, match=r"does not say how it cuts text\. Convert it once, with 'sheepop tokenizer"
    ):
        load_tokenizer(path)
    named, spelled = load_tokenizer(path, pattern="cl100k"), load_tokenizer(path, pattern=r"[a-z]+|[^a-z]")
    theirs = tiktoken.Encoding("x", pat_str=r"[a-z]+|[^a-z]", mergeable_ranks=ranks, special_tokens={})
    text = "def parse_args(self, args=None):\n    return args"
    assert spelled.encode(text) == theirs.encode_ordinary(text) != named.encode(text)
    # A file under SentencePiece's name, as of Llama 3.
    assert load_tokenizer(path.rename(tmp_path / "tokenizer.model"), pattern="cl100k").encode(text) == named.encode(
        text
    )
    with pytest.raises(TokenizerError, match=r"the pattern '\(' is not a regular expression"):
        load_tokenizer(tmp_path, pattern="(")
    with pytest.raises(TokenizerError, match="the pattern is empty"):
        load_tokenizer(tmp_path, pattern="")


BYTES = "".join(f"{base64.b64encode(bytes((byte,))).decode()} {byte}\n" for byte in range(256))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "lacks 256 of the 256 bytes"),
        (BYTES[:-9], r"lacks 1 of the 256 bytes \(0xFF first\)"),
        (BYTES + "YWI=\n", "line 257 is not a token in base64 and a rank"),
        (BYTES + "Y*I= 256\n", "line 257 is not a token in base64"),
        (BYTES + "YWI= -1\n", "line 257 is not a token in base64"),
        (BYTES + "YWI= 99999999999999999999\n", "line 257 is not a token in base64"),
        (BYTES + "YWI= 7\n", "line 257 repeats a rank"),
        (BYTES + "YQ== 256\n", "line 257 repeats a token"),
        (BYTES + "YWI= 258\n", "no token has the rank 256"),
        (BYTES + f"{base64.b64encode(b'x' * 1025).decode()} 256\n", "line 257 is not a token in base64"),
    ],
)
def test_a_damaged_rank_file_is_refused(content: str, message: str, tmp_path: Path):
    (tmp_path / "r50k.tiktoken").write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_special_tokens_that_do_not_fit_the_ranks_are_refused(tmp_path: Path):
    (tmp_path / "r50k.tiktoken").write_text(BYTES)
    for recorded, message in (
        ({"5": {"content": END}}, "does not fit: it is also a rank"),
        ({"9999": {"content": END}}, "far beyond 256 ranks"),
        ({"x": {"content": END}}, "must be a table from id to token"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": recorded}))
        with pytest.raises(TokenizerError, match=message):
            load_tokenizer(tmp_path)


# GPT-2's own files


@pytest.fixture(scope="module")
def gpt2() -> tuple[Any, Tokenizer]:
    if not GPT2.is_dir():
        pytest.skip(f"GPT-2's files are not at {GPT2}")
    load = pytest.importorskip("tiktoken.load")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    merged = load.data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(GPT2 / "vocab.bpe"), encoder_json_file=str(GPT2 / "encoder.json")
    )
    theirs = tiktoken.Encoding(
        "gpt2", pat_str=public.r50k_pat_str, mergeable_ranks=merged, special_tokens={END: 50256}, explicit_n_vocab=50257
    )
    return theirs, load_tokenizer(GPT2)


@given(text=TEXTS)
@settings(max_examples=400)
def test_any_text_has_gpt2s_ids(gpt2: tuple[Any, Tokenizer], text: str):
    theirs, ours = gpt2
    assert ours.encode(text) == theirs.encode_ordinary(text)
    assert ours.encode(text, allow_special=True) == theirs.encode(text, allowed_special="all")
    assert ours.decode(ours.encode(text)) == text


def test_characters_beside_others_have_gpt2s_ids(gpt2: tuple[Any, Tokenizer]):
    theirs, ours = gpt2
    codes = (*range(0x1000), *range(0x1000, 0x110000, 37))
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    text = "".join(f"a{c} 1{c}!{c} {c}{c}'s" for c in characters)
    assert ours.encode(text) == theirs.encode_ordinary(text)


@pytest.mark.parametrize("name", ["tinyshakespeare.txt", "wikitext-2/valid.txt"])
def test_real_text_has_gpt2s_ids(gpt2: tuple[Any, Tokenizer], name: str):
    if not (SHARED / name).is_file():
        pytest.skip(f"{name} is not at {SHARED}")
    theirs, ours = gpt2
    text = (SHARED / name).read_text(encoding="utf-8")
    ids = ours.encode(text)
    assert ids == theirs.encode_ordinary(text)
    assert ours.decode(ids) == text


def test_gpt2_is_saved_as_it_was_read(gpt2: tuple[Any, Tokenizer], tmp_path: Path):
    theirs, ours = gpt2
    ours.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint() == ours.fingerprint()
    assert (loaded.eos_id, loaded.bos_id, loaded.special_id("pad"), loaded.filler_id) == (50256, 50256, None, 50256)
    assert loaded.encode("Hello World, don't") == theirs.encode("Hello World, don't")


@pytest.mark.parametrize(
    ("vocabulary", "merges", "message"),
    [
        ({"a": 0, "b": 1, "ab": 2}, "#version: 0.2\na b\nab c\n", r"does not fit .*: merge 2 makes 'abc' .* lacks 'c'"),
        ({"a": 0, "b": 1}, "a\n", "line 1 is not two tokens"),
        ({"a": 0, "b": 0}, "", "two of its 2 tokens have the same id"),
        ({"a": 0, "b": "1"}, "", "not a table from text to id"),
        ([], "", "not a table from text to id"),
        ({"a": 0}, "", "lacks 242 of the bytes"),
    ],
)
def test_a_pair_that_is_damaged_or_does_not_fit_is_refused(vocabulary: Any, merges: str, message: str, tmp_path: Path):
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    (tmp_path / "vocab.bpe").write_text(merges)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_half_a_pair_nested_json_and_a_choice_of_two_are_refused(tmp_path: Path):
    (tmp_path / "vocab.json").write_text("[" * 100_000)
    with pytest.raises(TokenizerError, match=r"merges\.txt is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(TokenizerError, match=r"vocab\.json is damaged: it is not valid JSON"):
        load_tokenizer(tmp_path / "merges.txt")
    (tmp_path / "a.model").write_text("")
    with pytest.raises(TokenizerError, match=r"more than one tokenizer: a\.model, vocab\.json\. Give the file itself"):
        load_tokenizer(tmp_path)
