"""Optimizers, and the learning rates and decays of their parameter groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.train.optimizers.adafactor import Adafactor
    from sheepop.train.optimizers.build import build_optimizers, optimizer_settings, optimizer_slots
    from sheepop.train.optimizers.groups import check_layers, set_learning_rate
    from sheepop.train.optimizers.momentum import Lion, Muon, orthogonalize
    from sheepop.train.optimizers.schedule_free import ScheduleFreeAdamW
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "Adafactor",
    "Lion",
    "Muon",
    "ScheduleFreeAdamW",
    "build_optimizers",
    "check_layers",
    "optimizer_settings",
    "optimizer_slots",
    "orthogonalize",
    "set_learning_rate",
]
