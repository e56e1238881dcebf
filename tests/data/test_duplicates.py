from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.duplicates import SeenContent


@given(st.lists(st.integers(0, 30)), st.integers(0, 20))
def test_it_is_a_set_wherever_the_ids_lie(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], in_memory: int
) -> None:
    path = tmp_path_factory.mktemp("seen") / "seen.sqlite"
    reference: set[int] = set()
    with SeenContent(path, in_memory=in_memory) as seen:
        for number in numbers:
            assert seen.add(f"{number:032x}") is (number not in reference)
            reference.add(number)
    assert not path.exists()


def test_the_file_appears_only_when_memory_is_full(tmp_path: Path) -> None:
    with SeenContent(tmp_path / "seen.sqlite", in_memory=2) as seen:
        assert seen.add("00" * 16) and seen.add("01" * 16)
        assert not (tmp_path / "seen.sqlite").exists()
        assert seen.add("02" * 16)
        assert (tmp_path / "seen.sqlite").exists()
