"""The table of stages that look at one document at a time: a name of the configuration, and the step that it means."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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

_STAGES: dict[str, Callable[[CleanConfig, Ledger, int], Stage]] = {
    "formatting": lambda config, ledger, seed: Formatting(ledger, config.formatting),
    "language": lambda config, ledger, seed: LanguageFilter(ledger, config.language),
    "quality": lambda config, ledger, seed: QualityFilter(ledger, config.quality),
    "toxicity": lambda config, ledger, seed: ToxicityFilter(ledger, config.toxicity),
    "pii": lambda config, ledger, seed: PiiReplacement(ledger, config.pii, seed=seed),
    "secrets": lambda config, ledger, seed: SecretsReplacement(ledger, config.secrets, seed=seed),
    "decontamination": lambda config, ledger, seed: Decontamination(ledger, config.decontamination),
}


def local_stages(config: CleanConfig, names: Iterable[str], ledger: Ledger, seed: int) -> list[Stage]:
    """The steps with these names, in this order; raises KeyError for a name that is no stage of single documents."""
    return [_STAGES[name](config, ledger, seed) for name in names]
