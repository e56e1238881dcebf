"""Problems as HumanEval and MBPP write them down, and how often programs for them are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.core.errors import DataError, UsageError
from sheepop.core.sandbox import IsolationError, Limits, Sandbox
from sheepop.evaluate.code import Problem, evaluate_code, read_problems
from sheepop.generate import Generator
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer, ChatTemplate, tokenizer_from_json

COUNT_VOWELS: dict[str, Any] = {
    "task_id": "Made/0",
    "prompt": 'from typing import List\n\ndef count_vowels(word: str) -> int:\n    """How many vowels a word has."""\n',
    "canonical_solution": "    return sum(letter in 'aeiou' for letter in word)\n",
    "test": "def check(candidate):\n    assert candidate('sheep') == 2\n    assert candidate('') == 0\n",
    "entry_point": "count_vowels",
}
PAIRS: dict[str, Any] = {
    "task_id": "Made/1",
    "prompt": 'from typing import List\n\ndef pairs(values: List[int]) -> List[int]:\n    """Sums of neighbours."""\n',
    "canonical_solution": "    return [a + b for a, b in zip(values, values[1:])]\n",
    "test": "def check(candidate):\n    assert candidate([1, 2, 4]) == [3, 6]\n    assert candidate([]) == []\n",
    "entry_point": "pairs",
}
UNDO = {
    "task_id": "Made/2",
    "prompt": "def turn(text):\n    return text[::-1]\n\n\ndef turn_back(text):\n    '''Undoes turn.'''\n",
    "canonical_solution": "    return turn(text)\n",
    "test": "def check(candidate):\n    assert candidate(turn('wool')) == 'wool'\n",
    "entry_point": "turn_back",
}
LARGEST = {
    "task_id": 11,
    "text": "Write a function to find the largest number.",
    "code": "def largest(values):\r\n  return max(values)",
    "test_list": ["assert largest([1, 3, 2]) == 3", "assert largest([-1]) == -1"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
SPREAD = {
    "task_id": 12,
    "prompt": "Write a function for the length of a point.",
    "code": "import math\ndef length(point):\n    return math.hypot(point.x, point.y)",
    "test_list": ["assert math.isclose(length(Point(3, 4)), 5)"],
    "test_setup_code": "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')",
}
ROOT = {
    "task_id": 13,
    "prompt": "Write a function for the square root.",
    "code": "def root(value):\n    return value ** 0.5",
    "test_list": ["assert math.isclose(root(2), math.sqrt(2))"],
    "test_imports": ["import math"],
}
ROWS = [COUNT_VOWELS, PAIRS, UNDO, LARGEST, SPREAD, ROOT]


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Problem]:
    path = written(tmp_path_factory.mktemp("problems") / "made.jsonl", *ROWS)
    return {problem.id: problem for problem in read_problems(path)}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox.find()
    except IsolationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def chain() -> Callable[..., Generator]:
    """A generator whose text is known: behind the character `first` comes `text`, and then the end."""

    def build(first: str, text: str, *, max_seq_len: int = 256, score: float = 40.0) -> Generator:
        tokenizer = CharTokenizer()
        size = tokenizer.vocab_size
        sizes = {"vocab_size": size, "d_model": size, "head_dim": 8, "num_heads": 1, "num_layers": 1, "d_ff": 8}
        config = ModelConfig(**sizes, max_seq_len=max_seq_len, norm="rmsnorm", bias=False, tie_weights=False)
        model: Transformer = build_model(config, 0).eval()
        ids = tokenizer.encode(first + text)
        assert len(set(ids)) == len(ids), "each character says which one comes next"
        end = tokenizer.special_id("eos")
        assert end is not None
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                    parameter.zero_()
                if "position" in name:
                    parameter.zero_()
            model.embedding.weight.copy_(torch.eye(size))
            for token, successor in zip(ids, [*ids[1:], end], strict=True):
                model.lm_head.weight[successor, token] = score / size**0.5
        return Generator(model, tokenizer)

    return build


def toy(answer: str) -> Problem:
    """The prompt ends in a colon; a right completion is the text of a number."""
    tests = f"assert f() == {answer}\n"
    return Problem("toy", "def f(): return -", "def f(): return -", tests, answer.lstrip("-"), "f")


@pytest.mark.parametrize("name", [str(row["task_id"]) for row in ROWS])
def test_a_right_solution_passes_and_an_empty_function_does_not(
    problems: dict[str, Problem], sandbox: Sandbox, name: str
) -> None:
    problem = problems[name]
    wrong = "    return None\n" if problem.entry_point else problem.solution.replace("return", "return 1 +")

    right_verdict = sandbox.run(problem.program(problem.solution), tests=problem.tests)
    wrong_verdict = sandbox.run(problem.program(wrong), tests=problem.tests)

    assert right_verdict.outcome == "passed", right_verdict
    assert wrong_verdict.outcome == "failed", wrong_verdict


def test_a_function_ends_where_something_else_begins(problems: dict[str, Problem]) -> None:
    body = COUNT_VOWELS["canonical_solution"].rstrip("\n")
    expected = COUNT_VOWELS["prompt"] + body + "\n"

    for tail in ("\nclass A:", "\ndef other():\n", "\n# more", "\nif __name__", "\nprint(1)", "\ndef a():\nif b"):
        assert problems["Made/0"].program(body + tail) == expected


def test_a_program_for_mbpp_may_define_several_things_and_ends_before_tests(problems: dict[str, Problem]) -> None:
    text = "def a():\n    pass\n\nclass B:\n    pass\n\ndef largest(v):\n    return max(v)"

    assert problems["11"].program(text + "\nassert largest([1]) == 1\nprint(2)") == text + "\n"


def test_a_block_of_an_answer_is_the_program(problems: dict[str, Problem], sandbox: Sandbox) -> None:
    whole = "def pairs(values: List[int]) -> List[int]:\n    return helper(values)\n\ndef helper(v):\n" + PAIRS[
        "canonical_solution"
    ].replace("values", "v")
    answers = [
        f"Here it is:\n\n```python\n{whole}```\nIt adds neighbours.",
        f"```\n{whole}\n```\n```python\nraise SystemExit\n```",
        f"Sure!\n```Python\n{whole}",
        f"```python\n{PAIRS['canonical_solution']}```",
    ]

    for answer in answers:
        program = problems["Made/1"].program(answer)
        assert program.startswith(PAIRS["prompt"])
        assert sandbox.run(program, tests=problems["Made/1"].tests).outcome == "passed", program


def test_the_prompt_of_mbpp_is_a_docstring_with_the_tests(problems: dict[str, Problem]) -> None:
    assert problems["11"].prompt == (
        '"""\nWrite a function to find the largest number.\n'
        'assert largest([1, 3, 2]) == 3\nassert largest([-1]) == -1\n"""\n'
    )
    assert problems["11"].before == ""
    assert problems["13"].before == "import math\n"


