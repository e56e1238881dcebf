from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from datatrove.data import Document
from datatrove.pipeline import filters
from pydantic import ValidationError

from sheepop.core.config import dump_config, parse_config, validate
from sheepop.core.errors import ConfigError
from sheepop.data.clean.account import Account
from sheepop.data.clean.config import STAGES, CleanConfig, QualityConfig
from sheepop.data.clean.quality import QualityFilter
from sheepop.data.documents import Draft
from sheepop.data.pipeline.passes import local_stages

Make = Callable[..., Draft]
STORY = (
    "Once there was a miller who had three sons, and he left them nothing but his mill, his ass and his cat. "
    "The eldest took the mill, the second took the ass, and the youngest had to be content with the cat. "
)


def judged(items: Iterable[Draft], **settings: Any) -> tuple[list[Draft], list[dict[str, Any]], Account]:
    """The documents that stay, and a record for each that goes."""
    account = Account(0)
    kept = list(QualityFilter(account, QualityConfig.model_validate(settings)).run(items))
    return kept, account.samples.as_record(), account


def random_words(count: int) -> str:
    chosen = random.Random(7)
    return " ".join("".join(chosen.choices("abcdefghijklmnop", k=5)) for _ in range(count))


# The gentle preset


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("text \x01\x02\x03\x04\x05 and more text here", "unprintable", "20.8% of the characters cannot be printed"),
        ("caf\ufffd \ufffd\ufffd\ufffd na\ufffdve", "unprintable", "more than 5%"),
        ("-----\n*****\n.....", "no letters", "there is no letter or digit in its 15 characters"),
        ("1.0 2.0 3.0 4.0\n" * 40, "no letters", "0.0% of the characters are letters, less than 10%"),
        (f"{STORY}\n" * 30, "repetition", "of the text is repeated lines, more than 90%"),
        ("buy now " * 500, "repetition", "of the text is repeated runs of 10 words, more than 90%"),
        (STORY * 40, "repetition", "of the text is repeated runs of 10 words"),
        ("a" * 3000, "repetition", "100.0% of the text is the character 'a', more than 50%"),
        (
            "\n".join(base64.b64encode(random.Random(n).randbytes(57)).decode() for n in range(30)),
            "encoded data",
            "of the text is base64 or hexadecimal data, more than 50%",
        ),
        ("404 Not Found\n", "placeholder", "it says only that there is nothing here"),
        ("This page intentionally left blank.", "placeholder", "nothing here"),
        ("Lorem ipsum dolor sit amet, consectetur adipiscing elit.", "placeholder", "nothing here"),
    ],
)
@pytest.mark.parametrize("kind", ["prose", "chat"])
def test_garbage_goes_and_the_reason_says_why(document: Make, kind: str, text: str, reason: str, detail: str):
    kept, removed, _ = judged([document(text, kind)])
    assert kept == []
    assert removed[0]["reason"] == reason
    assert detail in removed[0]["detail"]


@pytest.mark.parametrize(
    "text",
    [
        "numpy\n",
        "1.0",
        "Yes.",
        "TODO: write about 404 Not Found pages and how to avoid them.",
        STORY,
        f"{STORY}\n{STORY}",
        "# Changes\n\n- one\n- two\n- three\n",
        "name = value\n" * 3,
        "The blank page. " + random_words(3000),
        "日本語の文章です。" * 3 + "これは短い文です。",
        "見出し\n" + "".join(chr(0x4E00 + (n * 37) % 5000) for n in range(2000)),
        "=" * 79 + "\nHeading of the page\n" + "=" * 79,
        "\n".join(f"https://example.com/a/very/long/path/to/some/page/number/{n}/index" for n in range(40)),
    ],
)
def test_what_a_person_would_call_text_stays(document: Make, text: str):
    kept, removed, _ = judged([document(text)])
    assert len(kept) == 1, removed


def test_documentation_of_the_standard_library_stays(document: Make, prose: list[str]):
    kept, _, _ = judged([document(text) for text in prose])
    assert len(kept) >= 0.99 * len(prose)


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("a,b\n" + "0,0\n" * 3000, "of the table is repeated rows, more than 95%"),
        ("|---|---|", "no letter or digit"),
        ("a\x01\x02\x03\x04,b", "cannot be printed"),
        ("1,2\n3,4\n" * 5, None),
        ("\n".join(f"{n},{n * n}" for n in range(100)), None),
    ],
)
def test_tables_are_judged_by_few_rules(document: Make, text: str, detail: str | None):
    kept, removed, _ = judged([document(text, "table")])
    assert (kept != []) == (detail is None)
    assert detail is None or detail in removed[0]["detail"]


def test_every_bound_of_garbage_can_be_moved(document: Make):
    numbers = document("1.0 2.0 3.0 4.0\n" * 40)
    assert judged([numbers])[0] == []
    assert judged([numbers], garbage={"min_letters": 0, "max_repeated_lines": 1, "max_repeated_runs": 1})[0]
    assert judged([document("404 Not Found")], garbage={"placeholders": False})[0]


# The web preset


