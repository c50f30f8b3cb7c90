"""Images: every byte of a file lands where the plan says, whatever the chunking, and digests match the bytes."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucformat.containers import file_image as images
from ucformat.containers.checksums import digest
from ucformat.containers.file_image import ByteRequest, FilePlan, stream, write_image
from ucformat.errors import StorageError
from ucformat.storage.open import open_store
from ucformat.storage.store import Store


def _content(piece: int, size: int) -> np.ndarray:
    return np.random.default_rng(piece).integers(1, 256, size, dtype=np.uint8)


def _fill_from(contents: Sequence[np.ndarray]) -> images.ByteSource:
    def fill(parts: Sequence[ByteRequest]) -> None:
        for part in parts:
            part.out[:] = contents[part.piece][part.start : part.stop]

    return fill


@given(st.lists(st.integers(0, 3 << 20), max_size=8), st.integers(0, 9000), st.booleans(), st.sampled_from(["local", "memory"]))
@settings(max_examples=25, deadline=None)
def test_an_image_is_written_as_planned(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], gap: int, own_origin: bool, kind: str
) -> None:
    head = b"H" * 4096
    contents = [_content(i, n) for i, n in enumerate(sizes)]
    start = 4096 + np.cumsum(np.array([0, *sizes[:-1]] if sizes else [], dtype=np.int64) + gap)
    end = int(start[-1] + sizes[-1]) if sizes else 4096
    lengths = np.array(sizes, dtype=np.int64)
    image = FilePlan(end + 77, [(0, head), (end + 70, b"tail")], np.arange(len(sizes)), start, lengths, 4096 * own_origin)
    store: Store = open_store(str(tmp_path_factory.mktemp("i")) if kind == "local" else f"memory://{uuid.uuid4().hex}")
    with store.writer("f", image.size) as writer:
        digests = write_image(writer, image, _fill_from(contents), block_bytes=64 << 10)
    wanted = np.zeros(image.size, dtype=np.uint8)
    wanted[:4096] = ord("H")
    for at, content in zip(start, contents, strict=True):
        wanted[at : at + len(content)] = content
    wanted[end + 70 : end + 74] = np.frombuffer(b"tail", dtype=np.uint8)
    found = np.frombuffer(store.read("f"), dtype=np.uint8)
    assert np.array_equal(found, wanted)
    blocks = range(image.origin, image.size, 64 << 10)
    assert digests.tolist() == [digest("xxh3-64", found[at : at + (64 << 10)]) for at in blocks]


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(1, 3000), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_a_stream_gives_every_piece_in_order(sizes: list[int], chunk: int, threads: int) -> None:
    contents = [_content(i, n) for i, n in enumerate(sizes)]
    got = [b""] * len(sizes)
    last = 0
    for part in stream(sizes, _fill_from(contents), chunk, threads):
        assert part.piece >= last
        assert part.start == len(got[part.piece])
        assert part.crc == zlib.crc32(part.data.data)
        got[part.piece] += part.data.tobytes()
        last = part.piece
    assert got == [content.tobytes() for content in contents]


def test_a_failing_fill_fails_the_write_and_leaves_no_file(tmp_path: Path) -> None:
    def fill(parts: Sequence[ByteRequest]) -> None:
        raise StorageError("source", "gone")

    store = open_store(str(tmp_path))
    image = FilePlan(40 << 20, [], np.array([0]), np.array([0]), np.array([40 << 20]))
    with pytest.raises(StorageError, match="gone"), store.writer("f", image.size) as writer:
        write_image(writer, image, fill)
    assert store.list() == []
