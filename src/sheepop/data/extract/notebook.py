"""Turns Jupyter notebooks into Markdown: prose unchanged, code between fences, in the order of the cells."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

from nbformat import ValidationError, converter, versions

from sheepop.data.decoding import decode
from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError
from sheepop.data.extract.markdown import facts_of, fenced, marked

_NEWEST = 4
# The forms of an output to keep, the best first; HTML is for display only.
_TEXT_TYPES = ("text/markdown", "text/latex", "text/plain")
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def extract_notebook(content: Content, context: Context) -> Documents:
    """Yields one document with a mark ``cell N`` for each cell that is not empty.

    It is code in the kernel's language if most characters are code, else prose. Text outputs are included with
    `notebook_outputs` in the configuration, pictures never. Metadata: ``title`` and ``kernel_language`` if the notebook
    states them. Raises `ExtractionError`: ``unsupported`` for formats newer than 4, ``damaged`` for invalid JSON,
    ``invalid`` for other JSON, ``empty``.
    """
    notebook, language = _read(content)
    cells: list[tuple[str, str]] = []
    code_chars = 0
    for number, cell in enumerate(notebook.get("cells", []), 1):
        source = cell.get("source", "")
        is_code = cell.get("cell_type") == "code"
        pieces = [fenced(source.removesuffix("\n"), language) if is_code else source] if source.strip() else []
        if is_code and context.config.notebook_outputs:
            pieces += [fenced(output.removesuffix("\n"), "output") for output in _outputs(cell) if output.strip()]
        code_chars += len(source) if is_code and pieces else 0
        cells.append((f"cell {number}", "\n\n".join(piece.strip("\n") for piece in pieces)))
    text, marks = marked(cells)
    if not text:
        raise ExtractionError("empty", "all of its cells are empty")
    title = notebook.get("metadata", {}).get("title")
    facts = facts_of({"title": title if isinstance(title, str) else "", "kernel_language": language})
    is_code = 2 * code_chars > len(text)
    yield Extracted(text, "code" if is_code else "prose", language if is_code else "", "", marks, facts)


def _read(content: Content) -> tuple[Any, str]:
    """Returns the notebook converted to format 4, and its kernel language in lower case, or "" if it is not stated."""
    try:
        data = json.loads(decode(content.read()).text)
    except (ValueError, RecursionError) as error:
        raise ExtractionError("damaged", f"it is not valid JSON: {error}") from None
    version = data.get("nbformat") if isinstance(data, dict) else None
    if not isinstance(version, int) or version < 1:
        raise ExtractionError("invalid", "it does not name its notebook format")
    if version > _NEWEST:
        raise ExtractionError("unsupported", f"notebook format {version}; formats 1 to {_NEWEST} are read")
    # nbformat logs invalid parts of a notebook as errors, but still reads the rest.
    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    try:
        own = versions[version].to_notebook_json(data, minor=data.get("nbformat_minor", 0))
        language = _language(own)
        convert: Any = converter.convert
        return convert(own, _NEWEST), language
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, ValidationError) as error:
        detail = f"it is not a valid notebook of format {version}: {type(error).__name__}: {error}"
        raise ExtractionError("invalid", detail) from None


def _language(notebook: Any) -> str:
    metadata = notebook.get("metadata", {})
    stated = [metadata.get("language_info", {}).get("name"), metadata.get("kernelspec", {}).get("language")]
    # Up to format 3 each code cell had its own language.
    for sheet in notebook.get("worksheets", []):
        stated += [cell.get("language") for cell in sheet.get("cells", []) if cell.get("cell_type") == "code"]
    names = (name for name in stated if isinstance(name, str) and re.fullmatch(r"[\w+#. -]{1,40}", name))
    return next(names, "").strip().lower()


def _outputs(cell: Any) -> Iterator[str]:
    """Yields the text outputs of a cell."""
    for output in cell.get("outputs", []):
        kind = output.get("output_type")
        if kind == "stream":
            yield _joined(output.get("text", ""))
        elif kind == "error":
            lines = output.get("traceback") or [f"{output.get('ename', '')}: {output.get('evalue', '')}"]
            yield _TERMINAL_CODES.sub("", "\n".join(lines))
        else:
            data = output.get("data", {})
            yield next((_joined(data[name]) for name in _TEXT_TYPES if name in data), "")


def _joined(text: Any) -> str:
    return _TERMINAL_CODES.sub("", text if isinstance(text, str) else "".join(text))
