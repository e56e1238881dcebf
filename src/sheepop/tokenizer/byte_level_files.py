"""Reads other files of byte-level BPE: GPT-2's vocabulary and merges, tiktoken's ranks, Mistral's ``tekken.json``.

A rank file has a line for every token, with its bytes in base64 and its rank, which is its id. It defines neither how
text is cut before merging nor the special tokens; both are known for the encodings that OpenAI published.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.interface import SETTINGS_FILE, SPECIAL_TOKENS, TOKENIZER_FILE
from sheepop.tokenizer.pattern import byte_level_step, split_bytes
from sheepop.tokenizer.settings import (
    ROBERTA_CLASSES,
    ROBERTA_ROLES,
    SPECIAL_FLAGS,
    check_file_size,
    class_of,
    post_processor,
    read_text,
    recorded_tokens,
)
from sheepop.tokenizer.vocabulary import BPE_OPTIONS, JSON_HEAD, bytes_as_characters

MERGES_OF = {"encoder.json": "vocab.bpe", "vocab.json": "merges.txt"}
"""The file names of a pair in OpenAI's release and in transformers."""

VOCABULARY_OF = {merges: vocabulary for vocabulary, merges in MERGES_OF.items()}

_LARGEST_FILE = 2**26
# Classes of transformers that cut text as GPT-2 does and add no tokens around it.
_SAME_CUT = ("GPT2Tokenizer", "GPTNeoXTokenizer", "PreTrainedTokenizer")
_END_OF_TEXT = "<|endoftext|>"


def read_pair(file: Path, settings: dict[str, Any], pattern: str | None) -> tuple[str, dict[str, Any]]:
    """Converts the pair with `file` to the content of a ``tokenizer.json`` that cuts text as GPT-2 does.

    Returns it with the `settings` of the directory. Raises `TokenizerError` if a file is missing or damaged, if the two
    do not belong together, and if `settings` name a class that may cut text differently.
    """
    vocabulary_file = file.with_name(VOCABULARY_OF.get(file.name, file.name))
    merges_file = file.with_name(MERGES_OF[vocabulary_file.name])
    kind = class_of(settings)
    if kind in ROBERTA_CLASSES:
        settings = ROBERTA_ROLES | settings
    elif kind and kind not in _SAME_CUT:
        raise TokenizerError(
            f"{SETTINGS_FILE} names the class {settings['tokenizer_class']!r:.80}, and {vocabulary_file.name} with "
            f"{merges_file.name} does not say how that cuts text. Let transformers write a {TOKENIZER_FILE}: "
            'python -c "from transformers '
            "import AutoTokenizer as T; T.from_pretrained('DIR').save_pretrained('converted')\""
        )
    for file in (vocabulary_file, merges_file):
        if not file.is_file():
            raise TokenizerError(
                f"{file.name} is missing: {vocabulary_file.name} and {merges_file.name} together make a tokenizer."
            )
    vocabulary, merges = _read_vocabulary(vocabulary_file), _read_merges(merges_file)
    for number, (left, right) in enumerate(merges, start=1):
        if missing := [text for text in (left, right, left + right) if text not in vocabulary]:
            raise TokenizerError(
                f"{merges_file.name} does not fit {vocabulary_file.name}: merge {number} makes {left + right!r} of "
                f"{left!r} and {right!r}, and the vocabulary lacks {missing[0]!r}."
            )
    # GPT-2's own files name no special token; where others do, only these are special.
    names_roles = any(f"{role}_token" in settings for role in SPECIAL_TOKENS)
    special = [_END_OF_TEXT] if _END_OF_TEXT in vocabulary and not names_roles else []
    cut = {**byte_level_step(use_regex=True), "add_prefix_space": settings.get("add_prefix_space") is True}
    return byte_level_json(vocabulary, merges, cut, special, settings), settings


def byte_level_json(
    vocabulary: Mapping[str, int],
    merges: list[tuple[str, str]],
    pre_tokenizer: Mapping[str, Any],
    special: list[str],
    settings: Mapping[str, Any],
    *,
    ignore_merges: bool = False,
) -> str:
    """A ``tokenizer.json`` of byte-level BPE: `special` are its entries, `settings` define the tokens around a text."""
    added = {token["content"]: token_id for token_id, token in recorded_tokens(settings).items()}
    description = {
        **JSON_HEAD,
        "added_tokens": [{"id": vocabulary[text], "content": text, **SPECIAL_FLAGS} for text in special],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(settings, {**added, **vocabulary}),
        "decoder": byte_level_step(use_regex=True),
        "model": {**BPE_OPTIONS, "ignore_merges": ignore_merges, "vocab": vocabulary, "merges": merges},
    }
    return json.dumps(description, ensure_ascii=False)


def _read_vocabulary(file: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(read_text(file, _LARGEST_FILE))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file.name} is damaged: it is not valid JSON ({error}).") from None
    if not isinstance(vocabulary, dict) or not all(type(token_id) is int for token_id in vocabulary.values()):
        raise TokenizerError(f"{file.name} is damaged: it is not a table from text to id.")
    if len(set(vocabulary.values())) < len(vocabulary):
        raise TokenizerError(f"{file.name} is damaged: two of its {len(vocabulary)} tokens have the same id.")
    return vocabulary


def _read_merges(file: Path) -> list[tuple[str, str]]:
    # Not splitlines: tokens may contain other characters that end lines.
    lines = read_text(file, _LARGEST_FILE).replace("\r\n", "\n").split("\n")
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise TokenizerError(f"{file.name} is damaged: line {number} is not two tokens with a space between them.")
        merges.append((pair[0], pair[1]))
    return merges


