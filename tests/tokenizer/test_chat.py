"""transformers says what the text of a conversation is; what a hostile template may do is bounded."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import TokenizerError, UsageError
from sheepop.tokenizer import CharTokenizer, ChatTemplate, Tokenizer, chat_templates, load_tokenizer

# Headers around every message, a system message that is made up where there is none.
CHATML = """
{%- if messages[0].role != 'system' -%}
<|im_start|>system
You are helpful.<|im_end|>
{% endif -%}
{% for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- generation %}{{ message['content'] | trim }}{% endgeneration %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""

# Special tokens by name, the date, tools as JSON, calls of tools and their results.
TOOLS = """
{{- bos_token }}
{%- set ns = namespace(calls=0, first=true) %}
{%- macro header(role) %}<|start|>{{ role }}<|end|>

{% endmacro %}
{%- if tools is not none and tools %}
    {{- header('system') }}Year {{ strftime_now('%Y') }}.
    {% for tool in tools %}
{{ loop.index }}. {{ tool | tojson(indent=2) }}
    {% endfor %}
    {%- if documents %}{{ documents | map(attribute='title') | join(', ') }}{% endif %}
{%- endif %}
{%- for message in messages if message.content is not defined or message.content != 'skip' %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
    {{- header(message.role) }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {%- set ns.calls = ns.calls + 1 %}
<call {{ ns.calls }}>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</call>
        {%- endfor %}
    {%- elif message.content is string %}
        {{- message.content.replace('<', '&lt;').strip() }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type != 'text' %}{% continue %}{% endif %}
            {{- part.text | default('?', true) }}
        {%- endfor %}
    {%- endif %}
    {{- eos_token if not loop.last else '' }}
    {%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{%- endfor %}
{{- header('assistant') if add_generation_prompt }}
{{- 'thinking: ' ~ enable_thinking if enable_thinking is defined }}
"""

CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "  Hi, é < 🐑 \n"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "skip"},
        ],
        "add_generation_prompt": True,
    },
]
WITH_TOOLS: list[dict[str, Any]] = [
    *CONVERSATIONS,
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "image"}, {"type": "text"}]},
            {
                "role": "assistant",
                "content": None,
                "thinking": "use the tool",
                "tool_calls": [
                    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
                ],
            },
            {"role": "tool", "content": json.dumps({"t": 21.5}), "name": "weather"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
        "documents": [{"title": "One", "text": "x"}, {"title": "Two", "text": "y"}],
        "add_generation_prompt": True,
        "enable_thinking": False,
    },
]


@pytest.fixture(scope="module")
def process() -> Iterator[ChatTemplate]:
    with ChatTemplate("{{ messages[0].content }}") as template:
        yield template


