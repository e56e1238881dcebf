"""Reads BERT's vocabulary: a text file with an entry of WordPiece a line, whose number is its id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.interface import SETTINGS_FILE
from sheepop.tokenizer.settings import SPECIAL_FLAGS, read_text, recorded_tokens, role_text
from sheepop.tokenizer.vocabulary import JSON_HEAD

WORD_LIST = "vocab.txt"

_LARGEST_FILE = 2**26
_CONTINUES = "##"
# The class of transformers that reads such files, and its usual tokens, which settings may replace.
_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer", "PreTrainedTokenizer")
_ROLES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}


def read_word_list(file: Path, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Converts the list to the content of a ``tokenizer.json`` as BERT's, and returns it with its settings.

    ``do_lower_case``, ``strip_accents`` and ``tokenize_chinese_chars`` of `settings` say how text is cleaned, by
    default as in transformers. Raises `TokenizerError` if the list is damaged, and if `settings` name a class that may
    cut text differently.
    """
    kind = settings.get("tokenizer_class")
    if kind is not None and str(kind).removesuffix("Fast") not in _CLASSES:
        raise TokenizerError(
            f"{SETTINGS_FILE} names the class {kind!r:.80}, and {file.name} does not say how that cuts text."
        )
    if settings.get("do_basic_tokenize") is False:
        raise TokenizerError(f"{SETTINGS_FILE} turns off do_basic_tokenize, which is not supported.")
    vocabulary = _read(file)
    settings = {**{f"{role}_token": text for role, text in _ROLES.items() if text in vocabulary}, **settings}
    roles = {role: role_text(settings, role) for role in _ROLES}
    recorded = {token["content"]: token_id for token_id, token in recorded_tokens(settings).items()}
    ids = recorded | vocabulary
    special = sorted((ids[text], text) for text in set(filter(None, roles.values())) if text in vocabulary)
    description = {
        **JSON_HEAD,
        "added_tokens": [{"id": token_id, "content": text, **SPECIAL_FLAGS} for token_id, text in special],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": _flag(settings, "tokenize_chinese_chars", True),
            "strip_accents": _flag(settings, "strip_accents", None),
            "lowercase": _flag(settings, "do_lower_case", True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _around(roles["cls"], roles["sep"], ids),
        "decoder": {"type": "WordPiece", "prefix": _CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": roles["unk"],
            "continuing_subword_prefix": _CONTINUES,
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }
    return json.dumps(description, ensure_ascii=False), settings


def _read(file: Path) -> dict[str, int]:
    lines = read_text(file, _LARGEST_FILE).replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    vocabulary: dict[str, int] = {}
    for number, text in enumerate(lines, start=1):
        if text in vocabulary:
            raise TokenizerError(f"line {number} repeats the entry {text!r:.80} of line {vocabulary[text] + 1}.")
        vocabulary[text] = number - 1
    if not vocabulary or "" in vocabulary:
        raise TokenizerError(f"it is damaged: {'a line is empty' if vocabulary else 'it has no lines'}.")
    return vocabulary


def _flag(settings: dict[str, Any], key: str, usual: bool | None) -> bool | None:
    value = settings.get(key, usual)
    if value is not usual and not isinstance(value, bool):
        raise TokenizerError(f"{SETTINGS_FILE}: {key} = {value!r:.80} is neither true nor false.")
    return value


def _around(cls_text: str | None, sep_text: str | None, ids: dict[str, int]) -> dict[str, Any] | None:
    """BERT's tokens around a text, if it has both."""
    if cls_text is None or sep_text is None or cls_text not in ids or sep_text not in ids:
        return None
    return {"type": "BertProcessing", "sep": [sep_text, ids[sep_text]], "cls": [cls_text, ids[cls_text]]}
