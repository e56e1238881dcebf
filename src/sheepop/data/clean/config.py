"""The settings under ``data.clean``; the quality thresholds for prose are the published ones, the others our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config
from sheepop.data.duplicates.config import NearDuplicatesConfig

Preset = Literal["gentle", "web", "none"]

# The languages that can be detected: those of fastText's model lid.176
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
    """How text is repaired (with ftfy and Unicode NFC)."""

    decoding: bool = True
    """Repair wrong decoding ("CafÃ©") and remove control characters."""
    normalize: bool = True
    """Compose characters (Unicode NFC)."""
    whitespace: bool = True
    """Use one kind of line end, and remove zero-width marks and blanks at the end of lines."""
    max_blank_lines: int = Field(default=2, ge=0)
    """The most blank lines in a row to keep, with `whitespace`."""


class LanguageConfig(Config):
    """Which languages stay, and how they are detected."""

    keep: tuple[str, ...] = ()
    """Codes of the languages to keep, such as `en`, or `und` for text whose language cannot be detected; an empty
    list keeps all."""
    min_score: float = Field(default=0.0, ge=0, le=1)
    """A language detected with less confidence than this counts as `und`."""
    min_letters: int = Field(default=20, ge=1)
    """The language of text with fewer letters counts as `und`."""
    sample_characters: int = Field(default=600, ge=90)
    """The number of characters judged in a long text, from its beginning, middle and end."""

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


class PlaceholderConfig(Config):
    """The setting shared by stages that write placeholders."""

    salt: str = ""
    """A secret that is not stored with the corpus; without it nobody can test a guess against a placeholder."""


class PiiConfig(PlaceholderConfig):
    """Which personal identifiers are replaced by placeholders."""

    kinds: tuple[PiiKind, ...] = ("email", "phone", "ip", "card", "iban", "national_id")
    """Kinds of identifiers to replace; names and postal addresses are never replaced."""
    addresses: Literal["public", "all"] = "public"
    """IP addresses to replace: `public` ones, which are reachable from the internet, or `all`."""


class SecretsConfig(PlaceholderConfig):
    """How keys and passwords are found: by their form, and optionally by further plugins of detect-secrets."""

    detectors: tuple[Literal["entropy", "keyword"], ...] = ()
    """Also look for random strings (`entropy`) or values with a name like `password` (`keyword`); both are slow and
    flag many ordinary words."""


class ToxicityConfig(Config):
    """When a document is removed as toxic, judged by a list of words and phrases."""

    threshold: float = Field(default=40.0, gt=0)
    """A document is removed if the weights of its listed words add up to more than this per 1,000 words."""
    min_hits: int = Field(default=4, ge=1)
    """The fewest listed words in a document that is removed."""


class DecontaminationConfig(Config):
    """Which evaluation sets must not be in the corpus; documents that share a run of words with them are removed."""

    paths: tuple[str, ...] = ()
    """Evaluation sets, as JSONL files."""
    fields: tuple[str, ...] = ()
    """The JSON keys whose text is compared; an empty list compares all text."""
    ngram: int = Field(default=13, ge=2, le=64)
    """The number of consecutive words that count as a match."""
    min_words: int = Field(default=8, ge=2)
    """An evaluation text of fewer than `ngram` words is matched as a whole if it has at least this many words."""
    min_matches: int = Field(default=1, ge=1)
    """The number of different matches for which a document is removed."""


class GopherConfig(Config):
    """Gopher's quality rules for web pages in English (Rae et al. 2021, appendix A.1.1)."""

    min_words: int = Field(default=50, ge=0)
    """Fewest words in a document."""
    max_words: int = Field(default=100_000, ge=1)
    """Most words in a document."""
    min_mean_word_length: float = Field(default=3.0, ge=0)
    """Shortest mean length of a word, in characters."""
    max_mean_word_length: float = Field(default=10.0, gt=0)
    """Longest mean length of a word, in characters."""
    max_symbols_per_word: float = Field(default=0.1, ge=0)
    """Most hash signs per word, and most ellipses per word."""
    max_bullet_lines: float = Field(default=0.9, ge=0, le=1)
    """Largest share of lines that begin with a bullet."""
    max_ellipsis_lines: float = Field(default=0.3, ge=0, le=1)
    """Largest share of lines that end with an ellipsis."""
    min_words_with_letter: float = Field(default=0.8, ge=0, le=1)
    """Smallest share of words that contain a letter."""
    min_stop_words: int = Field(default=2, ge=0, le=8)
    """Fewest different words out of eight common English ones."""


