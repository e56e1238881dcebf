from __future__ import annotations

import pytest

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError
from sheepop.data import DataConfig


def test_defaults_are_those_of_the_design() -> None:
    config = DataConfig()
    assert (config.documents, config.split, config.packing, config.num_workers) == ("file", "document", True, 0)
    assert config.max_file_bytes == 2**40
    assert config.max_length is None and config.stride is None


def test_one_path_may_stand_without_a_list() -> None:
    assert validate(DataConfig, {"paths": "book.txt"}).paths == ("book.txt",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_fraction": 1.0}, "validation_fraction = 1.0: input should be less than 1"),
        ({"validation_fraction": -0.1}, "validation_fraction = -0.1"),
        ({"validation_fraction": float("nan")}, "validation_fraction"),
        ({"packing": False, "max_length": 8, "stride": 9}, "stride = 9 is greater than max_length = 8"),
        ({"stride": 8}, "Set data.packing=false"),
        ({"stride": 0, "packing": False}, "stride = 0"),
        ({"documents": "page"}, "documents = 'page'"),
        ({"paths": [""]}, "a path is empty"),
        ({"paths": ["a\0b"]}, "NUL"),
        ({"ignore": ["[z-a]"]}, "the pattern '[z-a]' is not a valid .gitignore pattern"),
        ({"num_worker": 2}, "Did you mean num_workers?"),
        ({"num_workers": -1}, "num_workers = -1"),
        ({"max_file_bytes": 0}, "max_file_bytes = 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_words(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(DataConfig, settings)
    assert message in str(caught.value)
