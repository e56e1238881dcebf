"""Reasoning and tool calls in the formats of published models: told from the template, read whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
        "function_gemma", "",
        "<start_function_call>call:weather{city:<escape>Bern<escape>,days:2}<end_function_call>", "", "", [BERN],
    ),
]  # fmt: skip


def chat(**more: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, "tools": TOOLS, **more})


def pushed(splitter: AnswerText, text: str, step: int) -> Part:
    found = Part()
    for start in range(0, len(text) + 1, step):
        part = splitter.push(text[start : start + step], is_last=start + step > len(text))
        found.said += part.said
        found.reasoning += part.reasoning
        found.calls += part.calls
    return found


@pytest.mark.parametrize("case", range(len(ANSWERS)))
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_answers_are_split_as_the_model_means_them(case: int, step: int) -> None:
    name, reasoning, text, said, thought, calls = ANSWERS[case]
    found = pushed(AnswerText(chat(), format_of(reasoning, name)), text, step)
    assert (found.said, found.reasoning) == (said, thought)
    assert [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in found.calls] == calls


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_told_from_its_template_and_calls_without_tools_are_text(name: str) -> None:
    mark = "<|channel|>" if name == "harmony" else next(part for part in FORMATS[name] if part.kind == "calls").begin
    assert format_of("" if name == "json" else f"{{{{ '{mark}' }}}}") == FORMATS[name]
    text = f"A{mark}b"
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
