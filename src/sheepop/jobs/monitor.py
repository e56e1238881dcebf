"""What the log of a server says about its models, and data for tuning and evaluation from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import DataError, OutputError
from sheepop.core.files import atomic_file
from sheepop.data import Corpus, is_corpus
from sheepop.data.clean.config import DecontaminationConfig
from sheepop.data.clean.decontamination import load_evaluation_sets
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.evaluate.statistics import Floats
from sheepop.jobs.run.record import find_corpus, view_run_config
from sheepop.monitor.answered import Answered, read_answers
from sheepop.monitor.decisions import FILE, read_decisions, reviewed
from sheepop.monitor.drift import Drift, drift, samples
from sheepop.monitor.figures import DRIFT, Alert, figures, least_sure, over_time
from sheepop.monitor.kinds import kinds
from sheepop.monitor.report import Monitored, OfModel
from sheepop.monitor.rows import (
    Kind,
    evaluation_rows,
    preference_rows,
    supervised_rows,
    text_of,
    without_near_copies,
)
from sheepop.monitor.words import word_vectors
from sheepop.posttrain.rows import Preference, Prompt, Row, RowError, Supervised, as_row, read_rows
from sheepop.serve.conversation_log import LogFaults
from sheepop.tokenizer.messages import MessageError, message_text

if TYPE_CHECKING:
    from sheepop.model import Transformer
    from sheepop.tokenizer import Tokenizer

_TOKENS_PER_PASS = 2048
_RUNS = {"words": 1, "pairs of words": 2}  # that prompts and data are compared by
_WANTED: dict[Kind, type[Row]] = {"sft": Supervised, "preferences": Preference, "eval": Prompt}


@dataclass(frozen=True)
class RowsWritten:
    """How many rows were written, and how many were left out, by reason."""

    written: int
    left_out: dict[str, int]


def monitor(
    directory: str | Path,
    *,
    model: str | None = None,
    alerts: Sequence[Alert] = (),
    against: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Monitored:
    """Returns what a log says about its models; raises `DataError` if it has no answers, or none of `model`.

    The prompts are compared with the data `against`: a corpus, or a run, whose model reads them on `device`.
    """
    faults = LogFaults()
    answers = read_of_model(directory, model, faults)
    by_model: dict[str, list[Answered]] = defaultdict(list)
    for each in answers:
        by_model[each.model].append(each)
    models = {
        name: OfModel(figures(of_model), over_time(of_model), kinds(of_model, seed), least_sure(of_model))
        for name, of_model in sorted(by_model.items())
    }
    drifts = {} if against is None else compare(answers, Path(against), device=device, seed=seed)
    shares = [(name, each.figures.shares) for name, each in models.items()]
    shares += [(f"prompts by {name}", {DRIFT: each.told}) for name, each in drifts.items()]
    fired = [(name, alert) for name, known in shares for alert in alerts if alert.fires(known.get(alert.share))]
    return Monitored(models, drifts, faults, fired)


def compare(answers: Sequence[Answered], against: Path, *, device: str = "auto", seed: int = 0) -> dict[str, Drift]:
    """Compares the prompts of answers with the data of a corpus or a run.

    They are compared by words, by pairs of words, and by the hidden states of a run's model.
    Raises `DataError` if `against` is neither, or has no data.
    """
    # One request with several answers is one prompt.
    prompts = [asked for _, asked in dict.fromkeys((each.id, each.asked) for each in answers)]
    is_run = RunDirectory(against).holds_run()
    drawn = samples(prompts, _texts_of_run(against) if is_run else _texts_of_corpus(against), seed)
    found = {name: drift(drawn, partial(word_vectors, count=count)) for name, count in _RUNS.items()}
    if is_run and RunDirectory(against).has_checkpoint():
        from sheepop.jobs.generate import load_adapted

        loaded = load_adapted(against, device=device)
        found["hidden states"] = drift(drawn, lambda texts: mean_states(loaded.model, loaded.tokenizer, texts))
    return found


def mean_states(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str]) -> Floats:
    """The mean of the last hidden states of each text, shape (texts, D), of its first `max_seq_len` tokens."""
    import torch  # loads slowly

    from sheepop.generate.runner import hidden_states, length_batches

    longest = model.config.max_seq_len
    ids = [[*tokenizer.prefix_ids, *tokenizer.encode(text)][:longest] or [tokenizer.filler_id] for text in texts]
    found = np.empty((len(texts), model.config.d_model))
    with torch.inference_mode():
        for batch in length_batches(list(map(len, ids)), _TOKENS_PER_PASS):
            states = hidden_states(model, [ids[place] for place in batch])
            found[batch] = [each.double().mean(0).cpu().numpy() for each in states]
    return found


def _texts_of_corpus(directory: Path) -> Iterator[str]:
    if not is_corpus(directory):
        raise DataError(f"{directory} is neither a corpus nor a run, so prompts cannot be compared with it.")
    for document in Corpus.open(directory, verify=False).documents("train"):
        yield document.text


def _texts_of_run(directory: Path) -> Iterator[str]:
    """The documents that a run learnt from, or the prompts of the examples that it was tuned on."""
    config = view_run_config(RunDirectory(directory))
    corpus = find_corpus(RunDirectory(directory), config)
    if corpus is not None:
        yield from _texts_of_corpus(corpus)
        return
    files = [Path(path) for path in config.data.paths]
    if missing := [str(path) for path in files if not path.is_file()]:
        raise DataError(f"The data of the run {directory} is not here any more: {', '.join(missing)}. Give its corpus.")
    for row in read_rows(files, Prompt, config.tuning.columns or {}, on_bad=lambda _: None):
        yield row.prompt if isinstance(row.prompt, str) else message_text(row.prompt[-1])


def write_rows(
    directory: str | Path,
    kind: Kind,
    output: str | Path,
    *,
    model: str | None = None,
    unvoted: bool = False,
    leave_out: Sequence[Path] = (),
    overwrite: bool = False,
) -> RowsWritten:
    """Writes rows of a `kind` from the log of a server to the file `output`; see `sheepop.monitor.rows`.

    Answers are taken as they were decided in review, see `sheepop.monitor.decisions.reviewed`.

    Near copies of earlier rows, rows that share a run of words with the evaluation sets `leave_out`, and rows that
    tuning could not read are left out. Raises `DataError` if nothing is left, `OutputError` for a file that exists.
    """
    target = Path(output)
    if target.exists() and not overwrite:
        raise OutputError(f"{target} exists. Choose another --output, or replace it with --overwrite.")
    decisions, num_bad = read_decisions(directory)
    left_out = Counter({f"a line of {FILE} is no decision": num_bad})
    answers = list(reviewed(read_of_model(directory, model, LogFaults()), decisions, left_out))
    if kind == "sft":
        rows = list(supervised_rows(answers, left_out, unvoted=unvoted))
    else:
        rows = list(preference_rows(answers) if kind == "preferences" else evaluation_rows(answers))
    readable = [row for row in rows if _is_readable(row, kind, left_out)]
    distinct = without_near_copies(readable, NearDuplicatesConfig())
    left_out["a copy of an earlier row, or nearly one"] = len(readable) - len(distinct)
    if leave_out:
        sets = load_evaluation_sets(DecontaminationConfig(paths=tuple(map(str, leave_out))))
        clean = [row for row in distinct if next(sets.matches(text_of(row)), None) is None]
        left_out["shares text with an evaluation set"] = len(distinct) - len(clean)
        distinct = clean
    told = {reason: count for reason, count in left_out.items() if count}
    if not distinct:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in told.items())
        raise DataError(
            f"The log gives no rows for {kind}{f' ({reasons})' if reasons else ''}. "
            "Rows are made of answers with votes, which clients give with POST /v1/votes or on the page, and of "
            "answers that you keep or mend with --review."
        )
    with atomic_file(target, replace=overwrite) as temporary:
        temporary.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in distinct))
    return RowsWritten(len(distinct), told)


def read_of_model(directory: str | Path, model: str | None, faults: LogFaults) -> list[Answered]:
    """The answers in a log, or those of `model`; counts `faults`. Raises `DataError` if there are none."""
    found = list(read_answers(directory, faults))
    names = sorted({each.model for each in found})
    if not found:
        raise DataError(f"{directory} has no answers yet.")
    if model is not None and model not in names:
        raise DataError(f"{directory} has no answers of {model!r}; it has those of {', '.join(names)}.")
    return [each for each in found if model in (None, each.model)]


def _is_readable(row: dict[str, Any], kind: Kind, left_out: Counter[str]) -> bool:
    try:
        as_row(row, row["source"], _WANTED[kind])
    except (RowError, MessageError) as error:
        left_out[str(error)] += 1
        return False
    return True
