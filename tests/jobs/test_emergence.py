"""A jump of the metric over the checkpoints of a run is told from a jump of the models, in one command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from sheepop.checkpoint import RunDirectory, save_model
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer

from ..command_line import in_process

EVEN, SUDDEN = (3.0, 2.25, 1.5, 0.75, 0.01), (3.0, 2.98, 2.96, 0.04, 0.02)
TOKENS = 1000  # between two checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five checkpoints that give the right one of two choices so many bits: e against f evenly, s against t suddenly.

    The last norm has a weight of 0, so every hidden state is its bias, and every logit one weight of the head.
    """
    path = tmp_path_factory.mktemp("planted") / "run"
    tokenizer = CharTokenizer.train(["abcdefst"])
    model = build_model(
        ModelConfig(
            vocab_size=tokenizer.vocab_size, d_model=8, num_layers=1, num_heads=1, max_seq_len=16, norm="layernorm",
            bias=True, tie_weights=False, ngrams=None,
        ),
        seed=0,
    )  # fmt: skip
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.copy_(torch.eye(8)[0])
        for step, bits in enumerate(zip(EVEN, SUDDEN, strict=True), start=1):
            model.lm_head.weight.zero_()
            for right, each in zip("es", bits, strict=True):
                # A choice with this advantage in its logit has the probability 2 ** -bits of two.
                model.lm_head.weight[tokenizer.encode(right)[0], 0] = -math.log(2**each - 1)
            save_model(RunDirectory(path).checkpoint(step), model, tokenizer, {"step": step, "tokens": TOKENS * step})
    return path


def test_an_even_course_of_the_probability_and_a_sudden_one_are_told_apart(run: Path, tmp_path: Path) -> None:
    for right, wrong, name in ("e", "f", "even"), ("s", "t", "sudden"):
        rows = [{"prompt": prompt, "choices": [wrong, right], "answer": 1} for prompt in ("ab", "cd", "ba")]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tasks = ",".join(str(tmp_path / f"{name}.jsonl") for name in ("even", "sudden"))
    done = in_process("scale", "--emergence", run, "--tasks", tasks, "--json")
    assert done.code == 0, done.err
    even, sudden = json.loads(done.out)["tasks"]
    assert (even["task"], even["verdict"]) == ("even", "only the accuracy jumps")
    assert (sudden["task"], sudden["verdict"]) == ("sudden", "the models jump")
    for found, planted in (even, EVEN), (sudden, SUDDEN):
        points = found["points"]
        assert [point["model"] for point in points] == [f"step {step}" for step in range(1, 6)]
        assert [point["bits"] for point in points] == pytest.approx(planted, abs=1e-4)
        assert [point["accuracy"] for point in points] == [0, 0, 0, 1, 1]
        assert [point["flops"] / points[0]["flops"] for point in points] == pytest.approx([1, 2, 3, 4, 5])
    assert even["largest_step"]["bits_of_the_answer"] == pytest.approx(0.75 / 2.99, rel=1e-4)
    assert sudden["largest_step"]["bits_of_the_answer"] == pytest.approx(2.92 / 2.98, rel=1e-4)
    assert json.loads((run / "emergence.json").read_text())["tasks"] == [even, sudden]
    assert (run / "emergence.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("riddles", "--tasks riddles: give copying, brackets, arithmetic, cloze, or a file of questions"),
        ("copying,other/copying.jsonl", "another task is called copying"),
        ("cloze", "there is none"),
    ],
)
def test_tasks_that_cannot_be_asked_are_refused(run: Path, tasks: str, said: str) -> None:
    done = in_process("scale", "--emergence", run, "--tasks", tasks)
    assert done.code == 2 and said in done.err


def test_a_run_with_one_checkpoint_has_no_course(run: Path, tmp_path: Path) -> None:
    for source in RunDirectory(run).checkpoint(1).rglob("*"):
        target = RunDirectory(tmp_path).checkpoint(1) / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    done = in_process("scale", "--emergence", tmp_path, "--tasks", "copying")
    assert done.code == 3 and "has 1 finished models; a course needs two" in done.err
