"""Reads GPT-2's own files: ``encoder.json`` with the ids, and ``vocab.bpe`` with the merges in order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.added_tokens import recorded_tokens
from sheepop.tokenizer.interface import SETTINGS_FILE, TOKENIZER_FILE
from sheepop.tokenizer.pattern import byte_level_step
from sheepop.tokenizer.settings import SPECIAL_FLAGS, post_processor, read_text

MERGES_OF = {"encoder.json": "vocab.bpe", "vocab.json": "merges.txt"}
"""The file names of a pair in OpenAI's release and in transformers."""

VOCABULARY_OF = {merges: vocabulary for vocabulary, merges in MERGES_OF.items()}

_LARGEST_FILE = 2**26
# Classes of transformers that cut text as GPT-2 does and add no tokens around it.
_SAME_CUT = ("GPT2Tokenizer", "GPTNeoXTokenizer", "PreTrainedTokenizer")
_END_OF_TEXT = "<|endoftext|>"


def read_vocabulary_and_merges(vocabulary_file: Path, merges_file: Path, settings: Mapping[str, Any]) -> str:
    """Converts the pair to the content of a ``tokenizer.json`` that cuts text as GPT-2 does.

    `settings` are those of the directory. Raises `TokenizerError` if a file is missing or damaged, if the two do not
    belong together, and if `settings` name a class that may cut text differently.
    """
    kind = settings.get("tokenizer_class")
    if kind is not None and str(kind).removesuffix("Fast") not in _SAME_CUT:
        raise TokenizerError(
            f"{SETTINGS_FILE} names the class {kind!r:.80}, and {vocabulary_file.name} with {merges_file.name} does "
            f'not say how that cuts text. Let transformers write a {TOKENIZER_FILE}: python -c "from transformers '
            "import AutoTokenizer as T; T.from_pretrained('DIR').save_pretrained('converted')\""
        )
    for file in (vocabulary_file, merges_file):
        if not file.is_file():
            raise TokenizerError(
                f"{file.name} is missing: {vocabulary_file.name} and {merges_file.name} together make a tokenizer."
            )
    vocabulary = _read_vocabulary(vocabulary_file)
    merges = _read_merges(merges_file)
    for number, (left, right) in enumerate(merges, start=1):
        if missing := [text for text in (left, right, left + right) if text not in vocabulary]:
            raise TokenizerError(
                f"{merges_file.name} does not fit {vocabulary_file.name}: merge {number} makes {left + right!r} of "
                f"{left!r} and {right!r}, and the vocabulary lacks {missing[0]!r}."
            )
    special = [_END_OF_TEXT] if _END_OF_TEXT in vocabulary else []
    cut = {**byte_level_step(use_regex=True), "add_prefix_space": settings.get("add_prefix_space") is True}
    return byte_level_json(vocabulary, merges, cut, special, settings)


def byte_level_json(
    vocabulary: Mapping[str, int],
    merges: list[tuple[str, str]],
    pre_tokenizer: Mapping[str, Any],
    special: list[str],
    settings: Mapping[str, Any],
    *,
    ignore_merges: bool = False,
) -> str:
    """The content of a ``tokenizer.json`` of byte-level BPE; `special` are entries of the vocabulary.

    `settings` define the tokens that are added around a text.
    """
    added = {token["content"]: token_id for token_id, token in recorded_tokens(settings).items()}
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[text], "content": text, **SPECIAL_FLAGS} for text in special],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(settings, {**added, **vocabulary}),
        "decoder": byte_level_step(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(description, ensure_ascii=False)


def _read_vocabulary(file: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(read_text(file, _LARGEST_FILE))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file.name} is damaged: it is not valid JSON ({error}).") from None
    if not isinstance(vocabulary, dict) or not all(type(token_id) is int for token_id in vocabulary.values()):
        raise TokenizerError(f"{file.name} is damaged: it is not a table from text to id.")
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise TokenizerError(
            f"{file.name} is damaged: its {len(vocabulary)} tokens must have the ids 0 to {len(vocabulary) - 1}, each "
            "once."
        )
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
