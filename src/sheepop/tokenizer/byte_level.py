"""Byte-level BPE: tokens are sequences of bytes, so every Unicode text can be encoded and decoded exactly.

Sennrich, Haddow and Birch 2016 (merges); Radford et al. 2019, section 2.2 (bytes as the alphabet).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.alphabet import BYTE_ALPHABET, characters_as_bytes, text_as_characters
from sheepop.tokenizer.backend import BackendTokenizer
from sheepop.tokenizer.config import SMALLEST_VOCABULARY
from sheepop.tokenizer.decoding import Decoding
from sheepop.tokenizer.encoder import parse
from sheepop.tokenizer.gpt2_files import byte_level_json
from sheepop.tokenizer.interface import SPECIAL_TOKENS, TOKENIZER_FILE
from sheepop.tokenizer.parts import PartEncoder
from sheepop.tokenizer.pattern import PATTERNS, cut_text, find_pattern, surrogate_error, unicode_texts
from sheepop.tokenizer.settings import further_special_tokens, standard_settings
from sheepop.tokenizer.vocabulary import check_options, require_size

if TYPE_CHECKING:
    import tokenizers

_SMALLEST = SMALLEST_VOCABULARY["bpe"]

# 0xC0, 0xC1 and 0xF5 to 0xFF never occur in UTF-8, and some vocabularies lack them.
_UTF8_CHARACTERS = {c for c, byte in BYTE_ALPHABET.items() if byte not in {0xC0, 0xC1, *range(0xF5, 0x100)}}


class ByteLevelBPE(BackendTokenizer):
    """Byte-level BPE, trained here or read from a ``tokenizer.json`` such as GPT-2's.

    A tokenizer trained here decodes every Unicode text exactly and has ``<pad>``, ``<unk>``, ``<bos>``, ``<eos>`` at
    the ids 0 to 3, the 256 bytes at 4 to 259, and further special tokens at the last ids. The file of another one may
    specify that text is normalized first.
    """

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), *, pattern: str = "llama3"
    ) -> ByteLevelBPE:
        """Learns merges from `texts`, which are read once; the same texts give the same file.

        There are ``vocab_size - 260 - len(special_tokens)`` merges; the further `special_tokens` get the last ids.
        `pattern` names the entry of `PATTERNS` that cuts the text. Raises `TokenizerError` if the texts have too few
        different parts for this many tokens.
        """
        smallest = _SMALLEST + len(special_tokens)
        if vocab_size < smallest:
            raise TokenizerError(
                f"A byte-level vocabulary needs at least {smallest} tokens "
                f"({len(SPECIAL_TOKENS) + len(special_tokens)} special tokens and 256 bytes), got "
                f"vocab_size={vocab_size}."
            )
        from tokenizers import decoders, pre_tokenizers, trainers

        backend = parse(byte_level_json({}, [], PATTERNS[pattern].pre_tokenizer, [], {}))
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(special_tokens),
            min_frequency=1,
            special_tokens=list(SPECIAL_TOKENS.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator((part for text in unicode_texts(texts) for part in cut_text(text)), trainer)
        further = _add_special_tokens(backend, special_tokens)
        require_size(backend.get_vocab_size(with_added_tokens=True), vocab_size)
        return cls(backend.to_str(), standard_settings(further))

    def _check(self) -> None:
        model = self._description["model"]
        check_options(model, "dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if missing := _UTF8_CHARACTERS.difference(model["vocab"]):
            raise TokenizerError(
                f"The vocabulary of {TOKENIZER_FILE} lacks {len(missing)} of the bytes that UTF-8 text is made of "
                f"(0x{min(BYTE_ALPHABET[c] for c in missing):02X} first), so text would be lost. The file is "
                "damaged, or was trained without its initial alphabet."
            )

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of every text, in order; part by part in this thread if that gives the same ids as the library."""
        encoder = self._part_encoder
        if encoder is None:
            return super().encode_batch(texts, allow_special=allow_special)
        texts = list(texts)
        cut_out = list(self._added.values()) if allow_special else self._ordinary_added
        results: list[list[int]] = []
        left_over: list[int] = []
        for index, text in enumerate(texts):
            whole = isinstance(text, str) and not any(token in text for token in cut_out)
            ids = encoder.encode(text) if whole else None
            results.append([] if ids is None else ids.tolist())
            if ids is None:
                left_over.append(index)
        if left_over:
            if all(isinstance(text, str) for text in texts) and (problem := surrogate_error(texts)):
                raise problem
            encoded = super().encode_batch([texts[index] for index in left_over], allow_special=allow_special)
            for index, found in zip(left_over, encoded, strict=True):
                results[index] = found
        return results

    @cached_property
    def _part_encoder(self) -> PartEncoder | None:
        """The encoder by parts; None if text is normalized first or cut by an unknown pattern."""
        if self._description["normalizer"] is not None:
            return None
        pattern = find_pattern(self._description["pre_tokenizer"])
        return None if pattern is None else PartEncoder(self._ordinary.library, pattern, text_as_characters)

    @cached_property
    def _ordinary_added(self) -> list[str]:
        """Added tokens that are not special, which the library finds even if special tokens are not allowed."""
        return [text for text in self._added.values() if text not in self._special]

    def _read_decoding(self) -> Decoding:
        return Decoding((characters_as_bytes,), 0)


def _add_special_tokens(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> dict[str, int]:
    """Adds special tokens after all others; returns their ids."""
    from tokenizers import AddedToken

    first = backend.get_vocab_size(with_added_tokens=True)
    texts = further_special_tokens(texts, backend.get_vocab())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return {text: first + index for index, text in enumerate(texts)}


def is_byte_level(description: Mapping[str, Any]) -> bool:
    """Whether the pre-tokenizer of a ``tokenizer.json`` works on bytes."""
    pre_tokenizer = description.get("pre_tokenizer")
    if not isinstance(pre_tokenizer, dict):
        return False
    steps = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    return isinstance(steps, list) and any(isinstance(step, dict) and step.get("type") == "ByteLevel" for step in steps)
