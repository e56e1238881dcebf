"""Byte-level BPE in a GGUF file: the tokenizer model that llama.cpp calls ``gpt2``.

A character tokenizer is also written as byte-level BPE, whose merges form each character from its bytes.
"""

from __future__ import annotations

from typing import Any

from sheepop.checkpoint.gguf.metadata import Value, texts, value_of
from sheepop.checkpoint.gguf.pre_tokenizers import BY_NAME, find_name
from sheepop.checkpoint.gguf.token_list import TokenKind, TokenList, described_tokens, looking_notes
from sheepop.checkpoint.given import Given
from sheepop.core.errors import CheckpointError
from sheepop.tokenizer import CharTokenizer
from sheepop.tokenizer.vocabulary import bytes_as_characters

_PRE = "ggml.pre"
_MERGES = "ggml.merges"


def byte_level_entries(description: dict[str, Any]) -> tuple[TokenList, dict[str, Value], list[str]]:
    """Returns tokens, further keys and notes for a byte-level BPE ``tokenizer.json``.

    Raises `CheckpointError` if llama.cpp would split text differently.
    """
    model = description["model"]
    name = find_name(description["pre_tokenizer"], bool(model.get("ignore_merges")))
    if name is None:
        raise CheckpointError(
            "llama.cpp cannot split text like this tokenizer, and would produce other ids. For byte-level BPE it "
            "knows the patterns of GPT-2, Llama 3, Qwen, DeepSeek and others; tokenizer.pattern=llama3, the "
            "default, trains with Llama 3's. Export without the tokenizer for a program that brings its own."
        )
    notes = _normalizer_notes(description["normalizer"]) + looking_notes(description["added_tokens"])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return described_tokens(description), {_PRE: value_of(name), _MERGES: texts(merges)}, notes


def character_entries(tokenizer: CharTokenizer) -> tuple[TokenList, dict[str, Value], list[str]]:
    """Returns tokens, further keys and notes for a character tokenizer."""
    special = {token_id: token for token, token_id in tokenizer.special_tokens.items()}
    tokens = TokenList([], [])
    merges = []
    for token_id in range(tokenizer.vocab_size):
        if token_id in special:
            tokens.append(special[token_id], TokenKind.CONTROL)
            continue
        spelled = bytes_as_characters(tokenizer.token_bytes(token_id))
        tokens.append(spelled, TokenKind.NORMAL)
        merges += [f"{spelled[:end]} {spelled[end]}" for end in range(1, len(spelled))]
    note = (
        "llama.cpp skips characters that are not in the vocabulary of a character tokenizer; SheepOp encodes them as "
        "<unk>."
    )
    # Characters may share their first bytes.
    return tokens, {_PRE: value_of("gpt-2"), _MERGES: texts(dict.fromkeys(merges))}, [note]


def byte_level_adds_bos(keys: Given) -> bool:
    """Whether llama.cpp by default puts a BOS token before a text."""
    known = BY_NAME.get(keys.typed(_PRE, str, ""))
    return known is not None and known.add_bos


def byte_level_description(keys: Given, tokens: TokenList) -> dict[str, Any]:
    """Returns the ``tokenizer.json`` of a file's byte-level BPE, without added tokens."""
    name = keys.typed(_PRE, str, "")
    known = BY_NAME.get(name)
    if known is None:
        reason = f"is a way to split text that SheepOp does not know; it knows {', '.join(BY_NAME)}"
        raise keys.problem(_PRE, reason if name else "is missing, but it defines how text is split")
    merges = [merge.split(" ") for merge in keys.entries(_MERGES, str)]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise keys.problem(_MERGES, f"has the entry {' '.join(wrong)!r}, which does not have two parts")
    return {
        "normalizer": None,
        "pre_tokenizer": known.description,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": known.ignore_merges,
            "vocab": {token: token_id for token_id, token in enumerate(tokens.texts)},
            "merges": merges,
        },
    }


def _normalizer_notes(normalizer: Any) -> list[str]:
    if normalizer is None:
        return []
    if normalizer == {"type": "NFC"}:
        return ["llama.cpp does not normalise text to Unicode's composed form (NFC) before it splits it."]
    raise CheckpointError(
        f"The tokenizer changes text before it splits it ({normalizer['type']}), which llama.cpp does not do."
    )
