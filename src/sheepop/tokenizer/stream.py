"""Text from tokens as they come, never showing half a character."""

from __future__ import annotations

import codecs

from sheepop.tokenizer.interface import Tokenizer, without_leading_spaces


class StreamDecoder:
    """Decodes one token at a time; what is pushed plus what is finished equals ``tokenizer.decode`` of all ids.

    A character whose bytes are spread over several tokens appears with the token that completes it. With `continues`
    the tokens stand behind others that hold text (see `Tokenizer.decode`).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._first_spaces = 0 if continues else tokenizer.leading_spaces
        self._spaces = self._first_spaces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        data = self._tokenizer.decode_bytes((token_id,), skip_special=self._skip_special, continues=True)
        if self._spaces and data:
            kept = without_leading_spaces(data, self._spaces)
            # A text that begins with something else has no spaces in front any more.
            self._spaces = 0 if kept else self._spaces - len(data)
            data = kept
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What remains: U+FFFD for bytes that never became a character. The decoder is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._spaces = self._first_spaces
        return rest
