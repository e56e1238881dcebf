"""The settings under ``data.clean``: which stages run, in which order, and how strict each is.

The thresholds of quality are those of the published rules for prose, and of our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config
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


class PlaceholderConfig(Config):
    """What stages that leave placeholders share."""

    salt: str = ""
    """A secret of your own, kept apart from the corpus: without it nobody can test a guess against a placeholder."""


class PiiConfig(PlaceholderConfig):
    """Which personal identifiers are replaced by placeholders."""

    kinds: tuple[PiiKind, ...] = ("email", "phone", "ip", "card", "iban", "national_id")
    """Which kinds of identifiers are replaced; names and postal addresses never are."""
    addresses: Literal["public", "all"] = "public"
    """IP addresses that are replaced: `public` ones, which can be reached from the internet, or `all`."""


class SecretsConfig(PlaceholderConfig):
    """How keys and passwords are found: by their shapes, and by detect-secrets' other plugins where asked for."""

    detectors: tuple[Literal["entropy", "keyword"], ...] = ()
    """Also look for what is random (`entropy`) or has a telling name (`keyword`); both flag many ordinary words and
    are slow."""


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
    """Most number signs, and most ellipses, for each word."""
    max_bullet_lines: float = Field(default=0.9, ge=0, le=1)
    """Most lines that begin with a bullet, as a share of all."""
    max_ellipsis_lines: float = Field(default=0.3, ge=0, le=1)
    """Most lines that end with an ellipsis, as a share of all."""
    min_words_with_letter: float = Field(default=0.8, ge=0, le=1)
    """Fewest words that hold a letter, as a share of all."""
    min_stop_words: int = Field(default=2, ge=0, le=8)
    """Fewest different words of eight common English ones."""


