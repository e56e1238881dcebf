"""The table of formats: what reads a type, what must be installed for it, and whether it is kept within bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sheepop.data.extract.interface import Extractor


@dataclass(frozen=True, slots=True)
class Format:
    """How one type is read.

    `load` imports the function that reads it. `extra` names what ``pip install sheepop[EXTRA]`` adds for it, empty
    when nothing is needed. A `bounded` format is read in a process with limits. A `container` holds other files.
    """

    load: Callable[[], Extractor]
    extra: str = ""
    bounded: bool = True
    container: bool = False


def _text() -> Extractor:
    from sheepop.data.extract.text import extract_text

    return extract_text


def _html() -> Extractor:
    from sheepop.data.extract.html import extract_html

    return extract_html


def _xml() -> Extractor:
    from sheepop.data.extract.html import extract_xml

    return extract_xml


def _pdf() -> Extractor:
    from sheepop.data.extract.pdf import extract_pdf

    return extract_pdf


def _image() -> Extractor:
    from sheepop.data.extract.image import extract_image

    return extract_image


def _docx() -> Extractor:
    from sheepop.data.extract.word import extract_docx

    return extract_docx


def _pptx() -> Extractor:
    from sheepop.data.extract.slides import extract_pptx

    return extract_pptx


def _xlsx() -> Extractor:
    from sheepop.data.extract.sheets import extract_xlsx

    return extract_xlsx


def _xls() -> Extractor:
    from sheepop.data.extract.sheets import extract_sheets

    return extract_sheets


def _odt() -> Extractor:
    from sheepop.data.extract.opendocument import extract_odt

    return extract_odt


def _odp() -> Extractor:
    from sheepop.data.extract.opendocument import extract_odp

    return extract_odp


def _rtf() -> Extractor:
    from sheepop.data.extract.legacy_office import extract_rtf

    return extract_rtf


def _doc() -> Extractor:
    from sheepop.data.extract.legacy_office import extract_doc

    return extract_doc


def _ppt() -> Extractor:
    from sheepop.data.extract.legacy_office import extract_ppt

    return extract_ppt


def _mail() -> Extractor:
    from sheepop.data.extract.mail import extract_mail

    return extract_mail


def _mailbox() -> Extractor:
    from sheepop.data.extract.mail import extract_mailbox

    return extract_mailbox


def _msg() -> Extractor:
    from sheepop.data.extract.mail import extract_msg

    return extract_msg


def _epub() -> Extractor:
    from sheepop.data.extract.epub import extract_epub

    return extract_epub


def _notebook() -> Extractor:
    from sheepop.data.extract.notebook import extract_notebook

    return extract_notebook


def _warc() -> Extractor:
    from sheepop.data.extract.warc import extract_warc

    return extract_warc


def _csv() -> Extractor:
    from sheepop.data.extract.table import extract_csv

    return extract_csv


def _json() -> Extractor:
    from sheepop.data.extract.records import extract_json

    return extract_json


def _jsonl() -> Extractor:
    from sheepop.data.extract.records import extract_jsonl

    return extract_jsonl


def _parquet() -> Extractor:
    from sheepop.data.extract.columns import extract_parquet

    return extract_parquet


def _arrow() -> Extractor:
    from sheepop.data.extract.columns import extract_arrow

    return extract_arrow


def _sqlite() -> Extractor:
    from sheepop.data.extract.database import extract_sqlite

    return extract_sqlite


def _duckdb() -> Extractor:
    from sheepop.data.extract.database import extract_duckdb

    return extract_duckdb


def _zip() -> Extractor:
    from sheepop.data.extract.archive import extract_zip

    return extract_zip


def _tar() -> Extractor:
    from sheepop.data.extract.archive import extract_tar

    return extract_tar


def _compressed() -> Extractor:
    from sheepop.data.extract.archive import extract_compressed

    return extract_compressed


FORMATS = {
    **dict.fromkeys(("text", "markdown", "rst", "latex", "code"), Format(_text, bounded=False)),
    "html": Format(_html, "data"),
    "xml": Format(_xml, "data"),
    "pdf": Format(_pdf, "data"),
    "image": Format(_image, "ocr"),
    "docx": Format(_docx, "data"),
    "pptx": Format(_pptx, "data"),
    "xlsx": Format(_xlsx, "data"),
    **dict.fromkeys(("xls", "xlsb", "ods"), Format(_xls, "data")),
    "odt": Format(_odt, "data"),
    "odp": Format(_odp, "data"),
    "rtf": Format(_rtf, "data"),
    "doc": Format(_doc, "data"),
    "ppt": Format(_ppt, "data"),
    "mail": Format(_mail, "data", container=True),
    "mailbox": Format(_mailbox, "data", container=True),
    "msg": Format(_msg, "data", container=True),
    "epub": Format(_epub, "data", container=True),
    "notebook": Format(_notebook, "data"),
    "warc": Format(_warc, "data", container=True),
    **dict.fromkeys(("csv", "tsv"), Format(_csv)),
    "json": Format(_json),
    "jsonl": Format(_jsonl),
    "parquet": Format(_parquet, "data"),
    "arrow": Format(_arrow, "data"),
    "sqlite": Format(_sqlite),
    "duckdb": Format(_duckdb, "data"),
    "zip": Format(_zip, container=True),
    "tar": Format(_tar, container=True),
    **dict.fromkeys(("gzip", "bzip2", "xz", "zstd"), Format(_compressed, container=True)),
}
"""Every type that `detect` names."""
