"""Weights in huge pages are the same numbers at the same place; copies near threads have memory of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sheepop.core.memory_placement import copied_by_threads, move_to_huge_pages


def test_content_and_addresses_stay(tmp_path: Path) -> None:
    """Of memory of this process, and of a file."""
    own = torch.arange(3 * 2**20, dtype=torch.int32)
    (tmp_path / "numbers").write_bytes(own.numpy().tobytes())
    mapped = torch.from_numpy(np.memmap(tmp_path / "numbers", np.int32, "c"))
    places, expected = [own.data_ptr(), mapped.data_ptr()], own.clone()
    thread = move_to_huge_pages([own, mapped, torch.ones(3)])
    assert (thread is not None) == (sys.platform == "linux")
    if thread is not None:
        thread.join()
    assert [own.data_ptr(), mapped.data_ptr()] == places
    assert torch.equal(own, expected)
    assert torch.equal(mapped, expected)
    assert (tmp_path / "numbers").read_bytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("tensors", [[], [torch.ones(2**10)], [torch.empty(2**24, device="meta")]])
def test_small_and_other_tensors_stay_where_they_are(tensors: list[torch.Tensor]) -> None:
    assert move_to_huge_pages(tensors) is None


@pytest.mark.parametrize("shape", [(1000, 600), (7, 160, 500), (3,)])
def test_copies_of_threads_are_equal(shape: tuple[int, ...]) -> None:
    numbers = torch.randint(-100, 100, shape, dtype=torch.int8)
    for weight in (numbers, numbers.bfloat16()):
        found = copied_by_threads(weight, are_experts=len(shape) > 2)
        assert torch.equal(found, weight) and found.dtype == weight.dtype
        assert found.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
