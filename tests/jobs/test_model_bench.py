"""What limits a step is named by its shares of what the machine and its products reach."""

from __future__ import annotations

import pytest

from sheepop.jobs.model_bench import _Measured


@pytest.mark.parametrize(
    ("moved", "operations", "product_rate", "wall"),
    [
        (120.0, 100.0, 1000.0, "memory"),  # 60 of 100 bytes a second, 50 of 100 operations
        (100.0, 120.0, 60.0, "arithmetic"),
        (90.0, 80.0, 70.0, "products"),  # 45 and 40 percent, but 40 of the 70 that a product reaches alone
        (90.0, 80.0, 90.0, "calls and threads"),
        (90.0, 80.0, 30.0, "products"),  # a product that was measured on a busy machine has no share above 1
    ],
)
def test_the_wall_is_the_larger_share_of_the_machine_or_the_products(
    moved: float, operations: float, product_rate: float, wall: str
) -> None:
    row = _Measured("decode", 8, "greedy", 8, 2.0, moved, operations, product_rate).row(100.0, 100.0)
    assert row["wall"] == wall
    assert row["share_of_bandwidth"] == moved / 200 and row["share_of_peak"] == operations / 200
    assert row["share_of_products"] == min(1.0, operations / 2 / product_rate)
