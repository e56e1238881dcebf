"""Where byte-level BPE cuts text into parts before it looks for tokens, which no token reaches over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sheepop.core.errors import TokenizerError


def split_step(regex: str) -> dict[str, Any]:
    """The step of a ``pre_tokenizer`` in ``tokenizer.json`` that cuts text into the matches of `regex`."""
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def byte_level_step(*, use_regex: bool) -> dict[str, Any]:
    """The step that writes bytes as characters; with `use_regex` it cuts text as GPT-2 does first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split_bytes(regex: str) -> dict[str, Any]:
    """The ``pre_tokenizer`` that cuts text into the matches of `regex` and writes them as bytes."""
    return {"type": "Sequence", "pretokenizers": [split_step(regex), byte_level_step(use_regex=False)]}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A way of cutting text: `pre_tokenizer` as it stands in ``tokenizer.json``, and two expressions that cut the same.

    `regex` is for the `regex` library, whose classes of characters are trusted only where they are found equal;
    `ascii_regex` is for Python's own, and text of ASCII characters only, whose white space is TAB to CR and the space.
    A part ends after an ASCII letter or digit that stands before a space or line end, which `cut_text` relies on. None
    holds both a letter and a sign behind it, so that no merge ever spells a special token such as ``<eos>``.
    """

    pre_tokenizer: dict[str, Any]
    regex: str
    ascii_regex: str

    @property
    def step(self) -> dict[str, Any]:
        """The first step of the pre-tokenizer, which does the cutting."""
        step: dict[str, Any] = self.pre_tokenizer.get("pretokenizers", [self.pre_tokenizer])[0]
        return step


def _by_split(regex: str, ascii_regex: str) -> Pattern:
    return Pattern(split_bytes(regex), regex, ascii_regex)


# As Llama 3 cuts, which llama.cpp and most other programs know:
#   a contraction ("'s", "'LL"), its letters listed: (?i:s), as Llama 3's own file has it, would take a long s as well,
#       which llama.cpp does not,
#   a word with the one character before it (" word", "(self", "_name", ".append"),
#   at most three digits,
#   punctuation with the line ends after it ("):\n"),
#   white space up to its last line end,
#   other white space, of which the last character goes to the word behind it.
LLAMA3 = _by_split(
    "|".join(
        (
            r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
    "|".join(
        (
            r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])",
            r"[^\r\n0-9A-Za-z]?[A-Za-z]+",
            r"[0-9]{1,3}",
            r" ?[^0-9A-Za-z\t-\r ]+[\r\n]*",
            r"[\t-\r ]*[\r\n]+",
            r"[\t-\r ]+(?![^\t-\r ])",
            r"[\t-\r ]+",
        )
    ),
)

# Made for code, and for scripts that write vowels as marks on letters:
#   a word, its marks included, with the one character before it,
#   at most three digits,
#   punctuation with the line end and indentation after it ("):\n        "),
#   a line end with the indentation after it,
#   other white space, of which the last character goes to the word behind it.
SHEEPOP = _by_split(
    "|".join(
        (
            r"[^\r\n\p{N}\p{L}\p{M}]?[\p{L}\p{M}]+",
            r"\p{N}{1,3}",
            r" ?[^\s\p{N}\p{L}\p{M}]+(?:[\r\n]+[ \t]*)?",
            r"[\r\n]+[ \t]*",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
    "|".join(
        (
            r"[^\r\n0-9A-Za-z]?[A-Za-z]+",
            r"[0-9]{1,3}",
            r" ?[^0-9A-Za-z\t-\r ]+(?:[\r\n]+[ \t]*)?",
            r"[\r\n]+[ \t]*",
            r"[\t-\r ]+(?![^\t-\r ])",
            r"[\t-\r ]+",
        )
    ),
)

# As GPT-2 cuts (Radford et al. 2019), which the library has built in.
GPT2 = Pattern(
    byte_level_step(use_regex=True),
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "|".join(
        (
            r"'(?:[stmd]|re|ve|ll)",
            r" ?[A-Za-z]+",
            r" ?[0-9]+",
            r" ?[^0-9A-Za-z\t-\r ]+",
            r"[\t-\r ]+(?![^\t-\r ])",
            r"[\t-\r ]+",
        )
    ),
)

PATTERNS = {"llama3": LLAMA3, "sheepop": SHEEPOP, "gpt2": GPT2}
"""The ways of cutting text that a tokenizer can be trained with, by the names that `tokenizer.pattern` takes."""


def find_pattern(pre_tokenizer: Mapping[str, Any] | None) -> Pattern | None:
    """The pattern that a ``pre_tokenizer`` cuts by; None for one that is not known here."""
    wanted = without_offsets(pre_tokenizer)
    return next((known for known in PATTERNS.values() if without_offsets(known.pre_tokenizer) == wanted), None)


def begins_with_known_cut(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether the first step of a ``pre_tokenizer`` is the cut of a known pattern, so that `cut_text` changes no id."""
    first = without_offsets(pre_tokenizer.get("pretokenizers", [pre_tokenizer])[0])
    return any(without_offsets(known.step) == first for known in PATTERNS.values())


def without_offsets(description: Any) -> Any:
    """A ``pre_tokenizer``, or a step of one, without what plays no part in ids."""
    if isinstance(description, dict):
        return {key: without_offsets(value) for key, value in description.items() if key != "trim_offsets"}
    return [without_offsets(item) for item in description] if isinstance(description, list) else description


CUT = re.compile(r"(?<=[0-9A-Za-z])(?=[ \n])")
_PART_CHARACTERS = 2**15


def cut_text(text: str, characters: int = _PART_CHARACTERS) -> Iterator[str]:
    """Cuts `text` into parts of about `characters` where every `Pattern` cuts too, so that no id changes.

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
