"""Storage: one conformance suite that every store passes, and what the local disk does beyond it."""

from __future__ import annotations

import ctypes
import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucformat.errors import FormatError, MissingFileError, StorageError
from ucformat.storage import local
from ucformat.storage.local import ALIGNMENT, LocalStore, aligned
from ucformat.storage.open import open_store
from ucformat.storage.store import Bytes, Sheet, Store, safe_path

StoreMaker = Callable[[], Store]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def _data(size: int) -> Bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def test_what_was_put_is_read_back_in_any_range(store: Store) -> None:
    data = _data(100_000).tobytes()
    store.put("folder/file.bin", data)
    assert store.size("folder/file.bin") == len(data)
    for start, stop in ((0, len(data)), (1, 2), (99_999, 100_000), (5000, 5000), (4096, 8192)):
        assert store.read("folder/file.bin", start, stop) == data[start:stop]
    with store.reader("folder/file.bin") as reader:
        out = np.empty(10, dtype=np.uint8)
        for start in (0, 777):
            reader.read_into(start, out)
            assert out.tobytes() == data[start : start + 10]


@pytest.mark.parametrize("sizes", [[5], [0, 7, 0], [1] * 2500, [3000, 1, 4096, 2]])
def test_consecutive_bytes_are_read_into_many_buffers(store: Store, sizes: list[int]) -> None:
    data = _data(10_000)
    store.put("f", data.tobytes())
    parts = [np.zeros(size, dtype=np.uint8) for size in sizes]
    with store.reader("f") as reader:
        reader.read_parts(17, parts)
    assert np.concatenate(parts).tobytes() == data[17 : 17 + sum(sizes)].tobytes()
    with pytest.raises(FormatError, match="ends at byte 10000"), store.reader("f") as reader:
        reader.read_parts(9_000, [np.zeros(999, dtype=np.uint8), np.zeros(2, dtype=np.uint8)])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 100), st.data())
def test_a_sheet_knows_the_memory_of_every_byte(sizes: list[int], origin: int, draw: st.DataObject) -> None:
    sheet = Sheet(origin, *(np.zeros(size, dtype=np.uint8) for size in sizes))
    whole = sheet.cut(origin, sheet.stop)
    assert [part.nbytes for part in whole] == sizes
    for part, stop in zip(whole, np.cumsum(sizes), strict=True):
        part[:] = np.arange(stop - part.nbytes, stop)
    start = draw.draw(st.integers(0, sum(sizes)))
    stop = draw.draw(st.integers(start, sum(sizes)))
    found = b"".join(part.tobytes() for part in sheet.cut(origin + start, origin + stop))
    assert found == np.arange(start, stop, dtype=np.uint8).tobytes()


def test_a_put_replaces_the_file_of_that_name(store: Store) -> None:
    store.put("a", b"old and long")
    store.put("a", b"new")
    assert store.read("a") == b"new"


def test_a_streamed_file_appears_only_when_closed(store: Store) -> None:
    data = _data(3_000_000)
    writer = store.writer("big/file", data.nbytes)
    writer.write(0, data[:1_000_000])
    if isinstance(store, LocalStore):  # fsspec's memory:// shows files while they are open; real object stores do not
        assert not store.exists("big/file")
    writer.write(1_000_000, data[1_000_000:])
    writer.close()
    assert store.read("big/file") == data.tobytes()
    assert store.list("big") == ["file"]


def test_an_aborted_file_leaves_nothing(store: Store) -> None:
    store.put("keep", b"x")
    with pytest.raises(KeyError), store.writer("gone", 1000) as writer:
        writer.write(0, _data(500))
        raise KeyError
    assert store.list() == ["keep"]


def test_missing_and_short_files_are_named(store: Store) -> None:
    store.put("short", b"12345")
    with pytest.raises(MissingFileError, match="absent"):
        store.read("absent", 0, 4)
    with pytest.raises(MissingFileError, match="absent"):
        store.size("absent")
    with pytest.raises(FormatError, match="ends at byte 5"):
        store.read("short", 3, 9)
    assert not store.exists("absent")
    assert store.list("nowhere") == []


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a//b", "a\\b", ".", "a/\0", "a/./b"])
def test_no_path_leaves_the_store(store: Store, path: str) -> None:
    with pytest.raises(FormatError, match="does not stay inside"):
        store.put(path, b"x")
    with pytest.raises(FormatError, match="does not stay inside"):
        store.read(path, 0, 1)
    with pytest.raises(FormatError):
        safe_path(path)


def test_listing_and_removing(store: Store) -> None:
    for path in ("b", "a/x", "a/y/z"):
        store.put(path, b"1")
    assert store.list() == ["a/", "b"]
    assert store.sub("a").list() == ["x", "y/"]
    store.remove("a")
    store.remove("never there")
    assert store.list() == ["b"]
    assert not store.exists("a")


def test_an_unknown_scheme_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="nosuchscheme"):
        open_store("nosuchscheme://bucket/x")


@given(st.integers(0, 3 << 20), st.integers(0, 2 << 20), st.integers(0, 4200), st.booleans())
@settings(max_examples=40, deadline=None)
def test_local_reads_past_the_page_cache_equal_those_through_it(
    tmp_path_factory: pytest.TempPathFactory, start: int, size: int, skew: int, cold: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "cold"
    data = _data(5_500_000)
    store = LocalStore(str(folder))
    if not store.exists("f"):
        store.put("f", data.tobytes())
    if cold:
        fd = os.open(folder / "f", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    out = aligned(size + skew)[skew:]
    store.read_into("f", start, out)
    assert out.tobytes() == data[start : start + size].tobytes()


def test_local_writes_of_any_alignment_and_order(tmp_path: Path) -> None:
    data = aligned(5 * ALIGNMENT + 123)
    data[:] = _data(len(data))
    with LocalStore(str(tmp_path)).writer("f", len(data)) as writer:
        for start, stop in ((2 * ALIGNMENT, 4 * ALIGNMENT), (4 * ALIGNMENT, len(data)), (0, 100), (100, 2 * ALIGNMENT)):
            writer.write(start, data[start:stop])
    assert (tmp_path / "f").read_bytes() == data.tobytes()


@pytest.mark.parametrize("limit", [0, 5000, 100_000])
def test_what_has_reached_the_disk_leaves_the_page_cache_and_stays_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(local, "IN_FLIGHT_BYTES", limit)
    data = _data(1_000_000)
    with LocalStore(str(tmp_path)).writer("f", len(data)) as writer:
        for start in range(0, len(data), 4096):
            writer.write(start, data[start : start + 4096])
    assert (tmp_path / "f").read_bytes() == data.tobytes()


def test_an_error_of_the_disk_while_writing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells of an error in the background once: whoever waits for a range is told, and `fsync` is not again."""

    def failing(*_: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(local, "IN_FLIGHT_BYTES", 0)
    monkeypatch.setattr(local, "_sync_file_range", failing)
    with pytest.raises(StorageError, match="Input/output"), LocalStore(str(tmp_path)).writer("f", 4096) as writer:
        writer.write(0, _data(4096))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_known_before_the_first_byte(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    with pytest.raises(StorageError):
        store.writer("huge", 1 << 60)
    assert store.list() == []


def test_aligned_buffers_are_aligned() -> None:
    for size in (1, 4096, 1_000_001):
        buffer = aligned(size)
        assert buffer.ctypes.data % ALIGNMENT == 0
        assert len(buffer) == size
