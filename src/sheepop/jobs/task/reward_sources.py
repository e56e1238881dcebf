"""The sources of rewards: a reward model, a Python program of the user, an HTTP service, a judge, or tests of code."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.checkpoint import LoadedModel, load_model
from sheepop.checkpoint.model_kind import PublishedName
from sheepop.core.bounded import BoundedProcess, BoundedProcessError, HandlerError, TimeLimitError
from sheepop.core.errors import ConfigError, DataError, TokenizerError, TrainingError, UsageError
from sheepop.core.facts import counted
from sheepop.core.http_client import HttpClient
from sheepop.core.machine import usable_cores
from sheepop.core.sandbox import Limits, Sandbox
from sheepop.evaluate.code import fenced_programs
from sheepop.evaluate.judge import ask_for_grades, grade_question
from sheepop.jobs.evaluate import How, open_judge
from sheepop.posttrain.config import CodeConfig, JudgeConfig, RolloutConfig, TuningConfig
from sheepop.posttrain.preference import answer_rewards
from sheepop.posttrain.rewards import Answer, Reward, checked, shown
from sheepop.tokenizer import Tokenizer
from sheepop.tokenizer.messages import message_text

JUDGE, CODE = "judge", "code"
_CHILD = "sheepop.jobs.task.program_child"
_MEMORY_BYTES = 2**31
_ATTEMPTS = 5
_EXPECTED = 'Give the address of a service that replies {"rewards": [...]} to {"answers": [...]}.'
_MOST_KNOWN = 100_000  # grades that a judge is not asked for again
_REPLY_CHARACTERS = 300


@dataclass(frozen=True, eq=False)
class ModelReward(Reward):
    """A reward model with the tokenizer of the policy."""

    model: LoadedModel
    batch_size: int

    @classmethod
    def fitting(cls, loaded: LoadedModel, tokenizer: Tokenizer, batch_size: int) -> ModelReward:
        """Checks a loaded model; raises `ConfigError` if it is no reward model or has another tokenizer."""
        if not hasattr(loaded.model, REWARD_HEAD):
            raise ConfigError(f"{loaded.directory} is no reward model. Make one with: sheepop tune reward")
        if loaded.tokenizer.fingerprint() != tokenizer.fingerprint():
            raise ConfigError(
                f"The reward model in {loaded.directory} has another tokenizer than the policy, so it cannot read its "
                "answers. Train it from the same model."
            )
        return cls(loaded, batch_size)

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """The outputs of the scalar head at the last tokens."""
        rows, loaded = [list(answer.token_ids) for answer in answers], self.model
        if (longest := max(map(len, rows), default=0)) > (most := loaded.config.max_seq_len):
            raise TrainingError(
                f"The reward model reads {most:,} tokens, but an answer with its prompt has {longest:,}."
            )
        found = answer_rewards(loaded.model, rows, batch_size=self.batch_size, pad_id=loaded.tokenizer.filler_id)
        return checked(found.tolist(), answers, str(loaded.directory))


class ProgramReward(Reward):
    """The function ``reward`` of a Python file, run in a separate process with limits.

    Its parameters say what it gets; see `program_child`. It has `seconds` for each answer, 2 GiB of memory, and no
    network if Linux allows that. If it `may_fail`, answers for which it fails get None.
    """

    def __init__(self, path: Path, seconds: float, *, may_fail: bool = False) -> None:
        self._path, self._seconds, self._may_fail = path, seconds, may_fail
        self._takes_all: bool | None = None
        self._process = BoundedProcess(_CHILD, memory_bytes=_MEMORY_BYTES, seconds=seconds)
        # Linux ends the process together with the thread that started it, so this object has a thread for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """The return values of the function."""
        found: list[Any] = []
        while True:
            try:
                if self._takes_all is None:
                    (self._takes_all,) = self._thread.submit(self._ask, (), []).result()
                if len(found) < len(answers):
                    self._thread.submit(self._ask, answers[len(found) :], found).result()
                return checked(found, answers, str(self._path))
            except BoundedProcessError as error:
                failure = self._failure(error, answers, len(found))
                if not (self._may_fail and answers):
                    raise failure from None
                self.failure = str(failure)
                found += [None] * (len(answers) - len(found) if self._takes_all else 1)

    def _ask(self, answers: Sequence[Answer], found: list[Any]) -> list[Any]:
        request = {"program": str(self._path.resolve()), "answers": [answer.to_dict() for answer in answers]}
        seconds = self._seconds * len(answers) if answers and self._takes_all else self._seconds
        with closing(self._process.request(request, seconds)) as replies:
            found.extend(replies)
        return found

    def _failure(self, error: BoundedProcessError, answers: Sequence[Answer], number: int) -> TrainingError:
        where = counted(len(answers), "answer") if self._takes_all else shown(answers, number)
        problem = f"{'failed for' if isinstance(error, HandlerError) else 'ended at'} {where}: {error}"
        if isinstance(error, TimeLimitError):
            each = " each" if self._takes_all else ""
            problem = f"took more than {self._seconds:g} s{each} for {where}. Fix it, or give it more time."
        return TrainingError(f"The reward program {self._path} {problem}")

    def close(self) -> None:
        """Ends the process."""
        self._thread.submit(self._process.close).result()
        self._thread.shutdown()


class EndpointReward(Reward):
    """A service that gets ``{"answers": [...]}`` by POST, with objects of `Answer.to_dict`, and replies
    ``{"rewards": [...]}``. It has `seconds` for each answer. If it `may_fail`, answers that it cannot judge get None.
    """

    def __init__(self, url: str, seconds: float, *, may_fail: bool = False) -> None:
        self._client, self._url, self._seconds = HttpClient(url, expected=_EXPECTED), url, seconds
        self._may_fail = may_fail

    def __call__(self, answers: Sequence[Answer]) -> list[float | None]:
        """The rewards in the reply. A request without answers, which only tests the service, is not repeated."""
        try:
            rewards = self._client.request(
                "",
                {"answers": [answer.to_dict() for answer in answers]},
                lambda reply: reply.get("rewards"),
                timeout=self._seconds * max(1, len(answers)),
                attempts=_ATTEMPTS if answers else 1,
            )
        except DataError as error:
            self.failure = f"Answers cannot be judged: {error}"
            if self._may_fail and answers:
                return [None] * len(answers)
            raise TrainingError(self.failure) from None
        if not isinstance(rewards, list):
            raise TrainingError(f'{self._url} did not reply with an object {{"rewards": [...]}}')
        return checked(rewards, answers, self._url)


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
        """The scaled grades."""
        questions = [self._question(answer) for answer in answers]
        new = {each: answer for each, answer in zip(questions, answers, strict=True) if each not in self._known}
        rewards = dict(self._known)
        for question, (grade, reply) in zip(
            new, ask_for_grades(self._judge, list(new), self._config.workers), strict=True
        ):
            if grade is not None:
                rewards[question] = (grade - 1) / 9
                continue
            self.failure = (
                f"The judge {self._config.by} gave no grade for {shown([new[question]], 0)}, but: "
                f"{reply[:_REPLY_CHARACTERS]!r}"
            )
            if not self._may_fail:
                raise TrainingError(self.failure)
        self._known = dict(list(rewards.items())[-_MOST_KNOWN:])
        return [rewards.get(question) for question in questions]

    def _question(self, answer: Answer) -> str:
        asked, reference = answer.asked, answer.fields.get("reference")
        said = [f"{message['role']}:\n{message_text(message)}" for message in asked]
        request = message_text(asked[0]) if len(asked) == 1 else "\n\n".join(said) or answer.prompt
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
            self.failure = f"The program of {shown([answer], 0)} cannot be tested: {error}"
            if self._may_fail:
                return None
            raise TrainingError(self.failure) from None
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
            if judge is None or judge.by is None:
                raise ConfigError("The reward judge needs tuning.judge.by, a chat model or the address of a server.")
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
