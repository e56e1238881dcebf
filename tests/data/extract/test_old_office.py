"""Files of old Microsoft programs, made record by record after the specifications of their formats."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.interface import Content, Extracted, Refused
from sheepop.data.extract.legacy_office import unpacked_rtf

from .compound_file import compound

DOCUMENT, SLIDE, NOTES, NOTES_ATOM, SLIDE_PERSIST, DRAWING = 1000, 1006, 1008, 1009, 1011, 1036
OUTLINE_TEXT, TEXT_KIND, TEXT, BYTES, SLIDE_LIST, USER_EDIT, DIRECTORY = 3998, 3999, 4000, 4008, 4080, 4085, 6002
TITLE, BODY, NOTES_TEXT, OTHER = 0, 1, 2, 4


def read(name: str, data: bytes, tmp_path: Path) -> list[Extracted | Refused]:
    return list(Dispatcher(ExtractConfig(ocr=False), tmp_path).documents(Content(name, data=data)))


def record(kind: int, content: bytes, version: int = 0, instance: int = 0) -> bytes:
    return struct.pack("<HHI", instance << 4 | version, kind, len(content)) + content


def container(kind: int, *inside: bytes, instance: int = 0) -> bytes:
    return record(kind, b"".join(inside), 15, instance)


def numbers(kind: int, *values: int) -> bytes:
    return record(kind, struct.pack(f"<{len(values)}I", *values))


def text(kind: int, words: str | None = None) -> bytes:
    """A text of a kind, which has only its head if there are no words."""
    words_ = b"" if words is None else record(TEXT, words.encode("utf-16-le"))
    return numbers(TEXT_KIND, kind) + words_


def box(*inside: bytes) -> bytes:
    return container(61453, *inside)


def drawing(*boxes: bytes) -> bytes:
    return container(DRAWING, container(61442, container(61443, *(container(61444, each) for each in boxes))))


def presentation(*saved: Mapping[int, bytes], edit_bytes: int = 28) -> bytes:
    """A presentation that was saved several times, each time with these objects by their number; 1 is the document."""
    stream, edit = b"", 0
    for objects in saved:
        places = dict[int, int]()
        for number, content in objects.items():
            places[number] = len(stream)
            stream += content
        directory = len(stream)
        stream += numbers(DIRECTORY, *(value for number in places for value in (1 << 20 | number, places[number])))
        before, edit = edit, len(stream)
        stream += record(
            USER_EDIT, struct.pack("<IIIIIII", 256, 3, before, directory, 1, 9, 1).ljust(edit_bytes, b"\0")
        )
    current = record(0x0FF6, struct.pack("<III", 20, 0xE391C05F, edit))
    return compound({"PowerPoint Document": stream.ljust(4096, b"\0"), "Current User": current})


def listed(*slides: tuple[int, int, bytes], instance: int = 0) -> bytes:
    """A list of slides: the number, the identifier and the texts of each."""
    inside = (numbers(SLIDE_PERSIST, number, 0, 0, identifier, 0) + texts for number, identifier, texts in slides)
    return container(SLIDE_LIST, *inside, instance=instance)


def test_a_slide_whose_title_is_empty_keeps_its_body(tmp_path: Path) -> None:
    shapes = drawing(box(numbers(OUTLINE_TEXT, 0)), box(numbers(OUTLINE_TEXT, 1)), box(text(OTHER, "In a box.")))
    outline = text(TITLE) + text(BODY, "It rained.\rThe sheep\x0bstayed in.")
    notes = container(
        NOTES, numbers(NOTES_ATOM, 256, 0), drawing(box(text(NOTES_TEXT, "Say so.")), box(text(OTHER, "*")))
    )
    lists = listed((3, 256, outline), (4, 257, text(TITLE, "Wool"))), listed((5, 300, b""), instance=2)
    objects = {
        3: container(SLIDE, shapes),
        4: container(SLIDE, drawing(box(numbers(OUTLINE_TEXT, 0)))),
        5: notes,
        1: container(DOCUMENT, *lists),
    }
    (item,) = read("a.ppt", presentation(objects), tmp_path)
    assert isinstance(item, Extracted)
    assert item.text == "It rained.\n\nThe sheep\nstayed in.\n\nIn a box.\n\nNotes:\nSay so.\n\n# Wool"
    assert item.marks == ((0, "slide 1"), (item.text.index("# Wool"), "slide 2"))


def test_what_was_saved_last_is_the_presentation(tmp_path: Path) -> None:
    def slide(words: str) -> bytes:
        return container(SLIDE, drawing(box(numbers(TEXT_KIND, OTHER), record(BYTES, words.encode("latin-1")))))

    first = {3: slide("Old"), 4: slide("Stays"), 1: container(DOCUMENT, listed((3, 256, b""), (4, 257, b"")))}
    (item,) = read("a.ppt", presentation(first, {3: slide("New: é")}), tmp_path)
    assert isinstance(item, Extracted) and item.text == "New: é\n\nStays"
    second = {1: container(DOCUMENT, listed((4, 257, b"")))}
    (item,) = read("a.ppt", presentation(first, second), tmp_path)
    assert isinstance(item, Extracted) and item.text == "Stays"


def test_slides_with_a_password_are_encrypted_and_those_of_powerpoint_95_are_not_read(tmp_path: Path) -> None:
    objects = {1: container(DOCUMENT, listed())}
    locked = presentation(objects, edit_bytes=32)  # states the number of the object with the key
    assert read("a.ppt", locked, tmp_path) == [Refused("", "encrypted", "it needs a password")]
    old = compound({"PP40": bytes(64), "Text_Content": b"The sheep", "PowerPoint Document": bytes(64)})
    assert read("a.ppt", old, tmp_path) == [Refused("", "unsupported", "it is a presentation of PowerPoint 95")]
    (refused,) = read("a.ppt", compound({"PowerPoint Document": bytes(5000)}), tmp_path)
    assert isinstance(refused, Refused) and refused.reason == "damaged"


@pytest.mark.parametrize("stream", ["Workbook", "Book"])
def test_a_workbook_with_a_password_is_encrypted(stream: str, tmp_path: Path) -> None:
    # BOF, then FilePass with the two numbers of an obfuscation by XOR ([MS-XLS] 2.4.117).
    begin = struct.pack("<HHHHHHII", 0x0809, 16, 0x0600, 5, 0, 0, 0, 0) + struct.pack(
        "<HHHHH", 0x2F, 6, 0, 0x1234, 0x5678
    )
    workbook = compound({stream: begin + bytes(4096)})
    assert read("a.xls", workbook, tmp_path) == [Refused("", "encrypted", "it needs a password")]


def message(properties: Mapping[str, bytes]) -> bytes:
    """A message of Outlook with these streams; each property has its entry in the list ([MS-OXMSG] 2.4)."""
    entries = [
        struct.pack("<HHIII", int(tag[4:], 16), int(tag[:4], 16), 6, len(data), 0) for tag, data in properties.items()
    ]
    streams = {f"__substg1.0_{tag}": data for tag, data in properties.items()}
    ids = dict.fromkeys(("__substg1.0_00020102", "__substg1.0_00030102", "__substg1.0_00040102"), b"")
    return compound({"__properties_version1.0": bytes(32) + b"".join(entries), "__nameid_version1.0": ids, **streams})


def test_a_message_in_8_bit_texts_is_read_in_their_encoding(tmp_path: Path) -> None:
    words = "Zażółć gęślą jaźń, owce są na łące"
    page = '<html><head><meta charset="utf-8"></head><body><p>Grüße vom Hof</p></body></html>'.encode()
    polish = message({"001A001E": b"IPM.Note", "0037001E": b"Wool", "1000001E": f"{words}.".encode("cp1250")})
    (item,) = read("a.msg", polish, tmp_path)
    assert isinstance(item, Extracted) and item.text == f"Subject: Wool\n\n{words}."
    # The page is in another encoding than the subject.
    mixed = message({"001A001E": b"IPM.Note", "0037001E": "Öl für die Wölfe".encode("cp1252"), "1013001E": page})
    (item,) = read("a.msg", mixed, tmp_path)
    assert isinstance(item, Extracted) and item.text == "Subject: Öl für die Wölfe\n\nGrüße vom Hof"


# The two examples of [MS-OXRTFCP], 4.1: a text, and one with a run that repeats itself.
PACKED = {
    "2d0000002b0000004c5a4675f1c5c7a703000a007263706731323542320af32068656c090020627705b06c647d0a800fa0": (
        b"{\\rtf1\\ansi\\ansicpg1252\\pard hello world}\r\n"
    ),
    "1a0000001c0000004c5a4675e2d44b51410004205758595a0d6e7d010eb0": b"{\\rtf1 WXYZWXYZWXYZWXYZWXYZ}",
}


def test_the_examples_of_compressed_rich_text_unpack_and_are_read_in_a_message(tmp_path: Path) -> None:
    assert [unpacked_rtf(bytes.fromhex(packed)) for packed in PACKED] == list(PACKED.values())
    first, *_ = map(bytes.fromhex, PACKED)
    plain = struct.pack("<II4sI", 30, 18, b"MELA", 0) + b"{\\rtf1 It rained.}"
    for packed, words in ((first, "hello world"), (plain, "It rained.")):
        (item,) = read("a.msg", message({"001A001E": b"IPM.Note", "0037001E": b"Wool", "10090102": packed}), tmp_path)
        assert isinstance(item, Extracted) and item.text == f"Subject: Wool\n\n{words}"
    (refused,) = read("a.msg", message({"001A001E": b"IPM.Note", "10090102": b"\0" * 20}), tmp_path)
    assert isinstance(refused, Refused) and refused.reason == "damaged"
