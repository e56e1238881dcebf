from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sheepop.core.files import read_json
from sheepop.data import Corpus
from sheepop.data.pipeline.passes import split_into_passes

Tree = Callable[..., Path]
Build = Callable[..., Corpus]


def test_stages_of_single_documents_run_together_until_one_looks_at_all_documents() -> None:
    assert split_into_passes([]) == [([], [])]
    assert split_into_passes(["formatting", "pii"]) == [(["formatting", "pii"], [])]
    assert split_into_passes(["pii", "exact_duplicates", "near_duplicates"]) == [
        (["pii"], ["exact_duplicates", "near_duplicates"])
    ]
    assert split_into_passes(["exact_duplicates", "pii", "near_duplicates", "quality"]) == [
        ([], ["exact_duplicates"]),
        (["pii"], ["near_duplicates"]),
        (["quality"], []),
    ]


def test_the_order_of_the_stages_decides_what_is_equal(tree: Tree, build: Build) -> None:
    root = tree({"a.txt": "The same words here.\n", "b.txt": "The same words here.   \n", "c.txt": "Others.\n"})
    repaired_first = build(root, output="1", clean={"stages": ["formatting", "exact_duplicates"], "shuffle": False})
    compared_first = build(root, output="2", clean={"stages": ["exact_duplicates", "formatting"], "shuffle": False})
    assert repaired_first.manifest["documents"]["removed"] == {"formatting": 0, "exact_duplicates": 1}
    assert compared_first.manifest["documents"]["removed"] == {"formatting": 0, "exact_duplicates": 0}
    assert repaired_first.manifest["documents"]["kept"] == 2
    assert compared_first.manifest["documents"]["kept"] == 3


def test_what_leaves_a_stage_enters_the_next(tree: Tree, build: Build) -> None:
    near = "A shepherd counts the sheep in the meadow every morning before the dogs come back from the river. " * 4
    files = {f"{n}.txt": f"Text {n} speaks of the number {n} and of nothing else.\n" for n in range(30)}
    files |= {"copy.txt": files["3.txt"], "near 1.txt": near, "near 2.txt": near + "Then it rains.\n"}
    files |= {"mail.txt": "Write to shepherd@sheep-farm.org about the wool.\n", "odd.txt": "Trailing blanks.   \n"}
    corpus = build(tree(files), clean={"preset": "gentle"})
    report = read_json(corpus.directory / "report.json")
    stages = report["stages"]
    assert [stage["stage"] for stage in stages] == list(corpus.manifest["config"]["data"]["clean"]["stages"])
    assert stages[0]["documents_in"] == 35
    assert stages[0]["bytes_in"] == sum(len(text) for text in files.values())
    for before, after in zip(stages, [*stages[1:], None], strict=True):
        removed, removed_bytes = sum(before["removed"].values()), sum(before["removed_bytes"].values())
        assert before["documents_out"] == before["documents_in"] - removed
        assert before["bytes_out"] == before["bytes_in"] - removed_bytes + before["added_bytes"]
        if after is not None:
            assert (after["documents_in"], after["bytes_in"]) == (before["documents_out"], before["bytes_out"])
    by_name = {stage["stage"]: stage for stage in stages}
    assert by_name["exact_duplicates"]["removed"] == {"exact copy": 1}
    assert by_name["near_duplicates"]["removed"] == {"near copy": 1}
    assert by_name["pii"]["changes"] == {"email": 1}
    assert by_name["formatting"]["changed_documents"] >= 1
    assert report["documents"]["kept"] == 33 == stages[-1]["documents_out"]
    reasons = {sample["file"]: sample["stage"] for sample in report["removed_samples"]}
    assert reasons == {"copy.txt": "exact_duplicates", "near 1.txt": "near_duplicates"}
    assert len(report["kept_samples"]) == 20
