"""What runs in the process that reads files within limits: one request for each file, documents as answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from sheepop.core.bounded_child import Alive, serve
from sheepop.core.errors import StorageError
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.detection import FileType
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.interface import Content, Extracted, Refused

STORAGE = "storage"


def read_file(request: dict[str, Any], alive: Alive) -> Iterator[list[Any]]:
    """The documents of the file that the request names, as `to_message` encodes them."""
    scratch = Path(request["scratch"])
    dispatcher = Dispatcher(_config(request["config"]), scratch, alive)
    content = Content(request["name"], path=Path(request["path"]))
    try:
        for item in dispatcher.documents(content, FileType(*request["type"])):
            yield to_message(item)
    except StorageError as error:
        yield [STORAGE, str(error)]
    finally:
        clear(scratch)


def to_message(item: Extracted | Refused) -> list[Any]:
    """An item as JSON."""
    if isinstance(item, Refused):
        return [item.place, item.reason, item.detail]
    return [item.text, item.kind, item.language, item.place, item.marks, dict(item.metadata)]


def from_message(message: list[Any]) -> Extracted | Refused:
    """What `to_message` encoded; raises `StorageError` when the process found no room for temporary files."""
    if len(message) == 2:
        raise StorageError(message[1])
    if len(message) == 3:
        return Refused(*message)
    text, kind, language, place, marks, metadata = message
    return Extracted(text, kind, language, place, tuple((offset, name) for offset, name in marks), metadata)


def clear(directory: Path) -> None:
    """Removes what lies in a directory for temporary files."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@lru_cache(maxsize=4)
def _config(text: str) -> ExtractConfig:
    return ExtractConfig.model_validate_json(text)


if __name__ == "__main__":
    serve(read_file)
