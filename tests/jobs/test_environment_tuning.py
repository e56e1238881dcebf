"""Runs that learn from conversations with an environment: they go on bit for bit, and say what does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import ConfigError, TrainingError
from sheepop.jobs.config import load_config
from sheepop.jobs.run.open import find_resumable
from sheepop.jobs.task.environment import Environment
from sheepop.posttrain.conversations import Reply, State

from ..running import train
from .test_policy_tuning import SETTINGS, rows_of

# It answers twice, at random but from its seed, and likes short answers.
ENVIRONMENT = """
import random

class Environment:
    def reset(self, row, seed):
        self.draw, self.turns = random.Random(seed), 0

    def step(self, message):
        self.turns += 1
        return self.draw.choice(["more", "why"]), 1 / (1 + len(message["content"])), self.turns == 3
"""
ROLLOUTS = ("max_new_tokens=38", "epochs=2", "environment.max_turns=3")
MORE = {"ppo": ("minibatches=2",), "grpo": ("group_size=4", "temperature=0.9")}


@pytest.fixture(scope="module")
def talker(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt to end its turns."""
    place = tmp_path_factory.mktemp("talker")
    chats = [[{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "ok"}] for n in range(16)]
    (place / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    places = ("tuning.method=sft", f"data.paths={place / 'chats.jsonl'}", f"output_dir={place / 'run'}")
    more = ("training.max_steps=24", "training.eval_interval=24", "training.checkpoint_interval=24")
    return train(load_config(overrides=(*SETTINGS, *more, *places)), fork=base).run


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"say {n % 10}"}], "wanted": n} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environment") / "environment.py"
    path.write_text(ENVIRONMENT)
    return path


def config(method: str, data: Path, environment: Path, output: Path, *overrides: str) -> Any:
    settings = (f"environment.file={environment}", *ROLLOUTS, *MORE[method])
    places = (f"tuning.method={method}", f"data.paths={data}", f"output_dir={output}")
    own = [f"tuning.{method}.{setting}" for setting in settings]
    return load_config(overrides=(*SETTINGS, *places, *own, *overrides))


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_a_run_with_an_environment_goes_on_bit_for_bit(
    talker: Path, prompts: Path, environment: Path, tmp_path: Path, method: str
) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("def reward(completions):\n    return [len(each) / 10 for each in completions]\n")
    more = (f"tuning.{method}.reward={judge}", "training.max_steps=5")
    whole, output = tmp_path / "whole", tmp_path / "run"
    train(config(method, prompts, environment, whole, *more), fork=talker)
    train(config(method, prompts, environment, output, *more, "training.max_steps=3"), fork=talker)
    stored = find_resumable(output)
    assert stored is not None
    train(load_config(overrides=["training.max_steps=5"], base=stored.record.requested), resume=True)
    one, other = (RunDirectory(place).checkpoint(5) for place in (whole, output))
    for path in (*one.glob("*.safetensors"), one / "state" / "source.safetensors"):
        assert path.read_bytes() == (other / path.relative_to(one)).read_bytes(), path.name
    rows = rows_of(whole, "train")
    assert rows == rows_of(output, "train")
    assert (rows[0]["divergence_from_old"], rows[0]["clipped"]) == (0.0, 0.0), "to the bit"
    assert rows[0]["turns"] > 1
    assert rows[0]["reward"] > rows[0][f"reward_of_{judge}"] >= 0.2, "two messages at least"


def test_conversations_that_fail_stop_the_run_or_are_left_out(
    talker: Path, prompts: Path, environment: Path, tmp_path: Path
) -> None:
    path = tmp_path / "environment.py"
    path.write_text(ENVIRONMENT.replace("self.turns += 1", "self.turns += 1\n        1 / (self.turns - 2)"))
    with pytest.raises(TrainingError, match="failed: ZeroDivisionError"):
        train(config("grpo", prompts, path, tmp_path / "stopped"), fork=talker)
    more = ("tuning.grpo.missing_rewards=leave_out", "training.max_steps=2")
    run = train(config("grpo", prompts, path, tmp_path / "run", *more), fork=talker).run
    assert all(0 < row["left_out"] < 1 for row in rows_of(run, "train"))


def test_prompts_without_messages_and_files_without_an_environment_are_refused(
    talker: Path, prompts: Path, environment: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py does not exist, so there is no environment"):
        train(config("grpo", prompts, Path("nowhere.py"), tmp_path / "run"), fork=talker)
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(8)))
    with pytest.raises(ConfigError, match="8 prompts of the data are plain texts, with which no environment"):
        train(config("grpo", plain, environment, tmp_path / "run"), fork=talker)


def test_the_example_of_the_page_is_true(talker: Path, tmp_path: Path) -> None:
    """Of docs/tuning.md: its line, its calculator, and a run with them."""
    page = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text().split("## Conversations with tools")[1]
    program, line = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("python", "json"))
    place, row = tmp_path / "calculator.py", json.loads(line)
    place.write_text(program)
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": {"name": "add", "arguments": "?"}}]},
        {"role": "assistant", "content": "It is 42."},
    ]
    environment = Environment.open(str(place), 10.0)
    replies = [environment([State(0, {"sum": row["sum"]}, 0, turns[:count])])[0] for count in range(4)]
    environment.close()
    assert replies[0] == Reply(())
    assert [None if each is None else (each.reward, each.is_done) for each in replies[1:]] == [
        (0.1, False), (0.1, False), (1.0, True),
    ]  # fmt: skip
    assert [each.messages[0]["content"] for each in replies[1:3] if each is not None] == [
        "42", "add takes two whole numbers, a and b",
    ]  # fmt: skip
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if tools %}{{ tools[0].function.name }} {% endif %}{% for m in messages %}{{ m.content }}{{ eos_token }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
        "{% endfor %}"
    )
    data = tmp_path / "sums.jsonl"
    data.write_text((json.dumps(row) + "\n") * 8)
    more = (f"tuning.chat_template={template}", "training.max_steps=2", "data.validation_fraction=0")
    rows = rows_of(train(config("grpo", data, place, tmp_path / "run", *more), fork=talker).run, "train")
    assert len(rows) == 2 and all("turns" in each for each in rows)
