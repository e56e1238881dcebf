"""Opens sources of rewards by their names; the ready ones are a judge, and tests of code."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from sheepop.checkpoint import load_model
from sheepop.checkpoint.model_kind import PublishedName
from sheepop.core.errors import ConfigError, DataError, TokenizerError, TrainingError, UsageError
from sheepop.core.machine import usable_cores
from sheepop.core.sandbox import Limits, Sandbox
from sheepop.evaluate.code import fenced_programs
from sheepop.evaluate.judge import ask_for_grade, grade_question
from sheepop.jobs.evaluate import How, open_judge
from sheepop.posttrain.config import CodeConfig, JudgeConfig, RolloutConfig, TuningConfig
from sheepop.posttrain.rewards import Answer, EndpointReward, ModelReward, ProgramReward, Reward, shown
from sheepop.tokenizer import Tokenizer
from sheepop.tokenizer.messages import message_text

JUDGE, CODE = "judge", "code"
_MOST_KNOWN = 100_000  # grades that a judge is not asked for again
_SHOWN_CHARACTERS = 200


class JudgeReward(Reward):
    """A judge's grades of answers by a rubric, scaled from 1 to 10 to 0 to 1.

    Equal answers to equal prompts are graded once. If it `may_fail`, an answer gets None when the judge refuses it,
    gives no grade that can be read, or its server fails.
    """

    def __init__(self, config: JudgeConfig, device: str, *, may_fail: bool = False) -> None:
        assert config.by is not None
        self._config, self._may_fail = config, may_fail
        self._stack, self._known = ExitStack(), dict[str, float]()
        key = os.environ.get("OPENAI_API_KEY") if "://" in config.by else None
        how = How(device=device)
        self._judge = self._stack.enter_context(open_judge(config.by, config.model, key, how, config.seconds))

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """The scaled grades; those of new questions are asked for several at a time."""
        questions = [self._question(answer) for answer in answers]
        new = {each: answer for each, answer in zip(questions, answers, strict=True) if each not in self._known}
        with ThreadPoolExecutor(self._config.workers, thread_name_prefix="judge") as pool:
            found = dict(zip(new, pool.map(self._graded, new, new.values()), strict=True))
        graded = self._known | {each: reward for each, reward in found.items() if reward is not None}
        self._known = dict(list(graded.items())[-_MOST_KNOWN:])
        return [graded.get(each) for each in questions]

    def _graded(self, question: str, answer: Answer) -> float | None:
        try:
            grade, reply = ask_for_grade(self._judge, question)
        except DataError as error:
            grade, reply = None, str(error)
        if grade is None and not self._may_fail:
            raise TrainingError(
                f"The judge {self._config.by} gave no grade for {shown([answer], 0)}: {reply[:_SHOWN_CHARACTERS]!r}"
            )
        return None if grade is None else (grade - 1) / 9

    def _question(self, answer: Answer) -> str:
        messages, reference = answer.messages or (), answer.fields.get("reference")
        said = [f"{message['role']}:\n{message_text(message)}" for message in messages]
        request = message_text(messages[0]) if len(messages) == 1 else "\n\n".join(said) or answer.prompt
        if reference is not None and not isinstance(reference, str):
            reference = str(reference)
        return grade_question(self._config.rubric, request, answer.completion, reference)

    def close(self) -> None:
        """Closes the judge."""
        self._stack.close()


class CodeReward(Reward):
    """1 if the last fenced program of an answer passes the ``tests`` of its line in a sandbox, else 0.

    ``tests`` are Python source, or a list of such texts; a line without them has no reward (None). If it `may_fail`, so
    has an answer whose program the sandbox could not start.
    """

    def __init__(self, config: CodeConfig, *, may_fail: bool = False) -> None:
        self._sandbox, self._config, self._may_fail = Sandbox.find(), config, may_fail
        self._limits = Limits(seconds=config.seconds, memory_bytes=config.memory_bytes)

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """The rewards; several programs run at a time."""
        workers = self._config.workers or max(1, int(usable_cores()))
        with ThreadPoolExecutor(workers, thread_name_prefix="sandbox") as pool:
            return list(pool.map(self._tested, answers))

    def _tested(self, answer: Answer) -> float | None:
        given = answer.fields.get("tests")
        if given is None:
            return None
        tests = [given] if isinstance(given, str) else given
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise TrainingError(
                f"The tests of {shown([answer], 0)} are neither Python source nor a list of such texts, but {given!r}"
            )
        programs = fenced_programs(answer.completion.rpartition("</think>")[2])
        if not programs:
            return 0.0
        try:
            verdict = self._sandbox.run(programs[-1], tests="\n".join(tests), limits=self._limits)
        except UsageError as error:
            if self._may_fail:
                return None
            raise TrainingError(f"The program of {shown([answer], 0)} cannot be tested: {error}") from None
        if verdict.outcome == "timeout" and self._config.timeouts == "missing":
            return None
        return float(verdict.outcome == "passed")


def open_reward(
    place: str,
    seconds: float,
    tokenizer: Tokenizer,
    *,
    device: str,
    batch_size: int,
    may_fail: bool = False,
    judge: JudgeConfig | None = None,
    code: CodeConfig | None = None,
) -> Reward:
    """Opens a source of rewards (``judge``, ``code``, a URL, a Python file, or a reward model or its name).

    `seconds` is the time limit per answer of a service and a program. Answers for which a source fails get None if it
    `may_fail`. Raises `ConfigError` if it cannot be opened, or fails for an empty list of answers.
    """
    try:
        reward: Reward
        if place == JUDGE:
            if judge is None:
                raise ConfigError("The reward judge needs settings (tuning.judge), which a run of ppo or grpo has.")
            reward = JudgeReward(judge, device, may_fail=may_fail)
        elif place == CODE:
            reward = CodeReward(code or CodeConfig(), may_fail=may_fail)
        elif place.startswith(("http://", "https://")):
            reward = EndpointReward(place, seconds, may_fail=may_fail)
        elif not Path(place).exists() and (place.endswith(".py") or PublishedName.parse(place) is None):
            raise ConfigError(f"{place} does not exist, so it cannot judge answers.")
        elif place.endswith(".py"):
            reward = ProgramReward(Path(place), seconds, may_fail=may_fail)
        else:
            reward = ModelReward.fitting(load_model(place, device, torch.float32), tokenizer, batch_size)
        reward([])
    except (TrainingError, UsageError, DataError, TokenizerError) as error:
        raise ConfigError(f"{place}: {error}" if place == JUDGE else str(error)) from None
    return reward


def open_rewards(
    settings: RolloutConfig, tuning: TuningConfig, tokenizer: Tokenizer, device: str, batch_size: int
) -> Mapping[str, tuple[float, Reward]]:
    """Opens all sources of rewards; returns them with their weights, by the names that the settings give them."""
    options: dict[str, Any] = {
        "device": device,
        "batch_size": batch_size,
        "may_fail": settings.missing_rewards == "leave_out",
        "judge": tuning.judge,
        "code": tuning.code,
    }
    return {
        place: (weight, open_reward(place, settings.reward_seconds, tokenizer, **options))
        for place, weight in settings.rewards.items()
    }
