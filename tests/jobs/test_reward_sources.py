"""Rewards that are there by name: a judge behind an address or on this machine, and tests of code in the sandbox."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint import save_model
from sheepop.core.errors import ConfigError, TrainingError
from sheepop.core.sandbox import IsolationError, Sandbox
from sheepop.jobs.task.reward_sources import CodeReward, JudgeReward, open_reward, open_rewards
from sheepop.model import ModelConfig, build_model
from sheepop.posttrain.config import CodeConfig, JudgeConfig, TuningConfig
from sheepop.posttrain.rewards import Answer
from sheepop.tokenizer import CharTokenizer

from ..judge_server import judge_server

USER = {"role": "user", "content": "How many sheep?"}
SHORT = Answer("<u>How many sheep?<a>", "Three.", [1], {"reference": "three"}, [USER])
LONG = Answer("Count: ", "One, two, three.", [1], {})


def shown(question: str, name: str) -> str:
    """What stands in a question under a name, as a reader who trusts the marks alone finds it."""
    found = re.fullmatch(rf".*?\[(\w+) {name}\]\n(.*?)\n\[\1 end of {name}\].*", question, re.DOTALL)
    assert found is not None
    return found[2]


def by_length(question: str) -> str:
    return f"It has a length.\n[[{min(10, len(shown(question, 'answer')))}]]"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which take no time here."""
    found: list[float] = []
    monkeypatch.setattr("sheepop.core.http_client.sleep", found.append)
    return found


def opened(url: str, may_fail: bool = False, **settings: Any) -> JudgeReward:
    return JudgeReward(JudgeConfig(by=url, model="grader", **settings), "cpu", may_fail=may_fail)


def test_a_judge_grades_by_the_rubric_and_equal_questions_once() -> None:
    with judge_server(by_length) as (url, asked, _):
        judge = opened(url, rubric="Short is good.")
        assert judge([SHORT, LONG, SHORT]) == [pytest.approx(5 / 9), 1.0, pytest.approx(5 / 9)]
        assert len(asked) == 2
        short, long = sorted(asked, key=lambda question: len(shown(question, "answer")))
        assert "The rubric:\nShort is good." in short
        assert (shown(short, "request"), shown(short, "right answer")) == ("How many sheep?", "three")
        assert shown(long, "request") == "Count: " and "right answer" not in long
        assert judge([LONG]) == [1.0] and len(asked) == 2
        other = Answer(LONG.prompt, LONG.completion, [1], {}, [USER, {"role": "assistant", "content": "Two?"}, USER])
        judge([other])
        assert shown(asked[-1], "request") == "user:\nHow many sheep?\n\nassistant:\nTwo?\n\nuser:\nHow many sheep?"
        judge.close()


@pytest.mark.parametrize(
    ("reply", "grade"),
    [("[[1]]", 0.0), ("At first [[9]].\nNo: [[ 4 ]]", 3 / 9), ("<think>\n[[2]]\n</think>\n[[10]]", 1.0)],
)
def test_the_last_grade_of_a_reply_counts(reply: str, grade: float) -> None:
    with judge_server(lambda question: reply) as (url, _, _):
        assert opened(url)([SHORT]) == [pytest.approx(grade)]


@pytest.mark.parametrize("reply", ["Fine.", "[[11]]", "[[0]]", "[[3.5]]", "[[7]] or [[8]]", "[[A]]"])
def test_a_reply_without_a_grade_is_requested_again_and_then_as_the_policy_says(reply: str) -> None:
    with judge_server(by_length) as (url, asked, first):
        first += [reply, "[[2]]"]
        assert opened(url)([SHORT]) == [pytest.approx(1 / 9)]
        assert asked[1].startswith(asked[0]) and asked[1].endswith("End with a line that is one of [[1]] to [[10]].")
        first += [reply] * 2
        with pytest.raises(TrainingError, match=rf"The judge {url} gave no grade for the answer 'Three.', but: '"):
            opened(url)([SHORT])
        first += [reply] * 2
        may_fail = opened(url, may_fail=True)
        assert may_fail([SHORT]) == [None]
        assert may_fail([SHORT]) == [pytest.approx(5 / 9)], "an unreadable grade is not remembered"


@pytest.mark.parametrize(
    ("reply", "problem", "attempts"),
    [
        ("busy", "answered 503: .* \\(5 attempts\\)", 5),
        ("refuse", "answered 400: .* a shorter one may work", 1),
        ("denied", "answered 401: .* Give a key .* in OPENAI_API_KEY", 1),
    ],
)
def test_a_judge_whose_server_fails(waits: list[float], reply: str, problem: str, attempts: int) -> None:
    with judge_server(lambda question: reply) as (url, asked, _):
        with pytest.raises(TrainingError, match=f"gave no grade for the answer 'Three.', but: .*{problem}"):
            opened(url)([SHORT])
        assert (len(asked), waits) == (attempts, [1.0, 2.0, 4.0, 8.0][: attempts - 1])
        may_fail = opened(url, may_fail=True)
        assert may_fail([SHORT]) == [None]
        assert re.search(problem, may_fail.failure)


