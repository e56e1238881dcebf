"""Reads a tokenizer from disk, in any supported format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from sheepop.core.errors import TokenizerError
from sheepop.core.lazy import without_collections
from sheepop.tokenizer.backend import BackendTokenizer, as_bytes
from sheepop.tokenizer.bpe import BpeTokenizer
from sheepop.tokenizer.bpe_tables import TABLES_FILE, BpeTables
from sheepop.tokenizer.byte_level import ByteLevelBPE, is_byte_level
from sheepop.tokenizer.byte_level_files import (
    MERGES_OF,
    SUFFIX,
    TEKKEN,
    VOCABULARY_OF,
    is_rank_file,
    read_pair,
    read_ranks,
    read_tekken,
)
from sheepop.tokenizer.character import CharTokenizer, is_character_tokenizer
from sheepop.tokenizer.interface import TOKENIZER_FILE, Tokenizer
from sheepop.tokenizer.sentencepiece import read_sentencepiece
from sheepop.tokenizer.settings import are_tokens, read_content, read_settings, vocabulary_of, with_recorded_tokens
from sheepop.tokenizer.vocabulary import ALGORITHMS, without_holes
from sheepop.tokenizer.wordpiece_file import WORD_LIST, read_word_list

WHAT_IS_READ = (
    f"SheepOp reads {TOKENIZER_FILE}, SentencePiece models (*.model), tiktoken's ranks (*{SUFFIX}), Mistral's "
    f"{TEKKEN}, BERT's {WORD_LIST}, and pairs of "
    f"{' or '.join(f'{vocabulary} with {merges}' for vocabulary, merges in MERGES_OF.items())}."
)

# Gemma's, one of the largest, has 33 MB and 2^18 tokens.
_LARGEST_FILE = 2**27
_LARGEST_VOCABULARY = 2**22

Converted = tuple[bytes, dict[str, Any]]
Reader = Callable[[Path, dict[str, Any], str | None], Converted]


def load_tokenizer(path: str | Path, *, pattern: str | None = None) -> Tokenizer:
    """Reads the tokenizer in a directory or file.

    A directory has ``tokenizer.json``, or one of: a SentencePiece model, a rank file of tiktoken, ``tekken.json``,
    ``vocab.txt``, and the pair ``encoder.json`` and ``vocab.bpe`` (or ``vocab.json`` and ``merges.txt``).
    ``tokenizer_config.json``, ``special_tokens_map.json``, ``added_tokens.json`` and ``chat_template.jinja`` beside it
    define added tokens, the roles of special tokens, and the chat template.
    `pattern` defines how a rank file cuts text, as the name of an encoding (``cl100k``) or a regular expression; a
    file that is named after a known encoding needs none.

    Raises `TokenizerError` if there is no tokenizer, if it is damaged or of an unsupported kind, and if files
    contradict each other.
    """
    path = Path(path)
    file = _find(path) if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(f"There is no tokenizer at {file}. Give a directory or a file. {WHAT_IS_READ}")
    settings = read_settings(file.parent)
    try:
        read = _reader(file)
        if pattern is not None and read is not _READERS["ranks"]:
            raise TokenizerError("a pattern is for tiktoken's rank files, but this file says how it cuts text.")
        with without_collections():
            if file.name == TABLES_FILE:
                return _from_alone(file, settings)
            content, settings = read(file, settings, pattern)
            tables = BpeTables.load(file.parent, content) if file.name == TOKENIZER_FILE else None
            return _tokenizer(content, settings, tables)
    except TokenizerError as error:
        raise TokenizerError(f"Cannot use the tokenizer {file}: {error}") from None


def tokenizer_from_json(content: str | bytes, settings: Mapping[str, Any] | None = None) -> Tokenizer:
    """Makes a tokenizer from the text of a ``tokenizer.json`` and the keys of its ``tokenizer_config.json``."""
    with without_collections():
        return _tokenizer(as_bytes(content), settings or {}, None)


def tokenizer_from_tables(tables: BpeTables, settings: Mapping[str, Any]) -> Tokenizer:
    """Makes a BPE tokenizer from its tables alone; its ``tokenizer.json`` is made when it is asked for."""
    with without_collections():
        whole = _with_recorded_tokens(tables.outline, settings, tables)
        if whole is not tables.outline:
            tables = tables.with_added(whole["added_tokens"])
        return _class_of(tables.outline)(None, settings, tables)


def _from_alone(file: Path, settings: Mapping[str, Any]) -> Tokenizer:
    tables = BpeTables.load(file.parent, None)
    if tables is None:
        raise TokenizerError(f"it is not complete without the {TOKENIZER_FILE} that it belongs to.")
    return tokenizer_from_tables(tables, settings)


def _class_of(description: Mapping[str, Any]) -> type[BpeTokenizer]:
    return ByteLevelBPE if is_byte_level(description) else BpeTokenizer


def _tokenizer(content: bytes, settings: Mapping[str, Any], tables: BpeTables | None) -> Tokenizer:
    """`tables` are those of `content`, if they are known."""
    notes: tuple[str, ...] = ()
    is_outline = tables is not None
    if tables is not None:
        description = tables.outline
    else:
        found = _description(content)
        description, notes = without_holes(found)
        if description is not found:
            content = json.dumps(description, ensure_ascii=False).encode("utf-8")
    kind = description["model"]["type"]
    if kind == "WordLevel" and is_character_tokenizer(description):
        return CharTokenizer.from_json(content.decode("utf-8"), settings)
    if kind == "BPE" and tables is None:
        tables = BpeTables.of(description)
    whole = _with_recorded_tokens(description, settings, tables)
    if whole is not description:
        full = _description(content) if is_outline else description
        description = {**full, "added_tokens": whole["added_tokens"]}
        content = json.dumps(description, ensure_ascii=False).encode("utf-8")
        tables = None if tables is None else tables.with_added(whole["added_tokens"])
    tokenizer: BackendTokenizer
    if kind == "BPE":
        tokenizer = _class_of(description)(content, settings, tables)
    else:
        tokenizer = BackendTokenizer(content, settings)
    tokenizer.notes += notes
    return tokenizer


def _with_recorded_tokens(
    description: dict[str, Any], settings: Mapping[str, Any], tables: BpeTables | None
) -> Mapping[str, Any]:
    if tables is not None:
        return with_recorded_tokens(description, settings, tables.id_of, len(tables))
    vocabulary, added = vocabulary_of(description), description.get("added_tokens") or []
    if not vocabulary or not are_tokens(added):
        return description  # the library says what is wrong
    free = max((*vocabulary.values(), *(token["id"] for token in added))) + 1
    return with_recorded_tokens(description, settings, vocabulary.get, free)


def _description(content: bytes) -> dict[str, Any]:
    try:
        description = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{TOKENIZER_FILE} is damaged: it is not valid JSON ({error}).") from None
    model = description.get("model") if isinstance(description, dict) else None
    if not isinstance(model, dict):
        raise TokenizerError(f"{TOKENIZER_FILE} is not a file of the tokenizers library: it has no model.")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict | list) and len(vocabulary) > _LARGEST_VOCABULARY:
        raise TokenizerError(f"{TOKENIZER_FILE} has more than {_LARGEST_VOCABULARY:,} tokens, or is damaged.")
    # Files of the library's first versions have no type; only BPE has merges.
    kind = model.get("type", "BPE" if "merges" in model else None)
    if not isinstance(kind, str) or kind not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise TokenizerError(f"{TOKENIZER_FILE} has a model of the type {kind!r}, but the known types are {known}.")
    return {**description, "model": {**model, "type": kind}}


def holds_tokenizer(path: Path) -> bool:
    """Whether `path` is a file, or a directory that directly contains a tokenizer."""
    return path.is_file() or bool(path.is_dir() and _found(path))


def _found(directory: Path) -> list[Path]:
    for name in (TOKENIZER_FILE, TABLES_FILE):
        if (directory / name).is_file():
            return [directory / name]
    return [
        *(file for suffix in (".model", SUFFIX) for file in sorted(directory.glob(f"*{suffix}")) if file.is_file()),
        *(directory / name for name in (*MERGES_OF, TEKKEN, WORD_LIST) if (directory / name).is_file()),
    ]


def _find(directory: Path) -> Path:
    found = _found(directory)
    if not found:
        raise TokenizerError(f"There is no tokenizer in {directory}. {WHAT_IS_READ}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise TokenizerError(f"{directory} has more than one tokenizer: {names}. Give the file itself.")
    return found[0]


def _reader(file: Path) -> Reader:
    if file.name in MERGES_OF or file.name in VOCABULARY_OF:
        return _READERS["pair"]
    if file.name in _READERS:
        return _READERS[file.name]
    # Some models of Meta have tiktoken's ranks under SentencePiece's file name.
    if file.suffix == SUFFIX or (file.suffix == ".model" and is_rank_file(file)):
        return _READERS["ranks"]
    return _READERS["sentencepiece"] if file.suffix == ".model" else _READERS["json"]


def _read_json(file: Path, settings: dict[str, Any], pattern: str | None) -> Converted:
    if file.name != TOKENIZER_FILE and not _begins_as_json(file):
        raise TokenizerError(f"it is not a tokenizer. {WHAT_IS_READ}")
    return read_content(file, _LARGEST_FILE), settings


def _begins_as_json(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(64).lstrip().startswith(b"{")
    except OSError:
        return True  # reading the file will raise a clear error


def _converted(read: Callable[[Path, dict[str, Any], str | None], tuple[str, dict[str, Any]]]) -> Reader:
    def converted(file: Path, settings: dict[str, Any], pattern: str | None) -> Converted:
        content, settings = read(file, settings, pattern)
        return as_bytes(content), settings

    return converted


_READERS: dict[str, Reader] = {
    "json": _read_json,
    "pair": _converted(read_pair),
    "ranks": _converted(read_ranks),
    TEKKEN: _converted(lambda file, settings, pattern: read_tekken(file, settings)),
    WORD_LIST: _converted(lambda file, settings, pattern: read_word_list(file, settings)),
    "sentencepiece": _converted(lambda file, settings, pattern: read_sentencepiece(file, settings)),
}
