"""Tasks of lm-eval: the usual benchmarks, and those of local task files, asked of a model of ours.

A task file may name Python functions, which lm-eval runs, so it is as trusted as a program.
"""

from __future__ import annotations

import io
import logging
import math
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from sheepop.core.config import validate
from sheepop.core.errors import DataError, SheepOpError, TokenizerError, UsageError, first_few
from sheepop.core.random import derive_seed
from sheepop.evaluate.results import Evaluation, Item, Measure
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.likelihood import LikelihoodScorer
from sheepop.tokenizer import ChatTemplate

_NUMPY_SEED = 1234  # lm-eval's own, of numpy and of the choice of examples; its seed of `random` is 0
_RESAMPLES = 1000
_TOGETHER = 64  # texts that are written between two reports of progress
_MAX_NEW_TOKENS = 256
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DRAWING = ("top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_NEEDED = ("dataset_path", "doc_to_text", "doc_to_target")
_BUILDERS = ("json", "csv", "parquet", "text", "arrow")  # of local files
# What lm-eval warns of where a task file leaves something to its defaults.
_USUAL = ("using default", "fewshot_split is None")
_INTERVAL = " The interval is 1.96 of lm-eval's standard errors to either side."
_CHOICE = "How often the right choice has the highest "
# By metric, and where that is not enough by the kind of request too.
_DEFINITIONS = {
    "acc": f"{_CHOICE}log-probability.",
    "acc_norm": f"{_CHOICE}log-probability for each character of its text.",
    "acc_bytes": f"{_CHOICE}log-probability for each byte of its text.",
    "acc_mutual_info": f"{_CHOICE}log-probability less the one that it has behind nothing.",
    "loglikelihood acc": "How often the model would write the right text, taking the likeliest token each time.",
    "exact_match": "How often the written text is the right one, after the changes that the task file asks for.",
    "multiple_choice exact_match": "How often the model would write the right choice, taking the likeliest tokens.",
    "perplexity": "e to the power of minus the right text's log-probability, which is averaged over questions.",
    "word_perplexity": "e to the power of minus the log-probability of all text for each of its words.",
    "byte_perplexity": "e to the power of minus the log-probability of all text for each of its UTF-8 bytes.",
    "bits_per_byte": "Minus the binary logarithm of the probability of all text, for each of its UTF-8 bytes.",
    "brier_score": "The squared distance of the choices' probabilities from 1 for the right one and 0 for others.",
    "f1": "F1 over all questions: the harmonic mean of precision and recall.",
    "mcc": "Matthews' correlation coefficient of chosen and right answers.",
    "bleu": "BLEU of the written texts by sacrebleu, from 0 to 100: n-grams that they share with the right ones.",
    "chrf": "chrF by sacrebleu, from 0 to 100: n-grams of characters that written and right texts share.",
    "chrf++": "chrF++ by sacrebleu, from 0 to 100: n-grams of characters and words that both texts share.",
    "ter": "Translation edit rate by sacrebleu: edits that make the right text, in percent of its words.",
}


@dataclass(frozen=True)
class _Loaded:
    """What one name stands for: a task, the tasks of a tag, or a group with its parts."""

    name: str
    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]
    notes: Sequence[str]


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
    """One evaluation of each task, and one of each group that has scores of its own.

    `tasks` are names that lm-eval knows, those of task files in the directories of `include`, or such files. Each gets
    `num_fewshot` examples, or its own number, and its first `limit` questions; `chat` puts them in the chat template.
    With `seed` 0 examples are those that lm-eval chooses by default. `on_progress` hears how many more texts are
    scored or written.

    Raises `UsageError` for an unknown task, one that runs code, and a model that does not continue text; `DataError`
    for a task that cannot be loaded or asked, among others because its dataset is not here.
    """
    try:
        from lm_eval.evaluator import evaluate  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(f'Tasks of lm-eval need more packages: pip install "sheepop[eval]" ({error})') from None
    with ExitStack() as stack:
        template = stack.enter_context(ChatTemplate.of(generator.tokenizer)) if chat else None
        answers = Answers(generator, template, seed, on_progress)
        settings = {"lm_eval": version("lm_eval"), "limit": limit, "seed": seed, "chat": chat}
        found: list[Evaluation] = []
        for loaded in _load_all(tasks, include, num_fewshot, seed):
            with _undisturbed(seed) as warnings, _explained(f"The task {loaded.name} cannot be asked"):
                results = evaluate(
                    language_model(answers),
                    {"tasks": loaded.tasks, "groups": loaded.groups},
                    limit=limit,
                    bootstrap_iters=_RESAMPLES,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                )
            notes = [*loaded.notes, *warnings, *answers.take_notes()]
            found += _evaluations(loaded, results, notes, settings)
        return found


