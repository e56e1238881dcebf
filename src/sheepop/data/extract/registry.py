"""The table of formats: what reads a type, what must be installed for it, and whether it is kept within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import cast

from sheepop.data.extract.interface import Extractor


@dataclass(frozen=True, slots=True)
class Format:
    """How one type is read.

    `reader` is a function of this folder as ``module.function``, imported with the first file of the type. `extra`
    names what ``pip install sheepop[EXTRA]`` adds for it, empty when nothing is needed. A `bounded` format is read in
    a process with limits. A `container` holds other files.
    """

    reader: str
    extra: str = ""
    bounded: bool = True
    container: bool = False

    def load(self) -> Extractor:
        """The function that reads it; raises ImportError where something must be installed first."""
        module, _, function = self.reader.rpartition(".")
        return cast("Extractor", getattr(import_module(f"sheepop.data.extract.{module}"), function))


FORMATS = {
    **dict.fromkeys(("text", "markdown", "rst", "latex", "code"), Format("text.extract_text", bounded=False)),
    "subtitles": Format("subtitles.extract_subtitles"),
    "html": Format("html.extract_html", "data"),
    "xml": Format("html.extract_xml", "data"),
    "pdf": Format("pdf.extract_pdf", "data"),
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
    "mailbox": Format("mail.extract_mailbox", "data", container=True),
    "msg": Format("mail.extract_msg", "data", container=True),
    "epub": Format("epub.extract_epub", "data", container=True),
    "notebook": Format("notebook.extract_notebook", "data"),
    "warc": Format("warc.extract_warc", "data", container=True),
    **dict.fromkeys(("csv", "tsv"), Format("table.extract_csv")),
    "json": Format("records.extract_json"),
    "jsonl": Format("records.extract_jsonl"),
    "parquet": Format("columns.extract_parquet", "data"),
    "arrow": Format("columns.extract_arrow", "data"),
    "sqlite": Format("database.extract_sqlite"),
    "duckdb": Format("database.extract_duckdb", "data"),
    "zip": Format("archive.extract_zip", container=True),
    "tar": Format("archive.extract_tar", container=True),
    **dict.fromkeys(("gzip", "bzip2", "xz", "zstd"), Format("archive.extract_compressed", container=True)),
}
"""Every type that `detect` names."""
