"""What chat templates get of tool calls and tools."""

from __future__ import annotations

import json

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
