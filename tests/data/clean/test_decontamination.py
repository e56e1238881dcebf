"""Documents that share n-grams with evaluation texts go, exactly those that a slow search finds."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.core.errors import DataError
from sheepop.data.clean.account import Account
from sheepop.data.clean.config import DecontaminationConfig
from sheepop.data.clean.decontamination import (
    Decontamination,
    EvaluationSets,
    hashed_words,
    load_evaluation_sets,
)
from sheepop.data.clean.stage import Removal
from sheepop.data.documents import Draft
from sheepop.data.duplicates.shingles import spelled_words

QUESTION = "A train leaves the station at nine and travels sixty miles an hour; when does it reach the coast?"


@pytest.fixture
def jsonl(tmp_path: Path):
    def write(records: list[object], name: str = "eval.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
        return str(path)

    return write


def judged(text: str, **settings: object) -> Removal | None:
    stage = Decontamination(Account(1), DecontaminationConfig.model_validate(settings))
    return stage.removal(Draft(text, "a", 0))


def test_a_document_that_holds_an_evaluation_text_is_removed_and_the_detail_says_where_it_stands(jsonl):
    other = "Something else entirely, long enough to count as a text of more than thirteen words here."
    path = jsonl([{"question": other}, {"question": QUESTION, "answer": "noon"}])
    removal = judged(f"Exam of 1999.\n\n{QUESTION}\nThink well.", paths=[path])
    first = "a train leaves the station at nine and travels sixty miles an hour"
    assert removal == Removal("evaluation text", f"13 words of {path}, line 2: {first}")


def test_case_punctuation_and_line_breaks_make_no_difference(jsonl):
    path = jsonl([{"question": QUESTION}])
    changed = "“A TRAIN leaves — the station\nat nine, and travels (sixty miles) an hour”"
    assert judged(changed, paths=[path]) is not None


def test_twelve_words_in_a_row_are_not_enough_and_thirteen_anywhere_are(jsonl):
    path = jsonl([{"question": QUESTION}])
    words = QUESTION.split()
    for begin in range(len(words) - 12):
        assert judged(f"so {' '.join(words[begin : begin + 13])} end", paths=[path]) is not None
        assert judged(f"so {' '.join(words[begin : begin + 12])} end", paths=[path]) is None


def test_a_short_text_counts_as_a_whole_and_one_shorter_than_that_is_ignored_and_counted(jsonl):
    path = jsonl([{"q": "the quick brown fox jumps over the lazy dog"}, {"q": "two plus two is four"}, {"q": ""}])
    config = {"paths": [path], "min_words": 8}
    assert judged("Say: the quick, brown fox jumps over the lazy dog!", **config) is not None
    assert judged("the quick brown fox jumps over the lazy", **config) is None
    assert judged("of course two plus two is four", **config) is None
    (file,) = load_evaluation_sets(DecontaminationConfig.model_validate(config)).files
    assert (file.texts, file.too_short) == (1, 2)
    assert file.sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_texts_inside_lists_and_objects_count_and_only_the_fields_that_were_named(jsonl):
    path = jsonl(
        [{"id": QUESTION, "turns": [{"role": "user", "content": QUESTION[::-1]}], "choices": ["x", f"{QUESTION} yes"]}]
    )
    assert judged(QUESTION, paths=[path]) is not None
    assert judged(QUESTION[::-1], paths=[path]) is not None
    assert judged(QUESTION, paths=[path], fields=["turns"]) is None
    assert judged(QUESTION, paths=[path], fields=["choices"]) is not None


def test_more_matches_can_be_asked_for(jsonl):
    path = jsonl([{"question": QUESTION}])
    words = QUESTION.split()
    assert judged(" ".join(words[:14]), paths=[path], min_matches=2) is not None
    assert judged(" ".join(words[:13]) + ". " + " ".join(words[:13]), paths=[path], min_matches=2) is None


def test_characters_of_scripts_without_spaces_are_words(jsonl):
    path = jsonl([{"question": "火车九点离开车站以每小时六十英里的速度行驶什么时候到达海岸"}])
    assert judged("题目：离开车站以每小时六十英里的速度行驶，请回答。", paths=[path]) is not None
    assert judged("题目：每小时六十英里的速度，请回答。", paths=[path]) is None


def test_without_evaluation_sets_every_document_stays():
    assert judged(QUESTION) is None
    assert judged(QUESTION, paths=[]) is None


def test_a_changed_file_is_read_again(jsonl):
    path = jsonl([{"question": QUESTION}])
    assert judged(QUESTION, paths=[path]) is not None
    jsonl([{"question": "another text that has nothing to do with it but is long enough for an n-gram of words"}])
    assert judged(QUESTION, paths=[path]) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"q": "a"}\n{"q": \n', "line 2: not valid JSON"),
        (b'["q"]\n', "line 1: not a JSON object"),
        (b"[" * 100_000 + b"\n", "line 1: not valid JSON"),
        (b'{"q": "a\xff"}\n', "line 1: not valid JSON"),
        (b'{"other": "a"}\n', "has no field q"),
        (b"", "has no field q"),
    ],
)
def test_a_file_that_is_no_evaluation_set_is_refused_with_its_place(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "eval.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        judged("text", paths=[str(path)], fields=["q"])
    with pytest.raises(DataError, match="no such file"):
        judged("text", paths=[str(tmp_path / "none")])


WORDS = ["a", "b", "It's", "c-d", "é", "Ω", "x1", "_y_", "中文", "ß", "हिन्दी", "e\u0301", "😀", "3.5", "-", "w" * 70]


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=9), max_size=4),
    st.lists(st.sampled_from(WORDS), max_size=25),
    st.integers(2, 5),
    st.integers(2, 4),
)
def test_exactly_the_n_grams_of_a_slow_search_are_found(tmp_path_factory, texts, document, ngram: int, min_words: int):
    path = tmp_path_factory.mktemp("eval") / "eval.jsonl"
    path.write_text("".join(json.dumps({"q": " ".join(text)}) + "\n" for text in texts), encoding="utf-8")
    config = DecontaminationConfig(paths=(str(path),), ngram=ngram, min_words=min_words)
    expected = set()
    words = spelled_words(" ".join(document))
    for text in texts:
        wanted = spelled_words(" ".join(text))
        size = min(ngram, len(wanted))
        if size >= min(min_words, ngram):
            grams = {tuple(wanted[at : at + size]) for at in range(len(wanted) - size + 1)}
            expected |= {gram for gram in grams if gram in {tuple(words[at : at + size]) for at in range(len(words))}}
    found = list(EvaluationSets(config).matches(" ".join(document)))
    spelled = {tuple(spelled_words(match.text.text)[match.word : match.word + match.words]) for match in found}
    assert spelled == expected
    assert len(found) == len(expected)


@given(st.text(max_size=60))
def test_words_are_spelled_as_they_are_hashed(text: str):
    words = spelled_words(text)
    assert len(words) == hashed_words(text).size
    if text.isascii():
        plain = re.findall(r"[a-z0-9]+", text.lower())
        assert words == [word[at : at + 64] for word in plain for at in range(0, len(word), 64)]


def test_a_large_evaluation_set_flags_its_own_texts_and_no_others(jsonl):
    texts = [
        " ".join(hashlib.sha256(f"{number}/{word}".encode()).hexdigest()[:6] for word in range(30))
        for number in range(3000)
    ]
    path = jsonl([{"q": text} for text in texts[:1500]])
    stage = Decontamination(Account(1), DecontaminationConfig(paths=(path,)))
    documents = [Draft(f"x {text[20:]}", "a", index) for index, text in enumerate(texts)]
    assert [document.part for document in stage.run(documents)] == list(range(1500, 3000))
    assert stage.account.stage("decontamination").as_record()["removed"] == {"evaluation text": 1500}
