"""Trains a tokenizer; each algorithm is a row in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from sheepop.core.console import Console, Progress
from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.byte_level import ByteLevelBPE
from sheepop.tokenizer.character import CharTokenizer
from sheepop.tokenizer.config import TokenizerConfig
from sheepop.tokenizer.files import load_tokenizer
from sheepop.tokenizer.interface import SPECIAL_TOKENS, Tokenizer
from sheepop.tokenizer.unigram import train_unigram
from sheepop.tokenizer.wordpiece import train_wordpiece


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
        return _with_special_tokens(load_tokenizer(config.path), special_tokens, config.path)
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


def _with_special_tokens(tokenizer: Tokenizer, names: Sequence[str], path: str) -> Tokenizer:
    missing = [name for name in names if name not in tokenizer.special_tokens]
    if missing:
        raise TokenizerError(
            f"The tokenizer {path} has no special token {', '.join(missing)}. Leave out tokenizer.path to train one "
            "that has it."
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
        self.bytes_read = 0
        self.capped = False

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            left = self._max_bytes - self.bytes_read
            encoded = text.encode("utf-8", errors="surrogatepass")
            if len(encoded) > left:
                self.capped = True
                text, encoded = _first_bytes(encoded, left)
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


def _first_bytes(encoded: bytes, limit: int) -> tuple[str, bytes]:
    """The longest prefix of whole characters of UTF-8 text that fits in `limit` bytes."""
    while limit > 0 and encoded[limit] & 0xC0 == 0x80:
        limit -= 1
    return encoded[:limit].decode("utf-8", errors="surrogatepass"), encoded[:limit]
