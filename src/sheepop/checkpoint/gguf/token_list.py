"""What every vocabulary in a GGUF file has, whatever its algorithm: texts, kinds, tokens with a role, a template."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sheepop.checkpoint.gguf.keys import Keys
from sheepop.checkpoint.gguf.values import Value, flag, i32s, text, texts, u32
from sheepop.core.errors import CheckpointError
from sheepop.tokenizer import SpecialRole, Tokenizer

# Keys below ``tokenizer.``
MODEL = "ggml.model"
TOKENS = "ggml.tokens"
KINDS = "ggml.token_type"
TEMPLATE = "chat_template"
ADD_BOS = "ggml.add_bos_token"
ADD_EOS = "ggml.add_eos_token"
ROLE_KEYS: dict[SpecialRole, str] = {
    "bos": "ggml.bos_token_id",
    "eos": "ggml.eos_token_id",
    "unk": "ggml.unknown_token_id",
    "pad": "ggml.padding_token_id",
}


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
    """The tokens in the order of their ids."""

    texts: list[str]
    kinds: list[TokenKind]

    def append(self, token: str, kind: TokenKind) -> None:
        """One token more."""
        self.texts.append(token)
        self.kinds.append(kind)

    def pad(self, size: int) -> None:
        """Unused tokens up to `size`: llama.cpp wants one for each row of the embedding."""
        missing = range(len(self.texts), size)
        self.texts += [_padding(index) for index in missing]
        self.kinds += [TokenKind.UNUSED for _ in missing]

    def without_padding(self) -> TokenList:
        """The tokens before those that only fill rows of the embedding."""
        count = len(self.texts)
        while count and self.kinds[count - 1] is TokenKind.UNUSED and self.texts[count - 1] == _padding(count - 1):
            count -= 1
        return TokenList(self.texts[:count], self.kinds[:count])

    def entries(self) -> dict[str, Value]:
        """The keys of a file; raises `CheckpointError` where two tokens have one text, which llama.cpp cannot tell."""
        if len(set(self.texts)) < len(self.texts):
            twice, _ = Counter(self.texts).most_common(1)[0]
            raise CheckpointError(f"Two tokens have the text {twice!r} in a GGUF file, which llama.cpp refuses.")
        return {TOKENS: texts(self.texts), KINDS: i32s(self.kinds)}


def _padding(index: int) -> str:
    return f"[PAD{index}]"


def read_tokens(keys: Keys, rows: int) -> TokenList:
    """The tokens of a file; one for each of the embedding's `rows`."""
    found = keys.texts(TOKENS)
    if len(found) != rows:
        raise keys.problem(TOKENS, f"has {len(found):,} tokens for {rows:,} rows of the embedding")
    numbers = keys.numbers(KINDS) if keys.has(KINDS) else [int(TokenKind.NORMAL)] * len(found)
    if len(numbers) != len(found):
        raise keys.problem(KINDS, f"has {len(numbers):,} entries for {len(found):,} tokens")
    known = set(TokenKind)
    if unknown := set(numbers) - known:
        raise keys.problem(KINDS, f"has the kind {min(unknown)}, which is none")
    return TokenList(found, [TokenKind(number) for number in numbers])


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
            "The tokenizer has no eos_token, and llama.cpp would take a token of its own choice for it. Name one of "
            "the special tokens as eos_token in tokenizer_config.json."
        )
    settings = tokenizer.settings()
    for name, key in (("add_bos_token", ADD_BOS), ("add_eos_token", ADD_EOS)):
        entries[key] = flag(bool(settings.get(name, False)))
    if entries[ADD_BOS].content and ROLE_KEYS["bos"] not in entries:
        raise CheckpointError("tokenizer_config.json sets add_bos_token, and the tokenizer has no bos_token.")
    return {**entries, **_template_entries(settings.get("chat_template"))}


def read_settings(keys: Keys, tokens: TokenList) -> dict[str, Any]:
    """The keys of ``tokenizer_config.json`` that a file speaks of."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, key in ROLE_KEYS.items():
        if keys.has(key):
            token_id = keys.size(key)
            if token_id >= len(tokens.texts):
                raise keys.problem(key, f"is none of the {len(tokens.texts):,} tokens")
            settings[f"{role}_token"] = tokens.texts[token_id]
    settings["add_bos_token"] = keys.truth(ADD_BOS, False)
    settings["add_eos_token"] = keys.truth(ADD_EOS, False)
    template = keys.text(TEMPLATE, "")
    if template:
        settings["chat_template"] = template
    return settings


def _template_entries(template: Any) -> dict[str, Value]:
    if template is None:
        return {}
    if isinstance(template, str):
        return {TEMPLATE: text(template)}
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named:
        raise CheckpointError(
            f"The tokenizer has chat templates called {', '.join(sorted(named))} and none called default, which is the "
            "one that a GGUF file has. Name one of them default."
        )
    return {TEMPLATE: text(named["default"])}
