"""Lines of files become rows, and what is wrong with one is said with its place."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import DataError
from sheepop.posttrain.rows import Judged, Preference, Prompt, Supervised, read_rows

from .conftest import chat

Lines = Callable[..., Path]
TWO = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"})


def one(path: Path, wanted: type[Any] = Supervised) -> Any:
    (row,) = read_rows([path], wanted)
    return row


@pytest.mark.parametrize(
    "line",
    [
        {"messages": list(TWO)},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": list(TWO)},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"instruction": "2+2?", "context": "", "response": "4", "category": "sums"},
        {"prompt": [TWO[0]], "completion": [TWO[1]]},
        {"prompt": [TWO[0]], "completion": "4"},
        {"question": "2+2?", "answer": "4"},
        {"problem": "2+2?", "solution": "4", "level": 1},
        {
            "conversations": [
                {"from": "human", "value": "2+2?"},
                {"from": "gpt", "value": "4"},
                {"from": "human", "value": "3?"},
            ]
        },
    ],
)
def test_every_shape_of_a_conversation_is_the_same_conversation(lines: Lines, line: dict[str, Any]) -> None:
    row = one(lines([line]))
    assert [(message["role"], message["content"]) for message in row.answer] == [("user", "2+2?"), ("assistant", "4")]
    assert row.prompt == ""


def test_a_context_stands_behind_its_instruction(lines: Lines) -> None:
    row = one(lines([{"instruction": "Sum up.", "input": "A long text.", "output": "Short."}]))
    assert row.answer[0]["content"] == "Sum up.\n\nA long text."


BRIEF = {"role": "system", "content": "Be brief."}
EARLIER = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("line", "learnt_from"),
    [
        ({"messages": list(TWO)}, 0),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, 0),
        ({"instruction": "2+2?", "input": "", "output": "4"}, 0),
        ({"instruction": "2+2?", "response": "4"}, 0),
        ({"prompt": "2+2?", "completion": "4"}, 4),
        ({"prompt": [TWO[0]], "completion": [TWO[1]]}, 4),
        ({"inputs": "2+2?", "targets": "4"}, 4),
    ],
)
@pytest.mark.parametrize("history", [[["1+1?", "2"]], EARLIER], ids=["pairs", "messages"])
def test_what_the_system_says_and_earlier_turns_stand_before_a_conversation(
    lines: Lines, line: dict[str, Any], learnt_from: int, history: list[Any]
) -> None:
    row = one(lines([{"system": "Be brief.", "history": history, **line}]))
    assert (row.prompt, row.answer, row.learnt_from) == ("", (BRIEF, *EARLIER, *TWO), learnt_from)


@pytest.mark.parametrize("prompt", ["2+2?", [TWO[0]]])
def test_they_stand_before_prompts_and_pairs_too(lines: Lines, prompt: Any) -> None:
    given = {"system": "Be brief.", "history": [["1+1?", "2"]], "prompt": prompt}
    pair = one(lines([{**given, "chosen": "4", "rejected": "5"}]), Preference)
    asked = one(lines([{**given, "answer": 4}]), Prompt)
    assert pair.prompt == asked.prompt == (BRIEF, *EARLIER, TWO[0])
    assert asked.fields == {"answer": 4}
    whole = {"system": "Be brief.", "chosen": list(TWO), "rejected": [TWO[0], {**TWO[1], "content": "5"}]}
    assert one(lines([whole]), Preference).prompt == (BRIEF, TWO[0])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"messages": [BRIEF, *TWO], "system": "Be long."}, "system: messages begin with a message of the system, too"),
        ({"messages": list(TWO), "system": 5}, "system: is not a text"),
        ({"messages": list(TWO), "history": "1+1"}, "history: is not a list"),
        ({"messages": list(TWO), "history": [["1+1"]]}, r"history\[0\]: is neither a message nor a pair of texts"),
        ({"instruction": "2+2?", "input": ["x"], "output": "4"}, "input: is not a text"),
        ({"prompt": "2+2?", "completion": "4", "tools": [{"name": "f"}]}, "tools: a plain text has no place for them"),
        ({"messages": [{**TWO[0], "train": True}, TWO[1]]}, r"messages\[0\].train: is True, but only answers of the"),
        ({"messages": [TWO[0], {**TWO[1], "train": "no"}]}, r"messages\[1\].train: is 'no'; it must be 1 or true"),
    ],
)
def test_what_cannot_be_honoured_is_named(lines: Lines, line: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        one(lines([line]))


def test_a_turn_of_sharegpt_keeps_what_says_whether_it_is_learnt(lines: Lines) -> None:
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4", "weight": 0}]
    assert one(lines([{"conversations": turns}])).answer[1] == {**TWO[1], "weight": 0}


@pytest.mark.parametrize("line", [{"prompt": "2+2=", "completion": "4"}, {"inputs": "2+2=", "targets": "4"}])
def test_plain_text_stays_plain(lines: Lines, line: dict[str, Any]) -> None:
    row = one(lines([line]))
    assert (row.prompt, row.answer) == ("2+2=", "4")


def test_only_the_completion_of_a_conversation_is_learnt(lines: Lines) -> None:
    asked, said = {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}
    line = {"prompt": [*TWO, asked], "completion": [said]}
    row = one(lines([line]))
    assert (len(row.answer), row.learnt_from) == (4, 3)


@pytest.mark.parametrize(
    ("line", "margin"),
    [
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, None),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": 9.0, "score_rejected": 2.5}, 6.5),
        ({"prompt": "2+2?", "completions": ["3", "4", "5"], "scores": [1, 8, 0.5]}, 7.5),
        ({"prompt": "2+2?", "completions": ["3", "4", "5"], "ranks": [2, 1, 3]}, 2),
        (
            {
                "instruction": "2+2?",
                "completions": [{"response": "5", "overall_score": 2}, {"response": "4", "overall_score": 7}],
            },
            5,
        ),
    ],
)
def test_preferences_and_rankings_are_pairs(lines: Lines, line: dict[str, Any], margin: float | None) -> None:
    row = one(lines([line]), Preference)
    assert (row.prompt, row.chosen, row.rejected, row.margin) == ("2+2?", "4", "5", margin)


def test_dialogues_of_hh_share_what_comes_before_the_answers(lines: Lines) -> None:
    begin = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 2+2?"
    line = {"chosen": f"{begin}\n\nAssistant: 4", "rejected": f"{begin}\n\nAssistant: 5"}
    row = one(lines([line]), Preference)
    assert [message["content"] for message in row.prompt] == ["hi", "hello", "2+2?"]
    assert (row.chosen[0]["content"], row.rejected[0]["content"]) == ("4", "5")


def test_whole_conversations_beside_their_prompt_are_cut_to_the_answers(lines: Lines) -> None:
    """As UltraFeedback has them."""
    answers = [[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": text}] for text in ("4", "5")]
    row = one(lines([{"prompt": "2+2?", "chosen": answers[0], "rejected": answers[1]}]), Preference)
    assert [message["content"] for message in (*row.prompt, *row.chosen, *row.rejected)] == ["2+2?", "4", "5"]


def test_dialogues_that_part_where_the_user_speaks_are_parted_before_the_answer(lines: Lines) -> None:
    both = [
        "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: " + rest for rest in ("a\n\nAssistant: 1", "b\n\nAssistant: 2")
    ]
    row = one(lines([{"chosen": both[0], "rejected": both[1]}]), Preference)
    assert [message["content"] for message in row.prompt] == ["hi"]
    assert [message["content"] for message in row.chosen] == ["hello", "a", "1"]


def test_a_prompt_keeps_what_else_its_line_says(lines: Lines) -> None:
    row = one(lines([{"prompt": "2+2?", "answer": 4}]), Prompt)
    assert (row.prompt, row.fields) == ("2+2?", {"answer": 4})


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ({"prompt": "2+2?", "completion": "4"}, {}),
        ({"prompt": [TWO[0]], "completion": [TWO[1]]}, {}),
        ({"messages": list(TWO), "reference": "4"}, {}),
        ({"question": "2+2?", "answer": "4"}, {"question": "2+2?", "answer": "4"}),
    ],
)
def test_the_answer_of_a_line_is_the_reference_of_its_prompt(
    lines: Lines, line: dict[str, Any], others: dict[str, Any]
) -> None:
    assert one(lines([line]), Prompt).fields == {"reference": "4", **others}
    with pytest.raises(DataError, match="reference: is there, but the answer of the line takes its place"):
        one(lines([{**line, "reference": "5"}]), Prompt)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "is not a JSON object"),
        ({"words": "hello"}, "has the keys words, which fit no known shape"),
        ({"messages": []}, "messages: is empty"),
        ({"messages": [TWO[0]]}, r"messages\[0\].role: is user, but the last message is the assistant's"),
        ({"messages": [TWO[1]]}, r"messages\[0\].role: is assistant, but must be developer or system or user"),
        ({"messages": [TWO[0], TWO[0]]}, r"messages\[1\].role: is user, but must be assistant"),
        (chat("2+2?", " "), r"messages\[1\].content: is empty"),
        ({"messages": [TWO[0], {"role": "robot", "content": "4"}]}, r"messages\[1\].role: is 'robot', not one of"),
        ({"messages": [TWO[0], {"role": "assistant", "content": 4}]}, r"messages\[1\].content: is not a text"),
        (
            {"messages": [TWO[0], {"role": "tool", "content": "4"}]},
            r"messages\[1\].role: is tool, but must be",
        ),
        ({"messages": [TWO[0], {**TWO[1], "weight": 0.5}]}, r"messages\[1\].weight: is 0.5; it must be 1"),
        (
            {"conversations": [{"from": ["human"], "value": "x"}]},
            r"conversations\[0\].from: is \['human'\], not one of",
        ),
        ({"conversations": [{"from": "cat", "value": "x"}]}, r"conversations\[0\].from: is 'cat', not one of"),
        ({"prompt": "2+2?"}, "has a prompt, but no answer to learn"),
        ({"prompt": "2+2?", "completion": ""}, "completion: is empty"),
        ({"prompt": "x", "chosen": "4", "rejected": "5"}, "is a preference"),
    ],
)
def test_a_line_that_cannot_be_learnt_is_named(lines: Lines, line: Any, problem: str) -> None:
    path = lines([chat("a", "b"), line])
    with pytest.raises(DataError, match=rf"1 of 2 lines cannot be used.*\n.*examples\.jsonl, line 2: {problem}"):
        list(read_rows([path], Supervised))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"prompt": "x", "chosen": "4", "rejected": "4"}, "rejected: is the same as chosen"),
        ({"prompt": "x", "chosen": "4", "rejected": " "}, "rejected: is empty"),
        ({"prompt": "x", "chosen": "4", "rejected": "5", "margin": "much"}, "margin: is not a number"),
        ('{"prompt": "x", "chosen": "4", "rejected": "5", "margin": NaN}', "is not valid JSON"),
        ({"prompt": "x", "completions": ["4", "5"], "scores": [1, 1]}, "completions: needs two answers with different"),
        ({"prompt": "x", "completions": ["4"], "scores": [1, 2]}, "completions and scores: are not two lists of one"),
        ({"prompt": "x", "completion": "4"}, "has no chosen and rejected answer"),
    ],
)
def test_a_preference_that_is_none_is_named(lines: Lines, line: Any, problem: str) -> None:
    with pytest.raises(DataError, match=rf"line 1: {problem}"):
        list(read_rows([lines([line])], Preference))


def test_all_bad_lines_are_counted_and_the_first_five_named(lines: Lines) -> None:
    path = lines([*(["{"] * 3), chat("a", "b"), *(["[]"] * 4)])
    with pytest.raises(DataError) as caught:
        list(read_rows([path], Supervised))
    told = str(caught.value).splitlines()
    assert told[0].startswith("7 of 8 lines cannot be used.")
    assert [line.split(":")[0].rpartition(" ")[2] for line in told[1:6]] == ["1", "2", "3", "5", "6"]
    assert told[6] == "... and 2 further lines."


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet, zstandard = (pytest.importorskip(name) for name in ("pyarrow.parquet", "zstandard"))
    values = [chat(f"{number}?", str(number)) for number in range(3)]
    text = "".join(json.dumps(value) + "\n" for value in values)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.json").write_text(json.dumps(values))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(text)
    parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "d.parquet")
    with zstandard.open(tmp_path / "e.jsonl.zst", "wt") as file:
        file.write(text)
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())  # as some editors begin a file
    found = [[row.answer for row in read_rows([path], Supervised)] for path in sorted(tmp_path.iterdir())]
    assert found == [[tuple(value["messages"]) for value in values]] * 6


def test_a_saved_chat_is_one_example(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(json.dumps({"messages": list(TWO)}))
    assert one(tmp_path / "chat.json").answer == TWO


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b"x", "Convert it"),
        ("a.json", b"1", "is not a JSON list of objects"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.parquet", b"no parquet", "is not a Parquet file, or damaged"),
        ("a.jsonl", b"\n\n", "There are no examples"),
        ("a.jsonl", b'{"messages": "\xff"}\n', "line 1: is not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        list(read_rows([tmp_path / name], Supervised))


def test_columns_get_the_names_of_shapes(lines: Lines) -> None:
    path = lines([{"question": "2+2=", "answer": "4", "id": 7}])
    (row,) = read_rows([path], Supervised, {"prompt": "question", "completion": "answer"})
    assert (row.prompt, row.answer) == ("2+2=", "4")
    rows = [{"question": "2+2=", "answer": "4"}] * 3 + [
        {"answer": "4"},
        {"prompt": "a", "question": "b", "answer": "c"},
    ]
    with pytest.raises(DataError) as caught:
        list(read_rows([lines(rows)], Supervised, {"prompt": "question", "completion": "answer"}))
    assert "line 4: question: is missing, which tuning.columns.prompt names" in str(caught.value)
    assert "line 5: prompt: is there, but tuning.columns.prompt = question takes its place" in str(caught.value)
    swapped = lines([{"prompt": "4", "completion": "2+2="}])
    (row,) = read_rows([swapped], Supervised, {"prompt": "completion", "completion": "prompt"})
    assert (row.prompt, row.answer) == ("2+2=", "4")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_is_missing_far_down_is_named_with_its_row(tmp_path: Path, kind: str) -> None:
    rows: list[dict[str, Any]] = [{"question": "2+2=", "answer": "4"}] * 12_345
    rows += [{"question": None, "answer": "4"} if kind == "parquet" else {"answer": "4"}]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"prompt": "question", "completion": "answer"}
    with pytest.raises(
        DataError, match=r"1 of 12,346 lines cannot be used.*\n.*\.\w+, (line|row) 12,346: question: is"
    ):
        list(read_rows([path], Supervised, named))
    problems: list[str] = []
    assert len(list(read_rows([path], Supervised, named, on_bad=problems.append))) == 12_345 and len(problems) == 1


def test_files_of_different_shapes_are_read_together(lines: Lines) -> None:
    files = [lines([{"question": "2+2?", "answer": "4"}], "a.jsonl"), lines([chat("2+2?", "4")], "b.jsonl")]
    assert [row.answer for row in read_rows(files, Supervised)] == [TWO, TWO]


def test_json_lines_may_have_the_name_that_the_hub_gives_them(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps(chat("2+2?", "4")) + "\n" + json.dumps(chat("a", "b")) + "\n")
    assert [row.place.rpartition(", ")[2] for row in read_rows([tmp_path / "train.json"], Supervised)] == [
        "line 1",
        "line 2",
    ]


def test_a_conversation_of_sharegpt_is_learnt_from_its_first_question_to_its_last_answer(lines: Lines) -> None:
    said = [("system", "Be brief."), ("gpt", "Hi."), ("human", "2+2?"), ("gpt", "4"), ("human", "3?")]
    line = {"conversations": [{"from": who, "value": what} for who, what in said]}
    changed = Counter[str]()
    (row,) = read_rows([lines([line])], Supervised, changed=changed)
    assert row.answer == (BRIEF, *TWO)
    assert changed == {"Left out answers before the first question": 1, "Left out questions after the last answer": 1}
    # An open question is what rewards are for.
    asked = one(lines([{"conversations": line["conversations"][2:]}]), Prompt)
    assert [message["content"] for message in asked.prompt] == ["2+2?", "4", "3?"]
    with pytest.raises(DataError, match=r"messages\[0\]\.role: is assistant, but must be"):
        one(lines([{"conversations": [{"from": "gpt", "value": "Hi."}]}]))


def test_neighbouring_turns_of_one_role_are_joined_where_that_is_asked_for(lines: Lines) -> None:
    more = {"role": "user", "content": "Quickly!"}
    path = lines([{"messages": [TWO[0], more, TWO[1], TWO[1]]}, {"messages": list(TWO)}])
    with pytest.raises(DataError, match=r"messages\[1\]\.role: is user, but .*tuning\.join_turns=true joins"):
        list(read_rows([path], Supervised))
    changed = Counter[str]()
    first, second = read_rows([path], Supervised, joins_turns=True, changed=changed)
    assert [message["content"] for message in first.answer] == ["2+2?\n\nQuickly!", "4\n\n4"]
    assert (second.answer, changed) == (TWO, {"Joined neighbouring turns of one role": 1})
    kept = {"messages": [TWO[0], {**TWO[1], "weight": 0}, TWO[1]]}
    with pytest.raises(DataError, match=r"messages\[2\]\.role: is assistant"):  # of which one is not learnt
        list(read_rows([lines([kept])], Supervised, joins_turns=True))


def test_text_alone_is_learnt_whole(lines: Lines) -> None:
    row = one(lines([{"text": "A long text."}]))
    assert (row.prompt, row.answer) == ("", "A long text.")


def test_a_question_is_the_prompt_of_answers_and_of_rewards(lines: Lines) -> None:
    pair = one(lines([{"question": "2+2?", "chosen": "4", "rejected": "5"}]), Preference)
    asked = one(lines([{"question": "2+2?", "answer": "4"}]), Prompt)
    assert (pair.prompt, asked.prompt) == ("2+2?", (TWO[0],))
    assert asked.fields["answer"] == "4"


@pytest.mark.parametrize("label", [0, 1, False, True])
def test_labels_are_truths_or_numbers(lines: Lines, label: int) -> None:
    row = one(lines([{"prompt": "2+2=", "completion": "4", "label": label}]), Judged)
    assert row.is_desirable is bool(label)


@pytest.mark.parametrize(
    ("calls", "replies"),
    [("function_call", "observation"), ("function-call", "function-response"), ("tool_call", "Tool_Response")],
)
def test_a_call_of_sharegpt_is_a_call(lines: Lines, calls: str, replies: str) -> None:
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    turns = [
        {"from": "human", "value": "Oslo?"},
        {"from": calls, "value": json.dumps(call)},
        {"from": replies, "value": "rain"},
        {"from": "gpt", "value": "It rains."},
    ]
    row = one(lines([{"conversations": turns}]))
    assert row.answer[1] == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    assert [message["role"] for message in row.answer] == ["user", "assistant", "tool", "assistant"]
    with pytest.raises(DataError, match=r"conversations\[1\].value: is not a call as JSON text"):
        one(lines([{"conversations": [turns[0], {"from": calls, "value": "weather"}]}]))


def test_former_function_calls_are_tool_calls(lines: Lines) -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
        {"role": "assistant", "content": "It rains.", "function_call": None},
    ]
    expected = (
        turns[0],
        {"role": "assistant", "content": None, "tool_calls": [{"id": "weather", "type": "function", "function": call}]},
        {"role": "tool", "name": "weather", "tool_call_id": "weather", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    )
    assert one(lines([{"messages": turns}])).answer == expected
    pair = one(lines([{"prompt": turns[:1], "chosen": turns[1:], "rejected": "Sun."}]), Preference)
    assert pair.prompt + pair.chosen == expected
    for change, problem in (
        ({"function_call": "weather"}, r"messages\[1\].function_call: is not a call with the name of a function"),
        ({"tool_calls": [call]}, r"messages\[1\].function_call: is there beside tool_calls"),
        ({"role": "function", "content": "rain"}, r"messages\[1\].name: is not the name of the function"),
    ):
        with pytest.raises(DataError, match=problem):
            one(lines([{"messages": [turns[0], {**turns[1], **change}]}]))