def test_a_judge_that_hangs_is_given_up_after_its_time(waits: list[float]) -> None:
    given_up = threading.Event()

    def hangs(question: str) -> str:
        given_up.wait(60)
        return "[[1]]"

    with judge_server(hangs) as (url, _, _):
        try:
            with pytest.raises(TrainingError, match="does not answer in time"):
                opened(url, seconds=0.05)([SHORT])
        finally:
            given_up.set()
        assert len(waits) == 4


def test_a_judge_may_be_a_model_on_this_machine(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for a server")
    options: dict[str, Any] = {"device": "cpu", "batch_size": 1}
    with pytest.raises(ConfigError, match="judge: This model has no chat template"):
        open_reward("judge", 1, CharTokenizer(), judge=JudgeConfig(by=str(base)), **options)
    sizes: dict[str, Any] = {"vocab_size": 128, "d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 2048}
    model = build_model(ModelConfig(**sizes, tie_weights=False), seed=1)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # so that it always writes the first token
    save_model(tmp_path / "judge", model, CharTokenizer(), {})
    (tmp_path / "judge" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    judge = JudgeConfig(by=str(tmp_path / "judge"))
    with pytest.raises(TrainingError, match=r"gave no grade for the answer 'Three\.', but: "):
        open_reward("judge", 1, CharTokenizer(), judge=judge, **options)([SHORT])
    lenient = open_reward("judge", 1, CharTokenizer(), judge=judge, may_fail=True, **options)
    assert lenient([SHORT, Answer("x" * 3000, "y", [1])]) == [None, None]
    lenient.close()


def test_only_rewards_that_are_named_may_be_set() -> None:
    with pytest.raises(ValueError, match=r"judge has no effect unless grpo.reward names judge"):
        TuningConfig(method="grpo", grpo={"reward": "check.py"}, judge={"by": "http://127.0.0.1:1"})
    with pytest.raises(ValueError, match="the reward judge needs judge"):
        TuningConfig(method="ppo", ppo={"reward": {"judge": 1.0}})
    with pytest.raises(ValueError, match=r"code has no effect unless grpo.reward names code"):
        TuningConfig(method="grpo", code={"seconds": 1})
    with pytest.raises(ValueError, match="judge has no effect with method sft"):
        TuningConfig(method="sft", judge={"by": "runs/judge"})


@pytest.fixture
def tested() -> Iterator[Callable[..., CodeReward]]:
    try:
        Sandbox.find()
    except IsolationError as error:
        pytest.skip(str(error))
    yield lambda may_fail=False, **settings: CodeReward(CodeConfig(**settings), may_fail=may_fail)


def program(text: str, tests: Any = "assert double(4) == 8") -> Answer:
    return Answer("Double it.", text, [1], {} if tests is None else {"tests": tests})


RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"


def test_a_program_passes_its_tests_or_not(tested: Callable[..., CodeReward]) -> None:
    wrong = RIGHT.replace("2 *", "3 *")
    rewards = {
        f"So: {RIGHT} Good.": 1.0,
        wrong: 0.0,
        f"First {wrong}\nNo: {RIGHT}": 1.0,
        f"<think>{RIGHT}</think>I do not know.": 0.0,
        "def double(x): return 2 * x": 0.0,
        "```python\ndef double(x):": 0.0,
        "```python\nimport socket\nsocket.create_connection(('127.0.0.1', 80), 1)\n```": 0.0,
        "```python\nimport sys\nsys.exit(0)\n```": 0.0,
    }
    reward = tested(workers=2)
    assert reward([program(text) for text in rewards]) == list(rewards.values())
    assert reward([program(RIGHT, ["assert double(1) == 2", "assert double(2) == 5"]), program(RIGHT, None)]) == [
        0.0,
        None,
    ]
    with pytest.raises(TrainingError, match=r"The tests of the answer '```python.* are neither .* but \[3\]"):
        reward([program(RIGHT, [3])])


def test_a_program_without_end_is_wrong_or_has_no_reward(tested: Callable[..., CodeReward]) -> None:
    endless, greedy = ("```python\nwhile True: pass\n```", "```python\nx = bytearray(2**33)\n```")
    others = [program(greedy), program(RIGHT)]
    assert tested(seconds=0.5, timeouts="fail")([program(endless)]) == [0.0]
    assert tested(memory_bytes=2**28, timeouts="fail")(others) == [0.0, 1.0]
    # The others have seconds for what takes a tenth of one.
    limits = {"seconds": 3.0, "memory_bytes": 2**28}
    assert tested(timeouts="missing", **limits)([program(endless), *others]) == [None, 0.0, 1.0]


def test_several_rewards_are_opened_by_the_settings(tested: Callable[..., CodeReward], tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text("def reward(completions, **columns): return [len(x) for x in completions]")
    with judge_server(by_length) as (url, _, _):
        place = str(tmp_path / "length.py")
        weights = {"code": 1.0, "judge": 0.5, place: 0.25}
        given: Any = {"method": "grpo", "grpo": {"reward": weights}, "judge": {"by": url, "model": "m"}}
        tuning = TuningConfig(**given)
        found = open_rewards(tuning.grpo, tuning, CharTokenizer(), "cpu", 2)
        assert {name: weight for name, (weight, _) in found.items()} == weights
        assert [reward([program(RIGHT)]) for _, reward in found.values()] == [[1.0], [1.0], [float(len(RIGHT))]]
        for _, reward in found.values():
            reward.close()