class RepetitionConfig(Config):
    """Gopher's repetition rules (Rae et al. 2021, table A1): largest shares of a text that may be repeated."""

    max_duplicate_lines: float = Field(default=0.3, ge=0, le=1)
    """Most lines that repeat earlier ones, as a share of all lines."""
    max_duplicate_paragraphs: float = Field(default=0.3, ge=0, le=1)
    """Most paragraphs that repeat earlier ones, as a share of all paragraphs."""
    max_duplicate_line_characters: float = Field(default=0.2, ge=0, le=1)
    """Most characters in lines that repeat earlier ones, as a share of all characters."""
    max_duplicate_paragraph_characters: float = Field(default=0.2, ge=0, le=1)
    """Most characters in paragraphs that repeat earlier ones, as a share of all characters."""
    top_ngrams: tuple[tuple[int, float], ...] = ((2, 0.2), (3, 0.18), (4, 0.16))
    """Pairs `[words, share]`: most characters in the most frequent run of that many words."""
    duplicate_ngrams: tuple[tuple[int, float], ...] = (
        (5, 0.15),
        (6, 0.14),
        (7, 0.13),
        (8, 0.12),
        (9, 0.11),
        (10, 0.10),
    )
    """Pairs `[words, share]`: most characters in runs of that many words that repeat earlier ones."""

    @field_validator("top_ngrams", "duplicate_ngrams")
    @classmethod
    def _sensible_runs(cls, bounds: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if any(not 1 <= n <= 64 or not 0 <= most <= 1 for n, most in bounds):
            raise ValueError(
                "each bound must be a number of words from 1 to 64 and a share from 0 to 1, such as [5, 0.15]"
            )
        return bounds


class C4Config(Config):
    """The rules of C4 (Raffel et al. 2020, section 2.2), which judge lines and, by what is left of them, documents."""

    min_sentences: int = Field(default=5, ge=0)
    """Fewest sentences in the lines that stay."""
    min_words_per_line: int = Field(default=3, ge=0)
    """Fewest words of a line that stays."""
    max_word_length: int = Field(default=1000, ge=1)
    """A line with a longer word, in characters, does not stay."""
    drop_lines: bool = False
    """Remove the other lines from the document, which otherwise stays whole."""


class FineWebConfig(Config):
    """FineWeb's own rules (Penedo et al. 2024, section 3.5)."""

    min_lines_with_punctuation: float = Field(default=0.12, ge=0, le=1)
    """Fewest lines that end with punctuation, as a share of all."""
    max_short_lines: float = Field(default=0.67, ge=0, le=1)
    """Most short lines, as a share of all."""
    short_line: int = Field(default=30, ge=0)
    """The most characters of a short line."""
    max_duplicate_line_characters: float = Field(default=0.01, ge=0, le=1)
    """Most characters in lines that repeat earlier ones, as a share of all."""
    max_lines_per_word: float = Field(default=0.3, ge=0)
    """Most line breaks for each word."""


class GarbageConfig(Config):
    """What anybody would call garbage, in prose and chat. White space does not count where shares are taken."""

    min_judged: int = Field(default=200, ge=1)
    """Texts with fewer characters need only be printable, contain a letter or digit, and not be a placeholder."""
    max_unprintable: float = Field(default=0.05, ge=0, le=1)
    """Most control, replacement and private characters, as a share of the text."""
    min_letters: float = Field(default=0.1, ge=0, le=1)
    """Fewest letters, as a share of the text."""
    max_repeated_lines: float = Field(default=0.9, ge=0, le=1)
    """Most text in lines that repeat earlier ones, as a share of it, white space included; from 1,000 characters on."""
    max_repeated_runs: float = Field(default=0.9, ge=0, le=1)
    """Most text in runs of ten words that repeat earlier ones, as a share of it; from 1,000 characters on."""
    max_one_character: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the text that is its most frequent character; from 1,000 characters on."""
    max_encoded: float = Field(default=0.5, ge=0, le=1)
    """Most base64 or hexadecimal data, as a share of the text."""
    placeholders: bool = True
    """Whether to remove a page that says only that there is nothing on it."""


class CodeConfig(Config):
    """Rules for source code; where none is given, the bounds are those of the preset.

    ``web`` has the bounds of The Stack (Kocetkov et al. 2022, section 3).
    """

    generated: bool = False
    """Remove files whose first lines or name say that a program wrote them."""
    max_line_length: int = Field(default=1_000_000, ge=1)
    """The longest line, in characters."""
    max_mean_line_length: float = Field(default=300.0, gt=0)
    """The longest mean of all lines, in characters."""
    max_in_long_lines: float = Field(default=0.5, ge=0, le=1)
    """Most characters in lines of more than 1,000, as a share of all."""
    min_alphanumeric: float = Field(default=0.05, ge=0, le=1)
    """Fewest letters and digits, as a share of all characters."""
    max_digits: float = Field(default=0.8, ge=0, le=1)
    """Most digits, as a share of what is not white space."""
    max_encoded: float = Field(default=0.5, ge=0, le=1)
    """Most base64 or hexadecimal data, as a share of what is not white space."""


class TableConfig(Config):
    """Rules for tables, in which numbers and repetition are no sign of garbage."""

    max_unprintable: float = Field(default=0.05, ge=0, le=1)
    """Most control, replacement and private characters, as a share of what is not white space."""
    max_repeated_rows: float = Field(default=0.95, ge=0, le=1)
    """Most text in rows that repeat earlier ones, as a share of it; from 20 rows on."""


_CODE_IN_WEB = {
    "generated": True,
    "max_line_length": 1000,
    "max_mean_line_length": 100.0,
    "min_alphanumeric": 0.25,
    "max_digits": 0.5,
    "max_encoded": 0.25,
}


class QualityConfig(Config):
    """Which documents are too bad to learn from, by the kind of document.

    The rules of Gopher, C4 and FineWeb are made for pages of English prose and remove most of what is not that.
    """

    preset: Literal["gentle", "web"] = "gentle"
    """`gentle` applies `garbage`, `code` and `table`; `web` adds `gopher`, `repetition`, `c4` and `fineweb` for
    prose, and stricter defaults in `code`; `data.clean.preset` sets it."""
    garbage: GarbageConfig = GarbageConfig()
    """What anybody would call garbage, in prose and chat."""
    gopher: GopherConfig = GopherConfig()
    """Gopher's rules for web pages in English; with the preset `web`."""
    repetition: RepetitionConfig = RepetitionConfig()
    """Gopher's rules against repetition; with the preset `web`."""
    c4: C4Config = C4Config()
    """The rules of C4, which judge lines; with the preset `web`."""
    fineweb: FineWebConfig = FineWebConfig()
    """FineWeb's own rules; with the preset `web`."""
    code: CodeConfig = CodeConfig()
    """Rules for source code."""
    table: TableConfig = TableConfig()
    """Rules for tables."""

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_preset(cls, given: Any) -> Any:
        """Writes the bounds that follow from the preset into the config, where they can be seen and are kept."""
        code = given.get("code", {}) if isinstance(given, Mapping) else None
        if isinstance(code, Mapping) and given.get("preset") == "web":
            return {**given, "code": {**_CODE_IN_WEB, **code}}
        return given


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
