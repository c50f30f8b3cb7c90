"""Storage: one conformance suite that every store passes, and what the local disk does beyond it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.s3.bucket import Server, serving
from ucformat.errors import ConflictError, FormatError, MissingFileError, StorageError
from ucformat.storage import atomic, local
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.local import ALIGNMENT, LocalStore, aligned
from ucformat.storage.open import open_store
from ucformat.storage.store import Bytes, Sheet, Store, safe_path

StoreMaker = Callable[[], Store]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(params=["local", "memory", "s3", "s3fs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """`s3fs` stands for the object stores that fsspec serves: it is the one that can run against a real server here."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}")
    server: Server = request.getfixturevalue("server")
    url = f"{server.bucket}/{uuid.uuid4().hex}"
    return open_store(url) if request.param == "s3" else FsspecStore.open(url)


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
    if store.appears_whole or isinstance(store, LocalStore):  # fsspec's memory:// shows files while they are open
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
    assert not list(store.files("a"))
    if isinstance(store, FsspecStore) and store.appears_whole:
        return  # this server keeps folders for a while that others never had
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


# -- what happens in one step -------------------------------------------------------------------------------------------


def test_a_file_is_created_only_where_none_is(store: Store) -> None:
    assert store.put_if_absent("ucf.json", b"first")
    assert not store.put_if_absent("ucf.json", b"second")
    assert store.read("ucf.json") == b"first"
    assert store.list() == ["ucf.json"]


def test_a_file_is_replaced_only_where_it_is_still_the_known_one(store: Store) -> None:
    assert not store.put_if_unchanged("ucf.json", b"b", b"a")
    assert store.list() == []
    store.put("ucf.json", b"a")
    assert not store.put_if_unchanged("ucf.json", b"c", b"b")
    assert not store.put_if_unchanged("ucf.json", b"c", b"")
    assert store.put_if_unchanged("ucf.json", b"b", b"a")
    assert store.read("ucf.json") == b"b"
    assert store.list() == ["ucf.json"]


def test_a_copy_has_the_same_bytes(store: Store) -> None:
    data = _data(9_000_001).tobytes()
    store.put("a/x", data)
    store.copy("a/x", "b/y")
    assert (store.read("b/y"), store.read("a/x")) == (data, data)
    with pytest.raises((MissingFileError, StorageError)):
        store.copy("a/none", "b/z")
    assert store.list("b") == ["y"]


def test_all_files_below_a_directory_are_listed(store: Store) -> None:
    for path in ("a", "b/c", "b/d/e"):
        store.put(path, b"")
    assert (list(store.files()), list(store.files("b")), list(store.files("none"))) == (
        ["a", "b/c", "b/d/e"],
        ["b/c", "b/d/e"],
        [],
    )


RACE = """
import sys
from ucformat.storage.open import open_store
store, name, known = open_store(sys.argv[1]), sys.argv[2].encode(), sys.argv[3].encode()
while not store.exists("go"):
    pass
print(store.put_if_unchanged("ucf.json", name, known) if known else store.put_if_absent("ucf.json", name))
"""


@pytest.mark.parametrize("known", ["", "old"])
def test_of_many_processes_that_commit_at_once_exactly_one_does(tmp_path: Path, known: str) -> None:
    store = open_store(str(tmp_path))
    if known:
        store.put("ucf.json", known.encode())
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    racers = [subprocess.Popen([*command, str(n), known], stdout=subprocess.PIPE, text=True) for n in range(4)]
    store.put("go", b"")
    told = [racer.communicate(timeout=120)[0].strip() for racer in racers]
    assert sorted(told) == ["False", "False", "False", "True"]
    assert store.read("ucf.json") == str(told.index("True")).encode()
    assert store.list() == ["go", "ucf.json"]


@pytest.mark.parametrize("missing", ["link", "rename", "lock"])
def test_without_links_or_locks_a_file_is_still_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    if missing == "rename":
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **more: object())
    if missing == "lock":
        monkeypatch.setattr(fcntl, "flock", refuse)
    store = open_store(str(tmp_path))
    assert store.put_if_absent("x", b"1")
    assert not store.put_if_absent("x", b"2")
    assert not store.put_if_unchanged("x", b"3", b"2")
    assert store.put_if_unchanged("x", b"3", b"1")
    assert (store.read("x"), store.list()) == (b"3", ["x"])


@pytest.mark.parametrize("modern", [True, False])
def test_a_name_that_is_taken_is_never_given_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modern: bool) -> None:
    if not modern:
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **more: object())
    store = open_store(str(tmp_path))
    for name in ("new/x", "old/x", "file", "other"):
        store.put(name, name.encode())
    (tmp_path / "empty").mkdir()
    for one, taken in (("new", "old"), ("new", "file"), ("file", "other"), ("file", "old")):
        with pytest.raises((ConflictError, StorageError)):
            store.rename(one, taken)
    store.rename("new", "empty")
    store.rename("file", "free")
    assert store.list() == ["empty/", "free", "old/", "other"]
    assert store.read("empty/x") == b"new/x"


def test_a_removal_never_follows_a_link(tmp_path: Path) -> None:
    other, store = tmp_path / "other", open_store(str(tmp_path / "store"))
    (other / "shards").mkdir(parents=True)
    (other / "shards/0").write_text("mine")
    store.put("kept", b"")
    for removed in ("step", "step/shards", "step/shards/0"):
        (tmp_path / "store/step").symlink_to(other)
        assert store.is_link("step")
        store.remove(removed)
        assert store.list() == ["kept"]
    assert (other / "shards/0").read_text() == "mine"


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_new_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        store = open_store(str(tmp_path))
        store.put("a", b"")
        store.put_if_absent("b", b"")
        store.put_if_unchanged("b", b"1", b"")
        store.writer("c", 0).close()
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "abc"} == {mode}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_cant_be_looked_at_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*args: object, **more: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "stat", fail)
    monkeypatch.setattr(os, "scandir", fail)
    store = open_store(str(tmp_path))
    for look in (store.exists, store.list, store.size):
        with pytest.raises(StorageError):
            look("x")


HOLDER = """
import sys, time
from ucformat.storage.open import open_store
hold = open_store(sys.argv[1]).hold("mark")
print("held", flush=True)
time.sleep(600)
"""


def test_a_hold_ends_with_its_process_and_only_then(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("mark", b"")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with_us = store.hold("mark")
        assert store.claim("mark") is None
        with_us.release()
        assert store.claim("mark") is None
        holder.kill()
    claim = store.claim("mark")
    assert claim is not None
    assert claim.intact()
    store.remove("mark")
    assert not claim.intact()
    claim.release()
    claim.release()


def test_a_name_that_cant_be_made_durable_is_there_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(atomic, "sync_directory", fail)
    assert open_store(str(tmp_path)).put_if_absent("ucf.json", b"1")
    assert "this directory could not be synced" in caplog.text