def with_template(directory: Path, template: Any, tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.save(directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return load_tokenizer(directory)


@pytest.mark.parametrize(("template", "conversations"), [(CHATML, CONVERSATIONS), (TOOLS, WITH_TOOLS)])
def test_the_text_of_a_conversation_is_that_of_transformers(
    template: str, conversations: list[dict[str, Any]], bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    ours = with_template(tmp_path, template, bpe)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    with ChatTemplate.of(ours) as chat:
        for conversation in conversations:
            arguments = {key: value for key, value in conversation.items() if key != "messages"}
            expected = theirs.apply_chat_template(conversation["messages"], tokenize=False, **arguments)
            text = chat.render(**conversation)
            assert text == expected
            ids = theirs.apply_chat_template(conversation["messages"], return_dict=False, **arguments)
            assert ours.encode(text, allow_special=True) == ids


def test_templates_are_found_wherever_a_directory_has_them(tmp_path: Path):
    named = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
        {"name": "rag", "template": "R"},
    ]
    tokenizer = with_template(tmp_path, named, CharTokenizer())
    assert chat_templates(tokenizer) == {"default": "D", "tool_use": "T", "rag": "R"}
    with pytest.raises(TokenizerError, match="no chat template 'x'; it has default, rag, tool_use"):
        ChatTemplate.of(tokenizer, "x")

    (tmp_path / "chat_template.jinja").write_text("F é")
    assert chat_templates(load_tokenizer(tmp_path)) == {"default": "F é"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("G")
    loaded = load_tokenizer(tmp_path)
    assert chat_templates(loaded) == {"default": "F é", "tool_use": "G"}
    loaded.save(tmp_path / "copy")
    assert chat_templates(load_tokenizer(tmp_path / "copy")) == {"default": "F é", "tool_use": "G"}


NAMED = [
    {"name": "default", "template": "D{% for m in messages %}[{{ m.content }}]{% endfor %}{{ style }}"},
    {"name": "tool_use", "template": "T{{ tools | length }}{{ messages[0].content }}"},
    {"name": "rag", "template": "R{{ documents | map(attribute='title') | join('+') }}{{ messages[0].content }}"},
]
SAID = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHOICES: list[tuple[str | None, dict[str, Any], str]] = [
    (None, {}, "D[Hi]"),
    (None, {"tools": [TOOL]}, "T1Hi"),
    (None, {"tools": []}, "T0Hi"),
    (None, {"documents": [{"title": "A", "text": "x"}]}, "D[Hi]"),
    ("rag", {"documents": [{"title": "A", "text": "x"}, {"title": "B", "text": "y"}]}, "RA+BHi"),
    ("default", {"tools": [TOOL], "style": "!"}, "D[Hi]!"),
]


@pytest.mark.parametrize("as_files", [False, True])
def test_of_several_templates_that_is_taken_which_transformers_takes(
    as_files: bool, bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    if as_files:
        bpe.save(tmp_path)
        (tmp_path / "additional_chat_templates").mkdir()
        for named in NAMED:
            place = "" if named["name"] == "default" else f"additional_chat_templates/{named['name']}"
            (tmp_path / f"{place or 'chat_template'}.jinja").write_text(named["template"])
        ours = load_tokenizer(tmp_path)
    else:
        ours = with_template(tmp_path, NAMED, bpe)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for name, given, expected in CHOICES:
        assert theirs.apply_chat_template(SAID, tokenize=False, chat_template=name, **given) == expected
        with ChatTemplate.of(ours, name) as chat:
            assert chat.render(SAID, **given) == expected


def test_variables_of_a_template_are_given_once_or_with_a_conversation(tmp_path: Path):
    tokenizer = with_template(tmp_path, "{{ bos_token }}{{ a }}{{ b | tojson }}", CharTokenizer())
    with ChatTemplate.of(tokenizer, variables={"a": 1, "b": {"c": [True, None]}}) as chat:
        assert chat.render(SAID) == '<bos>1{"c": [true, null]}'
        assert chat.render(SAID, a="x") == '<bos>x{"c": [true, null]}'
        assert chat.settings == {"chat_template_kwargs": {"a": 1, "b": {"c": [True, None]}}}
    with ChatTemplate.of(tokenizer, variables={"bos_token": "B"}) as chat:
        assert chat.render(SAID, b=1) == "B1"
    with pytest.raises(UsageError, match="messages, tools: a conversation gives the chat template this itself"):
        ChatTemplate.of(tokenizer, variables={"tools": [], "messages": []})


def test_templates_of_which_none_is_for_the_conversation_are_refused():
    only = {"tool_use": "T", "rag": "R"}
    with ChatTemplate(only) as chat:
        assert chat.render(SAID, tools=[TOOL]) == "T"
        with pytest.raises(TokenizerError, match=r"no chat template 'default'; it has rag, tool_use\. Choose one"):
            chat.render(SAID)
    with pytest.raises(TokenizerError, match="no chat template 'default'; it has rag"):
        ChatTemplate({"rag": "R"})


@pytest.mark.parametrize("given", [{"tools": [print]}, {"tools": {"a": 1}}, {"documents": ["x"]}, {"documents": "x"}])
def test_tools_and_documents_that_are_no_objects_are_refused(given: dict[str, Any], process: ChatTemplate):
    with pytest.raises(UsageError, match=f"{next(iter(given))} must be a list of objects"):
        process.render(SAID, **given)


PARTS = [{"type": "text", "text": "See "}, {"type": "text", "text": "this "}, {"type": "image"}]
WRITES_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}<end>{% endfor %}"
)
WRITES_REASONING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<end>{% endfor %}"
)
CONTINUED: list[tuple[str, list[dict[str, Any]], bool | str]] = [
    (CHATML, [*SAID, {"role": "assistant", "content": "The answer is "}], True),
    (CHATML, [*SAID, {"role": "assistant", "content": "Hi"}], True),
    (TOOLS, [*SAID, {"role": "assistant", "content": " a b "}], True),
    (WRITES_PARTS, [*SAID, {"role": "assistant", "content": "The answer is "}], True),
    (WRITES_PARTS, [*SAID, {"role": "assistant", "content": PARTS}], True),
    (WRITES_REASONING, [*SAID, {"role": "assistant", "content": "A", "thinking": "so "}], "reasoning_content"),
    (WRITES_REASONING, [*SAID, {"role": "assistant", "content": "A", "reasoning": "so"}], "reasoning"),
]


@pytest.mark.parametrize(("template", "messages", "field"), CONTINUED)
def test_a_last_message_is_continued_where_transformers_continues_it(
    template: str, messages: list[dict[str, Any]], field: bool | str
):
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    names = {"bos_token": "<b>", "eos_token": "<e>"}
    (expected,), _ = utilities.render_jinja_template(
        conversations=[messages], chat_template=template, continue_final_message=field, **names
    )
    with ChatTemplate(template, names) as chat:
        assert chat.render(messages, continue_final_message=field) == expected


@pytest.mark.parametrize(
    ("template", "message", "given", "error"),
    [
        ("{{ messages[0].content }}", {"content": "a"}, {"add_generation_prompt": True}, "exclude each other"),
        ("{{ messages[0].content }}", {"content": None}, {}, "has no text in 'content'"),
        ("{{ messages[0].content }}", {"content": [{"type": "image"}]}, {}, "has no text in 'content'"),
        ("{{ messages[0].role }}", {"content": "a"}, {}, "does not read 'content'"),
        ("{{ messages[0].content[:2] }}", {"content": "abc"}, {}, "changes the end of the last message"),
        ("{{ messages[0].content | upper }}", {"content": "abc"}, {}, "changes the end of the last message"),
    ],
)
def test_a_last_message_that_cannot_be_continued_is_refused(
    template: str, message: dict[str, Any], given: dict[str, Any], error: str
):
    with ChatTemplate(template) as chat, pytest.raises((UsageError, TokenizerError), match=error):
        chat.render([{"role": "user", **message}], continue_final_message=True, **given)


def test_a_model_without_a_template_says_so():
    with pytest.raises(TokenizerError, match=r"This model has no chat template: .* trained on conversations"):
        ChatTemplate.of(CharTokenizer())


@pytest.mark.parametrize("template", [3, [3], [{"name": "default"}], {"default": "x"}])
def test_what_is_no_template_is_refused(template: Any, tmp_path: Path):
    with pytest.raises(TokenizerError, match="chat_template must be a template, or a list of objects"):
        ChatTemplate.of(with_template(tmp_path, template, CharTokenizer()))


@pytest.mark.parametrize(
    "messages", [[], ["hi"], [{"role": "user", "content": {1, 2}}], [{"content": "x"}], [{"role": 1}]]
)
def test_what_is_no_conversation_is_refused(messages: Any, process: ChatTemplate):
    with pytest.raises(UsageError, match="conversation"):
        process.render(messages)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROW = "{% set ns = namespace(x='a' * 9999) %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "seconds", "message"),
    [
        (LOOP, 0.5, "did not finish within 0.5 s, so it was stopped"),
        # On a busy machine even these take a while.
        ("{{ 'a' * 10**10 }}", 60, "needed more than 268,435,456 bytes of memory"),
        (GROW, 60, "needed more than 268,435,456 bytes of memory|writes too much"),
    ],
)
def test_a_template_that_loops_or_allocates_is_stopped(template: str, seconds: float, message: str):
    chat = ChatTemplate(template, seconds=seconds, memory_bytes=2**28)
    with chat, pytest.raises(TokenizerError, match=message):
        chat.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(9999) %}{{ 'a' * 99 }}{% endfor %}", "writes too much .more than 65,536 characters"),
        ("{% if %}", "is not a valid Jinja template"),
        ("{{ ''.__class__.__mro__ }}", "does something that the sandbox forbids"),
        ("{{ namespace(__class__=1) }}", "does something that the sandbox forbids"),
        (
            "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
            "does something that the sandbox forbids|is not a valid",
        ),
        (
            "{{ dict.mro() }}",
            "uses a value that the conversation does not have|does something that the sandbox forbids",
        ),
        ("{{ messages.append(1) }}", "does something that the sandbox forbids"),
        ("{{ dict.update(messages[0], role='system') }}", "uses a value that the conversation does not have"),
        ("{{ cycler.__init__.__globals__ }}", "does something that the sandbox forbids"),
        ("{{ raise_exception('users first') }}", r"does not accept this conversation \(users first\)"),
        ("{{ messages[7].role.x }}", "uses a value that the conversation does not have"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "calls itself too deeply"),
        ("{% include 'x' %}", "failed"),
        ("{{ messages | tojson(indent=messages) }}", "failed"),
        ("{{" + "(" * 5000, "calls itself too deeply|is not a valid"),
    ],
)
def test_a_template_that_fails_says_why(process: ChatTemplate, template: str, message: str):
    process._templates, process._limits = {"default": template}, (10.0, 2**29, 2**16)
    with pytest.raises(TokenizerError, match=f"The chat template of the model ({message})"):
        process.render([{"role": "user", "content": "x"}])


