from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sheepop.core.errors import DataError
from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.search import Removed, find_duplicates, later_copies
from sheepop.data.duplicates.signatures import PartSignatures, SignatureWriter

# With so many bands of one row each, a pair at the threshold is missed with probability 5e-20.
SURE = NearDuplicatesConfig(threshold=0.5, bands=64, rows=1)
Decide = Callable[..., list[Removed]]


def cut(documents: list[Document], cuts: list[int]) -> list[list[Document]]:
    bounds = sorted({0, len(documents), *(min(place, len(documents)) for place in cuts)})
    return [documents[start:end] for start, end in pairwise(bounds)]


def by_ordinal(removed: list[Removed], parts: list[list[Document]]) -> dict[int, tuple[str, int, float]]:
    starts = [sum(map(len, parts[:number])) for number in range(len(parts))]
    places = [(item.part, item.index) for item in removed]
    assert places == sorted(set(places))
    return {
        starts[item.part] + item.index: (item.reason, starts[item.kept_part] + item.kept_index, item.similarity)
        for item in removed
    }


def families(make: Any) -> list[Document]:
    """Documents in any order, many of them alike in different degrees; some equal, some empty."""
    documents = [Document.of(text, "file", 0) for text in ("", "!", "One two", "one, two!", "one two")]
    for kind in ("prose", "code", "prose"):
        original = getattr(make, kind)(make.random.randint(20, 50))
        for _ in range(make.random.randint(1, 7)):
            words = make.edited(original, make.random.choice([0.3, 0.5, 0.6, 0.7, 0.9, 1.0]))
            documents.append(Document.of(" ".join(words), "file", 0, kind=kind))
            if make.random.random() < 0.3:
                original = words
            if make.random.random() < 0.2:
                documents.append(documents[-1])
    make.random.shuffle(documents)
    return documents


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 40), max_size=5),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([1, 2**24]),
)
def test_what_goes_is_what_comparing_all_pairs_removes_wherever_parts_are_cut(
    slow: Any,
    maker: Callable[[int], Any],
    decide: Decide,
    seed: int,
    cuts: list[int],
    protected: int,
    exact: bool,
    memory_bytes: int,
) -> None:
    documents = families(maker(seed))
    parts = cut(documents, cuts)
    protected = min(protected, len(parts))
    removed = decide(parts, SURE, protected=protected, exact=exact, memory_bytes=memory_bytes)
    num_protected = sum(map(len, parts[:protected]))
    expected = slow.duplicates(documents, SURE, num_protected=num_protected, exact=exact)
    assert by_ordinal(removed, parts) == expected


def test_the_longest_copy_stays_and_the_first_of_equal_length(decide: Decide) -> None:
    text = " ".join(f"word{number}" for number in range(100))
    texts = [text, text + " " * 2, text + " " * 3, text.upper() + " " * 3]
    parts = [[Document.of(text, "file", n)] for n, text in enumerate(texts)]
    assert decide(parts, NearDuplicatesConfig()) == [
        Removed(0, 0, "near", 2, 0, 1.0),
        Removed(1, 0, "near", 2, 0, 1.0),
        Removed(3, 0, "near", 2, 0, 1.0),
    ]


def test_a_beginning_goes_when_it_is_as_similar_to_the_whole_as_the_threshold_asks(decide: Decide) -> None:
    config = NearDuplicatesConfig(threshold=0.8, bands=128, rows=2)
    words = [f"word{number}" for number in range(104)]
    whole, enough, less = (Document.of(" ".join(words[:count]), "file", 0) for count in (104, 84, 83))
    assert decide([[enough, whole]], config) == [Removed(0, 0, "near", 0, 1, 0.8)]
    assert decide([[less, whole]], config) == []


def test_a_chain_of_likenesses_removes_no_document_that_is_unlike_all_that_stay(decide: Decide, slow: Any) -> None:
    words = [f"w{number:03d}" for number in range(150)]
    # Of the same length, each 100 words of which the next has 94.
    documents = [Document.of(" ".join(words[start : start + 100]), "file", 0) for start in range(0, 42, 6)]
    similarities = [slow.jaccard((documents[0].text, "prose"), (other.text, "prose")) for other in documents]
    assert [similarity >= 0.8 for similarity in similarities] == [True, True, False, False, False, False, False]
    removed = decide([documents], NearDuplicatesConfig())
    assert [(item.index, item.kept_index) for item in removed] == [(1, 0), (3, 2), (5, 4)]


