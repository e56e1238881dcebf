"""What of an example is learnt, for people to look at before hours are spent on it."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from sheepop.core.facts import visible
from sheepop.posttrain.encoding import Example
from sheepop.tokenizer import Tokenizer

_LEARNT, _GIVEN = ("bold green", "bold green underline"), ("dim", "dim underline")


def preview(example: Example, tokenizer: Tokenizer) -> Text:
    """The tokens of an example one by one, those that are learnt in green; every other one is underlined."""
    text = Text()
    for number, token in enumerate(preview_tokens(example, tokenizer)):
        styles = _LEARNT if token["supervised"] else _GIVEN
        text.append(token["text"], style=styles[number % 2])
    return text


def plain_preview(example: Example, tokenizer: Tokenizer) -> str:
    """The same without colours: what is learnt stands between ``[[`` and ``]]``."""
    parts, learnt = [], False
    for token in preview_tokens(example, tokenizer):
        if token["supervised"] != learnt:
            parts.append("[[" if token["supervised"] else "]]")
            learnt = token["supervised"]
        parts.append(token["text"])
    return "".join(parts) + ("]]" if learnt else "")


def preview_tokens(example: Example, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For each token its id, its text and whether it is learnt; a character of several tokens stands at the last."""
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    found: list[dict[str, Any]] = []
    held: list[int] = []
    for token_id, supervised in zip(example.ids, example.supervised, strict=True):
        if token_id in names:
            text, held = names[token_id], []
        else:
            held.append(token_id)
            try:
                text, held = b"".join(map(tokenizer.token_bytes, held)).decode("utf-8"), []
            except UnicodeDecodeError:
                text = ""
        found.append({"id": token_id, "text": visible(text), "supervised": supervised})
    return found
