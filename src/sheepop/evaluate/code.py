"""How often a model's programs pass their tests, for problems in the formats of HumanEval and MBPP."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError, UsageError
from sheepop.core.random import derive_seed
from sheepop.core.sandbox import Limits, Sandbox, Verdict
from sheepop.evaluate.answers import chat_prompt
from sheepop.evaluate.questions import read_items
from sheepop.evaluate.results import Evaluation, Item, Measure, Table
from sheepop.evaluate.statistics import mean_interval, pass_at_k
from sheepop.generate import Completion, GenerationConfig, Generator
from sheepop.tokenizer import ChatTemplate

_SHAPES = (
    "HumanEval's have task_id, prompt, canonical_solution, test and entry_point; MBPP's have task_id, text (or "
    "prompt), code and test_list, and perhaps test_setup_code or test_imports"
)
# Text that ends a completion. An answer to MBPP is a whole program, so definitions do not end it.
_FUNCTION_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_PROGRAM_STOPS = ("\nassert", '\n"""', "\nif", "\nprint")
_FENCED = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)
_COMPLETE = "Complete this Python program. Answer with all of it in a ```python block.\n\n```python\n{}\n```"
_WRITE = "Write a Python program for this task. Answer with a ```python block.\n\n{}"
_BATCH = 16  # problems; the text for a seed depends on it
_EMPTY = Verdict("failed", "The completion is empty.", 0.0)
_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True)
class Problem:
    """A task with tests. The program is `before`, the model's text and then `tests`; `solution` is a right completion.

    `entry_point` is the function that `prompt` begins and the model continues; "" if it writes a whole program.
    """

    id: str
    prompt: str
    before: str
    tests: str
    solution: str
    entry_point: str = ""

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a completion."""
        return _FUNCTION_STOPS if self.entry_point else _PROGRAM_STOPS

    def program(self, completion: str) -> str:
        """The program in a completion, "" if there is none.

        It is the first fenced block, or the text up to the first of `stops`. A block that defines the function itself
        is appended to the prompt too, because it may need the prompt's imports and other functions.
        """
        blocks = fenced_programs(completion)
        written = blocks[0] if blocks else re.split("|".join(map(re.escape, self.stops)), completion, maxsplit=1)[0]
        if not written.strip():
            return ""
        defined = self.entry_point and re.search(rf"^(?:async )?def {self.entry_point}\b", written, re.MULTILINE)
        return self.before + ("\n" if defined else "") + written + "\n"

    def message(self) -> str:
        """The task as a user's message."""
        return _COMPLETE.format(self.prompt.rstrip()) if self.entry_point else _WRITE.format(self.prompt.strip('"\n'))


def fenced_programs(text: str) -> list[str]:
    """The Python programs between fences in a text; the last fence may be open."""
    return _FENCED.findall(text)


def read_problems(path: str | Path) -> list[Problem]:
    """The problems of a JSONL file with the fields of HumanEval or of MBPP.

    A HumanEval prompt is the beginning of a function, taken from the file. An MBPP prompt is a docstring with the text
    and one line for each test, and a line break after it. Raises `DataError` with file and line for an invalid row,
    and for two problems with one id.
    """
    return read_items(path, _problem, f"problems. Write one JSON object a line: {_SHAPES}", key="task_id")


def _problem(row: dict[str, Any], name: str, place: str) -> Problem:
    given = row.get("task_id")
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise DataError(f'{place}: "task_id" must be a text or a number, not {given!r}. {_SHAPES}.')
    if "test_list" in row or "code" in row:
        tests = _field(row, "test_list", place, many=True)
        text = _field(row, "text" if "text" in row else "prompt", place)
        setup = [
            *_field(row, "test_imports", place, many=True, needed=False),
            _field(row, "test_setup_code", place, needed=False),
        ]
        prompt = "\n".join(['"""', text.strip(), *tests, '"""', ""])
        before = "".join(f"{part}\n" for part in setup if part)
        return Problem(name, prompt, before, "\n".join(tests), _field(row, "code", place))
    prompt, entry_point = _field(row, "prompt", place), _field(row, "entry_point", place)
    if not entry_point.isidentifier():
        raise DataError(f'{place}: "entry_point" must be the name of a function, not {entry_point!r}.')
    tests = f"{_field(row, 'test', place)}\ncheck({entry_point})\n"
    return Problem(name, prompt, prompt, tests, _field(row, "canonical_solution", place), entry_point)


def _field(row: dict[str, Any], key: str, place: str, *, many: bool = False, needed: bool = True) -> Any:
    """The text, or with `many` the list of texts, in a field of a row."""
    found = row.get(key)
    if not found and not needed:
        return [] if many else ""
    texts = found if many else [found]
    is_valid = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not is_valid or not (found and (many or found.strip() or not needed)):
        problem = f"not {found!r}" if key in row else "but it is missing"
        raise DataError(f'{place}: "{key}" must be a {"list of texts" if many else "text"}, {problem}. {_SHAPES}.')
    return found


