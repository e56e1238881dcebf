"""Which files a request means, on repositories as their owners make them."""

from collections.abc import Mapping
from typing import Any

import pytest

from sheepop.core.errors import DataError
from sheepop.core.hub import CONVERTED, Contents, HubFile
from sheepop.download.catalog import find
from sheepop.download.selection import Selection, data_type, glob_pattern, select, split_of


class Shelf:
    """A hub of one repository, of which the branches are listed."""

    name = "https://hub.test"

    def __init__(self, main: Mapping[str, int], converted: Mapping[str, int] | None = None, card: Any = None) -> None:
        self.branches = {"main": main, CONVERTED: converted}
        self.card = card or {}

    def contents(self, repository: str, revision: str = "main") -> Contents | None:
        files = self.branches[revision]
        if files is None:
            return None
        listed = tuple(HubFile(path, size, None, None) for path, size in files.items())
        return Contents(repository, "a" * 40 if revision == "main" else "b" * 40, listed, self.card)


def chosen(shelf: Shelf, name: str) -> list[tuple[str, str]]:
    selection = select(shelf, find(name))  # type: ignore[arg-type]
    return [(item.split, item.path) for item in selection.files]


def selected(shelf: Shelf, name: str) -> Selection:
    return select(shelf, find(name))  # type: ignore[arg-type]


def test_an_entry_of_the_catalogue_takes_its_own_subset_only_and_training_files_first():
    main = dict.fromkeys(
        [
            "README.md",
            "wikitext-103-raw-v1/test-00000-of-00001.parquet",
            "wikitext-103-raw-v1/train-00000-of-00002.parquet",
            "wikitext-103-raw-v1/train-00001-of-00002.parquet",
            "wikitext-103-raw-v1/validation-00000-of-00001.parquet",
            "wikitext-103-v1/train-00000-of-00002.parquet",
            "wikitext-2-raw-v1/train-00000-of-00001.parquet",
        ],
        9,
    )
    assert chosen(Shelf(main), "wikitext-103") == [
        ("train", "wikitext-103-raw-v1/train-00000-of-00002.parquet"),
        ("train", "wikitext-103-raw-v1/train-00001-of-00002.parquet"),
        ("test", "wikitext-103-raw-v1/test-00000-of-00001.parquet"),
        ("validation", "wikitext-103-raw-v1/validation-00000-of-00001.parquet"),
    ]


def test_a_language_is_its_own_edition_and_no_other():
    main = dict.fromkeys(["20231101.de/train-00000.parquet", "20231101.den/train-00000.parquet"], 9)
    assert chosen(Shelf(main), "wikipedia:de") == [("train", "20231101.de/train-00000.parquet")]
    with pytest.raises(
        DataError, match=r"has no files that match 20231101\.fr/\*\.parquet, and the hub has no conversion of it"
    ):
        chosen(Shelf(main), "wikipedia:fr")
    converted = {"20231101.de/train/0000.parquet": 9, "20231101.frr/train/0000.parquet": 9}
    with pytest.raises(DataError, match=r"no subset '20231101\.fr'\. Did you mean 20231101\.frr"):
        chosen(Shelf(main, converted), "wikipedia:fr")


def test_the_sample_of_fineweb_edu_is_not_the_rest_of_it():
    main = dict.fromkeys(["data/CC-MAIN-2024-10/train-00000.parquet", "sample/10BT/000_00000.parquet"], 9)
    main |= dict.fromkeys(["sample/100BT/000_00000.parquet", "sample/10BT/001_00000.parquet"], 9)
    assert chosen(Shelf(main), "fineweb-edu") == [
        ("train", "sample/10BT/000_00000.parquet"),
        ("train", "sample/10BT/001_00000.parquet"),
    ]


@pytest.mark.parametrize("folder", ["data", "plain_text"])
def test_a_dataset_whose_files_moved_within_its_repository_is_found(folder: str):
    main = {f"{folder}/train-00000-of-00080.parquet": 9, "openwebtext.py": 9}
    assert chosen(Shelf(main), "openwebtext") == [("train", f"{folder}/train-00000-of-00080.parquet")]


def test_a_dataset_made_by_a_script_is_taken_from_the_conversion_of_the_hub():
    shelf = Shelf(
        {"bookcorpus.py": 9, "README.md": 9},
        {"plain_text/train/0000.parquet": 9, "plain_text/train/0001.parquet": 9, "other/train/0000.parquet": 9},
    )
    selection = selected(shelf, "bookcorpus")
    assert selection.converted and not selection.partial and selection.contents.revision == "b" * 40
    assert [item.path for item in selection.files] == [
        "plain_text/train/0000.parquet",
        "plain_text/train/0001.parquet",
    ]


def test_a_dataset_made_by_a_script_without_a_conversion_is_refused_and_nothing_takes_its_place():
    with pytest.raises(
        DataError, match=r"bookcorpus/bookcorpus is made by a script, which SheepOp does not run.*no other dataset"
    ):
        chosen(Shelf({"bookcorpus.py": 9, "books.zip": 9}), "bookcorpus")


def test_a_conversion_of_the_beginning_is_marked_as_such():
    selection = selected(Shelf({"d.py": 9}, {"default/partial-train/0000.parquet": 9}), "hub:o/d")
    assert selection.partial and [item.split for item in selection.files] == ["train"]


CARD = {
    "configs": [
        {"config_name": "en", "data_files": [{"split": "train", "path": "en/*.parquet"}]},
        {
            "config_name": "fr",
            "default": True,
            "data_files": [
                {"split": "held out", "path": ["fr/b.jsonl", "fr/c.jsonl"]},
                {"split": "train", "path": "fr/a.jsonl"},
            ],
        },
    ]
}
MAIN = dict.fromkeys(["en/0.parquet", "en/x/1.parquet", "fr/a.jsonl", "fr/b.jsonl", "fr/c.jsonl"], 9)


