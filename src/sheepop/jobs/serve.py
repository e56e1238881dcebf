"""Serves models over HTTP until the process is told to stop, and shows runs on the page."""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import sys
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from starlette.types import ASGIApp

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, ConfigError, DataError, UsageError
from sheepop.core.facts import counted
from sheepop.core.json_lines import read_json_lines
from sheepop.data.corpus import trace_tokens
from sheepop.data.corpus_view import lost_records
from sheepop.data.report import REPORT_HTML, REPORT_JSON
from sheepop.interpret.store import StoredTrace
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.data import corpus_of_run, show_step
from sheepop.jobs.run.listing import Comparison, Listing, differing_settings, find_runs, read_run
from sheepop.jobs.run.record import find_corpus, view_run_config
from sheepop.jobs.snapshots import Snapshots, traced_steps
from sheepop.posttrain.rows import Prompt, read_rows
from sheepop.serve.access import Doorkeeper
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.inside import PAGE
from sheepop.serve.registry import Registry
from sheepop.serve.server import Server, Service
from sheepop.serve.stock import Stock

# Limits of one response: bytes of metrics, samples, documents of a step, and characters of each document.
_BYTES, _SAMPLES, _ORIGINS, _CHARACTERS = 2**21, 200, 64, 4000
_OPEN_TRACES, _LAST_LINES = 64, 1024
_PROMPT_TOKENS, _LOST = 20, 12
_PAGES = ("run", "plan", "corpus")


def serve(
    places: Mapping[str, Path],
    config: SheepOpConfig,
    *,
    adapters: Mapping[str, Path] | None = None,
    dtype: str | None,
    console: Console,
    prompts: Sequence[str] = (),
    room: str | None = None,
    for_page: bool = False,
) -> None:
    """Serves the models in `places` under their names, and the first of them with each adapter under its name.

    With the page (`server.ui`), runs can be watched and need no checkpoint yet; its arena draws from `prompts`, and the
    printed URL leads to the `room` if one is given. A server `for_page` alone writes no access log and, on a screen,
    opens the page in the browser. SIGTERM and Ctrl-C let open requests finish; SIGHUP reloads the
    models. Raises `UsageError` for a port that is taken, or a first model that cannot be loaded.
    """
    runs = (
        {name: place for name, place in places.items() if RunDirectory(place).holds_run()} if config.server.ui else {}
    )
    stock = Stock(dict(places), dict(adapters or {}), config.server, config.device, dtype)
    _check_certificate(config.server)
    with _service(stock, config, runs, prompts, console) as (app, service):
        listener = listen(config.server)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        if for_page:
            logging.getLogger("sheepop.access").setLevel(logging.WARNING)
        scheme = "https" if config.server.certificate else "http"
        host, port = listener.getsockname()[:2]
        names = ", ".join((*stock.sources, *config.server.aliases))
        console.info(f"Serving {names} at {scheme}://{host}:{port}/v1. Ctrl-C stops.")
        if config.server.ui:
            words, place = ("Look inside", "") if room is None else ("Open the page", f"#room={room}")
            address = f"{scheme}://{host}:{port}{PAGE}{place}"
            console.info(f"{words} at {address}")
            if for_page and console.is_terminal and has_screen():
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        Server(app, service, config.server).run(sockets=[listener])