def evaluate_code(
    generator: Generator,
    problems: Sequence[Problem],
    *,
    sandbox: Sandbox,
    name: str = "code",
    samples: int = 1,
    ks: Sequence[int] = (1,),
    temperature: float = 0.0,
    seed: int = 0,
    limits: Limits | None = None,
    workers: int = 1,
    max_new_tokens: int = 512,
    chat: ChatTemplate | None = None,
    on_done: Callable[[int], None] | None = None,
) -> Evaluation:
    """Lets the model write `samples` programs for every problem, runs them, and estimates pass@k for all `ks`.

    `workers` programs run at a time, on the first of several ranks. With `chat`, the problem is a user's message and
    the model ends its answer itself; otherwise it continues the prompt up to one of the problem's `stops`. `on_done`
    gets the number of further problems that are finished. Raises `UsageError` for settings that do not fit each other.
    """
    _require_fitting(samples, ks, temperature, workers, problems)
    limits = limits or Limits()
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=0.95 if temperature else 1.0,
        num_completions=samples,
        on_overflow="window",
    )
    items: list[Item] = []
    written: list[Completion] = []
    judged: list[Verdict] = []
    with ThreadPoolExecutor(workers, thread_name_prefix="sandbox") as pool:
        for group, texts in _written(generator, problems, config, seed, chat):
            repeated = [problem for problem in group for _ in range(samples)]
            programs = [problem.program(text.text) for problem, text in zip(repeated, texts, strict=True)]
            ran = None
            if generator.ranks.is_first:  # ranks of one machine would slow each other's programs down
                ran = [asdict(verdict) for verdict in pool.map(partial(_judged, sandbox, limits), repeated, programs)]
            verdicts = [Verdict(**each) for each in generator.ranks.told(ran)]
            for start, problem in zip(range(0, len(texts), samples), group, strict=True):
                of_it = slice(start, start + samples)
                items.append(_item(problem, texts[of_it], verdicts[of_it], ks))
            written += texts
            judged += verdicts
            if on_done is not None:
                on_done(len(group))
    settings: dict[str, Any] = {"samples": samples, "temperature": temperature, "top_p": config.top_p, "seed": seed}
    settings |= {"max_new_tokens": max_new_tokens, "chat": chat is not None, "limits": asdict(limits)}
    settings |= {} if chat is None else chat.settings
    ends = Counter(verdict.outcome for verdict in judged).most_common()
    table = Table("How the programs ended", ("Outcome", "Programs"), ends)
    return Evaluation("code", name, _measures(items, ks, samples), items, [table], _notes(written, judged), settings)


def _require_fitting(
    samples: int, ks: Sequence[int], temperature: float, workers: int, problems: Sequence[Problem]
) -> None:
    if not problems:
        raise UsageError("There is no problem to solve. Give at least one.")
    if workers < 1:
        raise UsageError(f"workers = {workers} must be at least 1.")
    if not ks or min(ks) < 1 or max(ks) > samples or len(set(ks)) < len(ks):
        raise UsageError(
            f"ks = {list(ks)} must be different numbers from 1 to samples = {samples}: pass@k needs k programs for "
            "every problem. Change ks, or write more samples."
        )
    if samples > 1 and temperature == 0:
        raise UsageError(
            f"temperature = 0 writes the same program {samples} times. Set samples = 1, or a temperature such as 0.8."
        )


def _written(
    generator: Generator, problems: Sequence[Problem], config: GenerationConfig, seed: int, chat: ChatTemplate | None
) -> Iterator[tuple[Sequence[Problem], list[Completion]]]:
    """Batches of problems with their completions: all those of the first problem, then of the second, and so on."""
    for start in range(0, len(problems), _BATCH):
        group = problems[start : start + _BATCH]
        own = config.replace(seed=derive_seed(seed, "code", start))
        if chat is None:
            configs = [own.replace(stop=problem.stops) for problem in group]
            yield group, generator.generate([problem.prompt for problem in group], configs)
            continue
        messages = [[{"role": "user", "content": problem.message()}] for problem in group]
        yield group, generator.generate([chat_prompt(generator.tokenizer, chat, each) for each in messages], own)


def _judged(sandbox: Sandbox, limits: Limits, problem: Problem, program: str) -> Verdict:
    return sandbox.run(program, tests=problem.tests, limits=limits) if program else _EMPTY


def _item(problem: Problem, texts: Sequence[Completion], verdicts: Sequence[Verdict], ks: Sequence[int]) -> Item:
    right = sum(verdict.outcome == "passed" for verdict in verdicts)
    shown = [
        {"text": text.text, "outcome": verdict.outcome, "output": verdict.output[-_SHOWN_CHARACTERS:]}
        for text, verdict in zip(texts, verdicts, strict=True)
    ]
    values = {f"pass@{k}": pass_at_k(len(verdicts), right, k) for k in ks}
    return Item(problem.id, values, shown={"prompt": problem.prompt, "completions": shown})


def _measures(items: Sequence[Item], ks: Sequence[int], samples: int) -> list[Measure]:
    measures = []
    for k in ks:
        name, values = f"pass@{k}", [item.values[f"pass@{k}"] for item in items]
        what = "a program passes" if k == 1 else f"at least one of {k} programs passes"
        definition = (
            f"The chance that {what} all tests of a problem, estimated without bias from {samples} programs for each "
            "(Chen et al. 2021, equation 1)."
        )
        if set(values) <= {0.0, 1.0}:  # a bootstrap of equal values has no spread
            measures.append(Measure.share(name, values, definition))
        else:
            measures.append(Measure(name, sum(values) / len(values), definition, len(values), mean_interval(values)))
    return measures


def _notes(written: Sequence[Completion], judged: Sequence[Verdict]) -> list[str]:
    notes = []
    if empty := sum(verdict == _EMPTY for verdict in judged):
        notes.append(f"{empty:,} of {len(judged):,} completions have no program and count as failed.")
    if cut := sum(text.num_dropped_prompt_tokens > 0 for text in written):
        notes.append(f"For {cut:,} of {len(written):,} completions the model did not see the beginning of the prompt.")
    return notes
