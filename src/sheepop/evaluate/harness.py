"""Tasks of lm-eval: the usual benchmarks, and those of local task files, asked of a model of ours.

A task file may name Python functions, which lm-eval runs, so it is as trusted as a program.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sheepop.core.errors import DataError, SheepOpError, UsageError, first_few
from sheepop.evaluate.harness_model import Answers, language_model
from sheepop.evaluate.harness_scores import evaluations_of
from sheepop.evaluate.results import Evaluation
from sheepop.generate import Generator
from sheepop.tokenizer import ChatTemplate

_NUMPY_SEED = 1234  # lm-eval's own, of numpy and of the choice of examples; its seed of `random` is 0
_RESAMPLES = 1000
_NEEDED = ("dataset_path", "doc_to_text", "doc_to_target")
_BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # of local files
# What lm-eval warns of where a task file leaves something to its defaults.
_USUAL = ("using default", "fewshot_split is None")


@dataclass(frozen=True)
class LoadedTask:
    """What one name stands for: a task, the tasks of a tag, or a group with its parts."""

    name: str
    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]
    notes: Sequence[str]


def load_tasks(
    tasks: Sequence[str], *, include: Sequence[Path] = (), num_fewshot: int | None = None, seed: int = 0
) -> list[LoadedTask]:
    """Tasks ready to be asked: names that lm-eval knows, those of task files in `include`, or such files.

    Each gets `num_fewshot` examples, or its own number. With `seed` 0 these are those that lm-eval chooses by default.
    All are loaded, so that none is asked when another cannot be. Raises `UsageError` for an unknown task, one that is
    named twice and one that runs code, and `DataError` for one that cannot be loaded, among others because its dataset
    is not here.
    """
    try:
        import lm_eval.evaluator  # noqa: F401
    except ImportError as error:
        raise UsageError(f'Tasks of lm-eval need more packages: pip install "sheepop[eval]" ({error})') from None
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # what lm-eval would fork has our threads and memory
    for directory in include:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory. Name one with task files of lm-eval, NAME.yaml.")
    with _undisturbed(seed):
        manager = _manager(tasks, include)
    found = []
    for name in tasks:
        with _undisturbed(seed) as warnings:
            loaded = _load(manager, name, include)
            notes = [note for task in loaded["tasks"].values() if (note := _set_up(task, num_fewshot, seed))]
        found.append(LoadedTask(name, loaded["tasks"], loaded["groups"], [*warnings, *notes]))
    counts = Counter(task for loaded in found for task in (*loaded.tasks, *loaded.groups))
    if twice := [task for task, count in counts.items() if count > 1]:
        raise UsageError(f"{first_few(twice, 3)} would be asked twice. Leave out the name or the group.")
    return found


def ask_tasks(
    generator: Generator,
    tasks: Sequence[LoadedTask],
    *,
    limit: int | None = None,
    chat: bool = False,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> list[Evaluation]:
    """One evaluation of each task, and one of each group that has scores of its own.

    The first `limit` questions are asked; `chat` puts them in the chat template. `on_progress` hears how many more
    texts are scored or written. Raises `UsageError` for a model that does not continue text, and `DataError` for a task
    that cannot be asked.
    """
    from lm_eval.evaluator import evaluate

    with ExitStack() as stack:
        template = stack.enter_context(ChatTemplate.of(generator.tokenizer)) if chat else None
        answers = Answers(generator, template, seed, on_progress)
        settings = {"lm_eval": version("lm_eval"), "limit": limit, "seed": seed, "chat": chat}
        found: list[Evaluation] = []
        for loaded in tasks:
            with _undisturbed(seed) as warnings, _explained(f"The task {loaded.name} cannot be asked"):
                results = evaluate(
                    language_model(answers),
                    {"tasks": loaded.tasks, "groups": loaded.groups},
                    limit=limit,
                    bootstrap_iters=_RESAMPLES,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                )
                notes = [*loaded.notes, *warnings, *answers.take_notes(loaded.name)]
                found += evaluations_of(loaded.tasks, loaded.groups, results, notes, settings)
        return found


def run_tasks(
    generator: Generator,
    tasks: Sequence[str],
    *,
    include: Sequence[Path] = (),
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> list[Evaluation]:
    """What `ask_tasks` finds of the tasks that `load_tasks` loads; arguments and errors are theirs."""
    loaded = load_tasks(tasks, include=include, num_fewshot=num_fewshot, seed=seed)
    return ask_tasks(generator, loaded, limit=limit, chat=chat, seed=seed, on_progress=on_progress)


def _manager(names: Sequence[str], include: Sequence[Path]) -> Any:
    """What finds tasks: in `include`, and only where these are not all that is needed among lm-eval's thousands."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(directory) for directory in include], include_defaults=False)
    if not all(_is_complete(name, manager.task_index) or _file_of(name, include) for name in names):
        for name, entry in _bundled().items():
            manager.task_index.setdefault(name, entry)
    return manager


