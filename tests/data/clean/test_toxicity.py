"""Pages of slurs, explicit words and threats go; medicine, law, news and the standard library stay."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.clean import toxicity as module
from sheepop.data.clean.account import Account
from sheepop.data.clean.config import ToxicityConfig
from sheepop.data.clean.stage import Removal
from sheepop.data.clean.toxicity import ToxicityFilter, toxic_lexicon
from sheepop.data.documents import Draft

ROWS = [
    line.split("|")
    for line in Path(module.__file__).with_name("toxic_words.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
WEIGHTS: dict[str, float] = {}
for _, _, weight, *found in ROWS:
    WEIGHTS |= {entry: max(WEIGHTS.get(entry, 0.0), float(weight)) for entry in found}
SENTENCE = "the garden behind our house was full of roses and bees in those years and we sat there until dark"
FILLER = SENTENCE.split()


def judged(text: str, kind: str = "prose", **settings: object) -> Removal | None:
    stage = ToxicityFilter(Account(1), ToxicityConfig.model_validate(settings))
    return stage.removal(Draft(text, "a", 0, kind))


def test_the_list_is_well_formed_and_says_that_it_is_weak():
    header = Path(module.__file__).with_name("toxic_words.txt").read_text(encoding="utf-8").split("\nen|")[0]
    assert "The signal is weak." in header
    assert {language for language, *_ in ROWS} == {"en", "de", "fr", "es", "it", "pt", "nl", "pl", "ru"}
    assert {category for _, category, *_ in ROWS} == {"slur", "explicit", "threat", "coarse"}
    for _, _, weight, *entries in ROWS:
        assert float(weight) in (1, 2, 3)
        assert len(entries) == len(set(entries))
        assert all(entry == entry.strip().lower() and "  " not in entry for entry in entries)


@pytest.mark.parametrize("language", ["en", "de", "fr", "es", "it", "pt", "nl", "pl", "ru"])
@pytest.mark.parametrize("category", ["slur", "explicit", "threat"])
def test_a_page_full_of_such_words_goes_in_every_language(language: str, category: str):
    entries = next(entries for lang, kind, _, *entries in ROWS if (lang, kind) == (language, category))
    text = ". ".join(
        f"{' '.join(FILLER[:6])} {entry.upper() if index % 2 else entry}" for index, entry in enumerate(entries)
    )
    removal = judged(text)
    assert removal is not None
    assert removal.reason == "words"
    assert judged(text, "chat") == removal
    assert judged(text, "code") is None


MEDICINE = """
Anal cancer and cancer of the penis, vulva and vagina are caused by human papillomavirus in most patients.
Transmission is by vaginal, anal and oral sex. Symptoms are bleeding from the rectum, pain during intercourse, and
discharge from the nipple in breast disease. Examination of the testicles, the scrotum and the prostate is done
with a gloved finger. Erectile dysfunction, premature ejaculation, impotence and loss of libido are treated with
drugs or by sexual therapy; masturbation is harmless. Suicidal patients must be asked whether they want to kill
themselves. The retarded growth of the foetus was seen on ultrasound.
"""
LAW = """
The defendant was convicted of rape, of sexual assault of a minor and of attempted murder. He had threatened to
kill the victim with a knife if she went to the police. The court of appeal held that the evidence of her previous
sexual behaviour was rightly excluded. Section 5 makes it an offence to possess extreme pornographic images.
Incitement to hatred against Jews, Muslims, black people or homosexuals is punished with imprisonment. The bastard
child could not inherit under the old law; the whore's contract was void for immorality.
"""
NEWS = """
Gunmen killed at least 40 people in an attack on a mosque, police said on Friday. Survivors told how the attackers
shouted slurs and shot men, women and children in the head. A man who said the city was a "shithole" was fined. The
senator apologised after he had called a reporter a "bitch". Protesters chanted "death to the dictator". Sex
workers asked for protection. The film, which shows nudity, sex, drug use and strong language, opens next week; its
best line is "fuck it".
"""


@pytest.mark.parametrize("text", [MEDICINE, LAW, NEWS], ids=["medicine", "law", "news"])
def test_texts_about_bodies_and_crimes_stay(text: str):
    assert judged(text) is None
    assert judged(text.replace("\n", " ") * 20) is None


def test_the_standard_library_stays_even_when_it_is_taken_for_prose():
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [*sorted(folder.glob("a*.py")), *sorted(folder.glob("c*.py")), folder / "pydoc_data/topics.py"]
    assert [path.name for path in paths if judged(path.read_text(encoding="utf-8"))] == []


def test_the_score_counts_words_of_the_text_and_the_detail_names_it():
    entries = [entry for entry in WEIGHTS if " " not in entry and WEIGHTS[entry] == 2][:4]
    text = " ".join((FILLER * 10)[: 200 - len(entries)] + entries)
    removal = judged(text, threshold=39.9)
    assert removal is not None
    assert removal.detail.startswith("weight 40.0 for every 1,000 words, 4 hits, most often ")
    assert judged(text, threshold=40.0) is None
    assert judged(text, threshold=39.9, min_hits=5) is None


@given(st.lists(st.sampled_from([*WEIGHTS, *FILLER, *FILLER]), max_size=30), st.data())
def test_hits_are_those_of_a_slow_count(pieces: list[str], data: st.DataObject):
    marks = st.sampled_from([" ", ", ", "\n", " – ", "… ", "\u00a0", "’ ", " “", "! "])
    cases = st.sampled_from([str.lower, str.upper, str.title])
    text = "".join(data.draw(cases)(piece) + data.draw(marks) for piece in pieces)
    words = re.findall(r"[^\W_]+", text.lower())
    counts: Counter[str] = Counter()
    for entry in WEIGHTS:
        wanted = re.findall(r"[^\W_]+", entry)
        count = sum(words[at : at + len(wanted)] == wanted for at in range(len(words)))
        if count:
            counts[entry] = count
    found = toxic_lexicon().hits(text)
    # Capital letters that do not fold back to what was written, such as SS for the sharp s, are no matter here.
    assert found.entries == counts
    assert found.weight == sum(WEIGHTS[entry] * count for entry, count in counts.items())
