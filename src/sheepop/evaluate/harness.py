"""Runs tasks of lm-eval, from its own collection or from local task files, on a SheepOp model.

A task file can name Python functions, which lm-eval runs. Trust it like a program.
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

_NUMPY_SEED = 1234  # lm-eval's default for numpy and for the choice of few-shot examples; for `random` it is 0
_RESAMPLES = 1000
_NEEDED = ("dataset_path", "doc_to_text", "doc_to_target")
_BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # datasets' names for local files
# Warnings of lm-eval about defaults that a task file did not set.
_USUAL = ("using default", "fewshot_split is None")


@dataclass(frozen=True)
class LoadedTask:
    """The tasks and groups of one name: a task, the tasks of a tag, or a group with its parts."""

    name: str
    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]
    notes: Sequence[str]


def load_tasks(
    tasks: Sequence[str], *, include: Sequence[Path] = (), num_fewshot: int | None = None, seed: int = 0
) -> list[LoadedTask]:
    """Loads tasks by name, from lm-eval or from task files in the directories of `include`, or by path of a task file.

    Each task gets `num_fewshot` examples, or its own number; with `seed` 0 lm-eval's default ones. Loading all tasks
    first means that none runs if another is unusable. Raises `UsageError` for a task that is unknown, named twice or
    runs generated code, and `DataError` for a task that cannot be loaded, for example because its dataset is missing.
    """
    try:
        import lm_eval.evaluator  # noqa: F401
    except ImportError as error:
        raise UsageError(f'Tasks of lm-eval need more packages: pip install "sheepop[eval]" ({error})') from None
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval must not fork a process with threads of torch
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
        raise UsageError(f"{first_few(twice, 3)} would run twice. Leave out the name or the group.")
    return found


def ask_tasks(
    generator: Generator,
    tasks: Sequence[LoadedTask],
    *,
    limit: int | None = None,
    chat: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    context: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[Evaluation]:
    """One evaluation of each task, and one of each group that has scores of its own.

    Runs the first `limit` questions; `chat` puts them into the chat template, which sees `chat_template_kwargs`.
    The model reads at most `context` tokens at a time, by default as many as it can. `on_progress` gets the number of
    further texts that are scored or generated. Raises `UsageError` for a longer context and for a model that does not
    continue text, and `DataError` for a task that fails.
    """
    from lm_eval.evaluator import evaluate

    with ExitStack() as stack:
        template = None
        settings: dict[str, Any] = {"lm_eval": version("lm_eval"), "limit": limit, "seed": seed, "chat": chat}
        settings |= {} if context is None else {"context": context}
        if chat:
            template = stack.enter_context(ChatTemplate.of(generator.tokenizer, variables=chat_template_kwargs))
            settings |= template.settings
        answers = Answers(generator, template, seed, on_progress, context)
        found: list[Evaluation] = []
        for loaded in tasks:
            with _undisturbed(seed) as warnings, _explained(f"The task {loaded.name} cannot be run"):
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


def _manager(names: Sequence[str], include: Sequence[Path]) -> Any:
    """lm-eval's task manager for `include`; lm-eval's own task files are indexed only if needed (seconds)."""
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
    """The tasks and groups of a name, as lm-eval's manager returns them."""
    index = manager.task_index
    source = name
    if name not in index:
        if (file := _file_of(name, include)) is None:
            near = get_close_matches(name, index, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(
                f"There is no task {name}.{hint} For your own task files, give their directory as include (--include)."
            )
        source = str(file)
    config = (index[name].cfg if name in index else None) or {}
    parts = index[name].tags if name in index and not config else ()
    _refuse_code(part for part in (name, *parts) if part in index and (index[part].cfg or {}).get("unsafe_code"))
    path = index[name].yaml_path if name in index else source
    with _explained(f"The task {name} cannot be loaded{f' from {path}' if path else ''}", config):
        loaded = manager.load([source])
    _refuse_code(task for task, found in loaded["tasks"].items() if getattr(found, "UNSAFE_CODE", False))
    if shown := [task for task, found in loaded["tasks"].items() if getattr(found, "MULTIMODAL", False)]:
        raise UsageError(f"{first_few(shown, 3)} has pictures or sound, which SheepOp's models cannot read.")
    return loaded


def _file_of(name: str, include: Sequence[Path]) -> Path | None:
    """The task file at that path, or of that name in `include`; lm-eval does not index damaged files."""
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        return Path(name)
    named = re.compile(rf"""^(?:task|group):\s*["']?{re.escape(name)}["']?\s*$""", re.MULTILINE)
    files = (path for directory in include for path in sorted(directory.rglob("*.yaml")))
    return next((path for path in files if named.search(path.read_text("utf-8", errors="replace"))), None)


def _refuse_code(names: Iterable[str]) -> None:
    if found := list(names):
        raise UsageError(
            f"{first_few(found, 3)} runs programs that the model writes, and lm-eval would run them without isolation. "
            "Use sheepop eval code, which runs them in a sandbox."
        )


def _set_up(task: Any, num_fewshot: int | None, seed: int) -> str | None:
    """Sets the number and the seed of a task's few-shot examples; returns a note if the number cannot be changed."""
    task.set_fewshot_seed(seed=_NUMPY_SEED + seed)
    own = task.get_config("num_fewshot")
    if own == 0 and num_fewshot:
        return f"The task {task.task_name} always runs without examples; --fewshot does not apply to it."
    if num_fewshot is not None or own is None:
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    return None


@contextmanager
def _explained(what: str, config: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turns errors of a task's file and functions into `DataError`; `config` is the content of the file."""
    try:
        yield
    except (SheepOpError, RuntimeError):  # PyTorch's errors are not the task's fault
        raise
    except Exception as error:
        dataset = (config or {}).get("dataset_path")
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        if isinstance(error, ConnectionError) or (isinstance(error, OSError) and dataset not in (None, *_BUILDERS)):
            raise DataError(
                f"{what}: its dataset{f' {dataset}' if dataset else ''} is not on this machine and could not be "
                f"downloaded ({reason}). Load it once with a network, or write a task file with dataset_path: json and "
                "dataset_kwargs: {data_files: FILE.jsonl} for your own copy, and give its directory as include "
                "(--include)."
            ) from error
        missing = [key for key in _NEEDED if config and key not in config]
        lacks = f" It has no {' and no '.join(missing)}." if missing else ""
        raise DataError(f"{what}: {reason}.{lacks} Correct the task's file or its data.") from error


@contextmanager
def _undisturbed(seed: int) -> Iterator[list[str]]:
    """Silences lm-eval, seeds `random` and numpy for it, and restores both afterwards; yields its warnings."""
    warnings = _Warnings()
    logger = logging.getLogger("lm_eval")
    before = logger.handlers, logger.level, logger.propagate
    states = random.getstate(), np.random.get_state()
    logger.handlers, logger.propagate = [warnings], False
    logger.setLevel(logging.WARNING)
    random.seed(seed)
    np.random.seed((_NUMPY_SEED + seed) % 2**32)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield warnings.found
    finally:
        logger.handlers, level, logger.propagate = before
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])


class _Warnings(logging.Handler):
    """Collects lm-eval's warnings, each once, as one line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a warning."""
        message = " ".join(record.getMessage().split())[:500]
        if message not in self.found and not any(usual in message for usual in _USUAL):
            self.found.append(message)