RunBounds = tuple[tuple[int, float], ...]


class RepetitionConfig(Config):
    """Gopher's repetition rules (Rae et al. 2021, table A1): the largest repeated shares of a text."""

    max_duplicate_lines: float = Field(default=0.3, ge=0, le=1)
    """Largest share of lines that repeat earlier ones."""
    max_duplicate_paragraphs: float = Field(default=0.3, ge=0, le=1)
    """Largest share of paragraphs that repeat earlier ones."""
    max_duplicate_line_characters: float = Field(default=0.2, ge=0, le=1)
    """Largest share of characters in lines that repeat earlier ones."""
    max_duplicate_paragraph_characters: float = Field(default=0.2, ge=0, le=1)
    """Largest share of characters in paragraphs that repeat earlier ones."""
    top_ngrams: RunBounds = ((2, 0.2), (3, 0.18), (4, 0.16))
    """Pairs `[words, share]`: largest share of characters in the most frequent run of that many words."""
    duplicate_ngrams: RunBounds = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
    """Pairs `[words, share]`: largest share of characters in runs of that many words that repeat earlier ones."""

    @field_validator("top_ngrams", "duplicate_ngrams")
    @classmethod
    def _sensible_runs(cls, bounds: RunBounds) -> RunBounds:
        if any(not 1 <= n <= 64 or not 0 <= most <= 1 for n, most in bounds):
            raise ValueError(
                "each bound must be a number of words from 1 to 64 and a share from 0 to 1, such as [5, 0.15]"
            )
        return bounds


class C4Config(Config):
    """The rules of C4 (Raffel et al. 2020, section 2.2), which select lines and judge documents by those lines."""

    min_sentences: int = Field(default=5, ge=0)
    """Fewest sentences in the selected lines of a document."""
    min_words_per_line: int = Field(default=3, ge=0)
    """Fewest words in a selected line."""
    max_word_length: int = Field(default=1000, ge=1)
    """Longest word in a selected line, in characters."""
    drop_lines: bool = False
    """Remove the lines that are not selected; `false` keeps the document whole."""


class FineWebConfig(Config):
    """FineWeb's own rules (Penedo et al. 2024, section 3.5)."""

    min_lines_with_punctuation: float = Field(default=0.12, ge=0, le=1)
    """Smallest share of lines that end with punctuation."""
    max_short_lines: float = Field(default=0.67, ge=0, le=1)
    """Largest share of short lines."""
    short_line: int = Field(default=30, ge=0)
    """The most characters in a short line."""
    max_duplicate_line_characters: float = Field(default=0.01, ge=0, le=1)
    """Largest share of characters in lines that repeat earlier ones."""
    max_lines_per_word: float = Field(default=0.3, ge=0)
    """Most line breaks per word."""


