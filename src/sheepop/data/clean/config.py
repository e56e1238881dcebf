"""The settings under ``data.clean``: which stages run, in which order, and how strict each is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config
from sheepop.data.clean.language_codes import LANGUAGE_CODES, UNDETERMINED
from sheepop.data.clean.quality_config import QualityConfig
from sheepop.data.duplicates.config import NearDuplicatesConfig

Preset = Literal["gentle", "web", "none"]


class FormattingConfig(Config):
    """How text is repaired: `decoding` undoes wrong decoding and removes control characters (ftfy), `normalize`
    composes characters (Unicode's form NFC), `whitespace` unifies line ends, takes away marks without width and blanks
    at the end of lines, and leaves at most `max_blank_lines` in a row.
    """

    decoding: bool = True
    normalize: bool = True
    whitespace: bool = True
    max_blank_lines: int = Field(default=2, ge=0)


class LanguageConfig(Config):
    """Which languages stay, as codes such as ``en``; all when `keep` is empty.

    A language that is less sure than `min_score`, and the language of a text of fewer than `min_letters` letters,
    counts as ``und``, undetermined, which may be kept like any other. Of a long text `sample_characters` are looked at,
    from three places.
    """

    keep: tuple[str, ...] = ()
    min_score: float = Field(default=0.0, ge=0, le=1)
    min_letters: int = Field(default=20, ge=1)
    sample_characters: int = Field(default=600, ge=90)

    @field_validator("keep")
    @classmethod
    def _known_languages(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        for code in keep:
            if code not in LANGUAGE_CODES and code != UNDETERMINED:
                raise ValueError(f"{code!r} is not a language code that can be told; give codes such as en, de or zh")
        return keep


PiiKind = Literal["email", "phone", "ip", "card", "iban", "national_id"]


class PiiConfig(Config):
    """Which personal identifiers are replaced by placeholders.

    `addresses` is ``public`` for IP addresses that can be reached from the internet, or ``all`` for private,
    loopback and documentation addresses too. `salt` enters the keyed hash from which placeholders are made: keep it
    apart from the corpus, and nobody can test a guessed value against a placeholder.
    """

    kinds: tuple[PiiKind, ...] = ("email", "phone", "ip", "card", "iban", "national_id")
    addresses: Literal["public", "all"] = "public"
    salt: str = ""


class SecretsConfig(Config):
    """How keys and passwords are found.

    `detectors` adds detect-secrets' plugins that judge by randomness (``entropy``) or by the name of a variable
    (``keyword``); both flag many ordinary words and are slow. `salt` is as in `PiiConfig`.
    """

    detectors: tuple[Literal["entropy", "keyword"], ...] = ()
    salt: str = ""


class ToxicityConfig(Config):
    """When a document is removed as toxic.

    The lexical signal is the sum of the weights of listed words and phrases for every 1,000 words; a document goes
    when it is over `threshold` and there are at least `min_hits`. With `classifier`, the path of a model trained
    with `sheepop.data.clean.classifier.train_classifier`, that model decides instead: a document goes when its
    probability is over `classifier_threshold`.
    """

    threshold: float = Field(default=40.0, gt=0)
    min_hits: int = Field(default=4, ge=1)
    classifier: str | None = None
    classifier_threshold: float = Field(default=0.9, gt=0, lt=1)


class DecontaminationConfig(Config):
    """Which evaluation sets must not be in the corpus: a document that shares `ngram` words in a row with one goes.

    `paths` are JSONL files; `fields` are the keys whose text counts, all text when there are none. A text of fewer
    than `ngram` words counts as a whole when it has at least `min_words`. A document stays while fewer than
    `min_matches` different n-grams match.
    """

    paths: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    ngram: int = Field(default=13, ge=2, le=64)
    min_words: int = Field(default=8, ge=2)
    min_matches: int = Field(default=1, ge=1)


STAGES = (
    "formatting",
    "language",
    "quality",
    "toxicity",
    "secrets",
    "pii",
    "decontamination",
    "exact_duplicates",
    "near_duplicates",
)


class CleanConfig(Config):
    """Which stages documents go through, in which order, and how strict each is.

    The preset says how strict `quality` is where it is not told itself; with ``none`` no stage runs but those that
    `stages` names. With `shuffle`, the documents of the corpus are put in a random order.
    """

    preset: Preset = "gentle"
    stages: tuple[str, ...] = STAGES
    formatting: FormattingConfig = FormattingConfig()
    language: LanguageConfig = LanguageConfig()
    quality: QualityConfig = QualityConfig()
    toxicity: ToxicityConfig = ToxicityConfig()
    pii: PiiConfig = PiiConfig()
    secrets: SecretsConfig = SecretsConfig()
    decontamination: DecontaminationConfig = DecontaminationConfig()
    near_duplicates: NearDuplicatesConfig = NearDuplicatesConfig()
    shuffle: bool = True

    @model_validator(mode="before")
    @classmethod
    def _follow_the_preset(cls, given: Any) -> Any:
        """Writes what follows from the preset into the config, where it can be seen and is kept."""
        if not isinstance(given, Mapping):
            return given
        preset, quality = given.get("preset", "gentle"), given.get("quality", {})
        if preset == "none":
            return {"stages": (), **given}
        if preset == "web" and isinstance(quality, Mapping):
            return {**given, "quality": {"preset": "web", **quality}}
        return given

    @field_validator("stages")
    @classmethod
    def _known_stages(cls, stages: tuple[str, ...]) -> tuple[str, ...]:
        for name in stages:
            if name not in STAGES:
                raise ValueError(f"there is no stage {name!r}; there are {', '.join(STAGES)}")
        if len(set(stages)) < len(stages):
            twice = next(name for name in stages if stages.count(name) > 1)
            raise ValueError(f"the stage {twice!r} stands twice; name each stage once")
        return stages

    def named_paths(self) -> tuple[str, ...]:
        """The files and corpora that the stages of this config read beside the documents."""
        sets = self.decontamination.paths if "decontamination" in self.stages else ()
        classifier = self.toxicity.classifier if "toxicity" in self.stages else None
        against = self.near_duplicates.against if "near_duplicates" in self.stages else ()
        return (*sets, *([] if classifier is None else [classifier]), *against)
