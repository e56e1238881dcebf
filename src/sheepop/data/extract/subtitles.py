"""Turns subtitles (SubRip, WebVTT, SubStation Alpha) into lines of whole sentences, without times and markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError, Refused
from sheepop.data.extract.paged_text import join_lines
from sheepop.data.extract.template import longest_record
from sheepop.data.extract.text import Lines, extract_text

_TIME = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})[.,](\d{1,3})"
_TIMES = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}")
_EVENT = re.compile(rf"Dialogue:[^,]*,\s*{_TIME}\s*,\s*{_TIME}\s*,(.*)", re.DOTALL)
# The fields of an event between its end time and text, if the file does not name them (SubStation Alpha v4.00+).
_FIELDS_BEFORE_TEXT = 6
# Blocks of WebVTT without a cue (sections 4.1 and 6.1 of its specification).
_NO_CUE = re.compile(r"\ufeff?(?:WEBVTT|NOTE|STYLE|REGION)(?:\s|$)")
_MARKUP = re.compile(r"</?(?:[bisuc]|v|lang|ruby|rt|font)\b[^<>]*>|<[\d:.]+>|\{\\[^{}]*\}", re.IGNORECASE)
# Drawings, which tags switch on and off: \p1 to \p0.
_DRAWING = re.compile(r"\{[^{}]*\\p[1-9][^{}]*\}.*?(?:\{[^{}]*\\p0[^{}]*\}|$)", re.DOTALL)
_BREAK = re.compile(r"\\[Nn]")
_SENTENCE_END = re.compile("[.!?\u2026\u3002\uff01\uff1f\u266a:][\"\u201d\u2019')\\]\u300d]*$")
_NEXT_SPEAKER = re.compile("[-\u2010-\u2015>\u266a\\[(]")
# Seconds: the pause after which a new line begins, and the length below which a cue only moves the previous line up.
_PAUSE = 3.0
_SHORTEST_CUE = 0.1

# The begin and end in seconds, and the lines that are shown.
_Cue = tuple[float, float, list[str]]


def extract_subtitles(content: Content, context: Context) -> Documents:
    """Yields prose in documents of limited length, and refuses unreadable lines; without cues, reads plain text."""
    limit = context.config.max_document_bytes
    lines = Lines(content, longest_record(context.config))
    refused: list[Refused] = []
    text: list[str] = []
    size = parts = 0
    cues = _events if content.suffix in (".ass", ".ssa") else _cues
    for sentence in _sentences(cues(_readable(lines, refused))):
        yield from refused
        refused.clear()
        length = len(sentence.encode("utf-8", "replace")) + 1
        if text and size + length > limit:
            parts += 1
            yield Extracted("\n".join(text) + "\n", place=f"part {parts}", metadata={"encoding": lines.encoding})
            text, size = [], 0
        text.append(sentence)
        size += length
    if not text:
        yield from extract_text(content, context)
        return
    yield from refused
    place = f"part {parts + 1}" if parts else ""
    yield Extracted("\n".join(text) + "\n", place=place, metadata={"encoding": lines.encoding})


def _readable(lines: Lines, refused: list[Refused]) -> Iterator[str]:
    for number, line in lines:
        if isinstance(line, ExtractionError):
            refused.append(Refused(f"line {number}", line.reason, line.detail))
        else:
            yield line.rstrip("\r\n")


def _events(lines: Iterable[str]) -> Iterator[_Cue]:
    """Yields the cues of SubStation Alpha."""
    fields = _FIELDS_BEFORE_TEXT
    for line in lines:
        if event := _EVENT.match(line):
            text = _DRAWING.sub("", event[9].split(",", fields)[-1])
            yield _seconds(event.groups()[:4]), _seconds(event.groups()[4:8]), _BREAK.split(text)
        elif line.startswith("Format:") and line.rstrip().lower().endswith("text"):
            fields = line.count(",") - 3


def _cues(lines: Iterable[str]) -> Iterator[_Cue]:
    """Yields the cues of SubRip and WebVTT; lines after a blank line belong to the cue before, unless a cue begins."""
    begin = end = 0.0
    shown: list[str] = []
    in_block, is_note = 0, False
    for line in lines:
        if not line.strip():
            in_block, is_note = 0, False
        elif is_note or (in_block == 0 and _NO_CUE.match(line)):
            is_note = True
        elif times := _TIMES.match(line):
            # The line before may be the cue's number or name.
            if shown and (in_block == 1 or (in_block and shown[-1].strip().isdigit())):
                shown.pop()
            if shown:
                yield begin, end, shown
            begin, end, shown = _seconds(times.groups()[:4]), _seconds(times.groups()[4:]), []
            in_block = 2
        else:
            shown.append(line)
            in_block += 1
    if shown and end:
        yield begin, end, shown


def _sentences(cues: Iterable[_Cue]) -> Iterator[str]:
    """Yields the lines of the document: joins cues until a sentence ends, the speaker changes, or a pause follows."""
    text, last, until = "", "", 0.0
    for begin, end, lines in cues:
        shown = [" ".join(html.unescape(_MARKUP.sub("", line)).replace("\\h", " ").split()) for line in lines]
        shown = list(filter(None, shown))
        # Roll-up captions show a line again above the next one.
        if shown and shown[0] == last and (len(shown) > 1 or end - begin < _SHORTEST_CUE):
            del shown[0]
        for line in shown:
            if text and (_SENTENCE_END.search(text) or _NEXT_SPEAKER.match(line) or begin - until > _PAUSE):
                yield text
                text = ""
            text = join_lines(text, line, frozenset()) if text else line
            last, until = line, end
    if text:
        yield text


def _seconds(parts: tuple[str | None, ...]) -> float:
    hours, minutes, seconds, fraction = (part or "0" for part in parts)
    return 3600 * int(hours) + 60 * int(minutes) + int(seconds) + float(f"0.{fraction}")
