"""The Unigram model (Kudo 2018): the most probable cut of a text into pieces, and bytes for unknown characters."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.alphabet import BYTE_TOKENS
from sheepop.tokenizer.backend import BackendTokenizer
from sheepop.tokenizer.config import SMALLEST_VOCABULARY
from sheepop.tokenizer.interface import SPECIAL_TOKENS
from sheepop.tokenizer.pattern import SHEEPOP, unicode_texts
from sheepop.tokenizer.settings import further_special_tokens, special_token_entries, standard_settings
from sheepop.tokenizer.unigram_training import LONGEST_WORD, learn_pieces
from sheepop.tokenizer.vocabulary import PRINTABLE_ASCII, frequent_characters, require_size

# Pieces are learned from the most frequent words, with at most this many characters in total.
_MOST_CHARACTERS = 2**22

# The log probability of bytes and special tokens, so that no segmentation prefers them to pieces.
_NEVER = -1000.0


def train_unigram(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> BackendTokenizer:
    """Learns pieces from `texts`, which are read once and kept in memory; the same texts give the same file.

    Text is not normalized, spaces belong to pieces, and characters without a piece become bytes, so every Unicode text
    is decoded exactly. The ids 0 to 3 are the usual special tokens, 4 to 259 the bytes, and the last ids the further
    `special_tokens`. Raises `TokenizerError` if the texts have too many characters or too few words for the size.
    """
    smallest = SMALLEST_VOCABULARY["unigram"] + len(special_tokens)
    if vocab_size < smallest:
        raise TokenizerError(
            f"A Unigram vocabulary needs at least {smallest} tokens ({len(SPECIAL_TOKENS) + len(special_tokens)} "
            f"special tokens, 256 bytes and {len(PRINTABLE_ASCII) + 1} characters), got vocab_size={vocab_size}."
        )
    kept = list(unicode_texts(texts))
    alphabet = sorted({*frequent_characters(kept), *PRINTABLE_ASCII, " "})
    reserved = len(SPECIAL_TOKENS) + len(BYTE_TOKENS) + len(special_tokens)
    if reserved + len(alphabet) > vocab_size:
        raise TokenizerError(
            f"The text has {len(alphabet)} frequent characters, which with {reserved} special tokens and bytes make a "
            f"vocabulary of {reserved + len(alphabet)}, but tokenizer.vocab_size is {vocab_size}. Set "
            f"tokenizer.vocab_size={reserved + len(alphabet)} or more, or use algorithm bpe."
        )
    pieces = learn_pieces(_words(kept, alphabet), alphabet, vocab_size - reserved)
    require_size(reserved + len(pieces), vocab_size)
    return BackendTokenizer(*_file(pieces, special_tokens))


def _words(texts: Iterable[str], alphabet: Sequence[str]) -> dict[str, int]:
    """The parts into which text is cut, with their counts, without characters that are not in `alphabet`."""
    import regex  # type: ignore[import-untyped, unused-ignore]

    find = regex.compile(SHEEPOP.regex).findall
    parts: Counter[str] = Counter()
    for text in texts:
        parts.update(find(text))
    between = re.compile(f"[^{re.escape(''.join(alphabet))}]+")
    words: Counter[str] = Counter()
    for part, count in parts.items():
        for run in between.split(part):
            for start in range(0, len(run), LONGEST_WORD):
                words[run[start : start + LONGEST_WORD]] += count
    total = 0

    def fits(word: str) -> bool:
        nonlocal total
        total += len(word)
        return total <= _MOST_CHARACTERS

    ordered = sorted(words, key=lambda word: (-words[word], word))
    return {word: words[word] for word in takewhile(fits, ordered)}


def _file(pieces: Sequence[tuple[str, float]], special_tokens: Sequence[str]) -> tuple[str, dict[str, object]]:
    first = [(text, _NEVER) for text in (*SPECIAL_TOKENS.values(), *BYTE_TOKENS)]
    vocabulary = [*first, *pieces]
    further = further_special_tokens(special_tokens, {text for text, _ in vocabulary})
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_token_entries() + special_token_entries(len(vocabulary), further),
        "normalizer": None,
        "pre_tokenizer": SHEEPOP.step,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": 1, "vocab": vocabulary, "byte_fallback": True},
    }
    ids = {text: len(vocabulary) + number for number, text in enumerate(further)}
    return json.dumps(description, ensure_ascii=False, separators=(",", ":")), standard_settings(ids)
