"""What the local disk does beyond what every store does (see `test_stores`)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucformat.errors import ConflictError, StorageError
from ucformat.storage import atomic, local, page_cache
from ucformat.storage.local import ALIGNMENT, LocalStore, aligned
from ucformat.storage.open import open_store
from ucformat.storage.store import Bytes, Sheet


def _data(size: int) -> Bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


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
    monkeypatch.setattr(page_cache, "_sync_file_range", failing)
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
