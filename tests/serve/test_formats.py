"""Reasoning and tool calls in the formats of published models: told from the template, read whole and in pieces."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.serve.answer_text import AnswerText, Part
from sheepop.serve.chat_request import ChatRequest
from sheepop.serve.formats import FORMATS, format_of, markers

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "time")]
BERN, TIME = ("weather", {"city": "Bern", "days": 2}), ("time", {})
ARGUMENTS = '{"city": "Bern", "days": 2}'
THINK = "<think>\nHm, <b>.\n</think>\n\n"

# Format, what begins the template's reasoning, the answer, and what it says, thinks and calls.
ANSWERS: list[tuple[str, str, str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "hermes", "</think>",
        f'{THINK}Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        "Let me see.", "Hm, <b>.", [BERN, TIME],
    ),
    (
        "hermes", "",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "", "", [BERN, TIME],
    ),
    ("llama3", "", f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}', "", "", [BERN]),
    (
        "llama3", "", f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "time", "parameters": {{}}}}',
        "", "", [BERN, TIME],
    ),
    ("llama3", "", '{"name": "no tool"} is JSON.', '{"name": "no tool"} is JSON.', "", []),
    ("json", "", f' [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "time"}}]', "", "", [BERN, TIME]),
    (
        "mistral", "", f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}, "id": "a1"}}, {{"name": "time"}}]',
        "", "", [BERN, TIME],
    ),
    (
        "mistral", "[/THINK]",
        f"[THINK]Hm.[/THINK]Well[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}",
        "Well", "Hm.", [BERN, TIME],
    ),
    ("mistral", "", f"[TOOL_CALLS]weather{ARGUMENTS}", "", "", [BERN]),
    (
        "deepseek", "</think>",
        "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>time<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "Yes.", "", [BERN, TIME],
    ),
    (
        "harmony", "",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ARGUMENTS,
        "Wait.", "Hm.", [BERN],
    ),
    (
        "harmony", "", " to=functions.weather<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>",
        "", "", [BERN],
    ),
    ("harmony", "", "<|channel|>final<|message|>All is well.", "All is well.", "", []),
    (
        "gemma", "<channel|>",
        '<|channel>thought\nHm.<channel|>So<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:time{}<tool_call|>",
        "So", "Hm.", [BERN, TIME],
    ),
    (
        "dsml", "</think>",
        f"{THINK}Yes.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n"
        '<｜DSML｜parameter name="city" string="true">Bern</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Yes.", "Hm, <b>.", [BERN, TIME],
    ),
    (
        "kimi", "</think>",
        "Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "Yes.", "", [BERN, TIME],
    ),
    (
        "minimax", "</think>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bern</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>',
        "", "", [BERN, TIME],
    ),
    (
        "hermes", "</think>",
        f"{THINK}<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
        "", "Hm, <b>.", [BERN, TIME],
    ),
    (
        "hermes", "",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Bern</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
        "", "", [BERN],
    ),
    (
        "cohere", "<|END_THINKING|>",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", '
        f'"parameters": {ARGUMENTS}}},\n    {{"tool_call_id": "1", "tool_name": "time", "parameters": {{}}}}\n]'
        "<|END_ACTION|>",
        "", "Hm.", [BERN, TIME],
    ),
    ("cohere", "", "<|START_RESPONSE|>All is well.<|END_RESPONSE|>", "All is well.", "", []),
    (
        "command_r", "",
        f'Action: ```json\n[\n    {{\n        "tool_name": "weather",\n        "parameters": {ARGUMENTS}\n    }}\n]```',
        "", "", [BERN],
    ),
    (
        "lfm2", "", "Well<|tool_call_start|>[weather(city='Bern', days=2), time()]<|tool_call_end|>",
        "Well", "", [BERN, TIME],
    ),
    ("json", "", '[weather(city="Bern", days=2), time()]', "", "", [BERN, TIME]),
    ("granite", "", f'<|tool_call|>[{{"name": "weather", "arguments": {ARGUMENTS}}}]', "", "", [BERN]),
    ("nemotron", "", f'<TOOLCALL>[{{"name": "weather", "arguments": {ARGUMENTS}}}]</TOOLCALL>', "", "", [BERN]),
    (
        "jamba", "",
        f'<tool_calls>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n{{"name": "time", "arguments": {{}}}}\n'
        "</tool_calls>",
        "", "", [BERN, TIME],
    ),
    ("olmo", "", '<function_calls>weather(city="Bern", days=2)\ntime()</function_calls>', "", "", [BERN, TIME]),
    (
        "internlm", "", f'<|action_start|><|plugin|>{{"name": "weather", "parameters": {ARGUMENTS}}}<|action_end|>',
        "", "", [BERN],
    ),
    (
        "seed", "</seed:think>",
        "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Bern</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        "", "Hm.", [BERN],
    ),
    (
        "function_gemma", "",
        "<start_function_call>call:weather{city:<escape>Bern<escape>,days:2}<end_function_call>", "", "", [BERN],
    ),
]  # fmt: skip


def chat(**more: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, "tools": TOOLS, **more})


def add(found: Part, part: Part) -> None:
    found.said += part.said
    found.reasoning += part.reasoning
    found.calls += part.calls


def pushed(splitter: AnswerText, text: str, step: int) -> Part:
    found = Part()
    for start in range(0, len(text) + 1, step):
        add(found, splitter.push(text[start : start + step], is_last=start + step > len(text)))
    return found


@pytest.mark.parametrize("case", range(len(ANSWERS)))
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_answers_are_split_as_the_model_means_them(case: int, step: int) -> None:
    name, reasoning, text, said, thought, calls = ANSWERS[case]
    found = pushed(AnswerText(chat(), format_of(reasoning, name)), text, step)
    assert (found.said, found.reasoning) == (said, thought)
    assert [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in found.calls] == calls


@pytest.mark.parametrize("case", range(len(ANSWERS)))
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_stream_adds_up_to_the_whole(case: int, data: st.DataObject) -> None:
    """Answers of the format's marks, calls and texts in any order and cut anywhere are the same whole and in pieces."""
    name, reasoning, answer = ANSWERS[case][:3]
    sections = format_of(reasoning, name)
    marks = [mark for mark in markers(sections) if mark]
    bits = st.sampled_from(
        [*marks, *(mark[:-1] for mark in marks), answer, ARGUMENTS, "weather", " ", "\n\n", "Hm.", "}"]
    )
    text = "".join(data.draw(st.lists(bits, max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    begins = data.draw(st.sampled_from([None, *(section for section in sections if section.kind == "reasoning")]))
    chosen = chat(parallel_tool_calls=data.draw(st.booleans()))

    def seen(pieces: list[str]) -> tuple[Any, ...]:
        splitter, found = AnswerText(chosen, sections, begins), Part()
        for number, piece in enumerate(pieces, 1):
            add(found, splitter.push(piece, is_last=number == len(pieces)))
        return found.said, found.reasoning, [each["function"] for each in found.calls]

    pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
    assert seen(pieces) == seen([text])


def test_the_id_of_a_call_is_one_that_the_template_reads() -> None:
    kimi = pushed(AnswerText(chat(), FORMATS["kimi"]), next(each[2] for each in ANSWERS if each[0] == "kimi"), 5)
    assert [call["id"] for call in kimi.calls] == ["functions.weather:0", "functions.time:1"]
    mistral = pushed(AnswerText(chat(), FORMATS["mistral"]), "[TOOL_CALLS]time[ARGS]{}", 5)
    assert re.fullmatch("[a-zA-Z0-9]{9}", mistral.calls[0]["id"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_told_from_its_template_and_calls_without_tools_are_text(name: str) -> None:
    calls = next(part for part in FORMATS[name] if part.kind == "calls")
    mark = {"harmony": "<|channel|>", "dsml": "｜DSML｜"}.get(name, calls.begin)
    assert format_of("" if name == "json" else f"{{{{ '{mark}' }}}}") == FORMATS[name]
    text = f"A{calls.begin}b"
    if name != "harmony":
        assert pushed(AnswerText(chat(tool_choice="none"), FORMATS[name]), text, 1).said == text
    assert mark in "".join(markers(FORMATS[name]))


def test_reasoning_that_the_prompt_has_begun_ends_in_the_answer() -> None:
    sections = format_of("<think> </think>")
    splitter = AnswerText(chat(), sections, sections[0])
    found = pushed(splitter, "\nHm.\n</think>\n\nYes. ", 3)
    assert (found.said, found.reasoning) == ("Yes.", "Hm.")
    cut = pushed(AnswerText(chat(), sections), "<think>Hm, ", 2)
    assert (cut.said, cut.reasoning) == ("", "Hm,")
