"""The request of a run: its settings, its directory, and whether it begins, resumes or replaces a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import validate
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, UsageError
from sheepop.core.plugins import Plugin, loaded_plugins
from sheepop.jobs.config import SheepOpConfig, read_settings
from sheepop.jobs.recipe import Completed, Draft, complete, draft
from sheepop.jobs.run.record import resume_command
from sheepop.model import ModelConfig
from sheepop.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class RunRequest:
    """A requested run. Several `ranks` make the same request, and the first prepares the run.

    `given` is the tree of settings as the user gave it; the recipe chooses the others if `uses_recipe`. With `resume`
    a run in the directory is resumed; if there is none, a new one starts, unless `must_resume`. A new run starts from
    the model `fork`, if one is given. `command` is the command line, None if a program made the request, and
    `resume_with` the command that resumes the run, by default ``sheepop train --resume PATH``. A budget in minutes
    counts from `began`, a reading of the monotonic clock.
    """

    given: Mapping[str, Any]
    resume: bool = False
    must_resume: bool = False
    overwrite: bool = False
    fork: Path | None = None
    profile_steps: int | None = None
    command: str | None = None
    resume_with: str | None = None
    uses_recipe: bool = True
    ranks: Ranks = ALONE
    console: Console = field(default_factory=Console.silent)
    began: float = field(default_factory=time.monotonic)
    plugins: Sequence[Plugin] = field(default_factory=loaded_plugins)

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        *,
        overrides: Sequence[str] = (),
        config: Path | None = None,
        output: Path | None = None,
        resume: str | None = None,
        overwrite: bool = False,
        **rest: Any,
    ) -> Self:
        """The request of a command: the file `config`, over it the tree `options`, over both ``key=value`` `overrides`.

        `resume` is ``auto``, for the run at `output` if there is one, or the path of a run. `rest` are other fields.
        Raises `UsageError` if these contradict each other.
        """
        if resume is not None and overwrite:
            raise UsageError("--resume continues a run and --overwrite replaces it; give only one of them.")
        path = output if resume in (None, "auto") else Path(str(resume))
        if path != output and output is not None:
            raise UsageError(f"--resume names {resume} and --output names {output}; give only one of them.")
        if path is not None:
            options = {**options, "output_dir": str(path)}
        given = read_settings(config, overrides, options=options)
        if resume == "auto" and given.get("output_dir") is None:
            raise UsageError("--resume auto needs the run directory: give --output DIR.")
        must_resume = resume not in (None, "auto")
        return cls(given, resume is not None, must_resume, overwrite, **rest)

    @classmethod
    def exactly(cls, config: SheepOpConfig, **rest: Any) -> Self:
        """The request of a whole configuration, to which the recipe adds nothing. `rest` are other fields."""
        given, usual = config.model_dump(mode="json", exclude_unset=True), ModelConfig().model_dump(mode="json")
        model = config.model.model_dump(mode="json").items()  # in which derived sizes are set too
        given["model"] = {name: value for name, value in model if value != usual[name]}
        return cls(given, uses_recipe=False, **rest)

    @cached_property
    def draft(self) -> Draft:
        """The settings before anything is measured; the recipe, if it may choose, has made its smallest choices."""
        if self.uses_recipe:
            return draft(self.given, self.fork)
        return Draft(self.given, self.fork, validate(SheepOpConfig, self.given))

    @property
    def settings(self) -> SheepOpConfig:
        """The configuration of the draft."""
        return self.draft.config

    def completed(self) -> Completed:
        """The settings with the recipe's choices, if it may choose; this machine is measured if its speed matters."""
        if not self.uses_recipe:
            return Completed(self.settings, {})
        from sheepop.jobs.bench import training_speed  # which loads torch

        return complete(self.draft, training_speed, self.console)

    def reading(self, paths: Sequence[str]) -> Self:
        """The same request with other data."""
        if tuple(paths) == tuple(self.settings.data.paths):
            return self
        data = {**self.given["data"], "paths": list(paths)}
        return replace(self, given={**self.given, "data": data, "output_dir": str(self.path)})

    @cached_property
    def path(self) -> Path:
        """The run directory, by default a folder in ``runs`` with the date and time."""
        config = self.settings
        if config.output_dir is not None:
            return Path(config.output_dir)
        return Path("runs") / datetime.now(UTC).astimezone().strftime("%Y-%m-%d-%H%M%S")

    @property
    def resumes(self) -> bool:
        """Whether a run at `path` is resumed, as it also is when lost ranks start again."""
        return self.resume or self.ranks.restarts > 0

    @property
    def replaces(self) -> bool:
        """Whether a run at `path` is replaced."""
        return self.overwrite and not self.ranks.restarts

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return self.resume_with or resume_command(self.path)

    def check(self) -> None:
        """Raises `ConfigError` or `UsageError` for what is refused before anything is read or written."""
        with self.ranks.together():
            if self.settings.output_dir is None and self.ranks.are_several:
                raise ConfigError(
                    "Several ranks need the directory of the run, which all of them find: give --output DIR."
                )
            if self.must_resume and not RunDirectory(self.path).has_started():
                raise UsageError(why_no_run(self.path))
            self.ranks.require_agreement(self.given)


def why_no_run(path: Path) -> str:
    """Explains why no run can be resumed at `path`."""
    for folder in path.absolute().parents:
        if RunDirectory(folder).config_file.is_file():
            return (
                f"{path} is part of the run in {folder}. Give that directory; it resumes from its newest checkpoint. "
                "To start a new run from the weights of a checkpoint, use --fork."
            )
    return f"{path} does not hold a run that can be resumed. Use --resume auto to start one there."
