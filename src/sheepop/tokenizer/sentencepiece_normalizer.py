"""What SentencePiece does to a text before it looks for pieces, in the steps of the `tokenizers` library."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SPACE = "\u2581"
"""What stands for a space in pieces."""


@dataclass(frozen=True)
class NormalizerSpec:
    """The settings of a model: a table of replacements, a space in front of every text, and spaces taken together."""

    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def normalizer_of(spec: NormalizerSpec, symbols: Sequence[str]) -> dict[str, Any]:
    """The ``normalizer`` of a ``tokenizer.json``; `symbols` are the added tokens that are looked for in its result.

    The library normalises `symbols` too, each by itself, so a text that is one of them and nothing else gets no space
    in front: that is the one text that SentencePiece treats otherwise.
    """
    steps: list[dict[str, Any]] = []
    if spec.charsmap:
        table = base64.b64encode(spec.charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        steps += [_replace(r"\A +| +\z", ""), _replace(" {2,}", " ")]
    if spec.add_dummy_prefix and symbols:
        alone = "|".join(map(re.escape, symbols))
        steps.append(_replace(rf"\A(?!(?:{alone})\z)(?=[\s\S])", SPACE))
    elif spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    if spec.remove_extra_whitespaces:
        # A sign for a space that stands in the text itself is taken for one at the end, as there.
        steps.append(_replace(rf"{SPACE}+\z", ""))
    return {"type": "Sequence", "normalizers": steps}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
