from __future__ import annotations

import gzip
import io
import random
import zlib
from collections.abc import Callable, Iterator

import brotli
import pytest
import zstandard
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from sheepop.data.extract.interface import Extracted, Refused

# The writer of warcio leaves closing its temporary files to the collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ReadAs = Callable[..., list[Extracted | Refused]]

DATE = "2024-01-02T03:04:05Z"
SENTENCE = "The ferry leaves the island every morning at seven, and comes back with the mail before noon."
PAGE = f"<html><head><title>T</title></head><body><main><h1>Ferry</h1><p>{SENTENCE}</p></main></body></html>".encode()
TEXT = f"# Ferry\n\n{SENTENCE}"


class Archive:
    """An archive that warcio writes, record by record."""

    def __init__(self, *, compressed: bool = True) -> None:
        self.file = io.BytesIO()
        self.writer = WARCWriter(self.file, gzip=compressed)
        self.writer.write_record(self.writer.create_warcinfo_record("a.warc", {"software": "test"}))

    def response(
        self,
        url: str,
        body: bytes = PAGE,
        media_type: str = "text/html",
        status: str = "200 OK",
        headers: tuple[tuple[str, str], ...] = (),
        **record: str,
    ) -> Archive:
        http = StatusAndHeaders(status, [("Content-Type", media_type), *headers], protocol="HTTP/1.1")
        return self.record(url, "response", body, http_headers=http, **record)

    def record(self, url: str, kind: str, body: bytes, **options: object) -> Archive:
        more = {name: str(options.pop(name)) for name in list(options) if name.startswith("WARC-")}
        content_type = str(options.pop("content_type", ""))
        self.writer.write_record(
            self.writer.create_warc_record(
                url,
                kind,
                payload=io.BytesIO(body),
                warc_content_type=content_type,
                warc_headers_dict={"WARC-Date": DATE, **more},
                **options,
            )
        )
        return self

    @property
    def data(self) -> bytes:
        return self.file.getvalue()


def documents(items: list[Extracted | Refused]) -> list[Extracted]:
    found = [item for item in items if isinstance(item, Extracted)]
    assert len(found) == len(items), items
    return found


def refused(items: list[Extracted | Refused]) -> list[tuple[str, str]]:
    return [(item.place, item.reason) for item in items if isinstance(item, Refused)]


@pytest.mark.parametrize("compressed", [True, False])
def test_responses_resources_and_conversions_are_read_by_their_types(read_as: ReadAs, compressed: bool) -> None:
    archive = Archive(compressed=compressed)
    archive.response("http://a.example/").record("http://a.example/", "request", b"GET / HTTP/1.1\r\n\r\n")
    archive.record("http://a.example/r.txt", "resource", b"A resource.", content_type="text/plain")
    archive.record("http://a.example/", "conversion", b"The plain text.", content_type="text/plain")
    archive.record("http://a.example/", "metadata", b"fetchTimeMs: 3", content_type="application/warc-fields")
    archive.response("http://a.example/feed", b"<rss><title>News</title></rss>", "application/rss+xml; charset=utf-8")
    found = documents(read_as("warc", archive.data))
    assert [(item.text, item.place) for item in found] == [
        (TEXT, "record 2 http://a.example/"),
        ("A resource.", "record 4 http://a.example/r.txt"),
        ("The plain text.", "record 5 http://a.example/"),
        ("News", "record 7 http://a.example/feed"),
    ]
    facts = {"title": "T", "encoding": "utf_8", "url": "http://a.example/", "date": DATE}
    assert dict(found[0].metadata) == facts


def test_an_archive_in_one_stream_is_read_too(read_as: ReadAs) -> None:
    plain = Archive(compressed=False).response("http://a.example/1").response("http://a.example/2").data
    for data in (gzip.compress(plain), zstandard.compress(plain)):
        assert [item.text for item in documents(read_as("warc", data))] == [TEXT, TEXT]


