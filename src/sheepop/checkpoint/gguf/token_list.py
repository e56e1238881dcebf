"""What every vocabulary in a GGUF file has, whatever its algorithm: texts, kinds, tokens with a role, a template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sheepop.checkpoint.gguf.metadata import Value, f32s, flag, i32s, text, texts, u32
from sheepop.checkpoint.given import Given
from sheepop.core.errors import CheckpointError
from sheepop.tokenizer import SpecialRole, Tokenizer

# Of tokens that nothing is merged into: far below those of the others.
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
# Further tokens that end what a model says: of its turn in a conversation, of a message.
_END_KEYS = ("ggml.eot_token_id", "ggml.eom_token_id")


class TokenKind(IntEnum):
    """What a token is, as a file counts it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class TokenList:
    """The tokens in the order of their ids; scores are for models that choose by them."""

    texts: list[str]
    kinds: list[TokenKind]
    scores: list[float] | None = None

    def append(self, token: str, kind: TokenKind) -> None:
        """One token more."""
        self.texts.append(token)
        self.kinds.append(kind)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is there and never found in ordinary text."""
        return token_id < len(self.kinds) and self.kinds[token_id] in (TokenKind.CONTROL, TokenKind.UNKNOWN)

    def pad(self, size: int) -> None:
        """Unused tokens up to `size`: llama.cpp wants one for each row of the embedding."""
        missing = range(len(self.texts), size)
        self.texts += [_padding(index) for index in missing]
        self.kinds += [TokenKind.UNUSED for _ in missing]
        if self.scores is not None:
            self.scores += [LOWEST_SCORE for _ in missing]

    def without_padding(self) -> TokenList:
        """The tokens before those that only fill rows of the embedding."""
        count = len(self.texts)
        while count and self.kinds[count - 1] is TokenKind.UNUSED and self.texts[count - 1] == _padding(count - 1):
            count -= 1
        return TokenList(self.texts[:count], self.kinds[:count], self.scores and self.scores[:count])

    def entries(self) -> dict[str, Value]:
        """The keys of a file; raises `CheckpointError` where two tokens have one text, which llama.cpp cannot tell."""
        if len(set(self.texts)) < len(self.texts):
            twice, _ = Counter(self.texts).most_common(1)[0]
            raise CheckpointError(f"Two tokens have the text {twice!r} in a GGUF file, which llama.cpp refuses.")
        entries = {TOKENS: texts(self.texts), KINDS: i32s(self.kinds)}
        return entries if self.scores is None else {**entries, SCORES: f32s(self.scores)}


def _padding(index: int) -> str:
    return f"[PAD{index}]"


def read_tokens(keys: Given, rows: int) -> TokenList:
    """The tokens of a file; one for each of the embedding's `rows`."""
    found = keys.entries(TOKENS, str)
    if len(found) != rows:
        raise keys.problem(TOKENS, f"has {len(found):,} tokens for {rows:,} rows of the embedding")
    numbers = keys.entries(KINDS, int) if keys.has(KINDS) else [int(TokenKind.NORMAL)] * len(found)
    if len(numbers) != len(found):
        raise keys.problem(KINDS, f"has {len(numbers):,} entries for {len(found):,} tokens")
    known = set(TokenKind)
    if unknown := set(numbers) - known:
        raise keys.problem(KINDS, f"has the unknown kind {min(unknown)}")
    scores = keys.entries(SCORES, float) if keys.has(SCORES) else None
    if scores is not None and len(scores) != len(found):
        raise keys.problem(SCORES, f"has {len(scores):,} entries for {len(found):,} tokens")
    return TokenList(found, [TokenKind(number) for number in numbers], scores)


