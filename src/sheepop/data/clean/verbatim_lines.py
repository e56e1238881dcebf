"""Which lines of a text are code or other verbatim text, in Markdown, reStructuredText, LaTeX and plain manuals."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FENCES = ("```", "~~~")
_FENCE = re.compile(r"(`{3,}(?=[^`]*$)|~{3,})")
_LATEX_BEGIN = re.compile(r"\\begin\{(verbatim\*?|Verbatim|lstlisting|minted|alltt)\}")
_CODE_DIRECTIVE = re.compile(
    r"\.\. +(?:[\w.-]+:)?(?:code|code-block|sourcecode|highlight|parsed-literal|math|doctest|testcode|testoutput"
    r"|productionlist|prompt|ipython|graphviz|raw)::"
)
_LIST_ITEM = re.compile(r"[ \t]*(?:[-*+•‣–o]|\(?[0-9a-zA-Z]{1,3}[.)]|\[\w+\]|:[^:\n]+:|\.\.)(?:[ \t]|$)")
_INDENTED = re.compile(r"(?: {4}|\t)")
# A text without any of these has no verbatim lines.
_HINTS = ("```", "~~~", "::\n", ":: ", ">>> ", "\\begin{", "\n    ", "\n\t")


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """The text as runs of whole lines in order, each with whether it is verbatim; joined they are the text."""
    if not any(hint in text for hint in _HINTS) and not _INDENTED.match(text):
        yield text, False
        return
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    begin = 0
    for first, last in _blocks(lines):
        if first > begin:
            yield "".join(lines[begin:first]), False
        yield "".join(lines[first:last]), True
        begin = last
    yield "".join(lines[begin:]), False


def _blocks(lines: list[str]) -> Iterator[tuple[int, int]]:
    """The first and the last line (exclusive) of each verbatim block, in order."""
    number, after_blank, above = 0, True, ""
    while number < len(lines):
        line = lines[number]
        if not line or line.isspace():
            after_blank, number = True, number + 1
            continue
        first, last = _block_at(lines, number, after_blank, above)
        if last > first:
            yield first, last
        number, after_blank, above = max(last, number + 1), False, line


def _block_at(lines: list[str], number: int, after_blank: bool, above: str) -> tuple[int, int]:
    """The verbatim block that begins at, or is introduced by, this line; `above` is the line of text before it."""
    line = lines[number]
    content = line.strip()
    if content[:3] in _FENCES and (fence := _FENCE.match(content)):
        return number, _end_of_fence(lines, number, fence.group(1))
    if content.startswith(">>> "):
        blank = (n for n in range(number, len(lines)) if not lines[n].strip())
        return number, next(blank, len(lines))
    if "\\begin{" in content and (latex := _LATEX_BEGIN.search(content)):
        return number, _first_line_with(lines, number, f"\\end{{{latex.group(1)}}}")
    if after_blank and _INDENTED.match(line) and not _INDENTED.match(above) and not _LIST_ITEM.match(above):
        return number, _end_of_indented(lines, number, 3)
    is_directive = content.startswith(".. ")
    if _CODE_DIRECTIVE.match(content) if is_directive else content.endswith("::"):
        return number + 1, _end_of_indented(lines, number + 1, _indent(line))
    return number, number


def _end_of_fence(lines: list[str], number: int, fence: str) -> int:
    for end in range(number + 1, len(lines)):
        closing = lines[end].strip()
        if closing.startswith(fence) and not closing.strip(fence[0]):
            return end + 1
    return len(lines)


def _first_line_with(lines: list[str], number: int, phrase: str) -> int:
    return next((n + 1 for n in range(number, len(lines)) if phrase in lines[n]), len(lines))


def _end_of_indented(lines: list[str], number: int, indent: int) -> int:
    """The end of the lines from `number` on that are indented by more than `indent`, blank lines within included."""
    end = number
    for current in range(number, len(lines)):
        if lines[current].strip():
            if _indent(lines[current]) <= indent:
                break
            end = current + 1
    return end


def _indent(line: str) -> int:
    """The width of the white space at the beginning of a line; a tab goes on to the next multiple of 4."""
    expanded = line.expandtabs(4)
    return len(expanded) - len(expanded.lstrip())
