"""Requests with the same prefix go to the same replica, and stay there when other replicas are lost."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

front = pytest.importorskip("sheepop.serve.front", reason="Ray Serve is not installed", exc_type=ImportError)
beginning = front.beginning
home_of = pytest.importorskip("sheepop.serve.replicas", exc_type=ImportError).home_of


def key(tenant: str = "", **asked: Any) -> str:
    return beginning(json.dumps({"model": "m", **asked}).encode(), tenant)


def said(*texts: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_a_conversation_keeps_its_key_as_it_goes_on_and_shares_it_with_no_other():
    first = key(messages=said("Be kind.", "Hello"))
    assert key(messages=said("Be kind.", "Hello", "Good day.", "How are you?")) == first
    others = [
        key(messages=said("Be kind.", "Good bye")),
        key(messages=said("Be terse.", "Hello")),
        key(messages=said("Be kind.", "Hello"), model="other"),
        key("another tenant", messages=said("Be kind.", "Hello")),
    ]
    assert len({first, *others}) == 5


def test_texts_that_begin_with_the_same_256_characters_or_64_tokens_have_the_same_key():
    assert key(prompt="x" * 256 + "a") == key(prompt="x" * 256 + "b") == key(prompt=["x" * 300, "y"])
    assert key(prompt="x" * 255 + "a") != key(prompt="x" * 255 + "b")
    assert key(prompt=[7] * 64 + [1]) == key(prompt=[7] * 64 + [2]) == key(prompt=[[7] * 65, [3]])
    assert key(prompt=[7] * 63 + [1]) != key(prompt=[7] * 63 + [2])


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 100_000, b"[1]", b'{"model": "m", "input": "x"}'])
def test_what_has_no_beginning_has_no_key(body: bytes):
    assert beginning(body, "") == ""


def test_keys_are_spread_evenly_and_only_those_of_a_lost_replica_move():
    replicas = ["a", "b", "c", "d"]
    homes = {str(number): home_of(str(number), replicas) for number in range(1000)}
    assert all(200 < count < 300 for count in Counter(homes.values()).values())
    for number, home in homes.items():
        assert home == "b" or home_of(number, ["d", "c", "a"]) == home