class Answers:
    """A model's answers to what lm-eval requests, the same that its backend for transformers gives.

    Raises `UsageError` for an encoder-decoder, and `TokenizerError` where no token stands for the beginning or the end
    of a text.
    """

    def __init__(
        self,
        generator: Generator,
        template: ChatTemplate | None = None,
        seed: int = 0,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self._scorer = LikelihoodScorer(generator)
        self._generator, self._template, self._seed = generator, template, seed
        self._on_progress = on_progress or (lambda count: None)
        self._longest = generator.model.config.max_seq_len
        self.tokenizer = generator.tokenizer
        bos, eos = self.tokenizer.special_id("bos"), self.tokenizer.special_id("eos")
        self.prefix_id = self.tokenizer.eos_id if bos is None else bos
        self._beginning = self.tokenizer.decode([self.prefix_id], skip_special=False)
        self._end = [] if eos is None else [self.tokenizer.decode([eos], skip_special=False)]
        self._shortened = 0
        self._notes: list[str] = []
        self.encode = lru_cache(16)(self._encode)  # the choices of a question have one context

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """For each context and continuation the log-probability, and whether it is likeliest token by token."""
        for context, continuation in pairs:
            if not context or not continuation:
                whole = self.tokenizer.decode([*context, *continuation])
                raise DataError(f"A task asks for a text of no token or behind none, in or beside {whole[-80:]!r}.")
        self._shortened += sum(len(before) + len(after) > self._longest + 1 for before, after in pairs)
        return [(found.total, found.is_greedy) for found in self._scorer.score(pairs, on_done=self._on_progress)]

    def roll(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each whole text, in windows of the model's context that lm-eval cuts."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-untyped]

        windows = [
            (number, make_disjoint_window(window))
            for number, text in enumerate(texts)
            for window in get_rolling_token_windows(self.encode(text), self.prefix_id, self._longest, 1)
        ]
        totals = [0.0] * len(texts)
        for (number, _), (total, _) in zip(windows, self.score([window for _, window in windows]), strict=True):
            totals[number] += total
        return totals

    def write(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """A text for each prompt and its ``generation_kwargs``, up to the first of its stop strings."""
        requests = [self._request(prompt, settings) for prompt, settings in asked]
        written: list[str] = []
        for begin in range(0, len(requests), _TOGETHER):
            group = requests[begin : begin + _TOGETHER]
            seed = derive_seed(self._seed, "tasks", begin)
            completions = self._generator.generate(
                [prompt for prompt, _ in group], [config.replace(seed=seed) for _, config in group]
            )
            for completion, (_, config) in zip(completions, group, strict=True):
                text = self.tokenizer.decode(completion.token_ids)  # as if it stood alone, without a space in front
                for stop in config.stop:
                    text = text.split(stop)[0]
                written.append(text)
            self._on_progress(len(group))
        return written

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """A conversation in the chat template; without `add_generation_prompt` the model goes on with its last text."""
        assert self._template is not None
        try:
            text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        except TokenizerError:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise
            text = self._template.render(others, add_generation_prompt=add_generation_prompt)
            self._notes.append("The chat template takes no system message, so the task's description was left out.")
        if add_generation_prompt:
            return text
        last = messages[-1]["content"]
        place = text.rfind(last.strip())
        if place < 0:
            raise DataError(f"The chat template changes the answer that a task begins, {last!r}. Ask without it.")
        whole = last.lstrip() if text.startswith(last.lstrip(), place) else last.strip()
        return text[: place + len(whole)]

    def take_notes(self) -> list[str]:
        """What a reader must know of the answers since the last call."""
        notes = list(dict.fromkeys(self._notes))
        if self._shortened:
            notes.append(
                f"{self._shortened:,} texts were longer than the model's context of {self._longest} tokens has room "
                "for, so their first tokens were left out."
            )
        self._shortened, self._notes = 0, []
        return notes

    def _encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """The ids of a text, special tokens read as such, behind what the tokenizer puts before every text."""
        ids = self.tokenizer.encode(text, allow_special=True)
        adds = not text.startswith(self._beginning) if add_special_tokens is None else add_special_tokens
        return [*self.tokenizer.prefix_ids, *ids] if adds else ids

    def _request(self, prompt: str, settings: Mapping[str, Any]) -> tuple[list[int], GenerationConfig]:
        config = generation_config(settings, self._end)
        room = self._longest - config.max_new_tokens
        if room < 1:
            raise DataError(
                f"A task lets the model write {config.max_new_tokens} tokens, but its context of {self._longest} has to "
                "hold the question too. Set a smaller max_gen_toks in the generation_kwargs of the task's file."
            )
        ids = self.encode(prompt) or [self.prefix_id]
        self._shortened += len(ids) > room
        return ids[-room:], config


def generation_config(asked: Mapping[str, Any], end: Sequence[str]) -> GenerationConfig:
    """What a task's ``generation_kwargs`` mean to lm-eval's backend for transformers; `end` are more stop strings.

    Raises `DataError` for what is not known here, and `ConfigError` for a value that is out of range.
    """
    given = dict(asked)
    until = given.pop("until", None) or []
    stops = dict.fromkeys([*([until] if isinstance(until, str) else until), *end])
    lengths = [int(value) for value in (given.pop(name, None) for name in _LENGTHS) if value is not None]
    temperature, draws = float(given.pop("temperature", 0.0)), given.pop("do_sample", None)
    if draws and temperature == 0:
        raise DataError("A task's generation_kwargs have do_sample without a temperature above 0. Set one of them.")
    if given.get("num_beams") == 1:
        del given["num_beams"]
    if unknown := sorted(given.keys() - set(_DRAWING)):
        known = ", ".join(["until", "do_sample", "temperature", *_DRAWING, *_LENGTHS])
        raise DataError(f"A task's generation_kwargs have {', '.join(unknown)}. SheepOp knows {known}.")
    # The library draws from the 50 likeliest tokens unless it is told otherwise; 0 tells it so.
    given["top_k"] = given.get("top_k", 50) or None
    return validate(
        GenerationConfig,
        {
            "top_p": 1.0,
            **given,
            "temperature": 0.0 if draws is False else temperature,
            "max_new_tokens": lengths[0] if lengths else _MAX_NEW_TOKENS,
            "stop": list(stops),
        },
    )


def language_model(answers: Answers) -> Any:
    """`answers` behind the interface that lm-eval asks; it cuts contexts and continuations for its backends itself."""
    from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]

    class SheepOp(TemplateLM):  # type: ignore[misc]
        @property
        def eot_token_id(self) -> int:
            return answers.tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return answers.prefix_id

        @property
        def tokenizer_name(self) -> str:
            return answers.tokenizer.fingerprint()

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return str(answers.tokenizer.settings().get("chat_template")) if chat_template else None

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return answers.render(chat_history, add_generation_prompt=add_generation_prompt)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
            return answers.encode(string, add_special_tokens)

        def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
            return answers.score([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return answers.roll([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return answers.write([request.args for request in requests])

    return SheepOp()


def _load_all(names: Sequence[str], include: Sequence[Path], num_fewshot: int | None, seed: int) -> list[_Loaded]:
    """All tasks, so that none is asked when another cannot be; raises `UsageError` for one that is named twice."""
    for directory in include:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory. Name one with task files of lm-eval, NAME.yaml.")
    with _undisturbed(seed):
        manager = _manager(names, include)
    found = []
    for name in names:
        with _undisturbed(seed) as warnings:
            loaded = _load(manager, name, include)
            notes = [note for task in loaded["tasks"].values() if (note := _set_up(task, num_fewshot, seed))]
        found.append(_Loaded(name, loaded["tasks"], loaded["groups"], [*warnings, *notes]))
    counts = Counter(task for loaded in found for task in (*loaded.tasks, *loaded.groups))
    if twice := [task for task, count in counts.items() if count > 1]:
        raise UsageError(f"{first_few(twice, 3)} would be asked twice. Leave out the name or the group.")
    return found


def _manager(names: Sequence[str], include: Sequence[Path]) -> Any:
    """What finds tasks: in `include`, and only where these are not all that is needed among lm-eval's thousands."""
    from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

    manager = TaskManager(include_path=[str(directory) for directory in include], include_defaults=False)
    if not all(name in manager.all_subtasks or Path(name).is_file() for name in names):
        for name, entry in _bundled().items():
            manager.task_index.setdefault(name, entry)
    return manager


@cache
def _bundled() -> Mapping[str, Any]:
    from lm_eval.tasks import TaskManager

    return dict(TaskManager().task_index)


def _load(manager: Any, name: str, include: Sequence[Path]) -> Any:
    """The tasks and groups that a name stands for."""
    index = manager.task_index
    source = name
    if name not in index and not Path(name).is_file():
        broken = _file_of(name, include)
        if broken is None:
            near = get_close_matches(name, index, n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(
                f"There is no task {name}.{hint} For task files of your own, name their directory as include (--include)."
            )
        source = str(broken)
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
    """A task file that names itself so, though lm-eval could not read it."""
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
        if isinstance(error, OSError) and dataset not in _BUILDERS:
            raise DataError(
                f"{what}: its dataset {dataset or ''} is not on this machine and could not be downloaded ({reason}). "
                "Load it once where there is a network, or write a task file with dataset_path: json and "
                "dataset_kwargs: {data_files: FILE.jsonl} for a copy of yours, and name its directory as include "
                "(--include)."
            ) from error
        missing = [key for key in _NEEDED if config and key not in config]
        lacks = f" It has no {' and no '.join(missing)}." if missing else ""
        raise DataError(f"{what}: {reason}.{lacks} Correct the task's file or its data.") from error


@contextmanager
def _undisturbed(seed: int) -> Iterator[list[str]]:
    """Runs lm-eval without its output and its processes, with its seeds and not ours; yields what it warns of."""
    heard = _Warnings()
    logger = logging.getLogger("lm_eval")
    before = logger.handlers, logger.level, logger.propagate
    states = random.getstate(), np.random.get_state()
    alone = os.environ.get("DISABLE_MULTIPROC")
    logger.handlers, logger.propagate = [heard], False
    logger.setLevel(logging.WARNING)
    random.seed(seed)
    np.random.seed((_NUMPY_SEED + seed) % 2**32)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield heard.found
    finally:
        logger.handlers, level, logger.propagate = before
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
        if alone is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = alone
