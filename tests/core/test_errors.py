"""How many of many things a message names."""

from __future__ import annotations

import pytest

from sheepop.core.errors import first_few


@pytest.mark.parametrize(
    ("items", "options", "expected"),
    [
        ([], {}, ""),
        (["a"], {}, "a"),
        (["a", "b", "c"], {}, "a, b, c"),
        (["a", "b", "c", "d"], {}, "a, b, c and 1 more"),
        ({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, {}, "a, b, c and 2 more"),
        (["a", "b", "c", "d"], {"separator": "; "}, "a; b; c; and 1 more"),
        (["a", "b"], {"separator": "; "}, "a; b"),
        (["a\n", "b"], {"written": repr}, "'a\\n', 'b'"),
        (range(2003), {}, "0, 1, 2 and 2,000 more"),
    ],
)
def test_the_first_few_are_named_and_the_rest_is_counted(items: object, options: dict[str, object], expected: str):
    assert first_few(items, 3, **options) == expected
