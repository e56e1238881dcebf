"""Decodes a stream of tokens without splitting characters."""

from __future__ import annotations

import codecs

from sheepop.tokenizer.interface import Tokenizer, without_leading_spaces


class StreamDecoder:
    """Decodes one token at a time; the results of `push` and `finish` joined equal ``tokenizer.decode`` of all ids.

    A character whose bytes span several tokens appears with the token that completes it. With `continues`, the tokens
    follow others with text (see `Tokenizer.decode`).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._first_spaces = 0 if continues else tokenizer.leading_spaces
        self._spaces = self._first_spaces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty if a character is still incomplete."""
        data = self._tokenizer.decode_bytes((token_id,), skip_special=self._skip_special, continues=True)
        if self._spaces and data:
            kept = without_leading_spaces(data, self._spaces)
            # Once other text has begun, no more leading spaces are dropped.
            self._spaces = 0 if kept else self._spaces - len(data)
            data = kept
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The rest: U+FFFD for bytes of an incomplete character. Resets the decoder."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._spaces = self._first_spaces
        return rest
