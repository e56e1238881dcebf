"""Serves the page on which a person reviews the answers of a log."""

from __future__ import annotations

import logging
import threading
import webbrowser
from pathlib import Path

from sheepop.core.console import Console
from sheepop.core.facts import counted
from sheepop.jobs.monitor import read_of_model
from sheepop.jobs.serve import has_screen, listen
from sheepop.monitor.decisions import FILE, read_decisions
from sheepop.monitor.review import Review
from sheepop.serve.config import ServerConfig
from sheepop.serve.conversation_log import LogFaults
from sheepop.serve.server import Server


def review(directory: Path, *, model: str | None, port: int, console: Console) -> None:
    """Serves the page to this machine until the process is told to stop.

    Raises `DataError` for a log without answers, or none of `model`, and `UsageError` for a port that is taken.
    """
    faults = LogFaults()
    answers = read_of_model(directory, model, faults)
    decisions, num_bad = read_decisions(directory)
    if words := str(faults):
        console.warn(f"Lines of the log were left out: {words}.")
    if num_bad:
        console.warn(f"{counted(num_bad, 'line')} of {directory / FILE} were left out, because they are no decisions.")
    found, config = Review(answers, decisions, directory), ServerConfig(port=port)
    listener = listen(config)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/#token={found.token}"
    console.info(f"Review {counted(len(answers), 'answer')} at {address} Ctrl-C stops.")
    if console.is_terminal and has_screen():
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    Server(found.app(), found, config).run(sockets=[listener])
