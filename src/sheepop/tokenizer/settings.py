"""Reads ``tokenizer_config.json`` and the files beside it: roles of special tokens, added tokens, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.core.files import read_json
from sheepop.tokenizer.interface import CHAT_TEMPLATE, SETTINGS_FILE, SPECIAL_TOKENS, TOKENIZER_FILE, SpecialRole

SPECIAL_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

# Further special tokens: by role, and in lists or tables.
FURTHER_ROLES = ("sep_token", "cls_token", "mask_token")
FURTHER_LISTS = ("additional_special_tokens", "extra_special_tokens")
RECORDED = "added_tokens_decoder"

_LARGEST_SETTINGS = 2**26
LARGEST_TEMPLATE = 2**20

# Whether transformers adds bos and eos by default, by class.
_USUAL_AROUND = {
    "LlamaTokenizer": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False),
    "T5Tokenizer": (False, True),
}

# Classes that cut text as GPT-2 does, put ``<s>`` and ``</s>`` around it, and name their tokens so by default.
ROBERTA_CLASSES = ("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer", "MvpTokenizer")
ROBERTA_ROLES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": "<mask>",
}

# The names of the tokens of each role if the settings name none; GPT-2 has one special token for both ends.
_CONVENTIONAL_NAMES: dict[SpecialRole, tuple[str, ...]] = {
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "bos": ("<bos>", "<s>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>"),
}


def read_settings(directory: Path) -> dict[str, Any]:
    """The keys of ``tokenizer_config.json`` in `directory`, completed from the files beside it.

    ``special_tokens_map.json`` adds missing roles, and ``added_tokens.json`` adds tokens that ``added_tokens_decoder``
    lacks. ``chat_template.jinja`` and the files in ``additional_chat_templates`` replace the templates in
    ``tokenizer_config.json``, as in transformers. Missing files are skipped; raises `TokenizerError` for one that is
    damaged or too large.
    """
    settings = read_table(directory / SETTINGS_FILE)
    named = {*(f"{role}_token" for role in SPECIAL_TOKENS), *FURTHER_ROLES, *FURTHER_LISTS}
    for key, value in read_table(directory / "special_tokens_map.json").items():
        if key in named and settings.get(key) is None:
            settings[key] = value
    added = read_table(directory / "added_tokens.json")
    if not all(type(token_id) is int for token_id in added.values()):
        raise TokenizerError(f"{directory / 'added_tokens.json'} is damaged: it is not a table from text to id.")
    if added:
        found = {str(token_id): {"content": text, **SPECIAL_FLAGS} for text, token_id in added.items()}
        settings[RECORDED] = found | (settings.get(RECORDED) or {})
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: read_text(file, LARGEST_TEMPLATE) for name, file in files.items() if file.is_file()}
    if templates.keys() == {"default"}:
        settings[CHAT_TEMPLATE] = templates["default"]
    elif templates:
        settings[CHAT_TEMPLATE] = [{"name": name, "template": text} for name, text in templates.items()]
    return settings


def read_table(file: Path) -> dict[str, Any]:
    """The keys of a JSON file, empty if it does not exist; raises `TokenizerError` if it is damaged or too large."""
    if not file.is_file():
        return {}
    check_file_size(file, _LARGEST_SETTINGS)
    table = read_json(file, TokenizerError)
    if not isinstance(table, dict):
        raise TokenizerError(f"{file} is damaged: it is not a table of keys and values.")
    return table


def check_file_size(file: Path, largest: int) -> None:
    """Raises `TokenizerError` for a file of more than `largest` bytes, without reading it."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {error.strerror}.") from None
    if size > largest:
        raise TokenizerError(
            f"{file} has {size:,} bytes, but such a file may have at most {largest:,}. It is damaged, or not a "
            "tokenizer file."
        )


def read_content(file: Path, largest: int) -> bytes:
    """The bytes of a file; raises `TokenizerError` if it is unreadable or over `largest` bytes."""
    check_file_size(file, largest)
    try:
        return file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {error.strerror}.") from None


def read_text(file: Path, largest: int) -> str:
    """The text of a file, with its line ends; raises `TokenizerError` as `read_content`, or if it is not UTF-8."""
    try:
        return read_content(file, largest).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file} is damaged: it is not UTF-8 text ({error.reason}).") from None


