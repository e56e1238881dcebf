"""What a name asks for, and that no name asks for anything else."""

import re

import pytest

from sheepop.core.errors import UsageError
from sheepop.download.catalog import CATALOG, find


@pytest.mark.parametrize(
    ("name", "repository", "subset", "patterns"),
    [
        ("wikitext-2", "Salesforce/wikitext", "wikitext-2-raw-v1", ("wikitext-2-raw-v1/*.parquet",)),
        ("wikitext-103", "Salesforce/wikitext", "wikitext-103-raw-v1", ("wikitext-103-raw-v1/*.parquet",)),
        ("tinyshakespeare", "karpathy/tiny_shakespeare", "default", ("data/*.parquet",)),
        ("tinystories", "roneneldan/TinyStories", "default", ("data/*.parquet",)),
        ("openwebtext", "Skylion007/openwebtext", "plain_text", ("plain_text/*.parquet", "data/*.parquet")),
        ("fineweb-edu", "HuggingFaceFW/fineweb-edu", "sample-10BT", ("sample/10BT/*.parquet",)),
        ("wikipedia", "wikimedia/wikipedia", "20231101.en", ("20231101.en/*.parquet",)),
        ("wikipedia:zh-min-nan", "wikimedia/wikipedia", "20231101.zh-min-nan", ("20231101.zh-min-nan/*.parquet",)),
        ("amazon-reviews", "McAuley-Lab/Amazon-Reviews-2023", None, ("raw/review_categories/*.jsonl",)),
        (
            "amazon-reviews:All_Beauty",
            "McAuley-Lab/Amazon-Reviews-2023",
            "raw_review_All_Beauty",
            ("raw/review_categories/All_Beauty.jsonl",),
        ),
        ("bookcorpus", "bookcorpus/bookcorpus", "plain_text", ("plain_text/*.parquet", "data/*.parquet")),
    ],
)
def test_every_name_of_the_catalogue_means_one_place_on_the_hub(
    name: str, repository: str, subset: str | None, patterns: tuple[str, ...]
):
    request = find(name)
    assert (request.repository, request.subset, request.patterns) == (repository, subset, patterns)
    assert (request.name, request.column, request.split) == (name, "text", None)


def test_the_list_above_is_the_whole_catalogue():
    assert len(CATALOG) == 9
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repository) for entry in CATALOG.values())


def test_names_are_taken_in_any_case_and_have_folders_of_their_own():
    assert find(" WikiText-2 ") == find("wikitext-2")
    names = (
        "wikipedia",
        "wikipedia:de",
        "amazon-reviews",
        "hub:a/b",
        "hub:a/b/c",
        "hub:a/b:train",
        "hub:a/b/c:train:t",
    )
    folders = [find(name).folder for name in names]
    assert folders == [
        "wikipedia",
        "wikipedia-de",
        "amazon-reviews",
        "a--b",
        "a--b--c",
        "a--b--train",
        "a--b--c--train",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hub:o/d", ("o/d", None, None, None)),
        ("hub:o/d:train", ("o/d", None, "train", None)),
        ("hub:o/d:train:body", ("o/d", None, "train", "body")),
        ("hub:o/d::body", ("o/d", None, None, "body")),
        ("hub:o/d::a b:c", ("o/d", None, None, "a b:c")),
        ("hub:o/d/en.x", ("o/d", "en.x", None, None)),
        ("hub:O-1/d_2.x/en/v2:test:t", ("O-1/d_2.x", "en/v2", "test", "t")),
    ],
)
def test_a_dataset_of_the_hub_is_named_with_subset_split_and_column(name: str, expected: tuple[str | None, ...]):
    request = find(name)
    assert (request.repository, request.subset, request.split, request.column) == expected
    assert request.patterns == () and request.name == name
    assert re.fullmatch(r"[\w.-]+", request.folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wikitext2", r"no dataset 'wikitext2' in the catalogue\. Did you mean wikitext-2 or wikitext-103"),
        ("tiny_shakespeare", "Did you mean tinyshakespeare"),
        ("openwebtext2", "Did you mean openwebtext"),
        ("allenai/c4", r"Did you mean hub:allenai/c4\?"),
        ("zzz", r"no dataset 'zzz' in the catalogue\. It has wikitext-2,"),
        ("", "no dataset ''"),
        ("wikitext-2:train", "wikitext-2 has no parts to choose from"),
        ("wikipedia:", "does not name a language, such as wikipedia:de"),
        ("wikipedia:../x", "does not name a language"),
        ("wikipedia:{}", "does not name a language"),
        ("amazon-reviews:*", "does not name a category"),
        ("hub:squad", "not the name of a dataset on the hub. Write hub:OWNER/DATASET"),
        ("hub:", "not the name of a dataset"),
        ("hub:../../etc", "not the name of a dataset"),
        ("hub:a/b c", "not the name of a dataset"),
        ("hub:a/b\nc", "not the name of a dataset"),
    ],
)
def test_another_name_is_refused_and_the_nearest_are_named(name: str, message: str):
    with pytest.raises(UsageError, match=message):
        find(name)