@pytest.mark.parametrize("row", [COUNT_VOWELS, LARGEST], ids=["HumanEval", "MBPP"])
def test_a_missing_or_unusable_field_is_named_with_its_place(tmp_path: Path, row: dict[str, Any]) -> None:
    optional = {"test_setup_code", "challenge_test_list"}
    shape = {"prompt", "text", "canonical_solution", "test", "entry_point", "code", "test_list"}
    for key in shape & row.keys() - optional:
        without = {name: value for name, value in row.items() if name != key}
        named = "prompt" if key == "text" else key
        with pytest.raises(DataError, match=rf'made.jsonl, line 2: "{named}" must be a .*it is missing.*HumanEval'):
            read_problems(written(tmp_path / "made.jsonl", ROOT, without))
        with pytest.raises(DataError, match=rf'made.jsonl, line 1: "{key}" must be a .*not 7'):
            read_problems(written(tmp_path / "made.jsonl", {**row, key: 7}))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([LARGEST, LARGEST], "line 2: the id '11' is that of an earlier line"),
        ([{**LARGEST, "task_id": None}], '"task_id" must be a text or a number, not None'),
        ([{**PAIRS, "entry_point": "a b"}], "must be the name of a function"),
        ([{**LARGEST, "test_list": []}], '"test_list" must be a list of texts'),
        ([{**LARGEST, "test_setup_code": 3}], '"test_setup_code" must be a text'),
        ([[1, 2]], "line 1: not a JSON object"),
        ([], "has no problems"),
    ],
)
def test_what_is_no_problem_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_problems(written(tmp_path / "made.jsonl", *rows))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_problems(tmp_path / "absent.jsonl")


