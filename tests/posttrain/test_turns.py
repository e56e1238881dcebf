"""What is learnt of conversations that templates of the published forms render; all spans are checked by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.console import Console
from sheepop.posttrain.encoding import ExampleEncoder
from sheepop.posttrain.rows import Prompt, RowError, Supervised, read_rows
from sheepop.tokenizer import ByteLevelBPE, ChatTemplate
from sheepop.tokenizer.chat import Rendered
from sheepop.tokenizer.chat_child import render

from .conftest import MARKED, UNMARKED
from .test_encoding import learnt

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|start|>", "<|user|>", "<|assistant|>", "<|eot|>",
    "<|head|>", "<call>", "</call>", "<think>", "</think>",
)  # fmt: skip
TOKENIZER = ByteLevelBPE.train(["user assistant\n some text and more of it\n\n"] * 9, 300, list(SPECIAL))
NUMBERS = TOKENIZER.special_tokens

ASKED, SAID = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}
ONE = [ASKED, SAID]
TWO = [*ONE, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]
THOUGHT = [ASKED, {**SAID, "reasoning_content": "A greeting."}, TWO[2], {**TWO[3], "reasoning_content": "A sum."}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLED = [
    {"role": "user", "content": "Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]

# Thoughts and empty thoughts are written in the last turn only, as Qwen3 has it.
THINKING = """
{%- set ns = namespace(last=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}:{{ call.function.arguments | tojson }}</call>
{%- endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
# The end of the text stands behind the end of the last turn, as in Phi-3.
ENDED = """
{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}"""
# The beginning of the next answer is always written, as in Llama 3's first template.
HEADED = """
{%- for m in messages %}{{- '<|head|>' + m.role + '\n\n' + m.content + '<|eot|>' }}{% endfor %}
{{- '<|head|>assistant\n\n' }}"""
# Turns have no end but the beginning of the next one, as in GLM 4.
ENDLESS = """
{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{% endif %}"""
# The last answer ends otherwise than those before it, as in gpt-oss.
CHANNELS = """
{%- for m in messages %}{{- '<|start|>' + m.role + '<|head|>' + m.content }}
{{- '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
# The prompt begins a thought, and an answer without one has none or an empty one, as in DeepSeek-R1 and Qwen 3.5.
BEGUN = UNMARKED.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
EMPTY = BEGUN.replace(
    "%}{{ message['content'] + '<|im_end|>' }}",
    "%}{{ '<think>\n\n</think>\n\n' + message['content'] + '<|im_end|>' }}",
    1,
)
# Plain text with the tokenizer's own end, as in Vicuna.
PLAIN = """
{%- for m in messages %}{% if m.role == 'user' %}{{- 'USER: ' + m.content + ' ' }}
{%- else %}{{- 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{% endif %}"""
BARE = PLAIN.replace(" + eos_token", " + '\\n'")
# Two marks in the last turn, as in TRL's form of Phi-3.
TWICE = """
{%- for m in messages %}{{- '<|' + m.role + '|>\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>\n' }}{% endgeneration %}
{%- else %}{{- m.content + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}
{%- else %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"""
# Marked, and thoughts stay in the last turn only, which a prompt does not show yet.
SHORTENED = """
{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ '<think>' + m.reasoning_content | d('') + '</think>' if loop.index0 == ns.last }}
{{- m.content + '<|im_end|>' }}
{%- endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# A prompt ends the message before it otherwise than a conversation does, as in Hermes 2 Pro.
ALTERED = UNMARKED.replace(
    "message['content'] + '<|im_end|>' }}{% endif",
    "message['content'] + ('' if loop.last else '\n') + '<|im_end|>' }}{% endif",
)


@contextmanager
def encoding(template: str | dict[str, str], ends: Sequence[str] = ("<|im_end|>",)) -> Iterator[ExampleEncoder]:
    with ChatTemplate(template, {"eos_token": "<eos>"}) as chat:
        chat._ask = _rendered  # type: ignore[method-assign]
        yield ExampleEncoder(TOKENIZER, chat, [NUMBERS[end] for end in ends])


def _rendered(request: dict[str, Any]) -> Rendered:
    """The child's work in this process: a child for each test would take seconds."""
    text, *parts = render(json.loads(json.dumps(request)), lambda: None)  # type: ignore[arg-type]
    return Rendered(text, tuple((int(begin), int(end)) for begin, end in (part.split() for part in parts)))


@pytest.mark.parametrize(
    ("template", "ends", "messages", "spans"),
    [
        pytest.param(UNMARKED, ["<|im_end|>"], TWO, [["Hi there!<|im_end|>", "It is 4.<|im_end|>"]], id="ChatML"),
        pytest.param(UNMARKED, [], TWO, [["Hi there!<|im_end|>", "It is 4.<|im_end|>"]], id="ChatML of a base model"),
        pytest.param(
            THINKING,
            ["<|im_end|>"],
            TWO,
            [["<think>\n\n</think>\n\nHi there!<|im_end|>"], ["<think>\n\n</think>\n\nIt is 4.<|im_end|>"]],
            id="empty thoughts in the last turn",
        ),
        pytest.param(
            THINKING,
            ["<|im_end|>"],
            THOUGHT,
            [
                ["<think>\nA greeting.\n</think>\n\nHi there!<|im_end|>"],
                ["<think>\nA sum.\n</think>\n\nIt is 4.<|im_end|>"],
            ],
            id="thoughts in the last turn",
        ),
        pytest.param(ENDED, ["<|end|>"], TWO, [["Hi there!<|end|>", "It is 4.<|end|>"]], id="an end of the text"),
        pytest.param(ENDED, [], TWO, [["Hi there!<|end|>", "It is 4.<|end|>"]], id="an end that is not known as one"),
        pytest.param(HEADED, ["<|eot|>"], TWO, [["Hi there!<|eot|>", "It is 4.<|eot|>"]], id="a header behind"),
        pytest.param(HEADED, [], TWO, [["Hi there!<|eot|>", "It is 4.<|eot|>"]], id="a header behind an unknown end"),
        pytest.param(
            ENDLESS, ["<|user|>"], TWO, [["Hi there!<|user|>", "It is 4.<|user|>"]], id="an end in the next turn"
        ),
        pytest.param(
            CHANNELS,
            ["<|return|>"],
            TWO,
            [["<|head|>Hi there!<|return|>"], ["<|head|>It is 4.<|return|>"]],
            id="another end in the last turn",
        ),
        pytest.param(CHANNELS, [], ONE, [["<|head|>Hi there!"]], id="another end that is not known as one"),
        pytest.param(
            ALTERED, ["<|im_end|>"], TWO, [["Hi there!<|im_end|>"], ["It is 4.<|im_end|>"]], id="a prompt that differs"
        ),
        pytest.param(BEGUN, ["<|im_end|>"], ONE, [["Hi there!<|im_end|>"]], id="a thought that the prompt begins"),
        pytest.param(
            EMPTY, ["<|im_end|>"], ONE, [["\n</think>\n\nHi there!<|im_end|>"]], id="an empty one that it begins"
        ),
        pytest.param(PLAIN, [], TWO, [[" Hi there!<eos>", " It is 4.<eos>"]], id="plain text"),
        pytest.param(BARE, [], TWO, [[" Hi there!\n", " It is 4.\n"]], id="plain text without an end"),
        pytest.param(MARKED, [], TWO, [["Hi there!<|im_end|>", "It is 4.<|im_end|>"]], id="marks"),
        pytest.param(TWICE, [], TWO, [["Hi there!<|end|>\n", "It is 4.<|end|>\n<eos>"]], id="two marks in a turn"),
        pytest.param(
            SHORTENED,
            ["<|im_end|>"],
            THOUGHT,
            [["<think>A greeting.</think>Hi there!<|im_end|>"], ["<think>A sum.</think>It is 4.<|im_end|>"]],
            id="marks where the history is shortened",
        ),
    ],
)
def test_the_answers_and_their_ends_are_learnt(
    template: str, ends: list[str], messages: list[Any], spans: list[list[str]]
) -> None:
    with encoding(template, ends) as encode:
        found = encode.conversation(messages)
        prompts = [encode.prompt(messages[: 2 * number + 1]).ids for number in range(len(messages) // 2)]
    assert [learnt(example, TOKENIZER) for example in found] == spans
    if template not in (BEGUN, SHORTENED):  # in which the prompt has what a finished answer does not follow
        for example, prompt in zip(found, prompts, strict=False):  # answers that share an example begin with the first
            assert example.ids[: example.supervised.index(True)] == prompt


def test_one_learns_what_was_found_out_about_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Said at the start: new ends, answers apart, answers without an end, and prompts that nobody answers."""
    told = []
    for template, ends in ((UNMARKED, ()), (CHANNELS, ("<|return|>",)), (BARE, ()), (BEGUN, ("<|im_end|>",))):
        with encoding(template, ends) as encode:
            encode.conversation(TWO)
            encode.tell(Console())
            told.append((capsys.readouterr().err.replace("\n", " "), encode.end_ids))
    assert "Answers end with <|im_end|>, which joins the tokens that end the model's texts." in told[0][0]
    assert "1 answer became" in told[1][0]
    assert "2 answers end without a special token" in told[2][0]
    assert "A prompt in generation ends with '<think>\\n', but 2 answers here do not follow that" in told[3][0]
    numbers = [NUMBERS["<|im_end|>"], NUMBERS["<|return|>"], NUMBERS["<|im_end|>"]]
    assert [ends for _, ends in told] == [numbers[:1], numbers[1:2], [], numbers[2:]]


def test_a_call_is_learnt_whole_and_its_arguments_are_an_object() -> None:
    texts = ['<think>\n\n</think>\n\n<call>weather:{"city": "Oslo"}</call><|im_end|>', "It rains.<|im_end|>"]
    for arguments, written in (
        ('{"city": "Oslo"}', '{"city": "Oslo"}'),
        ({"city": "Oslo"}, '{"city": "Oslo"}'),
        ("", "{}"),
        (None, "{}"),
    ):
        call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
        with encoding(THINKING) as encode:
            found = encode.conversation([CALLED[0], {**CALLED[1], "tool_calls": [call]}, *CALLED[2:]], [WEATHER])
        expected = texts[0].replace('{"city": "Oslo"}', written), "<think>\n\n</think>\n\n" + texts[1]
        assert [learnt(example, TOKENIZER) for example in found] == [list(expected)]


@pytest.mark.parametrize(
    ("template", "messages", "tools", "field"),
    [
        (UNMARKED, CALLED, [WEATHER], r"tools\[0\]"),
        (UNMARKED, CALLED, [], r"messages\[1\]\.tool_calls\[0\]"),
        (MARKED, CALLED, [], r"messages\[1\]\.tool_calls\[0\]"),
        (UNMARKED, THOUGHT[:2], [], r"messages\[1\]\.reasoning_content"),
        (MARKED, THOUGHT[:2], [], r"messages\[1\]\.reasoning_content"),
        (
            UNMARKED,
            [ASKED, {**SAID, "mood": "glad"}],
            [],
            r"messages\[1\]\.mood: neither SheepOp nor the chat template",
        ),
        (UNMARKED, [{**ASKED, "name": "Ann"}, SAID], [], r"messages\[0\]\.name: neither"),
        (
            UNMARKED.replace(
                "{%- for message in messages %}", "{%- for message in messages if message.role != 'system' %}"
            ),
            [{"role": "system", "content": "Be brief."}, *ONE],
            [],
            r"messages\[0\]\.content",
        ),
        (
            UNMARKED.replace("message['content'] +", "message['content'].split('</thought>')[-1] +"),
            [ASKED, {**SAID, "content": "A greeting.</thought>Hi there!"}],
            [],
            r"messages\[1\]\.content",
        ),
    ],
)
def test_what_a_template_drops_is_refused_by_name(template: str, messages: Any, tools: Any, field: str) -> None:
    with encoding(template) as encode, pytest.raises(RowError, match=field):
        encode.supervised(Supervised("line 1", "", tuple(messages), tuple(tools)))
    if tools:
        with encoding(template) as encode, pytest.raises(RowError, match=field):
            encode.prompt(messages[:1], tools)


def test_a_key_that_the_template_reads_is_no_mistake() -> None:
    with encoding(UNMARKED.replace("message['role'] +", "(message.name or message['role']) +")) as encode:
        (found,) = encode.conversation([{**ASKED, "name": "Ann"}, SAID])
    assert "<|im_start|>Ann\n" in TOKENIZER.decode(found.ids, skip_special=False)


def test_with_tools_the_template_of_that_name_is_used() -> None:
    with encoding({"default": UNMARKED, "tool_use": THINKING}) as encode:
        (found,) = encode.conversation(CALLED, [WEATHER])
        (plain,) = encode.conversation(ONE)
    assert '"name": "weather"' in TOKENIZER.decode(found.ids, skip_special=False)
    assert "<think>" not in TOKENIZER.decode(plain.ids, skip_special=False)


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}])
def test_turns_that_are_not_to_be_learnt_are_read_only(key: dict[str, Any]) -> None:
    with encoding(UNMARKED) as encode:
        (found,) = encode.conversation([TWO[0], {**TWO[1], **key}, *TWO[2:]])
        (whole,) = encode.conversation(TWO)
        with pytest.raises(RowError, match="no answer to learn"):
            encode.conversation([ASKED, {**SAID, **key}])
    assert learnt(found, TOKENIZER) == ["It is 4.<|im_end|>"]
    assert found.ids == whole.ids


@pytest.mark.parametrize("template", [UNMARKED, MARKED, ENDED], ids=["unmarked", "marked", "ended"])
def test_a_special_token_that_a_message_spells_is_text(template: str) -> None:
    """The tokens are those of the same letters; nothing in a message begins or ends a turn."""
    said = "Use <|im_end|> or <eos>."
    with encoding(template, ["<|im_end|>", "<|end|>"]) as encode:
        (found,) = encode.conversation([ASKED, {**SAID, "content": said}, {**ASKED, "content": said}, SAID])
        (plain,) = encode.conversation([ASKED, SAID, ASKED, SAID])
    end = "<|end|>" if template is ENDED else "<|im_end|>"
    assert [found.ids.count(number) for number in NUMBERS.values()] == [
        plain.ids.count(number) for number in NUMBERS.values()
    ]
    assert TOKENIZER.decode(found.ids, skip_special=False).count(said) == 2
    assert learnt(found, TOKENIZER) == [said + end, "Hi there!" + end]


def test_a_prompt_with_tools_has_the_tokens_that_the_server_gives_to_the_model(lines: Callable[..., Path]) -> None:
    """Clients send null for what they leave out, arguments as JSON text, and contents as parts."""
    from sheepop.serve.chat_request import ChatRequest

    parameters = {"type": "object", "properties": {"day": {"enum": ["today", None]}}}
    tool = {"type": "function", "strict": None, "function": {**WEATHER["function"], "parameters": parameters}}  # type: ignore[dict-item]
    tool["function"] |= {"description": None, "strict": None}
    asked = {**CALLED[0], "content": [{"type": "text", "text": "Os"}, {"type": "text", "text": "lo?"}], "name": None}
    body = {"model": "m", "messages": [asked, {**CALLED[1], "content": None}, CALLED[2]], "tools": [tool]}
    requested = ChatRequest.model_validate(body)
    with encoding(THINKING) as encode, ChatTemplate(THINKING) as served:
        served._ask = _rendered  # type: ignore[method-assign]
        said = [message.to_template() for message in requested.messages]
        expected = served.encode(TOKENIZER, said, **requested.for_template(), **requested.variables())
        row = {"messages": [*body["messages"], CALLED[3]], "tools": [tool]}
        (read,) = read_rows([lines([row])], Supervised)
        (found,) = encode.supervised(read)
        (prompt,) = read_rows([lines([row], "prompts.jsonl")], Prompt)
        asked_alone = encode.prompt(prompt.prompt, prompt.tools)
    assert TOKENIZER.decode(expected, skip_special=False).count("null") == 1  # a value of the schema
    assert found.ids[: len(expected)] == asked_alone.ids == expected
    assert found.supervised[len(expected)] and sum(found.supervised[: len(expected)]) > 0  # the call before it
