"""The stages that look at one document at a time, by their names in the configuration."""

from __future__ import annotations

from collections.abc import Iterable

from sheepop.core.config import Config
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


def local_stages(config: CleanConfig, names: Iterable[str], ledger: Ledger, seed: int) -> list[Stage]:
    """The steps with these names, in this order; raises KeyError for a name that is no stage of single documents."""
    stages: dict[str, tuple[type[Stage], Config]] = {
        "formatting": (Formatting, config.formatting),
        "language": (LanguageFilter, config.language),
        "quality": (QualityFilter, config.quality),
        "toxicity": (ToxicityFilter, config.toxicity),
        "pii": (PiiReplacement, config.pii),
        "secrets": (SecretsReplacement, config.secrets),
        "decontamination": (Decontamination, config.decontamination),
    }
    return [stage(ledger, settings, seed=seed) for stage, settings in map(stages.__getitem__, names)]