@cache
def _bundled() -> Mapping[str, Any]:
    from lm_eval.tasks import TaskManager

    return dict(TaskManager().task_index)


def _is_complete(name: str, index: Mapping[str, Any]) -> bool:
    """Whether a task, or all parts of a group, are in `index`."""
    if name not in index:
        return False
    parts = (index[name].cfg or {}).get("task")
    return not isinstance(parts, list) or all(isinstance(part, str) and _is_complete(part, index) for part in parts)


def _load(manager: Any, name: str, include: Sequence[Path]) -> Any:
    """The tasks and groups that a name stands for."""
    index = manager.task_index
    source = name
    if name not in index:
        if (file := _file_of(name, include)) is None:
            near = get_close_matches(name, index, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(
                f"There is no task {name}.{hint} For task files of your own, name their directory as include "
                "(--include)."
            )
        source = str(file)
    config = (index[name].cfg if name in index else None) or {}
    parts = index[name].tags if name in index and not config else ()
    _refuse_code(part for part in (name, *parts) if part in index and (index[part].cfg or {}).get("unsafe_code"))
    with _explained(f"The task {name} cannot be loaded{_place(index, name, source)}", config):
        loaded = manager.load([source])
    _refuse_code(task for task, found in loaded["tasks"].items() if getattr(found, "UNSAFE_CODE", False))
    if shown := [task for task, found in loaded["tasks"].items() if getattr(found, "MULTIMODAL", False)]:
        raise UsageError(f"{first_few(shown, 3)} asks about pictures or sound, which SheepOp's models do not take.")
    return loaded


def _file_of(name: str, include: Sequence[Path]) -> Path | None:
    """The task file of that path, or one of that name in `include`, which lm-eval leaves out when it is damaged."""
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return Path(name)
    named = re.compile(rf"""^(?:task|group):\s*["']?{re.escape(name)}["']?\s*$""", re.MULTILINE)
    files = (path for directory in include for path in sorted(directory.rglob("*.yaml")))
    return next((path for path in files if named.search(path.read_text("utf-8", errors="replace"))), None)


def _place(index: Mapping[str, Any], name: str, source: str) -> str:
    path = index[name].yaml_path if name in index else source
    return "" if path is None else f" from {path}"


def _refuse_code(names: Iterable[str]) -> None:
    if found := list(names):
        raise UsageError(
            f"{first_few(found, 3)} runs programs that the model writes, and lm-eval would run them right here. "
            "sheepop eval code runs them in a sandbox."
        )


def _set_up(task: Any, num_fewshot: int | None, seed: int) -> str | None:
    """Sets how many examples a task shows and which; what is to be said of it."""
    task.set_fewshot_seed(seed=_NUMPY_SEED + seed)
    own = task.get_config("num_fewshot")
    if own == 0 and num_fewshot:
        return f"The task {task.task_name} is asked without examples, whatever number is wished for."
    if num_fewshot is not None or own is None:
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    return None


@contextmanager
def _explained(what: str, config: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turns whatever a task's file and functions raise into a `DataError`; `config` is the file's content."""
    try:
        yield
    except (SheepOpError, RuntimeError):  # PyTorch's errors are no fault of a task
        raise
    except Exception as error:
        dataset = (config or {}).get("dataset_path")
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        if isinstance(error, ConnectionError) or (isinstance(error, OSError) and dataset not in (None, *_BUILDERS)):
            raise DataError(
                f"{what}: the dataset {dataset or 'of it'} is not on this machine and could not be downloaded "
                f"({reason}). Load it once where there is a network, or write a task file with dataset_path: json and "
                "dataset_kwargs: {data_files: FILE.jsonl} for a copy of yours, and name its directory as include "
                "(--include)."
            ) from error
        missing = [key for key in _NEEDED if config and key not in config]
        lacks = f" It has no {' and no '.join(missing)}." if missing else ""
        raise DataError(f"{what}: {reason}.{lacks} Correct the task's file or its data.") from error


@contextmanager
def _undisturbed(seed: int) -> Iterator[list[str]]:
    """Runs lm-eval without its output, with seeds of its own; yields what it warns of."""
    heard = _Warnings()
    logger = logging.getLogger("lm_eval")
    before = logger.handlers, logger.level, logger.propagate
    states = random.getstate(), np.random.get_state()
    logger.handlers, logger.propagate = [heard], False
    logger.setLevel(logging.WARNING)
    random.seed(seed)
    np.random.seed((_NUMPY_SEED + seed) % 2**32)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield heard.found
    finally:
        logger.handlers, level, logger.propagate = before
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])


class _Warnings(logging.Handler):
    """Collects what lm-eval warns of, each warning once, as one line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a warning."""
        message = " ".join(record.getMessage().split())[:500]
        if message not in self.found and not any(usual in message for usual in _USUAL):
            self.found.append(message)
