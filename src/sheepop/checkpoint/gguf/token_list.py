"""The parts of every GGUF vocabulary, independent of its algorithm: texts, kinds, special tokens, chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.checkpoint.gguf.metadata import Metadata, Value, f32s, i32s, texts, value_of
from sheepop.core.errors import CheckpointError
from sheepop.tokenizer import SpecialRole, Tokenizer
from sheepop.tokenizer.text_index import Places, Texts

# The score of tokens that no merge forms, far below all others.
LOWEST_SCORE = -(2.0**24)
_LOOKS_AROUND = ("single_word", "lstrip", "rstrip")
# Keys below ``tokenizer.``
MODEL = "ggml.model"
TOKENS = "ggml.tokens"
KINDS = "ggml.token_type"
SCORES = "ggml.scores"
TEMPLATE = "chat_template"
ADD_BOS = "ggml.add_bos_token"
ADD_EOS = "ggml.add_eos_token"
ROLE_KEYS: dict[SpecialRole, str] = {
    "bos": "ggml.bos_token_id",
    "eos": "ggml.eos_token_id",
    "unk": "ggml.unknown_token_id",
    "pad": "ggml.padding_token_id",
}
# Keys of further tokens that end a text: end of turn, end of message.
_END_KEYS = ("ggml.eot_token_id", "ggml.eom_token_id")


# The kind of a token, with its number in a file.
TokenKind = IntEnum("TokenKind", "NORMAL UNKNOWN CONTROL USER_DEFINED UNUSED BYTE")


@dataclass
class TokenList:
    """The tokens to be written in the order of their ids, with scores for models that merge by them."""

    texts: list[str]
    kinds: list[TokenKind]
    scores: list[float] | None = None

    def append(self, token: str, kind: TokenKind) -> None:
        """Adds a token."""
        self.texts.append(token)
        self.kinds.append(kind)

    def pad(self, size: int) -> None:
        """Adds unused tokens up to `size`, because llama.cpp needs one for each row of the embedding."""
        missing = range(len(self.texts), size)
        self.texts += [_padding(index) for index in missing]
        self.kinds += [TokenKind.UNUSED for _ in missing]
        if self.scores is not None:
            self.scores += [LOWEST_SCORE for _ in missing]

    def entries(self) -> dict[str, Value]:
        """Returns the keys of a file; raises `CheckpointError` for duplicate texts, which llama.cpp refuses."""
        if len(set(self.texts)) < len(self.texts):
            twice, _ = Counter(self.texts).most_common(1)[0]
            raise CheckpointError(f"Two tokens have the text {twice!r} in a GGUF file, which llama.cpp refuses.")
        entries = {TOKENS: texts(self.texts), KINDS: i32s(self.kinds)}
        return entries if self.scores is None else {**entries, SCORES: f32s(self.scores)}


def _padding(index: int) -> str:
    return f"[PAD{index}]"


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file in the order of their ids: `kinds` (V,), and `scores` (V,) for models that merge by them."""

    texts: Texts
    kinds: NDArray[np.int64]
    scores: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.texts)

    def is_special(self, token_id: int) -> bool:
        """Whether the token exists and never matches ordinary text."""
        return token_id < len(self) and self.kinds[token_id] in (TokenKind.CONTROL, TokenKind.UNKNOWN)

    def has_all(self, wanted: Sequence[str]) -> bool:
        """Whether all of these texts are tokens."""
        return bool((self.ids_of(wanted) >= 0).all())

    def ids_of(self, wanted: Sequence[str]) -> Places:
        """The ids of texts, -1 for each that is no token."""
        return self.texts.index.find(Texts.of([text.encode("utf-8") for text in wanted]).of_all)

    def without_padding(self) -> Vocabulary:
        """Returns the tokens without those that `TokenList.pad` added."""
        count = len(self)
        while count and self.kinds[count - 1] == TokenKind.UNUSED and self.texts[count - 1] == _padding(count - 1):
            count -= 1
        return Vocabulary(
            self.texts.first(count), self.kinds[:count], None if self.scores is None else self.scores[:count]
        )


def described_tokens(description: Mapping[str, Any]) -> TokenList:
    """Returns the tokens of a ``tokenizer.json``: normal ones, and the added ones as control or user-defined tokens."""
    found = {token_id: (token, TokenKind.NORMAL) for token, token_id in description["model"]["vocab"].items()}
    for token in description["added_tokens"]:
        kind = TokenKind.CONTROL if token["special"] else TokenKind.USER_DEFINED
        found[token["id"]] = (token["content"], kind)
    tokens = TokenList([], [])
    for token_id in range(len(found)):
        tokens.append(*found[token_id])
    return tokens


