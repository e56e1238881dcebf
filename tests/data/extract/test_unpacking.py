from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from sheepop.data.extract.interface import ExtractionError
from sheepop.data.extract.unpacking import decompressed

MIB = 2**20
TEXT = "".join(f"line {number} of the text\n" for number in range(5_000)).encode()
FORMATS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.compress,
}
every_format = pytest.mark.parametrize("compress", FORMATS.values(), ids=FORMATS)


def unpacked(data: bytes) -> bytes:
    with decompressed(io.BytesIO(data)) as file:
        return file.read()


@every_format
def test_what_a_library_packed_is_unpacked(compress: Callable[[bytes], bytes]):
    assert unpacked(compress(TEXT)) == TEXT
    assert unpacked(compress(b"")) == b""


@every_format
def test_data_of_which_little_comes_out_at_a_time_is_unpacked_to_its_end(compress: Callable[[bytes], bytes]):
    data = random.Random(3).randbytes(400_000).hex().encode()
    assert unpacked(compress(data)) == data


@every_format
def test_streams_behind_each_other_and_zeros_that_fill_up_are_one_file(compress: Callable[[bytes], bytes]):
    assert unpacked(compress(b"one ") + compress(b"") + compress(b"two") + bytes(700)) == b"one two"


@pytest.mark.parametrize(
    "program", ["gzip -c", "bzip2 -c", "xz -c", "xz -c --check=sha256", "zstd -c -q", "zstd -c -19 -q"]
)
def test_what_a_program_of_the_system_packed_is_unpacked(program: str, tmp_path: Path):
    done = subprocess.run(program.split(), input=TEXT, capture_output=True, check=True)
    assert unpacked(done.stdout) == TEXT


@every_format
def test_a_file_that_ends_too_early_is_damaged_wherever_it_ends(compress: Callable[[bytes], bytes]):
    data = compress(TEXT)
    for end in (*range(8, 40, 5), len(data) // 2, len(data) - 9, len(data) - 1):
        with pytest.raises(ExtractionError) as caught:
            unpacked(data[:end])
        assert caught.value.reason == "damaged", end


@every_format
def test_changed_bytes_are_damaged_or_change_nothing(compress: Callable[[bytes], bytes]):
    data = compress(TEXT)
    generator = random.Random(7)
    damaged = 0
    for _ in range(100):
        place = generator.randrange(len(data))
        broken = data[:place] + bytes([data[place] ^ (1 << generator.randrange(8))]) + data[place + 1 :]
        try:
            # Zstandard and the header of gzip hold fields that nothing checks.
            assert unpacked(broken) == TEXT or compress is zstandard.compress
        except ExtractionError as error:
            assert error.reason in {"damaged", "unsupported"}
            damaged += 1
    assert damaged > 80 or compress is zstandard.compress


@every_format
def test_what_follows_the_data_must_be_data(compress: Callable[[bytes], bytes]):
    with pytest.raises(ExtractionError, match="the data after its compressed data"):
        unpacked(compress(TEXT) + b"something else")


@every_format
def test_a_bomb_is_unpacked_a_little_at_a_time(compress: Callable[[bytes], bytes]):
    bomb = compress(bytes(48 * MIB))
    tracemalloc.start()
    with decompressed(io.BytesIO(bomb)) as file:
        assert file.read(10) == bytes(10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 * MIB


def test_the_first_kilobyte_can_be_looked_at():
    with decompressed(io.BytesIO(gzip.compress(TEXT))) as file:
        assert file.peek(512)[:512] == TEXT[:512]
        assert file.read() == TEXT


def test_frames_without_data_are_passed_over():
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"
    assert unpacked(skippable + zstandard.compress(TEXT) + skippable) == TEXT


def test_a_window_beyond_reason_is_refused_in_words():
    packed = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    ).compressobj()
    data = packed.compress(b"x" * 1000) + packed.flush()
    with pytest.raises(ExtractionError, match="more memory") as caught:
        unpacked(data)
    assert caught.value.reason == "unsupported"
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**29}]
    with pytest.raises(ExtractionError, match="more memory"):
        unpacked(lzma.compress(b"x", filters=filters))


def test_an_error_of_the_disk_is_not_blamed_on_the_data():
    class Failing(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"), decompressed(Failing()) as file:
        file.read()
