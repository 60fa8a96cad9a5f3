"""Compressed files: the same text, piece by piece, and no damage that goes unsaid."""

import gzip
import json
import lzma
import random
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from kernels.errors import UserError
from zoo.data import Corpus
from zoo.data.text.files import zstd

TEXTS = [f"document {number}: " + "é many words " * (number % 5) for number in range(200)]
LINES = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".zst": lambda data: zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}),
    ".xz": lzma.compress,
}


@pytest.fixture(params=list(COMPRESS))
def suffix(request: pytest.FixtureRequest) -> str:
    return request.param


def test_lines_in_one_stream_or_several(suffix: str, tmp_path: Path):
    """Parallel compressors write several, one after the other."""
    compress, file = COMPRESS[suffix], tmp_path / f"a.jsonl{suffix}"
    for data in (
        compress(b"".join(LINES)),
        compress(b"".join(LINES[:77])) + compress(b"") + compress(b"".join(LINES[77:])),
        compress(b"".join(LINES)) + bytes(8 if suffix == ".gz" else 0),  # padded
    ):
        file.write_bytes(data)
        assert list(Corpus(str(tmp_path))) == TEXTS


@pytest.mark.parametrize("kind", [".txt", ".md"])
def test_a_whole_text(suffix: str, kind: str, tmp_path: Path):
    (tmp_path / f"A{kind}{suffix}".upper()).write_bytes(COMPRESS[suffix]("".join(TEXTS).encode()))
    assert list(Corpus(str(tmp_path))) == ["".join(TEXTS)]


@pytest.mark.slow
def test_a_large_file_is_never_in_memory_as_a_whole(suffix: str, tmp_path: Path):
    """64 MB of text in a few kB, of which the first lines are wanted."""
    data = COMPRESS[suffix](b"".join([json.dumps({"text": "x" * 1000}).encode() + b"\n"] * 64_000))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(data)
    tracemalloc.start()
    try:
        assert [len(text) for text in islice(Corpus(str(tmp_path)), 1000)] == [1000] * 1000
        assert tracemalloc.get_traced_memory()[1] < 24e6  # an .xz keeps 8 MB to look back at
    finally:
        tracemalloc.stop()


def outcome(path: str) -> list[str] | str:
    """The documents, or what is said instead."""
    try:
        return list(Corpus(path))
    except UserError as error:
        return str(error)


def test_damage_is_one_sentence(suffix: str, tmp_path: Path):
    """Bits that flip and files that end too early, also in the second of two streams.

    Python's lzma ignores what follows a stream and does not begin with a right header, so .xz has one here.
    """
    file, draw = tmp_path / f"a.jsonl{suffix}", random.Random(0)
    streams = [LINES] if suffix == ".xz" else [LINES[:100], LINES[100:]]
    data = b"".join(COMPRESS[suffix](b"".join(lines)) for lines in streams)
    cut = [data[:length] for length in (0, 1, len(data) // 4, len(data) - 1)]
    flipped = []
    for _ in range(150):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        flipped.append(bytes(damaged))
    for number, damaged in enumerate([*cut, *flipped]):
        file.write_bytes(damaged)
        found = outcome(str(file))
        if isinstance(found, str):
            assert f"data.path: {file}" in found
            assert "\n" not in found
        else:
            assert number >= len(cut)
            assert found == TEXTS  # the time in a header, say
