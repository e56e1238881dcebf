"""Turns content into documents with the extractor that the table of formats names; failures become `Refused`.

Run as a program, it is the child process that reads the requested files within limits.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from sheepop.core.bounded_child import Alive, serve
from sheepop.core.errors import StorageError
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.detection import FileType, detect
from sheepop.data.extract.interface import (
    Content,
    Context,
    Cutter,
    Documents,
    Extracted,
    ExtractionError,
    Extractor,
    Refused,
    Span,
)
from sheepop.data.extract.template import PAIR
from sheepop.data.extract.text import pieces_of
from sheepop.data.extract.unpacking import Allowance, raise_if_full

_DEEPEST_CONTENT = 2
_DETAIL_CHARACTERS = 300
_config_of = lru_cache(maxsize=4)(ExtractConfig.model_validate_json)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


@dataclass(frozen=True, slots=True)
class Format:
    """How one type is read.

    `reader` is a function of this folder as ``module.function``, imported with the first file of the type. It needs
    ``pip install sheepop[EXTRA]`` with the name in `extra`, unless that is empty. A `bounded` format is read in a
    process with limits. A `container` contains other files. `cutter` is the function that cuts a large file into spans,
    if there is one.
    """

    reader: str
    extra: str = ""
    bounded: bool = True
    container: bool = False
    cutter: str = ""

    def load(self) -> Extractor:
        """Returns the reader; raises ImportError if a package is not installed."""
        return cast("Extractor", _loaded(self.reader))

    def load_cutter(self) -> Cutter:
        """Returns the cutter; raises ImportError if a package is not installed."""
        return cast("Cutter", _loaded(self.cutter))


def _loaded(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(import_module(f"sheepop.data.extract.{module}"), function)


_TEXT = Format("text.extract_text", bounded=False, cutter="text.cut_text")
FORMATS = {
    **dict.fromkeys(("text", "markdown", "rst", "latex", "code"), _TEXT),
    "subtitles": Format("subtitles.extract_subtitles"),
    "html": Format("html.extract_html", "data"),
    "xml": Format("xml_text.extract_xml", "data"),
    "pdf": Format("pdf.extract_pdf", "data", cutter="pdf.cut_pdf"),
    "image": Format("image.extract_image", "ocr"),
    "docx": Format("word.extract_docx", "data"),
    "pptx": Format("slides.extract_pptx", "data"),
    "xlsx": Format("sheets.extract_xlsx", "data"),
    **dict.fromkeys(("xls", "xlsb", "ods"), Format("sheets.extract_sheets", "data")),
    "odt": Format("opendocument.extract_odt", "data"),
    "odp": Format("opendocument.extract_odp", "data"),
    "rtf": Format("legacy_office.extract_rtf", "data"),
    "doc": Format("legacy_office.extract_doc", "data"),
    "ppt": Format("legacy_office.extract_ppt", "data"),
    "mail": Format("mail.extract_mail", "data", container=True),
    "mailbox": Format("mail.extract_mailbox", "data", container=True, cutter="mail.cut_mailbox"),
    "msg": Format("mail.extract_msg", "data", container=True),
    "epub": Format("epub.extract_epub", "data", container=True),
    "notebook": Format("notebook.extract_notebook", "data"),
    "warc": Format("warc.extract_warc", "data", container=True),
    **dict.fromkeys(("csv", "tsv"), Format("table.extract_csv", cutter="table.cut_csv")),
    "json": Format("records.extract_json", cutter="records.cut_json"),
    "jsonl": Format("records.extract_jsonl", cutter="records.cut_jsonl"),
    "parquet": Format("columns.extract_parquet", "data", cutter="columns.cut_parquet"),
    "arrow": Format("columns.extract_arrow", "data"),
    "sqlite": Format("database.extract_sqlite", cutter="database.cut_sqlite"),
    "duckdb": Format("database.extract_duckdb", "data", cutter="database.cut_duckdb"),
    "zip": Format("archive.extract_zip", container=True, cutter="archive.cut_zip"),
    "tar": Format("archive.extract_tar", container=True, cutter="archive.cut_tar"),
    **dict.fromkeys(("gzip", "bzip2", "xz", "zstd"), Format("archive.extract_compressed", container=True)),
}
"""How to read every type that `detect` returns."""


class Dispatcher:
    """Runs the extractor for each content within the limits of `config`; for `scratch` and `alive` see `Context`."""

    def __init__(self, config: ExtractConfig, scratch: Path, alive: Callable[[], None] = lambda: None) -> None:
        self.config, self.scratch, self.alive = config, scratch, alive

    def documents(self, content: Content, file_type: FileType | None = None) -> Documents:
        """Yields the documents and refusals in `content`, with their places; detects the type if none is given.

        A refusal of the whole content has an empty place. Raises only MemoryError, and `StorageError` if the disk for
        temporary files is full.
        """
        try:
            unpacked, texts = (Allowance(content.share, self.config) for _ in range(2))
            for item in self._documents(content, file_type, "", 0, unpacked):
                yield from self._checked(item, texts)
            # An extractor may have caught the error of the exceeded allowance; this raises it again.
            unpacked.spend()
        except ExtractionError as error:
            yield Refused("", error.reason, error.detail)
        except OSError as error:
            yield self._unreadable("", error)

    def _documents(
        self, content: Content, file_type: FileType | None, place: str, depth: int, unpacked: Allowance
    ) -> Documents:
        def inner(content: Content, inner_place: str) -> Documents:
            unpacked.spend(content.size)
            return self._documents(content, None, inner_place, depth + 1, unpacked)

        extra = ""
        try:
            file_type = file_type or detect(content)
            row = FORMATS[file_type.name]
            extra = row.extra
            if depth > self.config.max_depth + (0 if row.container else _DEEPEST_CONTENT):
                raise ExtractionError("nested", f"it is nested {depth} containers deep; see data.extract.max_depth")
            context = Context(self.config, self.scratch, inner, self.alive)
            for item in row.load()(content, context):
                if place:
                    item = replace(item, place=f"{place}, {item.place}" if item.place else place)
                if file_type.name == "code" and isinstance(item, Extracted):
                    item = replace(item, kind="code", language=file_type.language)
                yield item
        except (MemoryError, StorageError):
            raise
        except ExtractionError as error:
            # If the whole file exceeded its allowance, this raises, so that all of it is refused.
            unpacked.spend()
            yield Refused(place, error.reason, self._clean(error.detail))
        except ImportError as error:
            remedy = f"install sheepop[{extra}]" if extra else "install sheepop again"
            yield Refused(place, "not_installed", f"{error.name or error} is not installed: {remedy}")
        except OSError as error:
            raise_if_full(error, self.scratch)
            yield self._unreadable(place, error)
        except Exception as error:
            yield Refused(place, "damaged", self._clean(f"{type(error).__name__}: {error}"))

    def _checked(self, item: Extracted | Refused, texts: Allowance) -> Documents:
        """Yields the item, cut into pieces if it is too long; refuses it if it has no pair or cannot be encoded."""
        if isinstance(item, Refused):
            yield item
            return
        texts.spend(len(item.text))
        if self.config.pair is not None and item.kind != PAIR:
            names = " and ".join(map(repr, self.config.pair))
            detail = f"it has no records with the fields {names} of data.extract.pair"
            yield Refused(item.place, "unsupported", detail)
            return
        try:
            yield from pieces_of(item, self.config.max_document_bytes)
        except UnicodeEncodeError as error:
            detail = f"it contains half of a surrogate pair at character {error.start:,}"
            yield Refused(item.place, "undecodable", detail)

    def _unreadable(self, place: str, error: OSError) -> Refused:
        return Refused(place, "unreadable", self._clean(error.strerror or str(error)).lower())

    def _clean(self, detail: str) -> str:
        """Returns the first line, or the last of a traceback, without paths and addresses that differ between runs."""
        lines = [line for line in detail.splitlines() if line.strip()] or [detail]
        line = lines[-1 if "Traceback (most recent call last)" in detail else 0].strip()
        line = re.sub(re.escape(str(self.scratch)) + r"[^\s'\"]*", "a temporary file", line)
        line = _ADDRESS.sub("0x…", line)[:_DETAIL_CHARACTERS]
        return line.encode("utf-8", "backslashreplace").decode("utf-8")


def read_file(request: dict[str, Any], alive: Alive) -> Iterator[list[Any]]:
    """Yields the documents of the requested file or span, encoded by `to_message`, or with `part_bytes` its spans."""
    scratch, config, span = Path(request["scratch"]), _config_of(request["config"]), request.get("span")
    dispatcher = Dispatcher(config, scratch, alive)
    content = Content(request["name"], path=Path(request["path"]), span=Span(*span) if span else None)
    if "part_bytes" in request:
        context = Context(config, scratch, lambda *_: iter(()), alive)
        yield from map(list, FORMATS[request["type"][0]].load_cutter()(content, context, request["part_bytes"]))
        return
    try:
        for item in dispatcher.documents(content, FileType(*request["type"])):
            yield to_message(item)
    except StorageError as error:
        yield ["storage", str(error)]
    finally:
        clear(scratch)


def to_message(item: Extracted | Refused) -> list[Any]:
    """Encodes an item as a JSON list; `from_message` decodes it."""
    if isinstance(item, Refused):
        return [item.place, item.reason, item.detail]
    return [item.text, item.kind, item.language, item.place, item.marks, dict(item.metadata)]


def from_message(message: list[Any]) -> Extracted | Refused:
    """Decodes the output of `to_message`; raises `StorageError` if the child had no space for temporary files."""
    if len(message) == 2:
        raise StorageError(message[1])
    if len(message) == 3:
        return Refused(*message)
    text, kind, language, place, marks, metadata = message
    return Extracted(text, kind, language, place, tuple((offset, name) for offset, name in marks), metadata)


def clear(directory: Path) -> None:
    """Removes everything in a directory for temporary files, if it is there."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    serve(read_file)
