"""Models that are split into several GGUF files, as ``llama-gguf-split`` does: NAME-00001-of-00003.gguf and so on.

The first part has the metadata of the model. Each part says how many there are, which one it is, counted from 0, and
how many tensors all have together.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from sheepop.checkpoint.gguf.container import Container
from sheepop.checkpoint.model_kind import gguf_parts
from sheepop.core.errors import CheckpointError, first_few

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_SHOWN = 3


def open_container(path: str | Path) -> Container:
    """Opens a file, or all parts of a model if the file is any one of them.

    Raises `CheckpointError` like `Container`, and for parts that are missing or do not belong together.
    """
    with ExitStack() as opened:
        given = opened.enter_context(Container(path))
        count = _number(given, _COUNT)
        if count > 1:
            parts = [
                given if other.name == given.path.name else opened.enter_context(Container(other))
                for other in _paths(given.path, count)
            ]
            _check_parts(parts)
            given = parts[0]
            for part in parts[1:]:
                given.absorb(part)
        opened.pop_all()
        return given


def is_split(container: Container) -> bool:
    """Whether a container is, or was opened from, a part of a model."""
    return _number(container, _COUNT) > 1


def _paths(path: Path, count: int) -> list[Path]:
    """Returns the paths of all parts of the model."""
    found = [path.with_name(name) for name in gguf_parts(path.name)]
    if len(found) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model, but its name does not end in -00001-of-{count:05}.gguf or "
            "another number, by which the other parts are found. Give all parts the names that were published."
        )
    if missing := [part.name for part in found if not part.is_file()]:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model, of which {first_few(missing, _SHOWN)} cannot be found. Put "
            "all parts into one folder."
        )
    return found


def _check_parts(parts: list[Container]) -> None:
    """Raises `CheckpointError` naming a part that does not belong to the first one."""
    first, names = parts[0], dict.fromkeys(parts[0].tensors, parts[0].path.name)
    for number, part in enumerate(parts):
        if (_number(part, _NUMBER), _number(part, _COUNT)) != (number, len(parts)):
            raise _mixed_up(
                part, f"says that it is part {_number(part, _NUMBER) + 1} of {_number(part, _COUNT)}, unlike its name"
            )
        if number == 0:
            continue
        for key, value in part.metadata.items():
            if key != _NUMBER and key in first.metadata and first.metadata[key] != value:
                raise _mixed_up(part, f"has another value of {key} than {first.path.name}")
        if twice := next((name for name in part.tensors if name in names), None):
            raise _mixed_up(part, f"has the tensor {twice!r}, which {names[twice]} has too")
        names |= dict.fromkeys(part.tensors, part.path.name)
    if len(names) != _number(first, _TENSORS):
        raise _mixed_up(
            first, f"says that the parts have {_number(first, _TENSORS)} tensors, but they have {len(names)}"
        )


def _mixed_up(part: Container, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{part.path} {reason}. Parts of different models were mixed up; copy or download them again."
    )


def _number(container: Container, key: str) -> int:
    """Returns the value of a key of the split, or 0 if it is missing."""
    value = container.metadata.get(key)
    if value is None:
        return 0
    if type(value.content) is not int or value.content < 0:
        raise CheckpointError(f"{container.path}: {key} is not a whole number.")
    return value.content
