"""The patterns by which byte-level BPE cuts text into parts; tokens never cross parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sheepop.core.errors import TokenizerError


def byte_level_step(*, use_regex: bool) -> dict[str, Any]:
    """The step that writes bytes as characters; with `use_regex`, it first cuts text as GPT-2 does."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split_bytes(*regexes: str, use_regex: bool = False) -> dict[str, Any]:
    """The ``pre_tokenizer`` that cuts text into the matches of each regex in turn and writes them as bytes.

    With `use_regex`, it finally cuts as GPT-2 does.
    """
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in regexes
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level_step(use_regex=use_regex)]}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A way of cutting text: the `pre_tokenizer` of ``tokenizer.json``, and two equivalent regular expressions.

    `regex` is for the `regex` library, whose character classes are used only after a comparison with the tokenizer
    library's; `ascii_regex` is for Python's `re` and ASCII text only, whose white space is TAB to CR and the space.
    Every pattern cuts between an ASCII letter or digit and a following space or line end, on which `cut_text` relies.
    No part contains a letter followed by a sign, so merges never spell a special token such as ``<eos>``.
    """

    pre_tokenizer: dict[str, Any]
    regex: str
    ascii_regex: str

    @property
    def step(self) -> dict[str, Any]:
        """The first step of the pre-tokenizer, which cuts the text."""
        step: dict[str, Any] = self.pre_tokenizer.get("pretokenizers", [self.pre_tokenizer])[0]
        return step


def _by_split(regex: str, ascii_regex: str) -> Pattern:
    return Pattern(split_bytes(regex), regex, ascii_regex)


# Llama 3's pattern, which llama.cpp and most other programs support:
#   a contraction ("'s", "'LL"), with its letters listed: (?i:s), as in Llama 3's own file, would also match a long s,
#       which llama.cpp does not match,
#   a word with one character before it (" word", "(self", "_name", ".append"),
#   at most three digits,
#   punctuation with the line ends after it ("):\n"),
#   white space up to its last line end,
#   other white space, except a last character that belongs to the following word.
LLAMA3 = _by_split(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
    r"|[^\r\n0-9A-Za-z]?[A-Za-z]+"
    r"|[0-9]{1,3}"
    r"| ?[^0-9A-Za-z\t-\r ]+[\r\n]*"
    r"|[\t-\r ]*[\r\n]+"
    r"|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+",
)

# SheepOp's pattern, for code and for scripts that write vowels as marks on letters:
#   a word, marks included, with one character before it,
#   at most three digits,
#   punctuation with the line end and indentation after it ("):\n        "),
#   a line end with the indentation after it,
#   other white space, except a last character that belongs to the following word.
SHEEPOP = _by_split(
    r"[^\r\n\p{N}\p{L}\p{M}]?[\p{L}\p{M}]+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{N}\p{L}\p{M}]+(?:[\r\n]+[ \t]*)?"
    r"|[\r\n]+[ \t]*"
    r"|\s+(?!\S)|\s+",
    r"[^\r\n0-9A-Za-z]?[A-Za-z]+"
    r"|[0-9]{1,3}"
    r"| ?[^0-9A-Za-z\t-\r ]+(?:[\r\n]+[ \t]*)?"
    r"|[\r\n]+[ \t]*"
    r"|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+",
)

# GPT-2's pattern (Radford et al. 2019), which is built into the library.
GPT2 = Pattern(
    byte_level_step(use_regex=True),
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^0-9A-Za-z\t-\r ]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+",
)

PATTERNS = {"llama3": LLAMA3, "sheepop": SHEEPOP, "gpt2": GPT2}
"""The patterns with which a tokenizer can be trained, by the values of `tokenizer.pattern`."""


def find_pattern(pre_tokenizer: Mapping[str, Any] | None) -> Pattern | None:
    """The pattern of a ``pre_tokenizer``, or None if it is unknown."""
    wanted = without_offsets(pre_tokenizer)
    return next((known for known in PATTERNS.values() if without_offsets(known.pre_tokenizer) == wanted), None)


def begins_with_known_cut(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether a ``pre_tokenizer`` first cuts by a known pattern, so that `cut_text` changes no ids."""
    first = without_offsets(pre_tokenizer.get("pretokenizers", [pre_tokenizer])[0])
    return any(without_offsets(known.step) == first for known in PATTERNS.values())


def without_offsets(description: Any) -> Any:
    """A ``pre_tokenizer``, or a step of one, without the option that does not affect ids."""
    if isinstance(description, dict):
        return {key: without_offsets(value) for key, value in description.items() if key != "trim_offsets"}
    return [without_offsets(item) for item in description] if isinstance(description, list) else description


CUT = re.compile(r"(?<=[0-9A-Za-z])(?=[ \n])")
_PART_CHARACTERS = 2**15


def cut_text(text: str, characters: int = _PART_CHARACTERS) -> Iterator[str]:
    """Cuts `text` into parts of about `characters` where every `Pattern` cuts; without such a place it stays whole."""
    start = 0
    while len(text) - start > characters and (place := CUT.search(text, start + characters)):
        yield text[start : place.start()]
        start = place.start()
    yield text[start:]


def unicode_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yields `texts`; raises `TokenizerError` for a lone surrogate."""
    for text in texts:
        if problem := surrogate_error((text,)):
            raise problem
        yield text


def surrogate_error(texts: Iterable[str]) -> TokenizerError | None:
    """The error for the first lone surrogate in `texts`, or None."""
    texts = list(texts)
    for index, text in enumerate(texts):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return TokenizerError(
                f"Text {index + 1} of {len(texts)} contains the lone surrogate {text[error.start]!r} at character "
                f"{error.start}, which is not Unicode text. Decode the input with errors='replace', or remove it."
            )
    return None
