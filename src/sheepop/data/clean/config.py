"""The settings under ``data.clean``: which stages run, in which order, and how strict each is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config
from sheepop.data.clean.quality_config import QualityConfig
from sheepop.data.duplicates.config import NearDuplicatesConfig

Preset = Literal["gentle", "web", "none"]

# The languages that can be told apart: those of fastText's model lid.176
# (https://fasttext.cc/docs/en/language-identification.html).
_LANGUAGES = (
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de "
    "diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie ilo "
    "io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms "
    "mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn "
    "sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf "
    "yi yo yue zh"
)
UNDETERMINED = "und"
LANGUAGE_CODES = frozenset(_LANGUAGES.split())


class FormattingConfig(Config):
    """How text is repaired (ftfy, Unicode's form NFC)."""

    decoding: bool = True
    """Undo wrong decoding ("CafÃ©") and remove control characters."""
    normalize: bool = True
    """Compose characters (Unicode's form NFC)."""
    whitespace: bool = True
    """Use one kind of line end, and remove zero-width marks and blanks at the end of lines."""
    max_blank_lines: int = Field(default=2, ge=0)
    """The most blank lines in a row that are kept, with `whitespace`."""


class LanguageConfig(Config):
    """Which languages stay, as codes such as ``en``; ``und``, undetermined, may be kept like any other."""

    keep: tuple[str, ...] = ()
    """Codes of the languages that stay, such as `en`; an empty list keeps all; `und` is text whose language cannot be
    detected."""
    min_score: float = Field(default=0.0, ge=0, le=1)
    """A language detected with less confidence than this counts as `und`."""
    min_letters: int = Field(default=20, ge=1)
    """The language of text with fewer letters counts as `und`."""
    sample_characters: int = Field(default=600, ge=90)
    """How many characters of a long text are looked at, from its beginning, middle and end."""

    @field_validator("keep")
    @classmethod
    def _known_languages(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        for code in keep:
            if code not in LANGUAGE_CODES and code != UNDETERMINED:
                raise ValueError(
                    f"{code!r} is not the code of a language that can be detected; give codes such as en, de or zh"
                )
        return keep


PiiKind = Literal["email", "phone", "ip", "card", "iban", "national_id"]


class PiiConfig(Config):
    """Which personal identifiers are replaced by placeholders."""

    kinds: tuple[PiiKind, ...] = ("email", "phone", "ip", "card", "iban", "national_id")
    """Which kinds of identifiers are replaced; names and postal addresses never are."""
    addresses: Literal["public", "all"] = "public"
    """IP addresses that are replaced: `public` ones, which can be reached from the internet, or `all`."""
    salt: str = ""
    """A secret of your own, kept apart from the corpus: without it nobody can test a guess against a placeholder."""


class SecretsConfig(Config):
    """How keys and passwords are found: by their shapes, and by detect-secrets' other plugins where asked for."""

    detectors: tuple[Literal["entropy", "keyword"], ...] = ()
    """Also look for what is random (`entropy`) or has a telling name (`keyword`); both flag many ordinary words and
    are slow."""
    salt: str = ""
    """A secret of your own, as for `data.clean.pii`."""


class ToxicityConfig(Config):
    """When a document is removed as toxic, by the words and phrases of a list."""

    threshold: float = Field(default=40.0, gt=0)
    """A document is removed when the weights of its listed words, per 1,000 words, add up to more than this."""
    min_hits: int = Field(default=4, ge=1)
    """It must also contain at least this many of them."""


class DecontaminationConfig(Config):
    """Which evaluation sets must not be in the corpus: a document that shares words in a row with one goes."""

    paths: tuple[str, ...] = ()
    """Evaluation sets, as JSONL files."""
    fields: tuple[str, ...] = ()
    """The keys whose text counts; an empty list takes all text."""
    ngram: int = Field(default=13, ge=2, le=64)
    """How many words in a row count as a match."""
    min_words: int = Field(default=8, ge=2)
    """An evaluation text of fewer than `ngram` words is looked for as a whole when it has at least this many."""
    min_matches: int = Field(default=1, ge=1)
    """How many different matches a document needs to be removed."""


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
    """Which stages documents go through, in which order, and how strict each is."""

    preset: Preset = "gentle"
    """`gentle` removes only garbage, `web` also what the rules for web crawls remove, `none` runs only the stages that
    `stages` names."""
    stages: tuple[str, ...] = STAGES
    """The stages, in the order in which they run; the default is all of them."""
    formatting: FormattingConfig = FormattingConfig()
    """The stage that repairs how text is written down; code stays as it is."""
    language: LanguageConfig = LanguageConfig()
    """The stage that detects languages and keeps some of them."""
    quality: QualityConfig = QualityConfig()
    """The stage that removes documents too bad to learn from."""
    toxicity: ToxicityConfig = ToxicityConfig()
    """The stage that removes toxic prose and chat, by a list of words."""
    pii: PiiConfig = PiiConfig()
    """The stage that replaces personal identifiers with placeholders."""
    secrets: SecretsConfig = SecretsConfig()
    """The stage that finds keys and passwords and replaces them with placeholders."""
    decontamination: DecontaminationConfig = DecontaminationConfig()
    """The stage that removes documents that share words with evaluation sets."""
    near_duplicates: NearDuplicatesConfig = NearDuplicatesConfig()
    """The stage that removes documents nearly equal to one that stays."""
    shuffle: bool = True
    """Put the documents of the corpus in a random order; `false` keeps the order of the input."""

    @model_validator(mode="before")
    @classmethod
    def _follow_the_preset(cls, given: Any) -> Any:
        """Writes what follows from the preset into the config, where it can be seen and is kept."""
        if not isinstance(given, Mapping):
            return given
        preset, quality = given.get("preset"), given.get("quality", {})
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
                raise ValueError(f"there is no stage {name!r}; the stages are {', '.join(STAGES)}")
        if len(set(stages)) < len(stages):
            twice = next(name for name in stages if stages.count(name) > 1)
            raise ValueError(f"the stage {twice!r} is listed twice; name each stage once")
        return stages

    def named_paths(self) -> tuple[str, ...]:
        """The files and corpora that the stages of this config read beside the documents."""
        sets = self.decontamination.paths if "decontamination" in self.stages else ()
        against = self.near_duplicates.against if "near_duplicates" in self.stages else ()
        return (*sets, *against)
