"""The verbs of Python for runs: `train`, `tune`, `plan` and `analyze`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sheepop.core.budget import Budget
from sheepop.core.console import Console
from sheepop.jobs.plan import plan_a_run
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train as train_run
from sheepop.jobs.run_analyses import RunAnalyses
from sheepop.language_model import LanguageModel, load
from sheepop.plan.machine import find_machine
from sheepop.plan.run_plan import RunPlan
from sheepop.posttrain.config import Method


def train(
    data: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    minutes: float | None = None,
    config: str | Path | None = None,
    fork: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """Trains a model on files, like ``sheepop train``, and loads its best checkpoint.

    `settings` are keys of the configuration with values, such as ``{"model.d_model": 128}``; settings that are not
    given are chosen for the text, the machine and the budget. The run is in the directory `output`, by default a new
    one in ``runs``; with `resume`, a run that is there continues. `fork` is a model to start from.
    """
    options: dict[str, Any] = {"training": {"max_minutes": minutes}} if minutes is not None else {}
    request = _request(options, data, output, config, fork, resume, overwrite, device, quiet, settings)
    return load(train_run(request).run, device)


def tune(
    model: str | Path,
    data: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    method: Method = "sft",
    config: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """Tunes a finished model on examples, like ``sheepop tune``; see `train` for the other arguments."""
    options = {"tuning": {"method": method}}
    request = _request(options, data, output, config, model, resume, overwrite, device, quiet, settings)
    return load(train_run(request).run, device)


def plan(
    data: str | Path | Sequence[str | Path] = (),
    output: str | Path | None = None,
    *,
    model: str | Path | None = None,
    method: Method | None = None,
    budget: str | None = None,
    machine: str = "this",
    price: float | None = None,
    seconds: float = 15.0,
    config: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    quiet: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> RunPlan:
    """Plans a run before it starts, like ``sheepop plan``: what would end it, memory, time and cost.

    `budget` is a text such as ``24h``, ``1e18flops`` or ``50usd``, `machine` a name such as ``h100x8`` or a file, and
    `price` that of the machine in US dollars an hour. Steps are timed for `seconds`. The run would tune `model` with a
    `method`, and be in the directory `output`; see `train` for the other arguments.
    """
    spends, there = None if budget is None else Budget.of(budget), find_machine(machine)
    options: dict[str, Any] = {} if method is None else {"tuning": {"method": method}}
    request = _request(options, data, output, config, model, False, overwrite, device, quiet, settings)
    return plan_a_run(request, budget=spends, machine=there, price=price, seconds=seconds)


def analyze(run: str | Path, device: str = "auto") -> RunAnalyses:
    """Returns the analyses of a run that has an optimizer and data; those of a model are in ``lm.analyze``."""
    return RunAnalyses(run, device)


def _request(
    options: dict[str, Any],
    data: str | Path | Sequence[str | Path],
    output: str | Path | None,
    config: str | Path | None,
    fork: str | Path | None,
    resume: bool,
    overwrite: bool,
    device: str,
    quiet: bool,
    settings: Mapping[str, Any] | None,
) -> RunRequest:
    paths = [data] if isinstance(data, str | Path) else data
    given = {"data": {"paths": [str(path) for path in paths]}} if paths else {}
    return RunRequest.of(
        {**options, **given, "device": device},
        overrides=[f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()],
        config=None if config is None else Path(config),
        output=None if output is None else Path(output),
        resume="auto" if resume else None,
        fork=None if fork is None else Path(fork),
        overwrite=overwrite,
        console=Console(quiet=quiet),
    )