def test_a_template_that_is_too_long_is_refused():
    with pytest.raises(TokenizerError, match="has 1,048,577 characters, but it may have at most 1,048,576"):
        ChatTemplate("x" * (2**20 + 1))


def test_threads_share_a_template():
    found: list[str] = []

    def ask(chat: ChatTemplate, number: int) -> None:
        found.append(chat.render([{"role": "user", "content": str(number)}]))

    with ChatTemplate("{{ messages[0].content }}!") as chat:
        threads = [threading.Thread(target=ask, args=(chat, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [f"{number}!" for number in range(8)]


def test_the_parts_that_a_model_writes_are_those_of_transformers():
    """``{% generation %}`` in CHATML surrounds every message."""
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [
        {"role": "user", "content": " 2+2? "},
        {"role": "assistant", "content": "4 \0 <|im_end|>"},
        {"role": "user", "content": "Käse 🧀"},
        {"role": "assistant", "content": ""},
    ]
    (expected,), (parts,) = utilities.render_jinja_template(
        conversations=[messages], chat_template=CHATML, return_assistant_tokens_mask=True
    )
    with ChatTemplate(CHATML) as chat:
        found = chat.render_marked(messages)
        assert found.text == expected == chat.render(messages)
    assert found.written == tuple(parts)
    written = [found.text[begin:end] for begin, end in found.written]
    assert written == ["2+2?", "4 \0 <|im_end|>", "Käse 🧀", ""]


@pytest.mark.parametrize(
    "template",
    [
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
        "{% filter upper %}{% generation %}a{% endgeneration %}{% endfilter %}",
        "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x[:20] }}",
        "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x[-20:] }}",
    ],
)
def test_parts_that_cannot_be_told_are_refused(template: str):
    with ChatTemplate(template) as chat:
        with pytest.raises(TokenizerError, match="generation blocks"):
            chat.render_marked([{"role": "user", "content": "x"}])
        chat.render([{"role": "user", "content": "x"}])
