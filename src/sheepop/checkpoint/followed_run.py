"""A run as every rank but the first has it: to read."""

from __future__ import annotations

from sheepop.checkpoint.run_directory import RunDirectory


class FollowedRun(RunDirectory):
    """The directory of a run that the first rank looks after: what changes it does nothing here."""

    def mark_best(self, step: int) -> None:
        """Nothing."""

    def forget_best(self) -> None:
        """Nothing."""

    def prune(self, newest: int, keep_last: int, milestones: set[int]) -> None:
        """Nothing."""

    def forget_after(self, step: int) -> None:
        """Nothing."""

    def mark_latest(self, step: int) -> None:
        """Nothing."""
