"""What chat templates get of tool calls and tools."""

from __future__ import annotations

import json

import pytest

from sheepop.tokenizer import ChatTemplate


def test_templates_get_calls_and_tools_as_they_expect_them() -> None:
    """Arguments are objects, or text where that is joined; a content beside calls is none where that is asked."""
    template = {
        "default": "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if m.content is none %}"
        "{{ c.function.name + c.function.arguments }}{% endif %}{% endfor %}{% endfor %}",
        "objects": "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
        "{% for key, value in f.arguments | items %}{{ f.name }}.{{ key }}={{ value }};{% endfor %}{% endfor %}"
        "{% endfor %}{{ tools | tojson }}",
    }
    texts = ['{"city": "Köln"}', "", None, "[1]"]
    with ChatTemplate(template) as joined, ChatTemplate(template, name="objects") as objects:
        for content, given, written in (
            *((None, text, f"f{text or '{}'}") for text in texts),
            ("", {"city": "Köln"}, 'f{"city": "Köln"}'),
        ):
            call = {"type": "function", "function": {"name": "f", "arguments": given}}
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            assert joined.render([message]) == written
        schema = {"type": "object", "properties": {"day": {"enum": ["now", None]}}}
        tool = {
            "type": "function",
            "strict": None,
            "function": {"name": "f", "description": None, "parameters": schema},
        }
        message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"city": "Köln"}'}]}
        kept = {"type": "function", "function": {"name": "f", "parameters": schema}}
        found = objects.render([message], tools=[tool])
    assert found == "f.city=Köln;" + json.dumps([kept])


# The forms in which published templates read parts: by a loop, and by a filter.
PARTS = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
)
# This one reads the user's as parts, and the model's as a text.
MIXED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<assistant>' + m.content }}{% else %}"
    "{{ '<' + m.role + '>' + m.content[0].text }}{% endif %}{% endfor %}{{ '' if messages[0].type else '' }}"
)


@pytest.mark.parametrize("template", [*PARTS, MIXED])
def test_a_template_that_reads_parts_gets_texts_as_parts(template: str) -> None:
    """As transformers renders them where they are given so."""
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    said = [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4")]
    plain = [{"role": role, "content": text} for role, text in said]
    parts = [
        message
        if template == MIXED and message["role"] == "assistant"
        else {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in plain
    ]
    (wanted,), _ = transformers.render_jinja_template([parts], chat_template=template)
    with ChatTemplate(template) as ours:
        assert ours.render(plain) == wanted == "".join(f"<{role}>{text}" for role, text in said)