def has_screen() -> bool:
    """Whether a browser would open a window here; in a text browser the page would not work."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def serve_arena(
    places: Mapping[str, Path],
    config: SheepOpConfig,
    *,
    prompts: Path | None,
    dtype: str | None,
    console: Console,
) -> None:
    """Serves the page, as `serve` does, for votes between models on a file of prompts or on the voters' own.

    Raises `UsageError` for fewer than two models, and `DataError` for prompts that are not texts.
    """
    if len(places) < 2:
        raise UsageError(f"An arena needs two models; given: {', '.join(places) or 'none'}. Name another one.")
    texts: list[str] = []
    for row in [] if prompts is None else read_rows([prompts], Prompt):
        if not isinstance(row.prompt, str):
            raise DataError(f"{row.place}: prompt: an arena takes texts, and this is a conversation. Give a text.")
        texts.append(row.prompt)
    served = config.replace(server=config.server.replace(ui=True))
    # A duplicate prompt would be drawn twice as often.
    serve(places, served, dtype=dtype, console=console, prompts=list(dict.fromkeys(texts)), room="arena")


@contextmanager
def _service(
    stock: Stock, config: SheepOpConfig, runs: Mapping[str, Path], prompts: Sequence[str], console: Console
) -> Iterator[tuple[ASGIApp, Service]]:
    """The application that serves the models, in this process or in replicas, and the service that it runs on."""
    server = config.server
    if server.engine == "local":
        later = [name for name, place in runs.items() if not RunDirectory(place).has_checkpoint()]
        for name in later:
            console.info(f"{name} has no checkpoint yet; the page can load the model once it has one.")
        registry = Registry(stock, later=later)
        for model in registry.models():
            if model.generator.defaults:
                settings = ", ".join(f"{key} {value}" for key, value in model.generator.defaults.items())
                console.info(f"{model.name} has its own settings, used where a request gives none: {settings}.")
        yield create_app(registry, server, runs=WatchedRuns(runs), prompts=prompts), registry
        return
    try:
        from sheepop.serve.front import Front
        from sheepop.serve.replicas import replicas_on_ray
    except ImportError as error:
        raise UsageError(f"The engine ray needs Ray Serve: pip install 'sheepop[cluster]' ({error})") from None
    doorkeeper = Doorkeeper(server.api_keys, server.api_key)
    console.info(f"Starting {counted(server.replicas, 'replica')} on the Ray cluster.")
    known = doorkeeper.without_limits()
    with replicas_on_ray(stock, known) as replicas:
        front = Front(replicas, server, doorkeeper)
        yield front, front


def _check_certificate(config: ServerConfig) -> None:
    """Raises `ConfigError` for a certificate or key that cannot be used, before models are loaded."""
    if config.certificate is None or config.private_key is None:
        return
    for name, path in (("certificate", config.certificate), ("private_key", config.private_key)):
        if not Path(path).is_file():
            raise ConfigError(f"server.{name}: there is no file {path}.")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The empty password keeps OpenSSL from asking for a passphrase on the terminal.
        context.load_cert_chain(config.certificate, config.private_key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"server.certificate = {config.certificate} and server.private_key = {config.private_key} cannot be used: "
            f"{getattr(error, 'reason', None) or error}. They must be PEM files that belong together, the key without "
            "a passphrase."
        ) from None


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens on the address of a server; raises `UsageError` if it is taken."""
    try:
        return socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another --port or --host."
        ) from None