class GarbageConfig(Config):
    """Rules against obvious garbage in prose and chat. White space does not count in shares, unless stated."""

    min_judged: int = Field(default=200, ge=1)
    """Shorter texts, in characters, need only be printable, contain a letter or digit, and not be a placeholder."""
    max_unprintable: float = Field(default=0.05, ge=0, le=1)
    """Largest share of control, replacement and private-use characters."""
    min_letters: float = Field(default=0.1, ge=0, le=1)
    """Smallest share of letters."""
    max_repeated_lines: float = Field(default=0.9, ge=0, le=1)
    """Largest share of text in lines that repeat earlier ones, white space included; for 1,000 characters or more."""
    max_repeated_runs: float = Field(default=0.9, ge=0, le=1)
    """Largest share of text in runs of ten words that repeat earlier ones; for 1,000 characters or more."""
    max_one_character: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the most frequent character; for 1,000 characters or more."""
    max_encoded: float = Field(default=0.5, ge=0, le=1)
    """Largest share of base64 or hexadecimal data."""
    placeholders: bool = True
    """Remove pages that say only that they are empty, such as "page not found"."""


class CodeConfig(Config):
    """Rules for source code; in the preset ``web`` with the bounds of The Stack (Kocetkov et al. 2022, section 3)."""

    generated: bool = False
    """Remove files whose name or first lines say that a program wrote them."""
    max_line_length: int = Field(default=1_000_000, ge=1)
    """The longest line, in characters."""
    max_mean_line_length: float = Field(default=300.0, gt=0)
    """The largest mean line length, in characters."""
    max_in_long_lines: float = Field(default=0.5, ge=0, le=1)
    """Largest share of characters in lines of more than 1,000 characters."""
    min_alphanumeric: float = Field(default=0.05, ge=0, le=1)
    """Smallest share of letters and digits in all characters."""
    max_digits: float = Field(default=0.8, ge=0, le=1)
    """Largest share of digits, not counting white space."""
    max_encoded: float = Field(default=0.5, ge=0, le=1)
    """Largest share of base64 or hexadecimal data, not counting white space."""


class TableConfig(Config):
    """Rules for tables, in which numbers and repetition are normal."""

    max_unprintable: float = Field(default=0.05, ge=0, le=1)
    """Largest share of control, replacement and private-use characters, not counting white space."""
    max_repeated_rows: float = Field(default=0.95, ge=0, le=1)
    """Largest share of text in rows that repeat earlier ones; for 20 rows or more."""


_CODE_IN_WEB = {
    "generated": True,
    "max_line_length": 1000,
    "max_mean_line_length": 100.0,
    "min_alphanumeric": 0.25,
    "max_digits": 0.5,
    "max_encoded": 0.25,
}


class QualityConfig(Config):
    """Which documents are too bad to learn from, with rules for each kind of document.

    The rules of Gopher, C4 and FineWeb are made for English web pages and remove most other text.
    """

    preset: Literal["gentle", "web"] = "gentle"
    """`gentle` applies `garbage`, `code` and `table`; `web` adds `gopher`, `repetition`, `c4` and `fineweb` for
    prose, and stricter defaults in `code`. The default follows `data.clean.preset`."""
    garbage: GarbageConfig = GarbageConfig()
    """Rules against obvious garbage in prose and chat."""
    gopher: GopherConfig = GopherConfig()
    """Gopher's rules for English web pages; with the preset `web`."""
    repetition: RepetitionConfig = RepetitionConfig()
    """Gopher's rules against repetition; with the preset `web`."""
    c4: C4Config = C4Config()
    """The rules of C4, which select lines; with the preset `web`."""
    fineweb: FineWebConfig = FineWebConfig()
    """FineWeb's own rules; with the preset `web`."""
    code: CodeConfig = CodeConfig()
    """Rules for source code."""
    table: TableConfig = TableConfig()
    """Rules for tables."""

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_preset(cls, given: Any) -> Any:
        """Writes the bounds of the preset into the config, so that they are visible and saved."""
        code = given.get("code", {}) if isinstance(given, Mapping) else None
        if isinstance(code, Mapping) and given.get("preset") == "web":
            return {**given, "code": {**_CODE_IN_WEB, **code}}
        return given


_STAGES = "formatting language quality toxicity secrets pii decontamination exact_duplicates near_duplicates"
STAGES = tuple(_STAGES.split())


class CleanConfig(Config):
    """The cleaning stages, their order, and how strict each is."""

    preset: Preset = "gentle"
    """`gentle` removes only garbage, `web` also applies the rules for web crawls, `none` runs only the stages named
    in `stages`."""
    stages: tuple[str, ...] = STAGES
    """The stages, in the order in which they run; the default is all of them."""
    formatting: FormattingConfig = FormattingConfig()
    """The stage that repairs characters and white space; code stays as it is."""
    language: LanguageConfig = LanguageConfig()
    """The stage that detects languages and may keep only some of them."""
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
    """The stage that removes near duplicates."""
    shuffle: bool = True
    """Shuffle the documents of the corpus; `false` keeps the order of the input."""

    @model_validator(mode="before")
    @classmethod
    def _follow_the_preset(cls, given: Any) -> Any:
        """Writes the settings of the preset into the config, so that they are visible and saved."""
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
        """The evaluation files and corpora that the configured stages read."""
        sets = self.decontamination.paths if "decontamination" in self.stages else ()
        against = self.near_duplicates.against if "near_duplicates" in self.stages else ()
        return (*sets, *against)
