"""A log becomes data: what the tuning of models reads of it, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import DataError, OutputError
from sheepop.jobs.monitor import monitor, write_rows
from sheepop.monitor.answered import read_answers
from sheepop.posttrain.rows import Preference, Prompt, Supervised, read_rows
from sheepop.serve.conversation_log import LogFaults

from ..command_line import in_process
from .conftest import Say


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_liked_answers_are_learnt(say: Say, tmp_path: Path) -> None:
    say("What is 1 + 1?", "It is 2.", votes=(1,))
    say("What is 2 + 2?", "It is 5.", votes=(-1,))
    say("What is 3 + 3?", "It is 6.")
    say("What is 4 + 4?", "It is 8, since 4", votes=(1,), reason="length")
    say("Once", " upon a time", votes=(1,), chat=False)
    say("   ", "Hm.", votes=(1,))
    output = tmp_path / "liked.jsonl"
    written = write_rows(tmp_path / "log", "sft", output)
    assert written.written == 2
    assert written.left_out == {"messages[0].content: is empty": 1, "the answer has no end": 1}
    first, second = read_rows([output], Supervised)
    assert isinstance(first.answer, tuple)
    assert [turn["content"] for turn in first.answer] == ["What is 1 + 1?", "It is 2."]
    assert (second.prompt, second.answer) == ("Once", " upon a time")
    # Each row leads back to its line of the log.
    for row, expected in zip(lines(output), ("It is 2.", " upon a time"), strict=True):
        name, _, number = row["source"].rpartition(":")
        assert expected in (tmp_path / "log" / name).read_text().splitlines()[int(number) - 1]
    with pytest.raises(OutputError, match="exists"):
        write_rows(tmp_path / "log", "sft", output)
    assert write_rows(tmp_path / "log", "sft", output, unvoted=True, overwrite=True).written == 3


def test_votes_for_and_against_answers_to_one_prompt_are_preferences(say: Say, tmp_path: Path) -> None:
    say("Name a river.", "The Aare.", "Bread.", "The Rhine.", votes=(1, -1, 0))
    say("Name a river.", "A stone.", votes=(-1,))
    say("Name a lake.", "Sand.", votes=(-1,))
    output = tmp_path / "votes.jsonl"
    assert write_rows(tmp_path / "log", "preferences", output).written == 2
    pairs = [(row.chosen[0]["content"], row.rejected[0]["content"]) for row in read_rows([output], Preference)]  # type: ignore[index]
    assert pairs == [("The Aare.", "Bread."), ("The Aare.", "A stone.")]
    say("Name a hill.", "Bantiger.", model="other", votes=(1,))
    with pytest.raises(DataError, match="gives no rows for preferences"):
        write_rows(tmp_path / "log", "preferences", tmp_path / "none", model="other")


def test_prompts_with_votes_become_an_evaluation_set(say: Say, tmp_path: Path) -> None:
    say("Name a river.", "Bread.", votes=(-1,))
    say("Name a river.", "The Aare.", votes=(1,))
    say("Name a lake.", "Sand.", votes=(-1,))
    say("Name a hill.", "Bantiger.")
    output = tmp_path / "eval.jsonl"
    assert write_rows(tmp_path / "log", "eval", output).written == 2
    found = [(row.prompt[0]["content"], row.fields.get("reference")) for row in read_rows([output], Prompt)]  # type: ignore[index]
    assert found == [("Name a river.", "The Aare."), ("Name a lake.", None)]


def test_copies_and_evaluation_texts_are_left_out(say: Say, tmp_path: Path) -> None:
    long = "The river begins at two glaciers in the east and flows through two lakes, past the old town and its tower"
    say("Tell me of the river.", f"{long}, then to the north.", votes=(1,))
    say("Tell me of the river!", f"{long}, then to the North!", votes=(1,))
    say("Tell me of bread.", "It is baked.", votes=(1,))
    say("A quiz", "What do eight sheep eat when the grass has gone in winter?", votes=(1,))
    quiz = tmp_path / "quiz.jsonl"
    quiz.write_text(json.dumps({"question": "What do eight sheep eat when the grass has gone in winter?"}) + "\n")
    written = write_rows(tmp_path / "log", "sft", tmp_path / "rows.jsonl", leave_out=[quiz])
    assert written.written == 2
    assert written.left_out == {
        "a copy of an earlier row, or nearly one": 1,
        "shares text with an evaluation set": 1,
    }


def test_figures_are_by_model_and_say_what_is_wrong_with_the_log(say: Say, tmp_path: Path) -> None:
    for number in range(3):
        say(f"Question {number}", "Answer.", votes=(1,))
    say("Question", "Answer", model="other")
    (path,) = (tmp_path / "log").iterdir()
    content = path.read_text().replace("Question 1", "Question 7")
    path.write_text(content[:-3])
    found = monitor(tmp_path / "log")
    assert {name: each.figures.answers for name, each in found.models.items()} == {"m": 2}
    assert found.faults == LogFaults(changed=1, cut=1)
    assert [each.asked for each in read_answers(tmp_path / "log", LogFaults())] == ["Question 0", "Question 2"]
    with pytest.raises(DataError, match="no answers of 'other'; it has those of m"):
        monitor(tmp_path / "log", model="other")


def test_the_command_prints_figures_fires_alerts_and_writes_rows(say: Say, tmp_path: Path) -> None:
    for number in range(40):
        say(f"Question {number}", f"Answer {number}.", votes=(-1 if number < 20 else 1,))
    log = tmp_path / "log"
    shown = in_process("monitor", log)
    assert shown.code == 0
    assert "m: 40 answers" in shown.out and "50.0% (35.2% to 64.8% of 40)" in shown.out  # statsmodels' Wilson interval
    fired = in_process("monitor", log, "--alert", "bad>0.3", "--alert", "bad>0.4", "--json")
    assert fired.code == 1 and json.loads(fired.out)["fired"] == ["m: bad>0.3"]
    written = in_process("monitor", log, "--to", "sft", "--output", tmp_path / "rows.jsonl")
    assert written.code == 0 and len(lines(tmp_path / "rows.jsonl")) == 20
    assert in_process("monitor", log, "--to", "sft").code == 2
    assert in_process("monitor", log, "--unvoted").code == 2
    nothing = in_process("monitor", tmp_path)
    assert nothing.code == 3 and "holds no log of a server" in nothing.err
