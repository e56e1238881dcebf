"""Downloads data, builds corpus directories, and says which text tokens and training steps come from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sheepop import data as corpora  # loads the builder only when it is called
from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import DataError, UsageError
from sheepop.core.facts import counted
from sheepop.core.files import read_json
from sheepop.core.interrupts import interrupts_advise
from sheepop.data import Corpus, is_corpus
from sheepop.data.config import pair_settings
from sheepop.data.corpus import Origin, trace_tokens
from sheepop.data.corpus_view import difference, file_record
from sheepop.data.extract.query import is_ordered
from sheepop.data.report import REPORT_JSON
from sheepop.jobs.config import SheepOpConfig, load_config, local_files
from sheepop.jobs.run.record import find_corpus, view_run_config
from sheepop.jobs.task.corpus_batches import build_schedule, reads_pairs
from sheepop.report.formatting import parse_size

if TYPE_CHECKING:
    from sheepop.data import Query
    from sheepop.jobs.task.examples import ExampleTask

EngineName = Literal["local", "ray"]


def build(
    inputs: Sequence[str],
    output: Path,
    config_file: Path | None,
    console: Console,
    *,
    engine: EngineName = "local",
    workers: int | None = None,
    overwrite: bool = False,
    query: str | None = None,
    shrinks: bool = False,
) -> dict[str, Any]:
    """Builds the corpus of `inputs`, paths and ``key=value`` settings in any order, and returns its counts.

    An input is a setting if it contains ``=`` and no file of that name exists. `query` reads the one input that is a
    database address (``dialect://...``). If `workers` is None, `data.num_workers` decides. With `shrinks`, little text
    gets a smaller vocabulary than a given one, as it gets one than the default.
    """
    addresses = [text for text in inputs if "://" in text]
    overrides = [text for text in inputs if "=" in text and text not in addresses and not Path(text).exists()]
    paths = [text for text in inputs if text not in overrides and text not in addresses]
    requested = _query(addresses, query)
    options: dict[str, Any] = {"data": {"paths": paths}} if paths or requested else {}
    if workers is not None:
        options.setdefault("data", {})["num_workers"] = workers
    config = load_config(config_file, overrides, options=options)
    if requested is not None and not is_ordered(requested.text):
        console.warn("The query has no ORDER BY, so the database may return its rows in another order next time.")
    if not config.data.paths and requested is None:
        raise UsageError("There is no input. Name at least one file or folder.")
    data = config.data
    if reads_pairs(config) or data.extract.pair is not None:
        data = pair_settings(data, data)
    data = data.replace(paths=local_files(data.paths, "data.extract.template", console))
    with interrupts_advise("Finished work is kept; run the same command again to resume."):
        corpus = corpora.build_corpus(
            data,
            config.tokenizer,
            output,
            seed=config.seed,
            console=console,
            overwrite=overwrite,
            engine=(corpora.RayEngine if engine == "ray" else corpora.LocalEngine)(config.data.num_workers),
            query=requested,
            shrinks=shrinks or "vocab_size" not in config.tokenizer.model_fields_set,
            failed=output.with_name(f"{output.name}.failed"),
        )
    return {
        "path": str(output),
        "train_documents": corpus.train.num_documents,
        "train_tokens": corpus.train.num_tokens,
        "validation_documents": corpus.validation.num_documents,
        "validation_tokens": corpus.validation.num_tokens,
        "skipped_files": sum(corpus.manifest["files"]["skipped"].values()),
        "refused_parts": sum(corpus.manifest["files"]["refused_parts"].values()),
        "removed_documents": sum(corpus.manifest["documents"]["removed"].values()),
        "reproducible": corpus.manifest["reproducible"],
        "fingerprint": corpus.fingerprint,
    }


def stats(directory: Path) -> dict[str, Any]:
    """The report of a corpus, or of a run's corpus, as plain data."""
    corpus = _open(directory)
    path = corpus.directory / REPORT_JSON
    if not path.is_file():
        raise DataError(f"{corpus.directory} has no {REPORT_JSON}: an older version of SheepOp built it. Rebuild it.")
    report: dict[str, Any] = read_json(path, DataError)
    return {"path": str(corpus.directory), **report}


def show_tokens(directory: Path, tokens: str, split: Literal["train", "validation"]) -> Iterator[Origin]:
    """Yields the documents that the tokens ``A:B`` of a split came from."""
    start, separator, stop = tokens.partition(":")
    try:
        first = int(start)
        last = int(stop) if separator else first + 1
    except ValueError:
        raise UsageError(
            f"--tokens takes A:B, two positions in the split, for example 0:100; got {tokens!r}."
        ) from None
    return trace_tokens(_open(directory), split, first, last)


def show_file(directory: Path, name: str) -> list[dict[str, Any]]:
    """What became of the file `name`; see `file_record`."""
    return file_record(_open(directory), name)


def compare(old: Path, new: Path) -> dict[str, Any]:
    """How the corpora of two builds differ; see `difference`."""
    return difference(_open(old), _open(new))


def _query(addresses: Sequence[str], query: str | None) -> Query | None:
    if query is None and addresses:
        from sheepop.data.extract.query import source_label

        raise UsageError(f"{source_label(addresses[0])} is a database. Give a --query that reads from it.")
    if query is None:
        return None
    if len(addresses) != 1:
        raise UsageError("--query needs exactly one database address among the inputs, such as sqlite:///my.db.")
    return corpora.Query(addresses[0], query)


def _open(directory: Path) -> Corpus:
    if is_corpus(directory):
        return Corpus.open(directory, verify=False)
    run = RunDirectory(directory)
    if run.config_file.is_file():
        return corpus_of_run(run, view_run_config(run))
    raise DataError(
        f"{directory} is neither a corpus nor a run. Make a corpus with: sheepop data build INPUT --output "
        f"{shlex.quote(str(directory))}"
    )


def corpus_of_run(run: RunDirectory, config: SheepOpConfig) -> Corpus:
    """Opens the corpus that `find_corpus` finds; raises `DataError` if it no longer exists."""
    path = find_corpus(run, config)
    if path is not None:
        return Corpus.open(path, verify=False)
    raise DataError(f"The corpus that {run.path} was trained on is no longer at {', '.join(config.data.paths)}.")


def download(
    name: str,
    output: str | Path,
    limit: str | int | None = None,
    token: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Downloads the dataset `name` to a folder below `output`; returns the content of its ``download.json``.

    `limit` bounds the transfer: bytes, or a size such as ``100MB``. `token` is an access token of the Hugging Face hub;
    None uses ``HF_TOKEN`` or a saved login. The result also has the folder as `path`, and as `next` the command that
    builds a corpus from it.
    """
    num_bytes = limit if limit is None or isinstance(limit, int) else parse_size(limit)
    if num_bytes is not None and num_bytes <= 0:
        raise UsageError(f"A limit of {num_bytes} bytes downloads nothing. Give a size such as 100MB.")
    from sheepop.download.download import download_dataset

    with interrupts_advise("What was downloaded is kept; run the same command again to resume."):
        return download_dataset(name, Path(output), limit=num_bytes, token=token, console=console)


def show_step(directory: Path, step: int, console: Console | None = None) -> Iterator[tuple[int, Origin]]:
    """Each sequence of a training step, by its row in the batch, with the origins of its tokens.

    For a step after the latest checkpoint it says that this may still change. Raises `UsageError` for a step that the
    run does not have, and for a run that learns from answers it writes itself.
    """
    # These load torch.
    from sheepop.checkpoint.run_directory import read_counters
    from sheepop.jobs.run.open import task_of
    from sheepop.jobs.task.examples import ExampleTask
    from sheepop.train import TrainingState

    run = RunDirectory.open(directory)
    config = view_run_config(run)
    if step < 1:
        raise UsageError(f"--step counts from 1, got {step}.")
    total = config.training.resolved().total_steps
    if step > total:
        raise UsageError(f"The run in {run.path} has {counted(total, 'step')}, but --step is {step:,}.")
    if config.tuning.method in ("ppo", "grpo", "distill"):
        raise UsageError(
            f"The run in {run.path} learns from answers that the model writes during training, not from stored text. "
            f"{run.samples_file.name} has samples of them."
        )
    task = task_of(config, run, Console.silent())
    latest = run.pointer("latest")
    state = TrainingState() if latest is None else TrainingState.from_record(read_counters(run.checkpoint(latest)))
    if step > state.step and console is not None:
        console.info(
            f"The latest checkpoint is from step {state.step:,}. Step {step:,} will read this unless batches before it "
            "are left out."
        )
    # Batches that the run left out after trouble are skipped here too.
    number = state.after(step=step - 1).batch_number
    if isinstance(task, ExampleTask):
        yield from _of_examples(task, number)
        return
    corpus = corpus_of_run(run, config)
    schedule = build_schedule(config, corpus, run, Console.silent(), store=False)
    for row, ranges in enumerate(schedule.token_ranges(number)):
        for start, stop in ranges:
            for origin in trace_tokens(corpus, "train", start, stop):
                yield row, origin


def _of_examples(task: ExampleTask, number: int) -> Iterator[tuple[int, Origin]]:
    """The examples in batch `number` of the schedule; their tokens are counted in the stored split."""
    split, tokenizer, rows = task.store.train, task.tokenizer(), task.rows(task.store.train)
    for row, sample in enumerate(task.schedule.rows(number).samples.tolist()):
        for example in rows.examples(sample):
            ids = split.example(example).ids
            stop = int(split.ends[example])
            place, text = f"example {example + 1}", tokenizer.decode(ids.tolist())
            yield (
                row,
                Origin("train", stop - len(ids), stop, example, "examples", 0, place, (), "example", "", {}, text),
            )
