from __future__ import annotations

import pytest
from pydantic import Field

from sheepop.core.config import Config
from sheepop.core.errors import ConfigError
from sheepop.core.keys import MayChange, find_key, keys, may_change


class Point(Config):
    weight: float = 1.0
    """How much
    it counts."""


class Logging(Config):
    interval: MayChange[int] = Field(10, ge=1)
    """Steps between two rows."""
    points: tuple[Point, ...] = ()
    """What is drawn."""


class Named(Config):
    name: str
    """What it is called."""


class Tree(Named):
    logging: Logging = Logging()
    """What is written."""
    writing: MayChange[Point] = Point()
    """How text is written."""
    spare: Point | None = None


def test_keys_are_walked_in_order_with_those_of_sections_lists_and_what_may_be_null():
    assert [key.path for key in keys(Tree)] == [
        "name",
        "logging",
        "logging.interval",
        "logging.points",
        "logging.points.weight",
        "writing",
        "writing.weight",
        "spare",
        "spare.weight",
    ]
    assert [key.path for key in keys(Tree) if key.section is Point] == ["logging.points", "writing", "spare"]


def test_a_mark_stands_for_its_key_or_for_a_whole_section():
    assert may_change(Tree) == {"logging.interval", "writing", "writing.weight"}


def test_a_marked_field_keeps_its_type_bounds_and_default():
    assert Logging().interval == 10
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Logging(interval=0)


def test_the_meaning_is_the_text_below_the_field_of_whichever_class_declares_it():
    meanings = {key.path: key.meaning for key in keys(Tree)}
    assert meanings["name"] == "What it is called."
    assert meanings["writing.weight"] == "How much it counts."
    assert meanings["logging.interval"] == "Steps between two rows."
    assert meanings["spare"] == ""


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("logging.intreval", r"^logging\.intreval: unknown key\. Did you mean logging\.interval\?$"),
        ("interval", r"^interval: unknown key\. Did you mean logging\.interval\?$"),
        ("nothing.like.it", r"Known keys here: name, logging, writing, spare\."),
        ("name.first", r"name has no keys\.$"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(path: str, message: str):
    with pytest.raises(ConfigError, match=message):
        find_key(Tree, path)


def test_a_known_key_is_found_inside_sections():
    assert find_key(Tree, "logging.points.weight").owner is Point