def role_entries(tokenizer: Tokenizer) -> dict[str, Value]:
    """Which tokens begin and end texts, whether they are put around a text, and the template of a chat.

    Raises `CheckpointError` where llama.cpp would take some ordinary token for the end of a text.
    """
    entries: dict[str, Value] = {}
    for role, key in ROLE_KEYS.items():
        token_id = tokenizer.special_id(role)
        if token_id is not None:
            entries[key] = u32(token_id)
    if ROLE_KEYS["eos"] not in entries:
        raise CheckpointError(
            "The tokenizer has no eos_token, so llama.cpp would choose one itself. Name one of the special tokens "
            "as eos_token in tokenizer_config.json."
        )
    for key, around, role in ((ADD_BOS, tokenizer.prefix_ids, "bos"), (ADD_EOS, tokenizer.suffix_ids, "eos")):
        if around not in ((), (tokenizer.special_id(role),)):
            raise CheckpointError(
                f"The tokenizer puts more around a text than its {role}_token, which llama.cpp does not."
            )
        entries[key] = flag(bool(around))
    return {**entries, **_template_entries(tokenizer.settings().get("chat_template"))}


def read_settings(keys: Given, tokens: TokenList, *, add_bos: bool, roles: Mapping[SpecialRole, int]) -> dict[str, Any]:
    """The keys of ``tokenizer_config.json`` that a file speaks of.

    Where it is silent `add_bos` counts, and the ids in `roles`, as far as they are special tokens.
    """
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    usual = {role: token_id for role, token_id in roles.items() if tokens.is_special(token_id)}
    for role, key in ROLE_KEYS.items():
        token_id = keys.typed(key, int) if keys.has(key) else usual.get(role)
        if token_id is not None and token_id >= len(tokens.texts):
            raise keys.problem(key, f"is not one of the {len(tokens.texts):,} tokens")
        if token_id is not None:
            settings[f"{role}_token"] = tokens.texts[token_id]
    settings["add_bos_token"] = keys.typed(ADD_BOS, bool, add_bos)
    settings["add_eos_token"] = keys.typed(ADD_EOS, bool, False)
    template = keys.typed(TEMPLATE, str, "")
    if template:
        settings["chat_template"] = template
    return settings


def end_entries(tokenizer: Tokenizer, end_ids: Sequence[int]) -> tuple[dict[str, Value], list[str]]:
    """Keys for tokens that end a text beside the tokenizer's own, and a remark on those that have no place."""
    further = [token_id for token_id in end_ids if token_id != tokenizer.special_id("eos")]
    left_out = further[len(_END_KEYS) :]
    notes = [f"llama.cpp does not end a text at the token {token_id}, as the model does." for token_id in left_out]
    return {key: u32(token_id) for key, token_id in zip(_END_KEYS, further, strict=False)}, notes


def read_end_ids(keys: Given, rows: int) -> list[int]:
    """Every token that ends a text; those outside the vocabulary end nothing."""
    ids = [keys.typed(key, int) for key in (ROLE_KEYS["eos"], *_END_KEYS) if keys.has(key)]
    return [token_id for token_id in dict.fromkeys(ids) if token_id < rows]


def _template_entries(template: Any) -> dict[str, Value]:
    if template is None:
        return {}
    if isinstance(template, str):
        return {TEMPLATE: text(template)}
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named:
        raise CheckpointError(
            f"The tokenizer has chat templates called {', '.join(sorted(named))} but none called default, which is "
            "the one that a GGUF file has. Name one of them default."
        )
    return {TEMPLATE: text(named["default"])}


def looking_notes(added: list[dict[str, Any]]) -> list[str]:
    """Remarks on special tokens that look at what stands around them; ordinary ones that do are refused."""
    looking = [token for token in added if any(token[flag] for flag in _LOOKS_AROUND)]
    ordinary = [token["content"] for token in looking if not token["special"]]
    if ordinary:
        raise CheckpointError(f"The token {ordinary[0]!r} looks at the text around it, which llama.cpp does not do.")
    return [f"llama.cpp leaves the white space around {token['content']} where it is." for token in looking]
