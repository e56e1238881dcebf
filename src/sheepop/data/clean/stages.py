"""The stages that look at one document at a time, by their names in the configuration."""

from __future__ import annotations

from collections.abc import Iterable

from sheepop.data.clean.config import CleanConfig
from sheepop.data.clean.decontamination import Decontamination
from sheepop.data.clean.formatting import Formatting
from sheepop.data.clean.language import LanguageFilter
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.pii import PiiReplacement
from sheepop.data.clean.quality import QualityFilter
from sheepop.data.clean.secrets import SecretsReplacement
from sheepop.data.clean.stage import Stage
from sheepop.data.clean.toxicity import ToxicityFilter

_STAGES: tuple[type[Stage], ...] = (
    Formatting,
    LanguageFilter,
    QualityFilter,
    ToxicityFilter,
    PiiReplacement,
    SecretsReplacement,
    Decontamination,
)


def local_stages(config: CleanConfig, names: Iterable[str], ledger: Ledger, seed: int) -> list[Stage]:
    """The steps with these names, in this order; raises KeyError for a name that is no stage of single documents."""
    stages = {stage.name: stage for stage in _STAGES}
    return [stages[name](ledger, getattr(config, name), seed=seed) for name in names]