def read_tokens(keys: Metadata, rows: int) -> Vocabulary:
    """Reads the tokens of a file, one for each of the embedding's `rows`."""
    found = keys.texts(TOKENS)
    if len(found) != rows:
        raise keys.problem(TOKENS, f"has {len(found):,} tokens for {rows:,} rows of the embedding")
    kinds = keys.numbers(KINDS, int).astype(np.int64) if keys.has(KINDS) else np.full(rows, int(TokenKind.NORMAL))
    if len(kinds) != len(found):
        raise keys.problem(KINDS, f"has {len(kinds):,} entries for {len(found):,} tokens")
    if unknown := set(np.unique(kinds).tolist()) - set(map(int, TokenKind)):
        raise keys.problem(KINDS, f"has the unknown kind {min(unknown)}")
    scores = keys.numbers(SCORES, float) if keys.has(SCORES) else None
    if scores is not None and len(scores) != len(found):
        raise keys.problem(SCORES, f"has {len(scores):,} entries for {len(found):,} tokens")
    return Vocabulary(found, kinds, scores)


def role_entries(tokenizer: Tokenizer) -> dict[str, Value]:
    """Returns keys for special tokens, whether they are put around a text, and the chat template.

    Raises `CheckpointError` if there is no eos token, because llama.cpp would then choose one.
    """
    entries: dict[str, Value] = {}
    for role, key in ROLE_KEYS.items():
        token_id = tokenizer.special_id(role)
        if token_id is not None:
            entries[key] = value_of(token_id)
    if ROLE_KEYS["eos"] not in entries:
        raise CheckpointError(
            "The tokenizer has no eos_token, so llama.cpp would choose one itself. Name one of the special tokens "
            "as eos_token in tokenizer_config.json."
        )
    for key, around, role in ((ADD_BOS, tokenizer.prefix_ids, "bos"), (ADD_EOS, tokenizer.suffix_ids, "eos")):
        if around not in ((), (tokenizer.special_id(role),)):
            raise CheckpointError(
                f"The tokenizer puts more tokens around a text than its {role}_token, which llama.cpp does not support."
            )
        entries[key] = value_of(bool(around))
    return {**entries, **_template_entries(tokenizer.settings().get("chat_template"))}


def read_settings(
    keys: Metadata, tokens: Vocabulary, *, add_bos: bool, roles: Mapping[SpecialRole, int]
) -> dict[str, Any]:
    """Returns the keys of ``tokenizer_config.json`` that a file defines.

    `add_bos` and the ids in `roles`, if they are special tokens, are the defaults.
    """
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    usual = {role: token_id for role, token_id in roles.items() if tokens.is_special(token_id)}
    for role, key in ROLE_KEYS.items():
        token_id = keys.typed(key, int) if keys.has(key) else usual.get(role)
        if token_id is not None and token_id >= len(tokens):
            raise keys.problem(key, f"is not one of the {len(tokens):,} tokens")
        if token_id is not None:
            settings[f"{role}_token"] = tokens.texts[token_id]
    settings["add_bos_token"] = keys.typed(ADD_BOS, bool, add_bos)
    settings["add_eos_token"] = keys.typed(ADD_EOS, bool, False)
    template = keys.typed(TEMPLATE, str, "")
    if template:
        settings["chat_template"] = template
    return settings


def end_entries(tokenizer: Tokenizer, end_ids: Sequence[int]) -> tuple[dict[str, Value], list[str]]:
    """Returns keys for tokens that end a text besides the tokenizer's own, and notes on tokens without a key."""
    further = [token_id for token_id in end_ids if token_id != tokenizer.special_id("eos")]
    left_out = further[len(_END_KEYS) :]
    notes = [f"Unlike SheepOp, llama.cpp does not end a text at the token {token_id}." for token_id in left_out]
    return {key: value_of(token_id) for key, token_id in zip(_END_KEYS, further, strict=False)}, notes


def read_end_ids(keys: Metadata, rows: int) -> list[int]:
    """Returns all tokens that end a text, without ids outside the vocabulary."""
    ids = [keys.typed(key, int) for key in (ROLE_KEYS["eos"], *_END_KEYS) if keys.has(key)]
    return [token_id for token_id in dict.fromkeys(ids) if token_id < rows]


def _template_entries(template: Any) -> dict[str, Value]:
    if template is None:
        return {}
    if isinstance(template, str):
        return {TEMPLATE: value_of(template)}
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named:
        raise CheckpointError(
            f"The tokenizer has chat templates called {', '.join(sorted(named))}, but none called default, the only "
            "one that a GGUF file stores. Rename one of them to default."
        )
    return {TEMPLATE: value_of(named["default"])}


def looking_notes(added: list[dict[str, Any]]) -> list[str]:
    """Returns notes on special tokens whose match depends on the text around them; refuses such ordinary tokens."""
    looking = [token for token in added if any(token[flag] for flag in _LOOKS_AROUND)]
    ordinary = [token["content"] for token in looking if not token["special"]]
    if ordinary:
        raise CheckpointError(
            f"Whether the token {ordinary[0]!r} matches depends on the text around it (lstrip, rstrip or single_word), "
            "which llama.cpp does not support."
        )
    return [f"llama.cpp does not strip the white space around {token['content']}." for token in looking]
