"""Memory of large results is used again, but never that of a tensor that someone still has."""

from __future__ import annotations

import gc
import threading

import torch

from sheepop.core.large_results import empty

LARGE = 2**23  # numbers of four bytes


def test_memory_is_used_again_once_no_view_refers_to_it() -> None:
    first = empty(2, LARGE // 2).fill_(1.0)
    view = first[1, 5:9].detach()
    second = empty(LARGE + 64).fill_(2.0)
    assert second.data_ptr() != first.data_ptr()
    assert view.tolist() == [1.0] * 4
    place = second.data_ptr()
    del second
    gc.collect()
    third = empty(2, LARGE // 2)
    assert (third.data_ptr(), tuple(third.shape)) == (place, (2, LARGE // 2))
    assert view.tolist() == [1.0] * 4


def test_results_are_aligned_and_those_of_threads_and_small_ones_are_apart() -> None:
    found = [empty(LARGE), empty(3, 5)]
    thread = threading.Thread(target=lambda: found.append(empty(LARGE)))
    thread.start()
    thread.join()
    assert len({tensor.data_ptr() for tensor in found}) == 3
    assert all(tensor.data_ptr() % 64 == 0 and tensor.dtype == torch.float32 for tensor in found)