def test_the_web_rules_judge_documentation_as_datatroves_chain_does(document: Make, prose: list[str]):
    names = ("GopherQualityFilter", "GopherRepetitionFilter", "C4QualityFilter", "FineWebQualityFilter")
    stream: Iterable[Document] = [Document(text, str(number)) for number, text in enumerate(prose)]
    for name in names:
        stream = getattr(filters, name)().run(stream)
    theirs = {item.id for item in stream}
    documents = [document(text, part=number) for number, text in enumerate(prose)]
    ours = {str(item.part) for item in judged(documents, preset="web")[0]}
    assert 10 <= len(theirs) <= len(prose) - 100
    assert len(prose) - len(ours ^ theirs) >= 0.98 * len(prose)


def test_the_web_rules_for_prose_judge_prose_only(document: Make):
    text = "A few words only."
    for kind in ("code", "table", "chat"):
        assert judged([document(text, kind)], preset="web")[0]
    kept, removed, _ = judged([document(text)], preset="web")
    assert kept == []
    assert removed[0]["detail"] == "gopher: 4 words, fewer than 50"


def test_order_and_account_are_kept_over_many_documents(document: Make, prose: list[str]):
    items = [document(text, part=number) for number, text in enumerate(prose * 3)]
    kept, _, account = judged(items, preset="web")
    numbers = [item.part for item in kept]
    assert numbers == sorted(numbers)
    assert len(kept) + account.stage("quality").removed.total() == len(items)
    stage = QualityFilter(Account(0), QualityConfig(preset="web"))
    assert numbers == [item.part for item in items if stage.removal(item) is None]


ARTICLE = (
    "The river had risen for three days before the people of the town thought of leaving it to the water. "
    "Those who lived on the hill took in the families that had to move, and nobody asked how long they would stay.\n"
    "Contents\n"
    "On the fourth day the rain stopped. The mayor walked along the dam with two engineers and a child. "
    "She told them that the old wall would hold, because it had held in the year when her grandmother was born.\n"
    "Read more\n"
    "In the evening there was music in the school. It was not good music, but they liked to hear it.\n"
)


def test_lines_that_c4_drops_stay_unless_it_is_told_to_drop_them(document: Make):
    kept, _, account = judged([document(ARTICLE)], preset="web")
    assert kept[0].text == ARTICLE
    assert account.stage("quality").changed_documents == 0
    marked = document(ARTICLE, marks=[(ARTICLE.index("Contents"), "2"), (ARTICLE.index("In the evening"), "3")])
    kept, _, account = judged([marked], preset="web", c4={"drop_lines": True})
    expected = Document(ARTICLE, "0")
    assert filters.C4QualityFilter().filter(expected) is True
    assert kept[0].text == expected.text
    begins = [(kept[0].text[offset:][:6], name) for offset, name in kept[0].marks]
    assert begins == [("On the", "2"), ("In the", "3")]
    assert account.stage("quality").changes == {"lines dropped": 2}


# The configuration


def test_the_preset_is_written_into_the_config():
    config = CleanConfig(preset="web")
    assert config.quality.preset == "web"
    assert config.quality.code.generated is True
    assert config.stages == STAGES
    assert CleanConfig.model_validate({"preset": "web", "quality": {"preset": "gentle"}}).quality.preset == "gentle"
    assert CleanConfig.model_validate(
        {"preset": "web", "quality": {"code": {"generated": False}}}
    ).quality.code.model_dump() == {
        **config.quality.code.model_dump(),
        "generated": False,
    }


def test_no_preset_means_no_stages_but_those_that_are_named():
    assert CleanConfig(preset="none").stages == ()
    assert CleanConfig(preset="none", stages=("pii", "formatting")).stages == ("pii", "formatting")


@pytest.mark.parametrize("preset", ["gentle", "web", "none"])
def test_a_config_that_was_written_is_read_back(preset: str):
    config = CleanConfig.model_validate({"preset": preset})
    assert validate(CleanConfig, parse_config(dump_config(config), where="config.yaml")) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stages": ["formatting", "spelling"]}, "there is no stage 'spelling'; the stages are formatting, language"),
        ({"stages": ["pii", "quality", "pii"]}, "the stage 'pii' is listed twice"),
        ({"quality": {"preset": "none"}}, "quality.preset"),
        ({"quality": {"gopher": {"min_word": 3}}}, "Did you mean quality.gopher.min_words?"),
        ({"quality": {"repetition": {"top_ngrams": [[0, 0.2]]}}}, "each bound must be a number of words from 1 to 64"),
        ({"quality": "web"}, "quality"),
    ],
)
def test_a_mistake_in_the_config_is_named(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        validate(CleanConfig, given)
    assert message in str(caught.value)


def test_the_files_that_stages_read_are_known():
    config = CleanConfig.model_validate(
        {
            "decontamination": {"paths": ["eval.jsonl"]},
            "near_duplicates": {"against": ["old"]},
        }
    )
    assert config.named_paths() == ("eval.jsonl", "old")
    assert CleanConfig(preset="none", decontamination=config.decontamination).named_paths() == ()


def test_every_local_stage_has_its_name_and_order():
    names = ("quality", "secrets", "formatting", "language", "pii", "toxicity")
    account = Account(0)
    steps = local_stages(CleanConfig(), names, account, seed=3)
    assert tuple(step.name for step in steps) == names
    assert all(step.account is account for step in steps)


def test_the_bounds_of_a_share_are_enforced():
    with pytest.raises(ValidationError):
        QualityConfig.model_validate({"garbage": {"min_letters": 1.5}})
