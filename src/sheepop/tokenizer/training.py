"""Trains a tokenizer; each algorithm is a row in a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from sheepop.core.console import Console, Progress
from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.backend import BackendTokenizer
from sheepop.tokenizer.byte_level import ByteLevelBPE
from sheepop.tokenizer.character import CharTokenizer
from sheepop.tokenizer.config import SMALLEST_VOCABULARY, TokenizerConfig
from sheepop.tokenizer.files import load_tokenizer
from sheepop.tokenizer.interface import SPECIAL_TOKENS, UNK, Tokenizer
from sheepop.tokenizer.pattern import cut_text, unicode_texts
from sheepop.tokenizer.settings import further_special_tokens, special_token_entries, standard_settings
from sheepop.tokenizer.unigram import train_unigram
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
    return BackendTokenizer(json.dumps(description, ensure_ascii=False, separators=(",", ":")), standard_settings(ids))


def _alphabet(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The frequent characters at the beginning of words, and with the prefix ``##`` inside words."""

    def words(text: str) -> list[str]:
        return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))]

    characters = sorted({*frequent_characters(texts), *PRINTABLE_ASCII})
    first = [character for character in characters if words(character) == [character]]
    further = [f"{_CONTINUES}{character}" for character in first if words(f"a{character}") == [f"a{character}"]]
    return first, further


def train_tokenizer(
    config: TokenizerConfig, texts: Iterable[str], *, console: Console | None = None, special_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Trains the tokenizer of `config` on `texts`, which are read once and in order.

    `special_tokens` are needed besides the usual four. With ``config.path``, reads that tokenizer and no `texts`.
    Training stops reading at ``config.max_training_bytes`` and reports that on `console` (standard error if None).
    Raises `TokenizerError` if there is no text, too little for ``config.vocab_size`` tokens (for ``char``: too many
    different characters), or a special token is impossible.
    """
    if config.path is not None:
        tokenizer = load_tokenizer(config.path)
        if missing := [name for name in special_tokens if name not in tokenizer.special_tokens]:
            raise TokenizerError(
                f"The tokenizer {config.path} has no special token {', '.join(missing)}. Leave out tokenizer.path to "
                "train one that has it."
            )
        return tokenizer
    _check_names(special_tokens)
    console = console or Console()
    with console.progress("Training the tokenizer", None, "bytes read") as progress:
        reader = _Reader(texts, config.max_training_bytes, progress)
        tokenizer = _TRAINERS[config.algorithm](reader, config, special_tokens)
    if reader.capped:
        console.info(
            f"The tokenizer was trained on the first {reader.bytes_read:,} bytes of the text "
            f"(tokenizer.max_training_bytes = {config.max_training_bytes:,}); the rest was not used for it."
        )
    return tokenizer


def _check_names(special_tokens: Sequence[str]) -> None:
    taken = set(SPECIAL_TOKENS.values())
    for name in special_tokens:
        if len(name.strip()) < 2 or name in taken:
            raise TokenizerError(
                f"{name!r} cannot be an additional special token: its name must have at least two characters and "
                "differ from all others."
            )
        taken.add(name)


def _train_characters(texts: Iterable[str], config: TokenizerConfig, special_tokens: Sequence[str]) -> Tokenizer:
    if special_tokens:
        raise TokenizerError(
            f"A character tokenizer has no special tokens except {', '.join(SPECIAL_TOKENS.values())}, but "
            f"{', '.join(special_tokens)} are needed. Set tokenizer.algorithm=bpe."
        )
    tokenizer = CharTokenizer.train(texts)
    if tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(
            f"The text has {len(tokenizer.extra_characters)} different characters beyond ASCII, which makes a "
            f"vocabulary of {tokenizer.vocab_size}, but tokenizer.vocab_size is {config.vocab_size}. Set "
            f"tokenizer.vocab_size={tokenizer.vocab_size} or more, or use algorithm bpe."
        )
    return tokenizer


_TRAINERS: dict[str, Callable[[Iterable[str], TokenizerConfig, Sequence[str]], Tokenizer]] = {
    "bpe": lambda texts, config, names: ByteLevelBPE.train(texts, config.vocab_size, names, pattern=config.pattern),
    "wordpiece": lambda texts, config, names: train_wordpiece(texts, config.vocab_size, names),
    "unigram": lambda texts, config, names: train_unigram(texts, config.vocab_size, names),
    "char": _train_characters,
}


class _Reader:
    """Yields texts until their UTF-8 bytes reach a limit; the last one is cut at a character."""

    def __init__(self, texts: Iterable[str], max_bytes: int, progress: Progress) -> None:
        self._texts, self._max_bytes, self._progress = texts, max_bytes, progress
        self.bytes_read, self.capped = 0, False

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            left = self._max_bytes - self.bytes_read
            encoded = text.encode("utf-8", errors="surrogatepass")
            if len(encoded) > left:
                self.capped = True
                while left > 0 and encoded[left] & 0xC0 == 0x80:  # inside a character
                    left -= 1
                encoded = encoded[:left]
                text = encoded.decode("utf-8", errors="surrogatepass")
            if text:
                self.bytes_read += len(encoded)
                self._progress.advance(len(encoded))
                yield text
            if self.capped:
                break
        if self.bytes_read == 0:
            raise TokenizerError(
                "There is no text to train a tokenizer on. Give at least one file that is not empty, and a "
                "tokenizer.max_training_bytes that holds at least one character."
            )
        self._progress.describe("merging")
