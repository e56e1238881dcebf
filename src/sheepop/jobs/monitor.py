"""What the log of a server says about its models, and data for tuning and evaluation from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sheepop.core.errors import DataError, OutputError
from sheepop.core.files import atomic_file
from sheepop.data.clean.config import DecontaminationConfig
from sheepop.data.clean.decontamination import load_evaluation_sets
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.monitor.answered import Answered, read_answers
from sheepop.monitor.figures import Alert, Figures, figures
from sheepop.monitor.log import LogFaults
from sheepop.monitor.rows import (
    Kind,
    evaluation_rows,
    preference_rows,
    supervised_rows,
    text_of,
    without_near_copies,
)
from sheepop.posttrain.rows import Preference, Prompt, Row, RowError, Supervised, as_row
from sheepop.tokenizer.messages import MessageError

_WANTED: dict[Kind, type[Row]] = {"sft": Supervised, "preferences": Preference, "eval": Prompt}


@dataclass(frozen=True)
class Monitored:
    """The figures of each model in a log, the faults of the log, and the alerts that fire with the model's name."""

    models: dict[str, Figures]
    faults: LogFaults
    fired: list[tuple[str, Alert]]


@dataclass(frozen=True)
class RowsWritten:
    """How many rows were written, and how many were left out, by reason."""

    written: int
    left_out: dict[str, int]


def monitor(directory: str | Path, *, model: str | None = None, alerts: Sequence[Alert] = ()) -> Monitored:
    """Returns the figures of the models in a log; raises `DataError` if it has no answers, or none of `model`."""
    faults = LogFaults()
    by_model: dict[str, list[Answered]] = defaultdict(list)
    for each in _answers(directory, model, faults):
        by_model[each.model].append(each)
    found = {name: figures(answers) for name, answers in sorted(by_model.items())}
    fired = [(name, alert) for name, of_model in found.items() for alert in alerts if alert.fires(of_model)]
    return Monitored(found, faults, fired)


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

    Near copies of earlier rows, rows that share a run of words with the evaluation sets `leave_out`, and rows that
    tuning could not read are left out. Raises `DataError` if nothing is left, `OutputError` for a file that exists.
    """
    target = Path(output)
    if target.exists() and not overwrite:
        raise OutputError(f"{target} exists. Choose another --output, or replace it with --overwrite.")
    answers, left_out = _answers(directory, model, LogFaults()), Counter[str]()
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
            "Rows are made of answers with votes: clients give them with POST /v1/votes, or on the page."
        )
    with atomic_file(target, replace=overwrite) as temporary:
        temporary.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in distinct))
    return RowsWritten(len(distinct), told)


def _answers(directory: str | Path, model: str | None, faults: LogFaults) -> list[Answered]:
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
