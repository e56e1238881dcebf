"""The evaluations of ``sheepop eval``: predicting text, answering questions, writing programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.machine import usable_cores
from sheepop.core.sandbox import Limits, Sandbox
from sheepop.data import Corpus
from sheepop.evaluate.answers import answers_of
from sheepop.evaluate.baselines import Texts, compress
from sheepop.evaluate.choices import evaluate_choices
from sheepop.evaluate.code import evaluate_code, read_problems
from sheepop.evaluate.contamination import shares_in_training, with_contamination
from sheepop.evaluate.honesty import evaluate_conduct, has_requests, judged_conduct, read_requests
from sheepop.evaluate.judge import Judge
from sheepop.evaluate.perplexity import Held, evaluate_perplexity, held_texts
from sheepop.evaluate.questions import CLOZE, MADE, is_own, questions_of
from sheepop.evaluate.report import REPORT
from sheepop.evaluate.results import Evaluation, Table, over_seeds
from sheepop.generate import GenerationConfig
from sheepop.jobs.evaluate import How, Outcome, Subject, compare_reports, run_evaluations
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.tokenizer import ChatTemplate

_ANSWER_TOKENS = 128
_JUDGE_WORKERS = 4


@dataclass(frozen=True)
class Perplexity:
    """Predicts the text of `data` (files, folders or corpora), or else the held-out text of the model's run.

    Windows have `context` tokens and each predicts `stride` of them; None means the defaults of `evaluate_perplexity`.
    `limit` is about the number of texts to read. `compressors` adds the bits per byte of gzip and xz on the same text.
    """

    data: Sequence[Path]
    context: int | None
    stride: int | None
    limit: int | None
    compressors: bool
    console: Console

    def __call__(self, subject: Subject) -> list[Evaluation]:
        """One evaluation of the network alone, and one with its memory of the training text if it has one."""
        corpus = subject.place.corpus()
        everything = held_texts(self.data) if self.data else _held_out(corpus, subject.place.name)
        texts = everything.sample(self.limit)
        num_bytes = sum(len(text.text.encode("utf-8")) for text in texts.read())
        name = ", ".join(path.name for path in self.data) or "held-out text"
        names: dict[str, CorpusMemory | None] = {name: None}
        if subject.memory is not None:
            names[f"{name}, with the memory of the training text"] = subject.memory
        found = []
        with self.console.progress("Predicting", len(names) * num_bytes / 1e3, "kB") as progress:
            for each, memory in names.items():
                evaluation = evaluate_perplexity(
                    subject.generator,
                    texts.read(),
                    name=each,
                    context=self.context,
                    stride=self.stride,
                    on_done=lambda count: progress.advance(count / 1e3),
                    memory=memory,
                )
                found.append(replace(evaluation, settings={**evaluation.settings, "texts": texts.count}))
        if texts.count < everything.count:
            note = f"A sample: {texts.count:,} of {everything.count:,} texts, evenly spaced."
            found = [replace(each, notes=[note, *each.notes]) for each in found]
        if not self.compressors or not subject.generator.ranks.is_first:
            return found
        return [self._beside_compressors(found[0], texts, num_bytes, corpus), *found[1:]]

    def _beside_compressors(self, found: Evaluation, texts: Held, num_bytes: int, corpus: Corpus | None) -> Evaluation:
        marks = compress(
            Texts(num_bytes, lambda: (text.text.encode("utf-8") for text in texts.read())),
            None if corpus is None else Texts.of(corpus, "train"),
            self.console,
        )
        rows = [["this model", found.measure("bits_per_byte").value], *map(list, marks.named.items())]
        return replace(found, tables=[Table("Beside compressors", ("What", "Bits per byte"), rows), *found.tables])


@dataclass(frozen=True)
class Tasks:
    """Asks questions: the generated tasks `MADE`, ``cloze``, files of questions, and with `harness` any other task.

    Without `tasks` it asks all of `MADE`, and ``cloze`` if there is held-out text. `training` is the corpus that is
    searched for the questions; None means the corpus of the model's run. `judge` opens the judge of answers to files of
    requests.
    """

    tasks: Sequence[str]
    limit: int | None
    seeds: Sequence[int]
    robustness: bool
    training: Path | None
    harness: Callable[[Subject, Sequence[str], int], list[Evaluation]]
    console: Console
    judge: Callable[[], AbstractContextManager[Judge]] | None = None

    def __call__(self, subject: Subject) -> list[Evaluation]:
        """One evaluation of each task."""
        corpus = subject.place.corpus() if self.training is None else Corpus.open(self.training, verify=False)
        tasks = self.tasks or [*MADE, *([CLOZE] if corpus is not None and corpus.validation.num_documents else [])]
        own = [task for task in tasks if is_own(task)]
        others = [task for task in tasks if not is_own(task)]
        found = [over_seeds([self._evaluate(subject, task, seed, corpus) for seed in self.seeds]) for task in own]
        if others:
            by_seed = [self.harness(subject, others, seed) for seed in self.seeds]
            found += [over_seeds(each) for each in zip(*by_seed, strict=True)]
        # Only the first rank writes the report.
        return [self._checked(each, corpus) if subject.generator.ranks.is_first else each for each in found]

    def _evaluate(self, subject: Subject, task: str, seed: int, corpus: Corpus | None) -> Evaluation:
        if task.endswith(".jsonl") and Path(task).is_file() and has_requests(task):
            return self._conduct(subject, task, seed)
        held_out = None if corpus is None else (document.text for document in corpus.documents("validation"))
        questions = questions_of(task, self.limit, seed, held_out)
        total = sum(len(question.choices) for question in questions)
        with self.console.progress(Path(task).stem, total, "choices") as progress:
            return evaluate_choices(
                subject.generator,
                Path(task).stem,
                questions,
                robustness=self.robustness,
                on_done=progress.advance,
            )

    def _conduct(self, subject: Subject, task: str, seed: int) -> Evaluation:
        """Lets the model answer the requests of a file, and a judge classify its answers."""
        if self.judge is None:
            raise UsageError(
                f"The answers to the requests of {task} need a judge. Name a server's address or a chat model with "
                "sheepop eval tasks --by."
            )
        requests = read_requests(task)[: self.limit]
        config = GenerationConfig(temperature=0.0, max_new_tokens=_ANSWER_TOKENS, on_overflow="window", seed=seed)
        with self.console.progress(Path(task).stem, len(requests), "answers") as progress:
            prompts = [request.prompt for request in requests]
            texts = answers_of(subject.generator, prompts, config, on_done=progress.advance)
        ranks, conducts = subject.generator.ranks, None
        if ranks.is_first:
            with self.judge() as judge, self.console.progress("Judging", len(requests), "answers") as progress:
                conducts = judged_conduct(judge, requests, texts, workers=_JUDGE_WORKERS, on_done=progress.advance)
        return evaluate_conduct(Path(task).stem, requests, texts, ranks.told(conducts))

    def _checked(self, found: Evaluation, corpus: Corpus | None) -> Evaluation:
        """Adds separate scores for the items in the training text; generated questions cannot be in it."""
        if corpus is None or found.name in MADE:
            return found
        texts = {item.id: f"{item.shown.get('prompt', '')}{item.shown.get('reference', '')}" for item in found.items}
        with self.console.progress("Searching the training text", corpus.train.num_bytes / 1e6, "MB") as bar:

            def read() -> Iterator[str]:
                for document in corpus.documents("train"):
                    yield document.text
                    bar.advance(document.num_bytes / 1e6)

            shares = shares_in_training(texts, read())
        return with_contamination(found, shares, str(corpus.directory))


@dataclass(frozen=True)
class Harness:
    """Runs tasks of lm-eval, also those defined in the directories of `include`.

    The model reads at most `context` tokens at a time, by default as many as it can.
    """

    include: Sequence[Path]
    fewshot: int | None
    limit: int | None
    chat: bool
    chat_template_kwargs: Mapping[str, Any] | None
    console: Console
    context: int | None = None

    def __call__(self, subject: Subject, tasks: Sequence[str], seed: int) -> list[Evaluation]:
        """One evaluation of each task, and one of each group."""
        from sheepop.evaluate.harness import ask_tasks, load_tasks

        loaded = load_tasks(tasks, include=self.include, num_fewshot=self.fewshot, seed=seed)
        with self.console.progress("lm-eval", None, "requests") as progress:
            return ask_tasks(
                subject.generator,
                loaded,
                limit=self.limit,
                chat=self.chat,
                chat_template_kwargs=self.chat_template_kwargs,
                seed=seed,
                context=self.context,
                on_progress=progress.advance,
            )


@dataclass(frozen=True)
class Code:
    """Lets a model write programs and runs their tests in a sandbox."""

    data: Sequence[Path]
    samples: int
    ks: Sequence[int]
    temperature: float
    max_new_tokens: int
    seconds: float
    limit: int | None
    seed: int
    chat: bool
    chat_template_kwargs: Mapping[str, Any] | None
    console: Console

    def _template(self, subject: Subject) -> ChatTemplate:
        return ChatTemplate.of(subject.generator.tokenizer, variables=self.chat_template_kwargs)

    def __call__(self, subject: Subject) -> list[Evaluation]:
        """One evaluation of each file."""
        sandbox = Sandbox.find()
        found = []
        for path in self.data:
            problems = read_problems(path)[: self.limit]
            with (
                self.console.progress(path.name, len(problems), "problems") as progress,
                self._template(subject) if self.chat else nullcontext() as template,
            ):
                found.append(
                    evaluate_code(
                        subject.generator,
                        problems,
                        name=path.stem,
                        samples=self.samples,
                        ks=self.ks,
                        temperature=self.temperature,
                        max_new_tokens=self.max_new_tokens,
                        seed=self.seed,
                        sandbox=sandbox,
                        limits=Limits(seconds=self.seconds),
                        workers=max(1, int(usable_cores())),
                        chat=template,
                        on_done=progress.advance,
                    )
                )
        return found


def compare_models(
    models: Sequence[Path],
    data: Sequence[Path],
    context: int | None,
    tasks: Sequence[str],
    limit: int | None,
    how: How,
    console: Console,
) -> Outcome:
    """Evaluates models on the same data and tasks and compares them, or compares their existing reports.

    The models predict `data` in windows of `context` tokens, and answer `tasks`. Without `data` they predict the
    held-out text of the first one's run, if there is any.
    """
    if all((model / REPORT).is_file() for model in models):
        return compare_reports(models, how)
    if len(models) < 2:
        raise UsageError("Give two models or more to compare, or directories that sheepop eval wrote.")
    corpora: list[Path] = []

    def evaluate(subject: Subject) -> list[Evaluation]:
        corpus = subject.place.corpus()
        if not corpora and corpus is not None and corpus.validation.num_documents:
            corpora.append(corpus.directory)
        questions = Tasks(tasks, limit, [0], False, None, Harness((), None, limit, False, None, console), console)
        found = (
            [] if not (data or corpora) else Perplexity(data or corpora, context, None, limit, False, console)(subject)
        )
        return [*found, *questions(subject)]

    return run_evaluations(models, evaluate, how, console)


def _held_out(corpus: Corpus | None, model: str) -> Held:
    if corpus is None or corpus.validation.num_documents == 0:
        raise UsageError(f"There is no text held out by the run of {model}. Give a text to predict with --data PATH.")
    return Held.of(corpus)
