"""Tasks: the kinds of runs, and what differs between them. Each is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.jobs.task.corpus import CorpusTask
    from sheepop.jobs.task.distillation import DistillTask
    from sheepop.jobs.task.interface import Task
    from sheepop.jobs.task.preferences import PreferenceTask, RewardTask
    from sheepop.jobs.task.rewards import GroupPolicyTask, ProximalPolicyTask
    from sheepop.jobs.task.supervised import SupervisedTask
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "CorpusTask",
    "DistillTask",
    "GroupPolicyTask",
    "PreferenceTask",
    "ProximalPolicyTask",
    "RewardTask",
    "SupervisedTask",
    "Task",
]
