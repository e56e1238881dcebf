"""WordPiece (Schuster and Nakajima 2012; Devlin et al. 2019): cuts words into the longest pieces, left to right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.backend import BackendTokenizer
from sheepop.tokenizer.config import SMALLEST_VOCABULARY
from sheepop.tokenizer.interface import SPECIAL_TOKENS, UNK
from sheepop.tokenizer.pattern import cut_text, unicode_texts
from sheepop.tokenizer.settings import further_special_tokens, special_token_entries, standard_settings
from sheepop.tokenizer.vocabulary import PRINTABLE_ASCII, frequent_characters, require_size

if TYPE_CHECKING:
    import tokenizers

_CONTINUES = "##"


def train_wordpiece(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> BackendTokenizer:
    """Learns pieces from `texts`, which are read once and kept in memory; the same texts give the same file.

    Text is cut at white space, around punctuation and around Chinese characters, as in BERT, but keeps case and
    accents. White space and control characters are lost, and words with rare characters or more than 100 characters
    become ``<unk>``. Raises `TokenizerError` if the texts have too many characters or too few words for the size.
    """
    smallest = SMALLEST_VOCABULARY["wordpiece"] + len(special_tokens)
    if vocab_size < smallest:
        raise TokenizerError(f"A WordPiece vocabulary needs at least {smallest} tokens, got vocab_size={vocab_size}.")
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.WordPiece(unk_token=UNK))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_CONTINUES, cleanup=True)
    kept = list(unicode_texts(texts))
    first, further = _alphabet(backend, kept)
    num_given = len(SPECIAL_TOKENS) + len(first) + len(further) + len(special_tokens)
    if num_given > vocab_size:
        raise TokenizerError(
            f"The text has so many frequent characters that the smallest vocabulary is {num_given}, but "
            f"tokenizer.vocab_size is {vocab_size}. Set tokenizer.vocab_size={num_given} or more, or use algorithm bpe."
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size - len(special_tokens),
        min_frequency=1,
        # Includes the characters inside words, which the trainer would add in random order.
        special_tokens=[*SPECIAL_TOKENS.values(), *first, *further],
        initial_alphabet=first,
        limit_alphabet=len(first),
        continuing_subword_prefix=_CONTINUES,
        show_progress=False,
    )
    backend.train_from_iterator((part for text in kept for part in cut_text(text)), trainer)
    description = json.loads(backend.to_str())
    vocabulary = description["model"]["vocab"]
    names = further_special_tokens(special_tokens, vocabulary.keys())
    require_size(len(vocabulary) + len(names), vocab_size)
    description["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    description["added_tokens"] = special_token_entries() + special_token_entries(len(vocabulary), names)
    ids = {text: len(vocabulary) + number for number, text in enumerate(names)}
    content = json.dumps(description, ensure_ascii=False, separators=(",", ":"))
    return BackendTokenizer(content, standard_settings(ids))


def _alphabet(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The frequent characters at the beginning of words, and with the prefix ``##`` inside words."""

    def words(text: str) -> list[str]:
        return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))]

    characters = sorted({*frequent_characters(texts), *PRINTABLE_ASCII})
    first = [character for character in characters if words(character) == [character]]
    further = [f"{_CONTINUES}{character}" for character in first if words(f"a{character}") == [f"a{character}"]]
    return first, further
