from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import Interrupted, UsageError
from sheepop.download import download as module
from sheepop.jobs.data import download
from sheepop.report.formatting import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("100MB", 100_000_000),
        ("100mb", 100_000_000),
        ("1.5 GB", 1_500_000_000),
        ("64MiB", 67_108_864),
        ("2k", 2_000),
        ("0.5KiB", 512),
        ("3T", 3_000_000_000_000),
        (" 7 B ", 7),
    ],
)
def test_sizes_are_in_powers_of_ten_unless_they_say_otherwise(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "1 XB", "-1MB", "1e9", "1,000", "10 MB please", "½GB", "1.MB", "9" * 40])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(UsageError, match=r"is not a size\. Write it as 100MB"):
        parse_size(text)


@pytest.mark.parametrize("limit", ["0", "0.2B", 0, -5])
def test_a_limit_of_nothing_is_refused(limit: str | int, tmp_path: Path):
    with pytest.raises(UsageError, match="downloads nothing"):
        download("wikitext-2", tmp_path, limit=limit)


def test_the_limit_and_the_token_are_handed_on_and_an_interrupt_says_what_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    given: list[Any] = []

    def interrupted(name: str, output: Path, **options: Any) -> dict[str, Any]:
        given.append((name, output, options["limit"], options["token"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "download_dataset", interrupted)
    with pytest.raises(Interrupted, match="kept; run the same command again to resume") as raised:
        download("wikitext-2", str(tmp_path), limit="1MB", token="hf_x")
    assert raised.value.exit_code == 130
    assert given == [("wikitext-2", tmp_path, 1_000_000, "hf_x")]