TEKKEN = "tekken.json"

# The special tokens of Mistral's files that do not list any, in the order of their ids.
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_TEKKEN_ROLES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def read_tekken(file: Path, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Converts Mistral's ``tekken.json`` to the content of a ``tokenizer.json``, and returns it with its settings.

    The file has the bytes of tokens by rank and a pattern, as tiktoken. Special tokens come first, so the id of a token
    is its rank plus their number; of the ranks, only those are used for which the size of the vocabulary has room.
    Raises `TokenizerError` if the file is damaged.
    """
    try:
        content = json.loads(read_text(file, _LARGEST_FILE))
        config, listed = content["config"], content.get("special_tokens")
        pattern, size = config["pattern"], config["default_vocab_size"]
        num_special = config["default_num_special_tokens"]
        named = dict(enumerate(_TEKKEN_SPECIAL))
        if listed is not None:
            named = {token["rank"]: token["token_str"] for token in listed}
        ranks = {
            base64.b64decode(token["token_bytes"], validate=True): token["rank"]
            for token in content["vocab"]
            if token["rank"] < size - num_special
        }
        special = [named.get(token_id, f"<SPECIAL_{token_id}>") for token_id in range(min(num_special, size))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TokenizerError(f"it is damaged or not a tekken.json of Mistral: {error!r:.80}.") from None
    if sorted(ranks.values()) != list(range(size - num_special)) or not _are_texts(special):
        raise TokenizerError(f"it is damaged: it does not have {size:,} tokens, {num_special:,} of them special.")
    _require_bytes(ranks)
    entries = {text: token_id for token_id, text in enumerate(special)}
    entries |= {bytes_as_characters(token): num_special + rank for token, rank in ranks.items()}
    if len(entries) < size:
        raise TokenizerError("it is damaged: one of its tokens has the text of a special token.")
    present = {key: text for key, text in _TEKKEN_ROLES.items() if text in special}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, **present, **settings}
    cut = split_bytes(_checked(pattern))
    return byte_level_json(entries, _merges(ranks), cut, special, settings, ignore_merges=True), settings


def _are_texts(texts: list[Any]) -> bool:
    return all(isinstance(text, str) and text for text in texts) and len(set(texts)) == len(texts)


SUFFIX = ".tiktoken"

_LARGEST_VOCABULARY = 2**21
_LONGEST_TOKEN = 2**10
_FURTHEST_SPECIAL = 4096

# As published by OpenAI, but without possessive quantifiers and case-insensitive groups, which libraries interpret
# differently. The long s matches an s.
_CONTRACTION = r"'(?:[sS\u017fdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]|\s+(?!\S)|\s"


def _cased(upper: str, lower: str, signs: str) -> str:
    """Words of `upper` before `lower` characters, and numbers, and signs that end in any of `signs`."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+(?:{_CONTRACTION})?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*(?:{_CONTRACTION})?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+{signs}*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_O200K = _cased(_UPPER, _LOWER, r"[\r\n/]")
# Moonshot's Kimi and Moonlight keep Chinese characters apart.
_KIMI = r"\p{Han}+|" + _cased(rf"(?:(?!\p{{Han}}){_UPPER})", rf"(?:(?!\p{{Han}}){_LOWER})", r"[\r\n]")


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
    "kimi": _Encoding(_KIMI, 163584),
}
# The names of the program code that reads a rank file, in the model's settings, if no other model uses it.
_CLASSES = {"TikTokenTokenizer": "kimi"}


def is_rank_file(file: Path) -> bool:
    """Whether the first line of a file is a token in base64 and a rank."""
    with file.open("rb") as opened:
        line = opened.readline(2 * _LONGEST_TOKEN)
    return _parsed(line) is not None


def read_ranks(file: Path, settings: dict[str, Any], pattern: str | None) -> tuple[str, dict[str, Any]]:
    """Converts a rank file to the content of a ``tokenizer.json``, and returns it with its settings.

    Special tokens are those in ``added_tokens_decoder`` of `settings`, else those of the encoding that `pattern`,
    ``tokenizer_class`` of `settings` or the file name names. Unused ids become reserved special tokens. Raises
    `TokenizerError` if the file is damaged, or if its way of cutting text is unknown.
    """
    encoding = _encoding(file, pattern, settings)
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
    cut, entries = split_bytes(encoding.pattern), vocabulary | special
    # A part that is a token becomes that token, regardless of merges.
    return byte_level_json(entries, _merges(ranks), cut, list(special), settings, ignore_merges=True), settings


def _encoding(file: Path, pattern: str | None, settings: Mapping[str, Any]) -> _Encoding:
    if pattern is not None:
        return _ENCODINGS.get(pattern.removesuffix("_base")) or _Encoding(_checked(pattern), -1)
    if (known := _CLASSES.get(str(settings.get("tokenizer_class")))) is not None:
        return _ENCODINGS[known]
    for name, encoding in _ENCODINGS.items():
        if file.name.startswith(name):
            return encoding
    raise TokenizerError(
        "a rank file does not say how it cuts text. Convert it once, with 'sheepop tokenizer convert FILE --pattern "
        f"PATTERN --output DIR': a regular expression, or one of {', '.join(_ENCODINGS)}; a file whose name begins "
        "with one of these needs no pattern."
    )


def _checked(pattern: Any) -> str:
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
    _require_bytes(ranks)
    return ranks


def _require_bytes(ranks: Mapping[bytes, int]) -> None:
    if missing := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
        raise TokenizerError(f"it lacks {len(missing)} of the 256 bytes (0x{missing[0]:02X} first), or is damaged.")


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
