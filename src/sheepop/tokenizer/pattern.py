"""Where the tokenizers that are trained here cut text into parts before they look for tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sheepop.core.errors import TokenizerError

# Text is cut into these parts before merging, and no token reaches over a cut:
#   a word with the one character before it (" word", "(self", "_name", ".append"),
#   at most three digits,
#   punctuation with the line end and indentation after it ("):\n        "),
#   a line end with the indentation after it,
#   other white space, of which the last character goes to the word behind it.
# No part holds an ASCII letter or digit before a space or line end, which `cut_text` relies on, and none holds
# both a letter and what stands behind it, so that no merge ever spells a special token.
PATTERN = "|".join(
    (
        r"[^\r\n\p{N}\p{L}\p{M}]?[\p{L}\p{M}]+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{N}\p{L}\p{M}]+(?:[\r\n]+[ \t]*)?",
        r"[\r\n]+[ \t]*",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The same parts where text is ASCII: white space is TAB to CR and the space.
ASCII_PATTERN = "|".join(
    (
        r"[^\r\n0-9A-Za-z]?[A-Za-z]+",
        r"[0-9]{1,3}",
        r" ?[^0-9A-Za-z\t-\r ]+(?:[\r\n]+[ \t]*)?",
        r"[\r\n]+[ \t]*",
        r"[\t-\r ]+(?![^\t-\r ])",
        r"[\t-\r ]+",
    )
)

# The same cut as it stands in ``tokenizer.json``.
SPLIT = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}

CUT = re.compile(r"(?<=[0-9A-Za-z])(?=[ \n])")
_PART_CHARACTERS = 2**15


def cut_text(text: str, characters: int = _PART_CHARACTERS) -> Iterator[str]:
    """Cuts `text` into parts of about `characters` where `PATTERN` always cuts too, so that no id changes.

    A text without such a place (a letter or digit of ASCII before a space or line end) stays whole.
    """
    start = 0
    while len(text) - start > characters and (place := CUT.search(text, start + characters)):
        yield text[start : place.start()]
        start = place.start()
    yield text[start:]


def unicode_texts(texts: Iterable[str]) -> Iterator[str]:
    """`texts` as they come; raises `TokenizerError` for a lone surrogate."""
    for text in texts:
        if problem := surrogate_error((text,)):
            raise problem
        yield text


def surrogate_error(texts: Iterable[str]) -> TokenizerError | None:
    """The error for the first lone surrogate in `texts`; None when there is none."""
    texts = list(texts)
    for index, text in enumerate(texts):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return TokenizerError(
                f"Text {index + 1} of {len(texts)} holds the lone surrogate {text[error.start]!r} at character "
                f"{error.start}, which is not Unicode text. Decode the input with errors='replace', or remove it."
            )
    return None
