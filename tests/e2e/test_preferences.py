"""The commands of docs/preferences.md run, in order, on a model at toy size; the example of the page at a small one."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from shutil import which
from typing import Any

import pytest

import sheepop

from ..command_line import Launcher, in_process
from ..judge_server import judge_server

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "preferences.md"
SMALL = [
    *("--device", "cpu", "training.max_steps=2", "training.global_batch_size=8", "training.precision=fp32"),
    *("training.sample_tokens=4", "data.validation_fraction=0.2"),
]
TINY = {
    "model.d_model": 16, "model.num_layers": 1, "model.num_heads": 2, "model.max_seq_len": 32, "model.dropout": 0.0,
    "model.ngrams": None, "model.short_convolution": None, "tokenizer.algorithm": "char", "data.documents": "line",
    "training.max_steps": 2, "training.global_batch_size": 4, "training.precision": "fp32",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/chat``, its teacher, and the files that the page speaks of."""
    place = tmp_path_factory.mktemp("preferences")
    words = ["cab", "fade", "head", "bead", "ace", "dab", "face", "gab"] * 4
    (place / "text.txt").write_text("".join(f"{word} > {word}\n" for word in words))
    for name in ("chat", "teacher"):
        sheepop.train(place / "text.txt", place / "runs" / name, device="cpu", quiet=True, settings=TINY)
    said = re.findall(r"^```(json|python)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (pair, program, prompt, of_messages, tests) = (text for _, text in said)
    names: dict[str, Any] = {}
    exec(of_messages, names)
    completions = [[{"role": "assistant", "content": content}] for content in ("abc\n", "ba")]
    assert names["reward"](["cab > ", "ab > "], completions, ["abc", "ab"]) == [1.0, 0.0]
    assert json.loads(pair) == {"prompt": "cab > ", "chosen": "abc", "rejected": "acb"}
    assert json.loads(prompt) == {"prompt": "cab > ", "answer": "abc"}
    right = {word: "".join(sorted(word)) for word in words}
    pairs = [{"prompt": f"{word} > ", "chosen": right[word], "rejected": word + "a"} for word in words]
    prompts = [{"prompt": f"{word} > ", "answer": right[word]} for word in words]
    answers = [{"prompt": f"{word} > ", "completion": right[word]} for word in words]
    tasks = [{**each, "tests": json.loads(tests)["tests"]} for each in prompts]
    for name, rows in (("pairs", pairs), ("prompts", prompts), ("chats", answers), ("tasks", tasks)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The program of the page, and some worth for every answer, so that there is a best one.
    (place / "check.py").write_text(program.replace("return ", "return len(completion) / 99 + "))
    return place


def test_every_command_of_the_page_does_what_it_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    printed = {}
    with judge_server(lambda question: "Short enough.\n[[7]]") as (url, asked, _):
        for line in (line for block in blocks for line in block.splitlines()):
            words = shlex.split(line.replace("http://127.0.0.1:8000", url))[1:]
            more = [] if "--show" in words else SMALL
            if "best-of" in words:
                more = ["--device", "cpu", "--max-new-tokens", "12", "--count", "4"]
            if words[1] in ("ppo", "grpo", "distill"):
                more = [*SMALL, f"tuning.{words[1]}.max_new_tokens=8"]
            if "code" in words and which("bwrap") is None:
                continue
            ended = in_process(*words, *more)
            assert ended.code == 0, f"{shlex.join(words)}: {ended.err}"
            printed[words[1], words[-1]] = ended.out
    assert asked and "The answer is short and polite." in asked[0]
    assert "pairs.jsonl, line 1: 10 tokens, 4 of them learnt\ncab > [[abc<eos>]]" in printed["dpo", "3"]
    assert "in the right order" in printed["dpo", "tuning.dpo.beta=0.5"]
    assert "reward" in printed["ppo", "runs/rewarded"]
    judged = sheepop.load(place / "runs" / "judge", device="cpu").rewards("cab > ", ["abc", "caba"])
    assert len(judged) == 2
    best = [json.loads(line) for line in (place / "best.jsonl").read_text().splitlines()]
    assert best and {"prompt", "completion", "reward"} == best[0].keys()


def test_the_example_goes_from_a_base_model_to_three_better_ones(launcher: Launcher, tmp_path: Path) -> None:
    """A hundredth of its steps: the numbers mean nothing, but every stage runs."""
    output = tmp_path / "letters"
    script = ROOT / "examples" / "sort_letters.py"
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    ended = launcher.run("--output", output, "--scale", "0.004", "--device", "cpu", program=program)
    assert ended.code == 0, ended.err
    curves = json.loads((output / "curves.json").read_text())
    assert list(curves) == ["SFT, DPO", "SFT, reward model, PPO", "SFT, GRPO"]
    assert [points[-1][2] for points in curves.values()] == ["dpo", "ppo", "grpo"]
    assert all(0 <= right <= 1 for points in curves.values() for _, right, _ in points)
    assert (output / "curves.png").stat().st_size > 1000