class WatchedRuns:
    """The runs in `places`, by name, read from their directories at each request, also during training.

    Methods raise `SheepOpError` for an unknown run and for data that it lacks.
    """

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._runs = {name: RunDirectory(place) for name, place in places.items()}
        self._traces: OrderedDict[tuple[Path, int], StoredTrace] = OrderedDict()
        self._last_lines: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._snapshots = Snapshots(self._trace)

    def names(self) -> list[str]:
        """The names of all runs."""
        return list(self._runs)

    def summary(self, name: str) -> dict[str, Any]:
        """State, size, steps and scores of a run, and the pages that it has."""
        run = self._run(name)
        found = read_run(run.path)
        return {**found.summary.to_dict(), "name": name, "pages": [kind for kind in _PAGES if _page(run, kind)]}

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

    def prompt(self, name: str) -> str:
        """The first tokens of the held-out text: a prompt of the kind that the model learnt to continue."""
        run = self._run(name)
        corpus = corpus_of_run(run, view_run_config(run))
        count = min(_PROMPT_TOKENS, corpus.validation.num_tokens)
        if not count:
            raise DataError(f"The corpus of {run.path} has no held-out text.")
        return next(trace_tokens(corpus, "validation", 0, count)).text.rstrip()

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
        return traced_steps(self._run(name))

    def trace(self, name: str, step: int) -> StoredTrace:
        """The trace of a step, verified when it is first read."""
        return self._trace(self._run(name), step)

    def _trace(self, run: RunDirectory, step: int) -> StoredTrace:
        with self._lock:
            found = self._traces.pop((run.path, step), None)
            if found is None:
                place = run.traces / f"step-{step:08d}"
                if not place.is_dir():
                    raise DataError(f"{run.path} has no trace of step {step}.")
                found = StoredTrace.open(place)
            self._traces[run.path, step] = found
            while len(self._traces) > _OPEN_TRACES:
                self._traces.popitem(last=False)
        return found

    def journeys(self, name: str) -> dict[str, Any]:
        """The steps whose networks can be drawn, and whether ``traces`` or ``checkpoints`` have them."""
        source, steps = self._snapshots.steps(self._run(name))
        return {"source": source, "steps": steps}

    def journey(self, name: str, step: int, channels: str = "") -> dict[str, Any]:
        """The picture of the network at a step with the run's prompt.

        `channels`, numbers with commas between them, are the channels to show, so that pictures can be compared.
        """
        run = self._run(name)
        try:
            chosen = [int(each) for each in channels.split(",")] if channels else None
        except ValueError:
            raise UsageError(f"channels = {channels!r} are not numbers with commas between them.") from None
        config = view_run_config(run)
        sampled = (row.get("prompt") for row in self.samples(name))
        prompt = config.trace.prompt or next((each for each in sampled if each and isinstance(each, str)), None)
        return self._snapshots.picture(run, step, config, prompt or self.prompt(name), chosen)

    def origins(self, name: str, step: int) -> list[dict[str, Any]]:
        """The first texts of a step, each with its row in the batch and its document."""
        found = islice(show_step(self._run(name).path, step), _ORIGINS)
        return [{"row": row, **asdict(origin), "text": origin.text[:_CHARACTERS]} for row, origin in found]

    def advice(self, name: str) -> dict[str, Any]:
        """What the analysis of a run measured, and its advice."""
        from sheepop.jobs.advice import advise  # which loads what trains

        return advise(self._run(name).path).to_dict()

    def corpus(self, name: str) -> dict[str, Any]:
        """The report of a run's corpus in numbers, its inputs, and the size of its vocabulary."""
        run = self._run(name)
        corpus = corpus_of_run(run, view_run_config(run))
        place = corpus.directory / REPORT_JSON
        try:
            report = json.loads(place.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{place} cannot be read ({error}). Build the corpus again.") from None
        return {**report, "inputs": corpus.manifest["inputs"], "vocabulary": corpus.manifest["tokenizer"]["vocab_size"]}

    def lost(self, name: str, start: int = 0, search: str = "") -> dict[str, Any]:
        """What the corpus of a run left out and removed: 12 records from `start` on, among those with `search` in them.

        `is_last` is true if no more follow.
        """
        run, wanted = self._run(name), search.casefold()
        records = (
            record
            for record in lost_records(corpus_of_run(run, view_run_config(run)))
            if wanted in f"{record['file']} {record['place']} {record['what']} {record['detail']}".casefold()
        )
        found = list(islice(records, max(0, start), max(0, start) + _LOST + 1))
        return {"rows": found[:_LOST], "is_last": len(found) <= _LOST}

    def report(self, name: str, kind: str) -> bytes:
        """The HTML page of a run: its report (``run``), its ``plan``, or the report of its ``corpus``."""
        run = self._run(name)
        if kind not in _PAGES:
            raise UsageError(f"A run has no page {kind!r}. Its pages are {', '.join(_PAGES)}.")
        page = _page(run, kind)
        if page is None:
            raise DataError(f"{run.path} has no {kind} page yet.")
        return page.read_bytes()

    def _run(self, name: str) -> RunDirectory:
        if name not in self._runs:
            raise CheckpointError(f"There is no run {name!r}. Runs: {', '.join(self._runs) or 'none'}.")
        return self._runs[name]


def _page(run: RunDirectory, kind: str) -> Path | None:
    """The report of a run, its plan, or the report of its corpus; None if it does not exist."""
    if kind == "corpus":
        corpus = find_corpus(run, view_run_config(run))
        page = None if corpus is None else corpus / REPORT_HTML
    else:
        page = {"run": run.report, "plan": run.plan}[kind]
    return page if page is not None and page.is_file() else None