def test_documents_of_earlier_corpora_stay_and_new_copies_of_them_go(decide: Decide) -> None:
    text = " ".join(f"word{number}" for number in range(100))
    old = [Document.of(text, "old", 0), Document.of(text + ".", "old", 1), Document.of(text, "old", 2)]
    new = [Document.of(text + " and much more", "new", 0), Document.of(text, "new", 1)]
    config = NearDuplicatesConfig()
    assert [
        (r.part, r.index, r.reason, r.kept_part, r.kept_index) for r in decide([old, new], config, protected=1)
    ] == [
        (1, 0, "near", 0, 0),
        (1, 1, "exact", 0, 0),
    ]
    assert decide([old, new], None, protected=1) == [Removed(1, 1, "exact", 0, 0, 1.0)]
    # Were the same documents new ones, the longest would stay.
    assert [(r.part, r.index, r.reason, r.kept_part, r.kept_index) for r in decide([old, new], config)] == [
        (0, 0, "near", 1, 0),
        (0, 1, "near", 1, 0),
        (0, 2, "exact", 0, 0),
        (1, 1, "exact", 0, 0),
    ]


def test_only_parts_with_candidates_are_read_again(tmp_path: Path, sign: Callable[..., list[PartSignatures]]) -> None:
    text = " ".join(f"word{number}" for number in range(100))
    parts = [[Document.of(text, "file", 0)], [Document.of("quite another text", "file", 1)], []]
    parts += [[Document.of(text + " more", "file", 2)]]
    read = []

    def read_part(number: int) -> Any:
        read.append(number)
        return iter(parts[number])

    config = NearDuplicatesConfig()
    removed = list(find_duplicates(sign(parts, config), read_part, config, tmp_path / "work"))
    assert (removed, read) == ([Removed(0, 0, "near", 3, 0, pytest.approx(96 / 97))], [0, 3])


def test_leftovers_of_a_decision_that_was_stopped_make_no_difference(
    tmp_path: Path, sign: Callable[..., list[PartSignatures]], maker: Callable[[int], Any]
) -> None:
    parts = cut(families(maker(1)), [10])
    signed = sign(parts, SURE)

    def decision() -> Any:
        return find_duplicates(signed, lambda n: iter(parts[n]), SURE, tmp_path / "work", memory_bytes=1)

    whole = list(decision())
    (tmp_path / "work" / "ids").mkdir(parents=True)
    (tmp_path / "work" / "ids" / "000000.run").write_bytes(b"remains")
    stopped = decision()
    assert next(stopped) == whole[0]
    stopped.close()
    assert not (tmp_path / "work").exists()
    assert list(decision()) == whole and len(whole) > 5


def test_a_part_that_changed_is_named(tmp_path: Path, sign: Callable[..., list[PartSignatures]]) -> None:
    text = " ".join(f"word{number}" for number in range(100))
    parts = [[Document.of(text, "file", 0), Document.of(text + " more", "file", 1)]]
    config = NearDuplicatesConfig()
    for now in ([parts[0][0]], [parts[0][0], Document.of("something else", "file", 1)]):
        removed = find_duplicates(sign(parts, config), lambda number, now=now: iter(now), config, tmp_path / "work")
        with pytest.raises(DataError, match=r"00000.signatures .* Build again"):
            list(removed)


def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, sign: Callable[..., list[PartSignatures]]) -> None:
    config = NearDuplicatesConfig()
    first, second = sign([[Document.of("a", "f", 0)], [Document.of("b", "f", 0)]], config, protected=1)
    with pytest.raises(ValueError, match="protected parts must come before"):
        list(find_duplicates([second, first], lambda n: iter([]), config, tmp_path / "work"))
    with pytest.raises(ValueError, match="signatures of the settings"):
        list(find_duplicates([first, second], lambda n: iter([]), SURE, tmp_path / "work"))


def test_nothing_is_decided_about_no_documents(decide: Decide) -> None:
    assert decide([], NearDuplicatesConfig()) == []
    assert decide([[], []], NearDuplicatesConfig()) == []


@given(st.lists(st.integers(0, 12), max_size=60), st.lists(st.integers(0, 60), max_size=4), st.booleans())
def test_later_copies_are_found_among_all_parts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[int], cuts: list[int], small: bool
) -> None:
    directory = tmp_path_factory.mktemp("copies")
    documents = [Document.of(f"text {number}", "file", place) for place, number in enumerate(texts)]
    bounds = sorted({0, len(documents), *(min(cut, len(documents)) for cut in cuts)})
    parts = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        with SignatureWriter(directory / f"{number}", None) as writer:
            for document in documents[start:end]:
                writer.add(document)
        parts.append(PartSignatures.open(directory / f"{number}", None))
    with later_copies(parts, directory / "work", memory_bytes=1 if small else 2**20) as copies:
        found = [tuple(row) for block in copies.blocks() for row in block.tolist()]
    assert found == [(n, texts.index(text)) for n, text in enumerate(texts) if texts.index(text) != n]
