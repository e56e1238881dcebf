"""Text from tokens as they come, never showing half a character."""

from __future__ import annotations

import codecs

from sheepop.tokenizer.interface import Tokenizer


class StreamDecoder:
    """Decodes one token at a time; what is pushed plus what is finished equals ``tokenizer.decode`` of all ids.

    A character whose bytes are spread over several tokens appears with the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        return self._decoder.decode(self._tokenizer.decode_bytes((token_id,), skip_special=self._skip_special))

    def finish(self) -> str:
        """What remains: U+FFFD for bytes that never became a character. The decoder is then as new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
