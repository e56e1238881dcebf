"""The runs that the page shows, read from their directories at each request, during training and afterwards."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import CheckpointError, DataError, UsageError
from sheepop.data.report import REPORT_HTML
from sheepop.interpret.store import StoredTrace
from sheepop.jobs.data import find_corpus
from sheepop.jobs.run.listing import Comparison, Listing, differing_settings, find_runs, read_run
from sheepop.jobs.run.record import view_run_config
from sheepop.jobs.run.steps import show_step
from sheepop.train.metrics import read_json_lines

# Limits of one response: bytes of metrics, samples, documents of a step, and characters of each document.
_BYTES, _SAMPLES, _ORIGINS, _CHARACTERS = 2**21, 200, 64, 4000
_OPEN_TRACES, _LAST_LINES = 64, 1024
_REPORTS = ("run", "corpus")


class WatchedRuns:
    """The runs in `places`, by name. Methods raise `SheepOpError` for an unknown run and for data that it lacks."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._runs = {name: RunDirectory(place) for name, place in places.items()}
        self._traces: OrderedDict[tuple[str, int], StoredTrace] = OrderedDict()
        self._last_lines: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The names of all runs."""
        return list(self._runs)

    def summary(self, name: str) -> dict[str, Any]:
        """State, size, steps and scores of a run, and the pages that it has."""
        run = self._run(name)
        found = read_run(run.path)
        corpus = find_corpus(run, view_run_config(run))
        pages = {"run": run.report, "corpus": None if corpus is None else corpus / REPORT_HTML}
        return {
            **found.summary.to_dict(),
            "name": name,
            "pages": [kind for kind, page in pages.items() if page is not None and page.is_file()],
        }

    def metrics(self, name: str, offset: int) -> dict[str, Any]:
        """Complete rows after byte `offset`; starts at 0 if a resumed run has cut the file.

        `is_whole` is true if there are no more rows for now.
        """
        run = self._run(name)
        if not run.metrics_file.is_file():
            return {"rows": [], "offset": 0, "from": 0, "is_whole": True, "is_running": run.is_running()}
        with run.metrics_file.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = offset if self._is_unchanged(file, name, offset) else 0
            file.seek(begin)
            read = file.read(_BYTES)
        whole = read[: read.rfind(b"\n") + 1]
        try:
            rows = [json.loads(line) for line in whole.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise DataError(f"{run.metrics_file} has a line that is not JSON ({error}).") from None
        end = begin + len(whole)
        self._remember(name, end, whole)
        return {"rows": rows, "from": begin, "offset": end, "is_whole": begin + len(read) >= size,
                "is_running": run.is_running()}  # fmt: skip

    def _is_unchanged(self, file: BinaryIO, name: str, offset: int) -> bool:
        """Whether the line before `offset` is still the one that was read there.

        A resumed run cuts the file and writes other rows, so the file may again be longer than `offset`.
        """
        with self._lock:
            last = self._last_lines.get((name, offset), b"\n")
        if offset == 0:
            return True
        file.seek(max(0, offset - len(last)))
        return file.read(len(last)) == last

    def _remember(self, name: str, offset: int, rows: bytes) -> None:
        """Stores the last line before `offset` for `_is_unchanged`."""
        if not rows:
            return
        with self._lock:
            self._last_lines[name, offset] = rows[rows.rfind(b"\n", 0, -1) + 1 :]
            while len(self._last_lines) > _LAST_LINES:
                self._last_lines.popitem(last=False)

    def samples(self, name: str) -> list[dict[str, Any]]:
        """The latest samples of a run."""
        return read_json_lines(self._run(name).samples_file)[0][-_SAMPLES:]

    def differences(self) -> dict[str, Any]:
        """The settings in which the runs differ, and a warning if their scores are not comparable."""
        runs, left_out = find_runs([run.path for run in self._runs.values()])
        found = Comparison(Listing(runs, left_out), differing_settings(runs))
        names = {str(run.path): name for name, run in self._runs.items()}
        return {
            "runs": [names.get(run.summary.path, run.summary.name) for run in runs],
            "settings": found.settings,
            "warning": found.warning if len(runs) > 1 else None,
        }

    def traces(self, name: str) -> list[int]:
        """The steps at which the prompt of `trace.prompt` was traced."""
        folder = self._run(name).traces
        found = folder.iterdir() if folder.is_dir() else ()
        numbers = (place.name.removeprefix("step-") for place in found if place.name.startswith("step-"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def trace(self, name: str, step: int) -> StoredTrace:
        """The trace of a step, verified when it is first read."""
        run = self._run(name)
        with self._lock:
            found = self._traces.pop((name, step), None)
            if found is None:
                place = run.traces / f"step-{step:08d}"
                if not place.is_dir():
                    raise DataError(f"{run.path} has no trace of step {step}.")
                found = StoredTrace.open(place)
            self._traces[name, step] = found
            while len(self._traces) > _OPEN_TRACES:
                self._traces.popitem(last=False)
        return found

    def origins(self, name: str, step: int) -> list[dict[str, Any]]:
        """The first texts of a step, each with its row in the batch and its document."""
        found = islice(show_step(self._run(name).path, step), _ORIGINS)
        return [{"row": row, **asdict(origin), "text": origin.text[:_CHARACTERS]} for row, origin in found]

    def report(self, name: str, kind: str) -> bytes:
        """The HTML report of a run (``run``) or of its corpus (``corpus``)."""
        run = self._run(name)
        if kind not in _REPORTS:
            raise UsageError(f"A run has no page {kind!r}. Its pages are {', '.join(_REPORTS)}.")
        page: Path | None = run.report
        if kind == "corpus":
            corpus = find_corpus(run, view_run_config(run))
            page = None if corpus is None else corpus / REPORT_HTML
        if page is None or not page.is_file():
            raise DataError(f"{run.path} has no {kind} report yet.")
        return page.read_bytes()

    def _run(self, name: str) -> RunDirectory:
        if name not in self._runs:
            raise CheckpointError(f"There is no run {name!r}. Runs: {', '.join(self._runs) or 'none'}.")
        return self._runs[name]
