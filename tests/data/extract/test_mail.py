from __future__ import annotations

import io
import mailbox
from email.message import EmailMessage
from pathlib import Path

import openpyxl
import pytest

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.detection import detect
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.interface import Content, Extracted, Refused

FILES = Path(__file__).parent / "files"


def message(subject: str = "Grüße vom Hof", text: str = "Den Schafen geht es gut.\n") -> EmailMessage:
    made = EmailMessage()
    made["Subject"], made["From"], made["To"] = subject, "Älice <alice@example.org>", "bob@example.org"
    made["Date"] = "Mon, 06 Jan 2025 10:00:00 +0000"
    made.set_content(text, charset="iso-8859-1", cte="quoted-printable")
    return made


def read(data: bytes, tmp_path: Path, name: str = "1.eml") -> list[Extracted | Refused]:
    return list(Dispatcher(ExtractConfig(), tmp_path).documents(Content(name, data=data)))


HEAD = "From: Älice <alice@example.org>\nTo: bob@example.org\nDate: Mon, 06 Jan 2025 10:00:00 +0000\nSubject: {}\n\n"


def test_a_message_is_its_headers_and_its_text(tmp_path: Path) -> None:
    (item,) = read(message().as_bytes(), tmp_path)

    assert isinstance(item, Extracted)
    assert item.text == HEAD.format("Grüße vom Hof") + "Den Schafen geht es gut."
    assert dict(item.metadata) == {
        "title": "Grüße vom Hof",
        "author": "Älice <alice@example.org>",
        "date": "Mon, 06 Jan 2025 10:00:00 +0000",
    }


def test_plain_text_comes_before_html_which_is_read_where_it_is_alone(tmp_path: Path) -> None:
    both = message(text="Plain.")
    both.add_alternative("<p>The <b>same</b> as HTML.</p>", subtype="html")
    alone = message()
    alone.set_content("<h1>Wool</h1><p>Shörn in <b>spring</b>.</p>", subtype="html", charset="cp1252", cte="base64")

    for made, body in ((both, "Plain."), (alone, "# Wool\n\nShörn in spring.")):
        (item,) = read(made.as_bytes(), tmp_path)
        assert isinstance(item, Extracted)
        assert item.text == HEAD.format("Grüße vom Hof") + body


def test_attachments_are_files_inside(tmp_path: Path) -> None:
    made, inner = message(), message("Inside", "A message in it.")
    workbook, buffer = openpyxl.Workbook(), io.BytesIO()
    workbook.active.append(["name", "born"])
    workbook.save(buffer)
    made.add_attachment(buffer.getvalue(), maintype="application", subtype="octet-stream", filename="flöck.xlsx")
    made.add_attachment(inner)
    made.add_attachment(b"", maintype="application", subtype="pdf", filename="../none.pdf")

    body, table, nested, refused = read(made.as_bytes(), tmp_path)

    assert isinstance(body, Extracted)
    assert body.text.endswith("Den Schafen geht es gut.")
    assert isinstance(table, Extracted)
    assert (table.place, table.text) == (
        "attachment flöck.xlsx, sheet Sheet",
        "# Sheet\n\n| name | born |\n| --- | --- |",
    )
    assert isinstance(nested, Extracted)
    assert (nested.place, nested.text) == ("attachment message.eml", HEAD.format("Inside") + "A message in it.")
    assert refused == Refused("attachment .._none.pdf", "empty", "0 bytes")


def test_a_mailbox_is_its_messages_in_order(tmp_path: Path) -> None:
    path = tmp_path / "box"
    box = mailbox.mbox(path)
    box.add(message("One", "From the meadow.\n\nFrom the barn."))
    box.add(message("Two", "Second."))
    box.close()

    assert [detect(Content(name, path=path)).name for name in ("box", "a.mbox")] == ["mailbox"] * 2
    first, second = read(path.read_bytes(), tmp_path, "box")
    assert isinstance(first, Extracted)
    assert isinstance(second, Extracted)
    assert (first.place, first.text) == ("message 1", HEAD.format("One") + "From the meadow.\n\nFrom the barn.")
    assert (second.place, second.text) == ("message 2", HEAD.format("Two") + "Second.")


def test_a_message_of_outlook_is_read_with_its_attachment(tmp_path: Path) -> None:
    body, attached = read((FILES / "message.msg").read_bytes(), tmp_path, "message.msg")

    assert isinstance(body, Extracted)
    assert body.text == (
        'From: "Alice" <alice@example.org>\nTo: Bob\nDate: 2025-01-06 10:30:00\nSubject: Grüße vom Hof\n\n'
        "Dear Bob,\n\nthe sheep are well."
    )
    assert isinstance(attached, Extracted)
    assert attached.place == "attachment flock.csv"
    assert "Dolly" in attached.text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Received: by example.org\n\tvia SMTP\nFrom: a@example.org\nDate: Mon, 6 Jan 2025\n\nhello\n", "mail"),
        ("From a@example.org Mon Jan  6 10:00:00 2025\nSubject: x\nFrom: a@example.org\n\nhello\n", "mailbox"),
        ("From: the shepherd\nTo: the reader\n\nA letter as one writes it.\n", "text"),
        ("From here to there it took us from 10:00 until 2025\nNote: a diary\n", "text"),
    ],
)
def test_mail_is_known_by_its_header_alone(text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheepop.data.extract.detection._model", lambda: None)
    assert detect(Content("note", data=text.encode())).name == kind


def test_a_message_without_text_is_empty_and_a_broken_one_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (refused,) = read(b"Subject: nothing\n\n\n", tmp_path)
    assert isinstance(refused, Refused)
    assert refused.reason == "empty"
    broken = b"Subject: =?utf-9?b?!!?=\nContent-Type: multipart/mixed; boundary=b\n\n--b\n\nhalf a mess"
    (item,) = read(broken, tmp_path)
    assert isinstance(item, Extracted)
    assert item.text.endswith("half a mess")