def test_the_readme_says_which_files_a_subset_and_a_split_are():
    shelf = Shelf(MAIN, card=CARD)
    expected = [("train", "fr/a.jsonl"), ("held out", "fr/b.jsonl"), ("held out", "fr/c.jsonl")]
    assert chosen(shelf, "hub:o/d") == chosen(shelf, "hub:o/d/fr") == expected
    assert chosen(shelf, "hub:o/d:held out") == expected[1:]
    assert chosen(shelf, "hub:o/d/en:train") == [("train", "en/0.parquet")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:o/d/fra", r"no subset 'fra'\. Did you mean fr\? It has: en, fr\."),
        ("hub:o/d/en:test", r"no split 'test'\. It has: train\."),
        ("hub:o/d:tran", r"no split 'tran'\. Did you mean train\?"),
    ],
)
def test_a_subset_or_split_that_is_not_there_is_refused(name: str, message: str):
    with pytest.raises(DataError, match=message):
        chosen(Shelf(MAIN, card=CARD), name)


def test_several_subsets_without_a_default_must_be_chosen_from():
    card = {"configs": [{"config_name": name, "data_files": f"{name}/*"} for name in ("b", "a")]}
    with pytest.raises(DataError, match=r"several subsets; name one, such as hub:o/d/a\. They are: a, b\."):
        chosen(Shelf({"a/x.txt": 9, "b/x.txt": 9}, card=card), "hub:o/d")


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("data/*", [("train", "data/train.csv"), ("test", "data/test.csv")]),
        (["data/train.csv"], [("train", "data/train.csv")]),
        ({"train": "data/test.csv"}, [("train", "data/test.csv")]),
        ({"a": ["data/test.csv"], "train": "data/train.csv"}, [("train", "data/train.csv"), ("a", "data/test.csv")]),
    ],
)
def test_each_form_of_listing_files_is_read(listed: object, expected: list[tuple[str, str]]):
    card = {"configs": [{"config_name": "default", "data_files": listed}]}
    assert chosen(Shelf({"data/train.csv": 9, "data/test.csv": 9}, card=card), "hub:o/d") == expected


def test_a_folder_named_by_the_readme_is_taken_with_what_is_below_it():
    card = {"configs": [{"config_name": "x", "data_dir": "in"}]}
    assert chosen(Shelf({"in/a/b.txt": 9, "in/c.txt": 9, "out.txt": 9}, card=card), "hub:o/d") == [
        ("train", "in/a/b.txt"),
        ("train", "in/c.txt"),
    ]


@pytest.mark.parametrize("card", [{"configs": None}, {"configs": "x"}, {"configs": [3, {"config_name": "x"}]}])
def test_a_readme_without_a_usable_listing_leaves_it_to_the_names_of_the_files(card: object):
    main = {"README.md": 9, "train.jsonl": 9, "dev.jsonl": 9, "test/a.jsonl": 9, "dataset_infos.json": 99}
    assert chosen(Shelf(main, card=card), "hub:o/d") == [
        ("train", "train.jsonl"),
        ("test", "test/a.jsonl"),
        ("validation", "dev.jsonl"),
    ]


def test_of_several_forms_of_the_same_data_one_is_taken():
    main = {"a.csv": 1000, "a.jsonl": 10, "a.parquet": 5}
    assert chosen(Shelf(main), "hub:o/d") == [("train", "a.parquet")]
    assert chosen(Shelf({"a.csv": 1000, "b.jsonl": 10, "c.csv": 1}), "hub:o/d") == [
        ("train", "a.csv"),
        ("train", "c.csv"),
    ]


def test_a_repository_without_text_is_refused_with_what_can_be_read():
    with pytest.raises(DataError, match=r"has no files of a type that SheepOp can read \(\.parquet, .*no conversion"):
        chosen(Shelf({"README.md": 9, "pictures.zip": 9, "model.py": 9}), "hub:o/d")


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("a/train-00000-of-00001.parquet", "train"),
        ("data/validation-0.parquet", "validation"),
        ("x/dev.jsonl", "validation"),
        ("train_data/test.csv", "test"),
        ("raw/review_categories/Books.jsonl", "train"),
        ("constrained/latest.txt", "train"),
        ("EVAL/a.txt", "test"),
    ],
)
def test_the_split_is_read_off_the_path(path: str, split: str):
    assert split_of(path) == split


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a/b.PARQUET", ".parquet"),
        ("a.jsonl.gz", ".jsonl"),
        ("a.json.zst", ".json"),
        ("a.tar.gz", ""),
        ("README.md", ""),
        ("LICENSE.txt", ""),
        ("dataset_info.json", ""),
        (".hidden.txt", ""),
        ("a.gz", ""),
    ],
)
def test_the_type_is_read_off_the_name(path: str, kind: str):
    assert data_type(path) == kind


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("data/train-*", "data/train-00000.parquet", True),
        ("data/*", "data/a/b.parquet", False),
        ("data/**", "data/a/b.parquet", True),
        ("**/x.txt", "x.txt", True),
        ("**/x.txt", "a/b/x.txt", True),
        ("a?.txt", "ab.txt", True),
        ("a?.txt", "a/.txt", False),
        ("a+(b).txt", "a+(b).txt", True),
        ("a.txt", "abtxt", False),
    ],
)
def test_patterns_of_paths(pattern: str, path: str, matches: bool):
    assert bool(glob_pattern(pattern).fullmatch(path)) is matches
