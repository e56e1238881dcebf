"""Reads tiktoken's rank files: a line for every token, with its bytes in base64 and its rank, which is its id.

Such a file defines neither how text is cut before merging nor the special tokens. Both are known for the encodings
that OpenAI published.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.added_tokens import recorded_tokens
from sheepop.tokenizer.alphabet import bytes_as_characters
from sheepop.tokenizer.gpt2_files import byte_level_json
from sheepop.tokenizer.pattern import split_bytes
from sheepop.tokenizer.settings import check_file_size

SUFFIX = ".tiktoken"

_LARGEST_FILE = 2**26
_LARGEST_VOCABULARY = 2**21
_LONGEST_TOKEN = 2**10
_FURTHEST_SPECIAL = 4096
_END_OF_TEXT = "<|endoftext|>"

# As published by OpenAI, but without possessive quantifiers and case-insensitive groups, which libraries interpret
# differently. The long s matches an s.
_CONTRACTION = r"'(?:[sS\u017fdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = "|".join(
    (
        _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s+\z",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s",
    )
)
_O200K = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?:{_CONTRACTION})?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?:{_CONTRACTION})?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@dataclass(frozen=True)
class _Encoding:
    """The pattern that cuts text, and the special tokens for a file of exactly `num_ranks` ranks."""

    pattern: str
    num_ranks: int
    special: Mapping[str, int] = field(default_factory=dict)


_FILL_IN = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_ENCODINGS = {
    "r50k": _Encoding(_R50K, 50256, {_END_OF_TEXT: 50256}),
    "p50k": _Encoding(_R50K, 50280, {_END_OF_TEXT: 50256}),
    "cl100k": _Encoding(_CL100K, 100256, {_END_OF_TEXT: 100257, **_FILL_IN, "<|endofprompt|>": 100276}),
    "o200k": _Encoding(_O200K, 199998, {_END_OF_TEXT: 199999, "<|endofprompt|>": 200018}),
}


def is_rank_file(file: Path) -> bool:
    """Whether the first line of a file is a token in base64 and a rank."""
    with file.open("rb") as opened:
        line = opened.readline(2 * _LONGEST_TOKEN)
    return _parsed(line) is not None


def read_ranks(file: Path, settings: dict[str, Any], pattern: str | None) -> tuple[str, dict[str, Any]]:
    """Converts a rank file to the content of a ``tokenizer.json``, and returns it with its settings.

    Special tokens are those in ``added_tokens_decoder`` of `settings`, else those of the encoding named by `pattern` or
    by the file name. Unused ids become reserved special tokens. Raises `TokenizerError` if the file is damaged, or if
    its way of cutting text is unknown.
    """
    encoding = _encoding(file, pattern)
    ranks = _read(file)
    recorded = {token["content"]: token_id for token_id, token in recorded_tokens(settings).items()}
    special = recorded or (dict(encoding.special) if len(ranks) == encoding.num_ranks else {})
    vocabulary = {bytes_as_characters(token): rank for token, rank in ranks.items()}
    taken = set(vocabulary.values())
    for text, token_id in special.items():
        if text in vocabulary or token_id in taken:
            raise TokenizerError(f"the special token {text!r} with the id {token_id} does not fit: it is also a rank.")
        taken.add(token_id)
        if token_id > len(ranks) + _FURTHEST_SPECIAL:
            raise TokenizerError(f"the special token {text!r} has the id {token_id}, far beyond {len(ranks):,} ranks.")
    holes = sorted(set(range(max(taken) + 1)) - taken)
    if holes and holes[0] < len(ranks):
        raise TokenizerError(f"it is damaged or incomplete: no token has the rank {holes[0]}.")
    special |= {f"<|reserved_{token_id}|>": token_id for token_id in holes}
    special = dict(sorted(special.items(), key=lambda item: item[1]))
    content = byte_level_json(
        vocabulary | special,
        _merges(ranks),
        split_bytes(encoding.pattern),
        list(special),
        settings,
        ignore_merges=True,  # a part that is a token becomes that token, regardless of merges
    )
    return content, settings


def _encoding(file: Path, pattern: str | None) -> _Encoding:
    if pattern is not None:
        return _ENCODINGS.get(pattern.removesuffix("_base")) or _Encoding(_checked(pattern), -1)
    for name, encoding in _ENCODINGS.items():
        if file.name.startswith(name):
            return encoding
    raise TokenizerError(
        "a rank file does not say how it cuts text. Convert it once, with 'sheepop tokenizer convert FILE --pattern "
        f"PATTERN --output DIR': a regular expression, or one of {', '.join(_ENCODINGS)}; a file whose name begins "
        "with one of these needs no pattern."
    )


def _checked(pattern: str) -> str:
    from tokenizers import Regex

    try:
        Regex(pattern)
    except Exception as error:  # the library has no specific error class
        raise TokenizerError(f"the pattern {pattern!r} is not a regular expression: {error}.") from None
    if not pattern:
        raise TokenizerError(f"the pattern is empty. Give {', '.join(_ENCODINGS)} or a regular expression.")
    return pattern


def _read(file: Path) -> dict[bytes, int]:
    check_file_size(file, _LARGEST_FILE)
    ranks: dict[bytes, int] = {}
    used: set[int] = set()
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line:
            continue
        parsed = _parsed(line)
        if parsed is None:
            raise TokenizerError(f"it is damaged: line {number} is not a token in base64 and a rank.")
        token, rank = parsed
        if token in ranks or rank in used:
            raise TokenizerError(f"it is damaged: line {number} repeats {'a token' if token in ranks else 'a rank'}.")
        ranks[token] = rank
        used.add(rank)
    if missing := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
        raise TokenizerError(f"it lacks {len(missing)} of the 256 bytes (0x{missing[0]:02X} first), or is damaged.")
    return ranks


def _parsed(line: bytes) -> tuple[bytes, int] | None:
    parts = line.split()
    if len(parts) != 2 or not parts[1].isdigit() or len(parts[1]) > 9 or int(parts[1]) >= _LARGEST_VOCABULARY:
        return None
    try:
        token = base64.b64decode(parts[0], validate=True)
    except (binascii.Error, ValueError):
        return None
    return (token, int(parts[1])) if 0 < len(token) <= _LONGEST_TOKEN else None


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that forms a token, in the order of ranks, in which tiktoken merges."""
    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right, token[:cut], token[cut:]))
    return [(bytes_as_characters(left), bytes_as_characters(right)) for *_, left, right in sorted(found)]
