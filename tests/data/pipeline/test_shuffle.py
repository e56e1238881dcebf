from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sheepop.core.files import read_json
from sheepop.data.config import DataConfig
from sheepop.data.documents import Document, read_stored
from sheepop.data.mixing import MixedSource, Mixture
from sheepop.data.pipeline.parts import FinishedPart, Removal, part_path, write_part, write_removals
from sheepop.data.pipeline.shuffle import DOCUMENTS_PREFIX, Assignment, Gather, Scatter, decide_assignment


def write_parts(directory: Path, texts: list[list[str]], mixture: Mixture | None = None) -> list[FinishedPart]:
    mixture = mixture or Mixture([])
    parts = []
    for number, part_texts in enumerate(texts):
        path = part_path(directory, number)
        path.mkdir(parents=True)
        write_part(path, (Document.of(text, f"{number}/{n}.txt", 0) for n, text in enumerate(part_texts)), mixture)
        parts.append(FinishedPart(directory, number))
    return parts


def ordered(directory: Path, parts: list[FinishedPart], **settings: object) -> tuple[list[str], list[str], Assignment]:
    """The documents of both splits in their order, through both passes."""
    clean, seed = {"shuffle": settings.pop("shuffle", True)}, int(str(settings.pop("seed", 3)))
    config = DataConfig.model_validate({"validation_fraction": 0, "clean": clean, **settings})
    assignment = decide_assignment(parts, config, seed)
    scattered, gathered = directory / "scattered", directory / "gathered"
    for rank in range(len(parts)):
        part_path(scattered, rank).mkdir(parents=True)
        Scatter(parts[0].directory, assignment)(rank, part_path(scattered, rank))
    texts: list[list[str]] = [[], []]
    for bucket in range(sum(assignment.buckets)):
        target = part_path(gathered, bucket)
        target.mkdir(parents=True)
        Gather(scattered, len(parts), sum(assignment.buckets), 3)(bucket, target)
        found = [stored.document().text for stored in read_stored(target, DOCUMENTS_PREFIX)]
        assert read_json(target / "account.json")["documents"] == len(found)
        texts[bucket >= assignment.buckets[0]] += found
    return texts[0], texts[1], assignment


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(min_size=1).filter(lambda t: t.strip() != ""), min_size=1, max_size=40, unique=True),
    cuts=st.lists(st.integers(0, 40), max_size=3),
    shuffle=st.booleans(),
)
def test_the_order_does_not_depend_on_the_cut_into_parts_and_loses_nothing(
    texts: list[str], cuts: list[int], shuffle: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("parts")
    bounds = [0, *sorted(min(cut, len(texts)) for cut in cuts), len(texts)]
    cut = [texts[a:b] for a, b in itertools.pairwise(bounds)]
    whole, _, _ = ordered(directory / "1", write_parts(directory / "whole", [texts]), shuffle=shuffle)
    parted, _, _ = ordered(directory / "2", write_parts(directory / "parted", cut), shuffle=shuffle)
    assert whole == parted
    assert sorted(whole) == sorted(texts)
    if not shuffle:
        assert whole == texts


def test_a_shuffle_is_another_with_another_seed_and_far_from_the_order_of_the_input(tmp_path: Path) -> None:
    texts = [f"document {n}" for n in range(400)]
    parts = write_parts(tmp_path / "parts", [texts])
    first, _, _ = ordered(tmp_path / "1", parts, seed=1)
    second, _, _ = ordered(tmp_path / "2", parts, seed=2)
    assert first != second
    correlation = np.corrcoef([texts.index(text) for text in first], range(400))[0, 1]
    assert abs(correlation) < 0.2  # four standard errors


def test_text_over_a_bucket_is_spread_over_files_in_the_order_of_keys(tmp_path: Path) -> None:
    texts = [f"{n} " + "x" * 200_000 for n in range(60)]
    parts = write_parts(tmp_path / "parts", [texts[:30], texts[30:]])
    train, held_out, assignment = ordered(tmp_path / "work", parts, validation_fraction=0.2)
    assert assignment.buckets == (6, 1)  # 12 MB in files of about 2 MiB; a fifth of it held out
    assert sorted(train + held_out) == sorted(texts)
    unshuffled, _, assignment = ordered(tmp_path / "plain", parts, shuffle=False)
    assert assignment.buckets == (6, 0)
    assert unshuffled == texts


def test_removed_documents_are_gone_and_accounted_for(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", [["a", "b", "c"], ["d", "e"]])
    write_removals(
        tmp_path / "parts",
        [
            Removal(0, 1, "exact_duplicates", "exact copy", "of x"),
            Removal(1, 0, "near_duplicates", "near copy", "of y"),
        ],
    )
    train, _, assignment = ordered(tmp_path / "work", parts, shuffle=False)
    assert train == ["a", "c", "e"]
    assert assignment.splitter.documents == 3
    records = [read_json(part_path(tmp_path / "work" / "scattered", rank) / "account.json") for rank in (0, 1)]
    assert records[0]["stages"]["exact_duplicates"]["removed"] == {"exact copy": 1}
    assert records[1]["stages"]["near_duplicates"]["removed"] == {"near copy": 1}
    assert records[1]["samples"][0]["excerpt"] == "d"


def test_a_mixture_repeats_training_documents_and_no_held_out_ones(tmp_path: Path) -> None:
    mix = [MixedSource(pattern="0/", epochs=3), MixedSource(pattern="1/", epochs=0.5)]
    texts = [[f"a{n}" for n in range(200)], [f"b{n}" for n in range(200)], [f"c{n}" for n in range(200)]]
    parts = write_parts(tmp_path / "parts", texts, Mixture(mix))
    train, held_out, _ = ordered(tmp_path / "work", parts, mix=mix, validation_fraction=0.1)
    plain, held_out_plain, _ = ordered(
        tmp_path / "plain", write_parts(tmp_path / "unmixed", texts), validation_fraction=0.1
    )
    assert sorted(held_out) == sorted(held_out_plain)
    times, trained = Counter(train), set(plain)
    assert {times[text] for text in texts[0] if text in trained} == {3}
    assert {times[text] for text in texts[2] if text in trained} == {1}
    half = [times[text] for text in texts[1] if text in trained]
    assert set(half) == {0, 1} and abs(sum(half) / len(half) - 0.5) < 0.15


def test_a_tail_is_cut_at_the_same_place_whatever_the_parts(tmp_path: Path) -> None:
    texts = [f"line {n} of a short text\n" * 4 for n in range(12)]
    whole = ordered(tmp_path / "1", write_parts(tmp_path / "a", [texts]), validation_fraction=0.3, shuffle=False)
    parted = ordered(
        tmp_path / "2",
        write_parts(tmp_path / "b", [texts[:5], texts[5:9], texts[9:]]),
        validation_fraction=0.3,
        shuffle=False,
    )
    assert whole[:2] == parted[:2]
    assert "".join(whole[0] + whole[1]) == "".join(texts)
    assert len("".join(whole[1])) / len("".join(texts)) == pytest.approx(0.3, abs=0.03)
    records = [read_json(part_path(tmp_path / "2" / "scattered", rank) / "account.json") for rank in range(3)]
    # One assignment for all parts, as in a process that does them one after the other.
    assert [record["cut_documents"] for record in records] == [0, 1, 0]
