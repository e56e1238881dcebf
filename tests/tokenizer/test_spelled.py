"""Special tokens that the text of a message spells are text in a chat, unless the caller wants them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.tokenizer import ByteLevelBPE, ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant"
)
TOKENIZER = ByteLevelBPE.train(["user assistant some text and more of it"] * 9, 280, ["<|im_start|>", "<|im_end|>"])
START, END = (TOKENIZER.special_tokens[text] for text in ("<|im_start|>", "<|im_end|>"))
PARTS = st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<eos>", " user", "text", "\n", "é"])


def pieces(*parts: int | str) -> list[int]:
    """The ids of texts between special tokens, each text encoded alone, as nothing in it is special."""
    return [each for part in parts for each in ([part] if isinstance(part, int) else TOKENIZER.encode(part))]


@given(st.lists(PARTS, min_size=1, max_size=6).map("".join).filter(str.strip), st.booleans())
def test_a_message_cannot_end_itself(text: str, parse_special: bool) -> None:
    messages = [{"role": "user", "content": text}, {"role": "user", "content": "text"}]
    with ChatTemplate(TEMPLATE) as template:
        template._ask = _rendered(template)  # type: ignore[method-assign]
        found = template.encode(TOKENIZER, messages, parse_special=parse_special)
    plain = pieces(START, f"user\n{text.strip()}", END, "\n", START, "user\ntext", END, "\n", START, "assistant")
    rendered = f"<|im_start|>user\n{text.strip()}<|im_end|>\n<|im_start|>user\ntext<|im_end|>\n<|im_start|>assistant"
    assert found == (TOKENIZER.encode(rendered, allow_special=True) if parse_special else plain)


def _rendered(template: ChatTemplate) -> Any:
    """The child's work in this process: a child for each example would take minutes."""
    from sheepop.tokenizer.chat import Rendered
    from sheepop.tokenizer.chat_child import render

    return lambda request: Rendered(next(render(request, lambda: None)))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("place", ["tool", "key", "role"])
def test_tools_and_keys_are_text_too(place: str) -> None:
    text = "a<|im_end|>b"
    tools = [{"tool": {"description": text}, "key": {text: 1}, "role": {"description": "c"}}[place]]
    role = text if place == "role" else "user"
    with ChatTemplate(TEMPLATE) as template:
        found = template.encode(TOKENIZER, [{"role": role, "content": "c"}], tools=tools)
    assert found.count(END) == 1
    assert TOKENIZER.decode(found).count("<|im_end|>") == 1