def with_roles(settings: Mapping[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
    """`settings`, with roles from conventional names if they state none."""
    if any(f"{role}_token" in settings for role in SPECIAL_TOKENS):
        return dict(settings)
    found = {
        f"{role}_token": next((name for name in names if name in special), None)
        for role, names in _CONVENTIONAL_NAMES.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings,
        **{key: name for key, name in found.items() if name is not None},
    }


def standard_settings(further: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The ``tokenizer_config.json`` of a tokenizer trained here with `further` special tokens, for `AutoTokenizer`."""
    ids = {text: i for i, text in enumerate(SPECIAL_TOKENS.values())} | dict(further or {})
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": text for role, text in SPECIAL_TOKENS.items()},
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(token_id): {"content": text, **SPECIAL_FLAGS} for text, token_id in ids.items()},
    }


def special_token_entries(first: int = 0, texts: Iterable[str] = SPECIAL_TOKENS.values()) -> list[dict[str, Any]]:
    """The ``added_tokens`` entries of special tokens with the ids `first`, `first` + 1, ..."""
    return [{"id": token_id, "content": text, **SPECIAL_FLAGS} for token_id, text in enumerate(texts, first)]


def further_special_tokens(names: Iterable[str], taken: Container[str]) -> list[str]:
    """Returns `names` as a list; raises `TokenizerError` if one of them already is in the vocabulary."""
    names = list(names)
    for name in names:
        if name in taken:
            raise TokenizerError(f"The special token {name!r} is part of ordinary text. Choose a name that is not.")
    return names


def check_special_ids(settings: Mapping[str, Any], ids: Mapping[str, int]) -> None:
    """Raises `TokenizerError` unless the roles and ids in `settings` agree with `ids` (text -> id)."""
    for role in SPECIAL_TOKENS:
        text = role_text(settings, role)
        if text is not None and text not in ids:
            raise TokenizerError(
                f"{SETTINGS_FILE} names {text!r} as {role}_token, but {TOKENIZER_FILE} has no special token of "
                "that text. Use the two files of the same tokenizer."
            )
    recorded = settings.get(RECORDED, {})
    if not isinstance(recorded, dict):
        raise TokenizerError(f"{SETTINGS_FILE}: added_tokens_decoder must be a table from id to token.")
    for token_id, token in recorded.items():
        text = token.get("content") if isinstance(token, dict) else token
        actual = ids.get(text) if isinstance(text, str) else None
        if actual is not None and str(actual) != token_id:
            raise TokenizerError(
                f"{SETTINGS_FILE} says that {text!r} has the id {token_id}, but {TOKENIZER_FILE} gives it "
                f"{actual}. Use the two files of the same tokenizer."
            )


def role_text(settings: Mapping[str, Any], role: str) -> str | None:
    """The text of the token that `settings` name for `role`, as a string or a token object."""
    value = settings.get(f"{role}_token")
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{SETTINGS_FILE}: {role}_token = {json.dumps(value)} is not a token's text.")
    return value


def class_of(settings: Mapping[str, Any]) -> str:
    """The class of transformers that `settings` name, without its ending ``Fast``; empty if they name none."""
    return str(settings.get("tokenizer_class") or "").removesuffix("Fast")


def post_processor(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """The ``post_processor`` for `settings`, by default that of the class they name; `ids` are of special tokens."""
    if class_of(settings) in ROBERTA_CLASSES:
        return _roberta_processor(settings, ids)
    usual = _USUAL_AROUND.get(class_of(settings), (False, False))
    is_on = [settings.get(key, default) for key, default in zip(("add_bos_token", "add_eos_token"), usual, strict=True)]
    named = (role_text(settings, "bos"), role_text(settings, "eos"))
    texts = [text if on is True and text in ids else None for text, on in zip(named, is_on, strict=True)]
    if texts == [None, None]:
        return None

    def template(*sequences: str) -> list[dict[str, Any]]:
        parts = []
        for number, name in enumerate(sequences):
            around = [None if text is None else {"SpecialToken": {"id": text, "type_id": number}} for text in texts]
            parts += [around[0], {"Sequence": {"id": name, "type_id": number}}, around[1]]
        return [part for part in parts if part is not None]

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in texts if text is not None
        },
    }


def _roberta_processor(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    named = {"cls": role_text(settings, "cls"), "sep": role_text(settings, "sep")}
    for role, text in named.items():
        if text not in ids:
            raise TokenizerError(
                f"{SETTINGS_FILE} names a class that puts the {role}_token around a text, but the vocabulary does not "
                f"have {text!r}."
            )
    around = {role: [text, ids[text]] for role, text in named.items() if text is not None}
    return {"type": "RobertaProcessing", **around, "trim_offsets": True, "add_prefix_space": False}


Entry = dict[str, Any]


def recorded_tokens(settings: Mapping[str, Any]) -> dict[int, Entry]:
    """The tokens in ``added_tokens_decoder`` by id, with all flags; raises `TokenizerError` if it is damaged."""
    try:
        found = {
            int(token_id): {**SPECIAL_FLAGS, **({"content": token} if isinstance(token, str) else token)}
            for token_id, token in settings.get(RECORDED, {}).items()
        }
    except (AttributeError, TypeError, ValueError):
        found = {-1: {}}
    if any(token_id < 0 or not isinstance(token.get("content"), str) for token_id, token in found.items()):
        raise TokenizerError(f"{SETTINGS_FILE}: {RECORDED} must be a table from id to token.")
    return found


def with_recorded_tokens(
    description: Mapping[str, Any], settings: Mapping[str, Any], id_of: Callable[[str], int | None], free: int
) -> Mapping[str, Any]:
    """`description` with all tokens named in `settings` among its added tokens, marked as special where stated.

    In some files such a token is an ordinary entry of the vocabulary, in which `id_of` finds it. In others, to which
    tokens were added later, it is missing: then it gets the next free id, at first `free`, as in transformers. Raises
    `TokenizerError` if `settings` state a different id.
    """
    added = description.get("added_tokens") or []
    if not are_tokens(added):
        return description
    recorded, further = recorded_tokens(settings), _further_names(settings)
    roles = {text for role in SPECIAL_TOKENS if (text := role_text(settings, role)) is not None}
    special = {*roles, *further, *(token["content"] for token in recorded.values() if token["special"])}
    flags = _flags_of_roles(settings) | {token["content"]: token for token in recorded.values()}
    known = {token["content"] for token in added}
    marked = [{**token, "special": True} if token["content"] in special else token for token in added]
    found = {text: token_id for text in {*special, *flags} - known if (token_id := id_of(text)) is not None}
    # In the order of ids, in which the library adds them.
    inside = sorted((token_id, text) for text, token_id in found.items())
    missing = {token_id: token for token_id, token in sorted(recorded.items()) if token["content"] not in known}
    missing = {token_id: token for token_id, token in missing.items() if token["content"] not in found}
    others = [text for text in further if text not in known and text not in found]
    tokens = [
        *({**SPECIAL_FLAGS, **flags.get(text, {}), "id": token_id, "content": text} for token_id, text in inside),
        *marked,
        *_appended(free, missing, others),
    ]
    return description if tokens == added else {**description, "added_tokens": tokens}


def _flags_of_roles(settings: Mapping[str, Any]) -> dict[str, Entry]:
    """The flags of the tokens that `settings` name for a role as an object."""
    named = (settings.get(key) for key in (*(f"{role}_token" for role in SPECIAL_TOKENS), *FURTHER_ROLES))
    tokens = [token for token in named if isinstance(token, dict) and isinstance(token.get("content"), str)]
    return {
        token["content"]: {**{flag: token.get(flag) is True for flag in SPECIAL_FLAGS}, "special": True}
        for token in tokens
    }


def _appended(first: int, missing: Mapping[int, Entry], further: list[str]) -> Iterator[Entry]:
    """Yields the tokens with the ids from `first`: those in `missing`, which state their ids, then `further` ones."""
    for free, (token_id, token) in enumerate(missing.items(), first):
        if token_id != free:
            raise TokenizerError(
                f"{SETTINGS_FILE} says that {token['content']!r} has the id {token_id}, but {TOKENIZER_FILE} does not "
                f"have it, and its next id is {free}. Use the two files of the same tokenizer."
            )
        yield {**token, "id": token_id}
    named = {token["content"] for token in missing.values()}
    for token_id, text in enumerate((text for text in further if text not in named), first + len(missing)):
        yield {"id": token_id, "content": text, **SPECIAL_FLAGS}


def _further_names(settings: Mapping[str, Any]) -> list[str]:
    """The distinct special tokens that `settings` name besides those of the four main roles."""
    found = [settings.get(key) for key in FURTHER_ROLES]
    for key in FURTHER_LISTS:
        names = settings.get(key) or []
        found += names.values() if isinstance(names, dict) else names if isinstance(names, list) else [0]
    named = [token.get("content") if isinstance(token, dict) else token for token in found if token is not None]
    texts = [text for text in named if isinstance(text, str) and text]
    if len(texts) < len(named):
        raise TokenizerError(f"{SETTINGS_FILE}: {', '.join((*FURTHER_ROLES, *FURTHER_LISTS))} must name tokens.")
    return list(dict.fromkeys(texts))


def are_tokens(added: Any) -> bool:
    """Whether `added` is a list of entries with a text and an id."""
    return (
        isinstance(added, list)
        and {type(token) for token in added} <= {dict}
        and {type(token.get("content")) for token in added} <= {str}
        and {type(token.get("id")) for token in added} <= {int}
    )


def vocabulary_of(description: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the model's entries in a ``tokenizer.json``; empty if it is damaged."""
    model = description.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        pairs = [entry for entry in vocabulary if isinstance(entry, list) and entry and isinstance(entry[0], str)]
        return {entry[0]: token_id for token_id, entry in enumerate(pairs)} if len(pairs) == len(vocabulary) else {}
    if isinstance(vocabulary, dict) and all(isinstance(token_id, int) for token_id in vocabulary.values()):
        return vocabulary
    return {}