def test_an_old_arc_file_is_read(read_as: ReadAs) -> None:
    def record(url: str, body: bytes) -> bytes:
        return f"{url} 1.2.3.4 20040102030405 text/html {len(body)}\n".encode() + body + b"\n"

    version = b"1 0 test\nURL IP-address Archive-date Content-type Archive-length\n"
    header = f"filedesc://a.arc 0.0.0.0 20040102030405 text/plain {len(version)}\n".encode() + version + b"\n"
    data = header + record("http://a.example/", b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n" + PAGE)
    (item,) = documents(read_as("warc", data))
    assert (item.text, item.metadata["url"], item.metadata["date"]) == (
        TEXT,
        "http://a.example/",
        "2004-01-02T03:04:05Z",
    )


def chunked(data: bytes, size: int = 37) -> bytes:
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])


def deflated(data: bytes, window: int) -> bytes:
    stream = zlib.compressobj(wbits=window)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (gzip.compress(PAGE, mtime=0), {"Content-Encoding": "gzip"}),
        (gzip.compress(PAGE, mtime=0), {"content-encoding": "x-gzip"}),
        (deflated(PAGE, 15), {"Content-Encoding": "deflate"}),
        (deflated(PAGE, -15), {"Content-Encoding": "deflate"}),
        (zstandard.compress(PAGE), {"Content-Encoding": "zstd"}),
        (brotli.compress(PAGE), {"Content-Encoding": "br"}),
        (chunked(PAGE), {"Transfer-Encoding": "chunked"}),
        (chunked(gzip.compress(PAGE, mtime=0)), {"Transfer-Encoding": "chunked", "Content-Encoding": "gzip"}),
        (PAGE, {"Content-Encoding": "gzip"}),
        (PAGE, {"Transfer-Encoding": "chunked"}),
        (PAGE, {"Content-Encoding": "identity"}),
    ],
)
def test_the_encodings_of_transfer_are_undone(read_as: ReadAs, body: bytes, headers: dict[str, str]) -> None:
    archive = Archive().response("http://a.example/", body, headers=tuple(headers.items()))
    (item,) = documents(read_as("warc", archive.data))
    assert item.text == TEXT