def test_a_model_that_is_right_once_of_two_problems_has_a_half(
    chain: Callable[..., Generator], sandbox: Sandbox
) -> None:
    done: list[int] = []
    right, wrong = toy("-71"), Problem("wrong", *list(vars(toy("-17")).values())[1:])

    found = evaluate_code(
        chain("-", "71"), [right, wrong], sandbox=sandbox, workers=2, max_new_tokens=8, on_done=done.append
    )

    assert found.measure("pass@1").value == 0.5
    assert [item.values["pass@1"] for item in found.items] == [1.0, 0.0]
    assert [item.shown["completions"][0]["outcome"] for item in found.items] == ["passed", "failed"]
    assert found.items[0].shown["completions"][0]["text"] == "71"
    assert "AssertionError" in found.items[1].shown["completions"][0]["output"]
    assert sorted(map(tuple, found.tables[0].rows)) == [("failed", 1), ("passed", 1)]
    assert sum(done) == 2
    assert found.notes == []


def test_pass_at_k_counts_the_right_ones_of_all_samples(chain: Callable[..., Generator], sandbox: Sandbox) -> None:
    found = evaluate_code(
        # Behind the sign each of 128 characters is drawn, so that nearly all programs are wrong.
        chain("-", "7", score=5.0),
        [toy("-7")],
        sandbox=sandbox,
        samples=12,
        ks=(1, 3, 12),
        temperature=1.0,
        seed=3,
        workers=4,
        max_new_tokens=1,
    )

    outcomes = [completion["outcome"] for completion in found.items[0].shown["completions"]]
    right = outcomes.count("passed")
    wrong_three = (12 - right) * (11 - right) * (10 - right) / (12 * 11 * 10)
    assert len(outcomes) == 12 and 0 < right < 12
    assert found.measure("pass@1").value == pytest.approx(right / 12)
    assert found.measure("pass@3").value == pytest.approx(1 - wrong_three)
    assert found.measure("pass@12").value == 1.0


def test_empty_completions_fail_and_are_counted(chain: Callable[..., Generator], sandbox: Sandbox) -> None:
    found = evaluate_code(chain("-", ""), [toy("-7")], sandbox=sandbox, max_new_tokens=4)

    assert found.measure("pass@1").value == 0.0
    assert found.notes == ["1 of 1 completions have no program and count as failed."]


def test_a_prompt_longer_than_the_context_is_told(chain: Callable[..., Generator], sandbox: Sandbox) -> None:
    found = evaluate_code(chain("-", "7", max_seq_len=8), [toy("-7")], sandbox=sandbox, max_new_tokens=2)

    assert found.measure("pass@1").value == 1.0
    assert found.notes == ["For 1 of 1 completions the model did not see the beginning of the prompt."]


def test_with_a_chat_template_the_problem_is_a_message(chain: Callable[..., Generator], sandbox: Sandbox) -> None:
    with ChatTemplate("{{ messages[0].role }}: {{ messages[0].content }}-") as chat:
        found = evaluate_code(
            chain("-", "71"), [toy("-71")], sandbox=sandbox, max_new_tokens=8, chat=chat, limits=Limits(seconds=5)
        )

    assert found.measure("pass@1").value == 1.0
    assert found.settings["chat"] is True


def test_variables_of_the_chat_template_are_read_and_recorded(
    chain: Callable[..., Generator], sandbox: Sandbox
) -> None:
    generator = chain("-", "71")
    settings = {**generator.tokenizer.settings(), "chat_template": "{{ messages[0].content }}{{ sign }}"}
    generator.tokenizer = tokenizer_from_json(generator.tokenizer.to_json(), settings)
    with ChatTemplate.of(generator.tokenizer, variables={"sign": "-"}) as chat:
        found = evaluate_code(
            generator, [toy("-71")], sandbox=sandbox, max_new_tokens=8, chat=chat, limits=Limits(seconds=5)
        )

    assert found.measure("pass@1").value == 1.0
    assert found.settings["chat_template_kwargs"] == {"sign": "-"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ks": (2,)}, r"ks = \[2\] must be different numbers from 1 to samples = 1"),
        ({"ks": ()}, "must be different numbers"),
        ({"samples": 2}, "temperature = 0 writes the same program 2 times"),
        ({"workers": 0}, "workers = 0 must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    chain: Callable[..., Generator], sandbox: Sandbox, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate_code(chain("-", "7"), [toy("-7")], sandbox=sandbox, **settings)


def test_the_same_seed_gives_the_same_programs(chain: Callable[..., Generator], sandbox: Sandbox) -> None:
    def texts(seed: int) -> list[str]:
        found = evaluate_code(
            chain("-", "7", score=2.0),
            [toy("-7")],
            sandbox=sandbox,
            samples=4,
            temperature=1.0,
            seed=seed,
            max_new_tokens=3,
            workers=2,
        )
        return [completion["text"] for completion in found.items[0].shown["completions"]]

    assert texts(1) == texts(1) != texts(2)
