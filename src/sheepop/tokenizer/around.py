"""What files without a ``tokenizer.json`` put around a text: the beginning and the end that their neighbours name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sheepop.tokenizer.settings import role_text

# What transformers puts around a text where ``tokenizer_config.json`` names the class and does not say: bos, eos.
_USUAL = {
    "LlamaTokenizer": (True, False),
    "LlamaTokenizerFast": (True, False),
    "CodeLlamaTokenizer": (True, False),
    "CodeLlamaTokenizerFast": (True, False),
    "GemmaTokenizer": (True, False),
    "GemmaTokenizerFast": (True, False),
    "T5Tokenizer": (False, True),
    "T5TokenizerFast": (False, True),
}


def post_processor(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """The ``post_processor`` for ``add_bos_token`` and ``add_eos_token``, or for what is usual for the class named.

    `ids` are those of the special tokens.
    """
    usual = _USUAL.get(str(settings.get("tokenizer_class")), (False, False))
    asked = [settings.get(key, default) for key, default in zip(("add_bos_token", "add_eos_token"), usual, strict=True)]
    named = (role_text(settings, "bos"), role_text(settings, "eos"))
    texts = [text if wanted is True and text in ids else None for text, wanted in zip(named, asked, strict=True)]
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