@pytest.mark.parametrize(
    ("body", "headers", "reason"),
    [
        (PAGE, (("Content-Encoding", "compress"),), "unsupported"),
        (gzip.compress(PAGE, mtime=0)[:-20], (("Content-Encoding", "gzip"),), "damaged"),
        (deflated(PAGE, 15)[:-20], (("Content-Encoding", "deflate"),), "damaged"),
        (brotli.compress(PAGE)[:-20], (("Content-Encoding", "br"),), "damaged"),
        (b"<html>no brotli</html>" * 20, (("Content-Encoding", "br"),), "damaged"),
        (b"", (), "empty"),
        (b"\x00\x01\x02", (), "binary"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_by_itself(
    read_as: ReadAs, body: bytes, headers: tuple[tuple[str, str], ...], reason: str
) -> None:
    archive = Archive().response("http://a.example/", body, headers=headers).response("http://a.example/2")
    items = read_as("warc", archive.data)
    assert refused(items) == [("record 2 http://a.example/", reason)]
    assert documents(items[1:])[0].text == TEXT


def test_what_is_no_page_is_refused_with_what_it_is(read_as: ReadAs) -> None:
    archive = Archive().response("http://a.example/1", status="404 Not Found")
    archive.response("http://a.example/2", b"\x89PNG", "image/png")
    archive.response("http://a.example/3", b"x = 1", "application/javascript")
    items = read_as("warc", archive.data)
    assert items == [
        Refused("record 2 http://a.example/1", "unsupported", "HTTP status 404 Not Found"),
        Refused(
            "record 3 http://a.example/2", "unsupported", "content of type image/png is not read from web archives"
        ),
        Refused(
            "record 4 http://a.example/3",
            "unsupported",
            "content of type application/javascript is not read from web archives",
        ),
    ]


def test_the_encoding_that_the_server_states_counts_more_than_that_of_the_page(read_as: ReadAs) -> None:
    page = '<html><head><meta charset="koi8-r"></head><body><p>паром уходит</p></body></html>'.encode("cp1251")
    archive = Archive().response("http://a.example/", page, "text/html; charset=windows-1251")
    (item,) = documents(read_as("warc", archive.data))
    assert item.text == "паром уходит"


def test_what_the_crawler_cut_short_says_so(read_as: ReadAs) -> None:
    archive = Archive().response("http://a.example/", **{"WARC-Truncated": "length"})
    (item,) = documents(read_as("warc", archive.data))
    assert item.metadata["truncated"] == "length"


def test_one_segment_of_several_is_refused(read_as: ReadAs) -> None:
    archive = Archive().response("http://a.example/", **{"WARC-Segment-Number": "1"})
    assert refused(read_as("warc", archive.data)) == [("record 2 http://a.example/", "unsupported")]


def test_a_record_that_is_too_large_is_refused_by_itself(read_as: ReadAs) -> None:
    archive = Archive().response("http://a.example/1", PAGE * 100).response("http://a.example/2")
    archive.response("http://a.example/3", gzip.compress(PAGE * 100), headers=(("Content-Encoding", "gzip"),))
    items = read_as("warc", archive.data, max_member_bytes=10_000)
    assert refused(items) == [
        ("record 2 http://a.example/1", "oversized"),
        ("record 4 http://a.example/3", "oversized"),
    ]


def test_an_archive_that_unpacks_to_too_much_is_a_bomb(read_as: ReadAs) -> None:
    archive = Archive().response("http://a.example/1").response("http://a.example/2", bytes(65 * 2**20))
    items = read_as("warc", archive.data)
    assert isinstance(items[0], Extracted)
    assert refused(items)[-1] == ("", "bomb")


def test_brotli_that_unpacks_to_too_much_is_unpacked_no_further(read_as: ReadAs) -> None:
    packed = brotli.compress(bytes(200 * 2**20), quality=3)  # the best one takes twenty seconds
    assert len(packed) < 1000
    archive = Archive().response("http://a.example/1", packed, headers=(("Content-Encoding", "br"),))
    items = read_as("warc", archive.response("http://a.example/2").data, max_member_bytes=2**20)
    assert [getattr(item, "reason", "") for item in items] == ["oversized", ""]


def test_more_documents_than_allowed_are_a_bomb(read_as: ReadAs) -> None:
    archive = Archive()
    for number in range(5):
        archive.response(f"http://a.example/{number}")
    items = read_as("warc", archive.data, max_members=3)
    assert len(documents(items[:-1])) == 3
    assert refused(items) == [("", "bomb")]


@pytest.mark.parametrize("compressed", [True, False])
def test_an_archive_cut_off_anywhere_gives_what_comes_before_and_says_that_it_is_damaged(
    read_as: ReadAs, compressed: bool
) -> None:
    archive = Archive(compressed=compressed)
    ends = []
    for number in range(4):
        archive.response(f"http://a.example/{number}")
        ends.append(len(archive.data))
    chosen = random.Random(1)
    for _ in range(25):
        length = chosen.randrange(ends[0], ends[-1])
        items = read_as("warc", archive.data[:length])
        whole = sum(end <= length for end in ends)
        found = [item for item in items if isinstance(item, Extracted) and item.text == TEXT]
        assert whole <= len(found) <= whole + 1
        # Between two records nothing shows that more was to come; the last blank lines may be missing.
        if not any(end - 4 <= length <= end for end in ends):
            assert refused(items)[-1][1] == "damaged"


def test_damaged_archives_are_read_or_refused(read_as: ReadAs, damaged: Callable[..., Iterator[bytes]]) -> None:
    for compressed in (True, False):
        archive = Archive(compressed=compressed).response("http://a.example/1").response("http://a.example/2")
        body = chunked(gzip.compress(PAGE, mtime=0))
        archive.response("http://a.example/3", body, headers=(("Content-Encoding", "gzip"),))
        for copy in damaged(archive.data):
            for item in read_as("warc", copy):
                assert isinstance(item, Refused) or item.text.strip()


def test_what_is_no_archive_is_damaged(read_as: ReadAs) -> None:
    for data in (b"no archive\n" * 10, b"WARC/1.0\r\n\r\n", b"WARC/1.0\r\nContent-Length: x\r\n\r\n", b"\x1f\x8b\x08"):
        assert all(isinstance(item, Refused) for item in read_as("warc", data))
        assert read_as("warc", b"no archive\n")[0].place == ""
