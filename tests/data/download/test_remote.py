import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.data.download.remote import LimitReached, RemoteFile

DATA = bytes(i * 7 % 251 for i in range(1000))


class Source:
    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        return DATA[start:stop]


@given(
    st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 400)), max_size=20),
    st.integers(1, 300),
)
@settings(max_examples=200)
def test_reads_give_what_a_local_file_gives(reads: list[tuple[int, int]], block: int):
    source, local = Source(), io.BytesIO(DATA)
    remote = RemoteFile(source, len(DATA), block=block)
    for place, size in reads:
        assert remote.seek(place) == local.seek(place)
        assert remote.read(size) == local.read(size)
        assert remote.tell() == local.tell()
    assert remote.transferred == sum(stop - start for start, stop in source.asked)
    # What was read is never asked for again while it is kept.
    places = [place for start, stop in source.asked for place in range(start, stop)]
    assert len(places) == len(set(places))


def test_places_are_counted_from_the_beginning_the_position_and_the_end():
    remote = RemoteFile(Source(), len(DATA), block=64)
    assert remote.seek(-10, io.SEEK_END) == 990 and remote.read() == DATA[-10:]
    assert remote.seek(-30, io.SEEK_CUR) == 970 and remote.read(5) == DATA[970:975]
    with pytest.raises(ValueError, match="before the beginning"):
        remote.seek(-1)


def test_a_long_read_is_one_request_and_leaves_out_what_is_there():
    source = Source()
    remote = RemoteFile(source, len(DATA), block=100)
    remote.seek(450)
    remote.read(10)
    remote.seek(0)
    assert remote.read() == DATA
    assert source.asked == [(400, 500), (0, 400), (500, 1000)]


def test_no_request_goes_over_the_limit():
    source = Source()
    remote = RemoteFile(source, len(DATA), block=100, limit=350)
    remote.read(250)
    with pytest.raises(LimitReached):
        remote.read(200)
    remote.seek(0)
    assert remote.read(300) == DATA[:300]
    assert remote.transferred == 300


def test_blocks_beyond_what_is_kept_are_fetched_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sheepop.data.download.remote._KEPT_BYTES", 200)
    monkeypatch.setattr("sheepop.data.download.remote._LONGEST_REQUEST", 100)
    source = Source()
    remote = RemoteFile(source, len(DATA), block=50)
    for place in (0, 200, 400, 600, 0):
        remote.seek(place)
        assert remote.read(100) == DATA[place : place + 100]
    assert source.asked.count((0, 100)) == 2
    assert len(remote._blocks) <= 6
