"""The run directory as seen by every rank except the first: read-only."""

from __future__ import annotations

from sheepop.checkpoint.run_directory import RunDirectory


class FollowedRun(RunDirectory):
    """A run directory whose changing methods do nothing, because only the first rank changes the run."""

    def mark_best(self, step: int) -> None:
        """Does nothing."""

    def forget_best(self) -> None:
        """Does nothing."""

    def prune(self, newest: int, keep_last: int, milestones: set[int]) -> None:
        """Does nothing."""

    def forget_after(self, step: int) -> None:
        """Does nothing."""

    def mark_latest(self, step: int) -> None:
        """Does nothing."""
