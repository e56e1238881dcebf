"""Turns mail messages (RFC 5322), mailboxes and Outlook files into headers and text, and reads attachments as files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from email import message_from_bytes
from email.errors import HeaderParseError, MessageError
from email.header import decode_header, make_header
from email.message import Message
from typing import Any, BinaryIO

from sheepop.data.decoding import decode, left_out
from sheepop.data.extract.interface import Content, Context, Documents, Extracted, ExtractionError, Refused, Span
from sheepop.data.extract.legacy_office import NEVER, rich_text, unpacked_rtf
from sheepop.data.extract.markdown import facts_of
from sheepop.data.extract.page import decoded_as
from sheepop.data.extract.page_blocks import blocks_of, page_text

_SHOWN = ("From", "To", "Cc", "Date", "Subject")
_FACTS = {"Subject": "title", "From": "author", "Date": "date"}
_FIRST_LINE = b"From "
_ESCAPED = re.compile(rb"^>(>*From )", re.MULTILINE)
_LONGEST_LINE = 2**20
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\]")
_STRING8 = "001E"  # PtypString8, [MS-OXMSG] 2.1.2
_RTF_BODY, _HTML_BODY, _HTML8_BODY = 0x1009, 0x1013, "__substg1.0_1013001E"  # [MS-OXPROPS]
_PATH_ADDRESS = re.compile(r"\s*<?/o=[^<>]*>?", re.IGNORECASE)


def extract_mail(content: Content, context: Context) -> Documents:
    """Yields one document of prose with the headers in `_SHOWN` and the text; then the documents in attachments.

    If the text is there both as plain text and as HTML, the plain one is used. Metadata: ``title``, ``author`` and
    ``date``. Raises `ExtractionError`: ``empty`` for a message without text and attachments.
    """
    message = message_from_bytes(content.read())
    shown, attached = _parts(message)
    charset, damage = next((found for part in shown if (found := part.get_content_charset(""))), ""), list[int]()
    headers = {name: ", ".join(_decoded(value, charset) for value in _raw(message, name)) for name in _SHOWN}
    text = "\n\n".join(filter(None, (_text(part, damage) for part in shown)))
    for refused in left_out(damage):
        yield replace(refused, place=f"{refused.place} of the text")
    yield from _documents(headers, text, [_attached(part, number) for number, part in enumerate(attached, 1)], context)


def extract_mailbox(content: Content, context: Context) -> Documents:
    """Yields the messages of a mailbox (mbox) in order, at places ``message N``; raises `ExtractionError`."""
    begin = 1 + (content.span.before if content.span else 0)
    for number, data in enumerate(_messages(content, context.config.max_member_bytes), begin):
        if number > context.config.max_members:
            raise ExtractionError("bomb", f"over data.extract.max_members = {context.config.max_members:,} messages")
        context.alive()
        yield from context.inner(Content(f"message {number}.eml", data=data), f"message {number}")


def cut_mailbox(content: Content, context: Context, part_bytes: int) -> Iterator[Span]:
    """Yields spans of whole messages; see `Cutter`."""
    number = begin = before = messages = at = 0
    is_after_empty = True
    with content.open() as file:
        while line := file.readline(_LONGEST_LINE):
            if is_after_empty and line.startswith(_FIRST_LINE):
                if at - begin >= part_bytes:
                    yield Span(number, begin, at, before, at - begin)
                    number, begin, before = number + 1, at, messages
                messages += 1
            at += len(line)
            is_after_empty = not line.strip()
    yield Span(number, begin, at, before, at - begin)


def extract_msg(content: Content, context: Context) -> Documents:
    """Yields a message that Outlook saved, in the form of `extract_mail`; raises `ExtractionError`."""
    import oxmsg

    with content.open() as file:
        message = oxmsg.Message.load(file)
        texts = _strings8(file)
        html = texts.pop(_HTML8_BODY, b"")  # which states its own encoding
        # What the file states is often another code page, or one without a codec of that name.
        encoding = _encoding_of(texts.values())
        parts: list[Any] = [message, *message.recipients, *message.attachments]
        for part in parts:
            part.properties.__dict__.update(_str_prop_encoding=encoding, body_encoding=encoding)
        headers = {name.title(): _decoded(value) for name, value in message.message_headers.items()}
        sent = message.sent_date
        stated = {
            # An address of Exchange is a path in its directory.
            "From": _PATH_ADDRESS.sub("", message.sender or ""),
            "To": ", ".join(str(one.name or one.email_address) for one in message.recipients),
            "Date": sent.strftime("%Y-%m-%d %H:%M:%S") if sent and sent.year > NEVER else "",
            "Subject": message.subject or "",
        }
        text = (message.body or "").replace("\r\n", "\n")
        html = html or message.properties.binary_prop_value(_HTML_BODY) or (message.html_body or "").encode()
        if not text.strip() and html:
            text = page_text(blocks_of(html))
        if not text.strip() and (packed := message.properties.binary_prop_value(_RTF_BODY)):
            text, _ = rich_text(unpacked_rtf(packed))
        attached = []
        for number, one in enumerate(message.attachments, 1):
            if one.file_bytes is None:
                yield Refused(f"attachment {number}", "unsupported", "an embedded message or object is not read")
            else:
                attached.append((_name(one.file_name or "", number), one.file_bytes))
        shown = {name: " ".join((headers.get(name) or stated.get(name, "")).split()) for name in _SHOWN}
        yield from _documents(shown, text, attached, context)


def _strings8(file: BinaryIO) -> dict[str, bytes]:
    """Returns the 8-bit texts in an Outlook file by the names of their streams."""
    from olefile import OleFileIO

    file.seek(0)
    opened = OleFileIO(file)
    names = [name for name in opened.listdir() if name[-1].endswith(_STRING8)]
    return {"/".join(name): opened.openstream(name).read().rstrip(b"\0") for name in names}


def _encoding_of(texts: Collection[bytes]) -> str:
    """Returns the encoding of 8-bit texts: UTF-8 if they are ASCII, Latin-1 if they fit no encoding that is found."""
    others = [text for text in texts if not text.isascii()]
    with suppress(ExtractionError, UnicodeDecodeError):
        encoding = decode(max(others, key=len, default=b"")).encoding
        for text in others:
            text.decode(encoding)
        return encoding
    return "latin-1"


def _documents(headers: Mapping[str, str], text: str, attached: list[tuple[str, bytes]], context: Context) -> Documents:
    head = "\n".join(f"{name}: {value}" for name, value in headers.items() if value)
    is_empty = not text.strip()
    if not is_empty:
        facts = facts_of({fact: headers.get(name) for name, fact in _FACTS.items()})
        yield Extracted(f"{head}\n\n{text.strip()}" if head else text.strip(), metadata=facts)
    for name, data in attached:
        is_empty = False
        yield from context.inner(Content(name, data=data), f"attachment {name}")
    if is_empty:
        raise ExtractionError("empty", "the message has no text")


def _messages(content: Content, limit: int) -> Iterator[bytes]:
    """Yields the messages, which are separated by lines that begin with ``From`` after an empty line."""
    lines: list[bytes] = []
    size, is_after_empty = 0, True
    with content.section() as file:
        while line := file.readline(_LONGEST_LINE):
            if is_after_empty and line.startswith(_FIRST_LINE):
                if lines:
                    yield _ESCAPED.sub(rb"\1", b"".join(lines))
                lines, size = [], 0
            else:
                lines.append(line)
                size += len(line)
                if size > limit:
                    raise ExtractionError("oversized", f"a message is over data.extract.max_member_bytes = {limit:,}")
            is_after_empty = not line.strip()
    if lines:
        yield _ESCAPED.sub(rb"\1", b"".join(lines))


def _parts(message: Message) -> tuple[list[Message], list[Message]]:
    """Returns the parts to show and the other parts; of alternatives it shows the first with text, preferably plain."""
    payload = message.get_payload()
    if not isinstance(payload, list) or message.get_content_maintype() != "multipart":
        is_shown = message.get_content_maintype() == "text" and message.get_content_disposition() != "attachment"
        return ([message], []) if is_shown else ([], [message])
    found = [_parts(part) for part in payload if isinstance(part, Message)]
    forms = [shown for shown, _ in found]
    if message.get_content_type() == "multipart/alternative":
        plain = [form for form in forms if all(part.get_content_subtype() == "plain" for part in form)]
        forms = [next((form for form in (*plain, *forms) if any(map(_text, form))), [])]
    return [part for form in forms for part in form], [part for _, others in found for part in others]


def _attached(part: Message, number: int) -> tuple[str, bytes]:
    """Returns the file name and the bytes of an attached part."""
    payload = part.get_payload()
    if isinstance(payload, list):
        messages = [inner.as_bytes() for inner in payload if isinstance(inner, Message)]
        return _name("message.eml", number), b"\n".join(messages)
    return _name(_decoded(part.get_filename("")), number), _bytes(part)


def _name(name: str, number: int) -> str:
    return _UNSAFE.sub("_", name).strip() or str(number)


def _text(part: Message, damage: list[int] | None = None) -> str:
    data, charset = _bytes(part), part.get_content_charset("")
    if part.get_content_subtype() == "html":
        known = decoded_as(data, charset)
        return page_text(blocks_of(data if known is None else known.text.encode()))
    return (decoded_as(data, charset) or decode(data, "", damage)).text.replace("\r\n", "\n").strip("\n")


def _bytes(part: Message) -> bytes:
    payload = part.get_payload(decode=True)
    return payload if isinstance(payload, bytes) else b""


def _raw(message: Message, name: str) -> list[str]:
    """Returns the values of a header; bytes beyond ASCII are lone surrogates in them."""
    return [str(value) for other, value in message.raw_items() if other.lower() == name.lower()]


def _decoded(value: str, charset: str = "") -> str:
    """Decodes a header; raw bytes beyond ASCII, which RFC 6532 allows, are UTF-8 or in the `charset` of the text."""
    data = value.encode("utf-8", "surrogateescape")
    with suppress(ExtractionError):
        value = (decoded_as(data, charset) or decode(data)).text
    with suppress(HeaderParseError, MessageError, LookupError, ValueError):
        value = str(make_header([_known(piece, known) for piece, known in decode_header(value)]))
    return " ".join(value.encode("utf-8", "replace").decode().split())


def _known(piece: bytes | str, charset: str | None) -> tuple[bytes | str, str | None]:
    """Returns an encoded word as UTF-8 if its charset has a name that only the web knows."""
    decoded = decoded_as(piece, charset) if charset and isinstance(piece, bytes) else None
    return (piece, charset) if decoded is None else (decoded.text.encode(), "utf-8")
