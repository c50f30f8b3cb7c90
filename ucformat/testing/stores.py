"""What every store must do, and that it has the capabilities that it claims."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ucformat.errors import ConflictError, FormatError, MissingFileError, StorageError, UnsupportedError
from ucformat.storage.store import Bytes, Store


def data(size: int) -> Bytes:
    """Bytes that look like nothing, the same ones for each size."""
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


class StoreTests:
    """Subclass this, and override `make`."""

    keeps_folders: bool = False
    """Whether a folder without files may still be listed: object stores that keep folders do that for a while."""

    def make(self, tmp_path: Path) -> Store:
        """An empty store, which no other test uses. It may lie anywhere."""
        raise NotImplementedError("override make() in the subclass")

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return self.make(tmp_path)

    # -- bytes ----------------------------------------------------------------------------------------------------------

    def test_what_was_put_is_read_back_in_any_range(self, store: Store) -> None:
        whole = data(100_000).tobytes()
        store.put("folder/file.bin", whole)
        assert store.size("folder/file.bin") == len(whole)
        assert store.read("folder/file.bin") == whole
        for start, stop in ((0, len(whole)), (1, 2), (99_999, 100_000), (5000, 5000), (4096, 8192)):
            assert store.read("folder/file.bin", start, stop) == whole[start:stop]
        with store.reader("folder/file.bin") as reader:
            out = np.empty(10, dtype=np.uint8)
            for start in (0, 777):
                reader.read_into(start, out)
                assert out.tobytes() == whole[start : start + 10]

    def test_consecutive_bytes_are_read_into_many_buffers(self, store: Store) -> None:
        whole = data(10_000)
        store.put("f", whole.tobytes())
        for sizes in ([5], [0, 7, 0], [1] * 2500, [3000, 1, 4096, 2]):
            parts = [np.zeros(size, dtype=np.uint8) for size in sizes]
            with store.reader("f") as reader:
                reader.read_parts(17, parts)
            assert np.concatenate(parts).tobytes() == whole[17 : 17 + sum(sizes)].tobytes()
        with pytest.raises(FormatError, match="ends at byte 10000"), store.reader("f") as reader:
            reader.read_parts(9_000, [np.zeros(999, dtype=np.uint8), np.zeros(2, dtype=np.uint8)])

    def test_many_threads_read_at_once(self, store: Store) -> None:
        whole = data(50_000).tobytes()
        store.put("f", whole)
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda at: store.read("f", at, at + 1000), range(0, 49_000, 1000)))
        assert b"".join(found) == whole[:49_000]

    def test_a_put_replaces_the_file_of_that_name(self, store: Store) -> None:
        store.put("a", b"old and long")
        store.put("a", b"new")
        assert store.read("a") == b"new"

    def test_missing_and_short_files_are_named(self, store: Store) -> None:
        store.put("short", b"12345")
        with pytest.raises(MissingFileError, match="absent"):
            store.read("absent", 0, 4)
        with pytest.raises(MissingFileError, match="absent"):
            store.size("absent")
        with pytest.raises(FormatError, match="ends at byte 5"):
            store.read("short", 3, 9)
        assert not store.exists("absent")
        assert store.list("nowhere") == []

    # -- files that are written piece by piece -----------------------------------------------------------------------------

    def test_a_streamed_file_is_whole_once_it_is_closed(self, store: Store) -> None:
        whole = data(3_000_000)
        store.put("big/file", b"old")
        writer = store.writer("big/file", whole.nbytes)
        writer.write(0, whole[:1_000_000])
        if store.appears_whole:
            assert store.read("big/file") == b"old", "appears_whole: what it replaces is there until it is closed"
        writer.write(1_000_000, whole[1_000_000:])
        writer.close()
        assert store.read("big/file") == whole.tobytes()
        assert store.list("big") == ["file"]

    def test_what_may_be_written_in_any_order_and_from_any_thread_is(self, store: Store) -> None:
        whole = data(1_000_000)
        with store.writer("f", whole.nbytes) as writer:
            starts = range(0, whole.nbytes, 100_000)
            calls: list[Callable[[], None]] = [lambda at=at: writer.write(at, whole[at : at + 100_000]) for at in starts]  # type: ignore[misc]
            if writer.ordered:
                for call in calls:
                    call()
            else:
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(lambda call: call(), reversed(calls)))
        assert store.read("f") == whole.tobytes()

    def test_an_aborted_file_leaves_nothing(self, store: Store) -> None:
        store.put("keep", b"x")
        with pytest.raises(KeyError), store.writer("gone", 1000) as writer:
            writer.write(0, data(500))
            raise KeyError
        assert store.list() == ["keep"]
        with pytest.raises(KeyError), store.writer("keep", 1000) as writer:
            writer.write(0, data(500))
            raise KeyError
        if store.appears_whole:
            assert store.read("keep") == b"x"

    def test_a_copy_has_the_same_bytes(self, store: Store) -> None:
        whole = data(9_000_001).tobytes()
        store.put("a/x", whole)
        store.copy("a/x", "b/y")
        assert (store.read("b/y"), store.read("a/x")) == (whole, whole)
        with pytest.raises((MissingFileError, StorageError)):
            store.copy("a/none", "b/z")
        assert store.list("b") == ["y"]

    # -- directories -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a//b", "a\\b", ".", "a/\0", "a/./b"])
    def test_no_path_leaves_the_store(self, store: Store, path: str) -> None:
        with pytest.raises(FormatError, match="does not stay inside"):
            store.put(path, b"x")
        with pytest.raises(FormatError, match="does not stay inside"):
            store.read(path, 0, 1)

    def test_listing_and_removing(self, store: Store) -> None:
        for path in ("b", "a/x", "a/y/z"):
            store.put(path, b"1")
        assert store.list() == ["a/", "b"]
        assert store.sub("a").list() == ["x", "y/"]
        assert store.sub("a").read("y/z") == b"1"
        assert (store.is_folder("a"), store.is_folder("b"), store.exists("a/x")) == (True, False, True)
        store.remove("a")
        store.remove("never there")
        assert list(store.files("a")) == []
        assert self.keeps_folders or (store.list() == ["b"] and not store.exists("a"))

    def test_files_and_the_folders_that_they_leave_empty_are_removed(self, store: Store) -> None:
        for path in ("a/x", "a/y/z", "b/k"):
            store.put(path, b"1")
        store.remove_files(["a/x", "a/y/z"])
        assert list(store.files()) == ["b/k"]
        assert self.keeps_folders or store.list() == ["b/"]
        store.remove_folder("b")
        assert list(store.files()) == ["b/k"], "a folder that is not empty stays"

    def test_all_files_below_a_directory_are_listed(self, store: Store) -> None:
        for path in ("a", "b/c", "b/d/e"):
            store.put(path, b"")
        found = (list(store.files()), list(store.files("b")), list(store.files("none")))
        assert found == (["a", "b/c", "b/d/e"], ["b/c", "b/d/e"], [])

    # -- what happens in one step ------------------------------------------------------------------------------------------

    def test_a_file_is_created_only_where_none_is(self, store: Store) -> None:
        assert store.put_if_absent("ucf.json", b"first")
        assert not store.put_if_absent("ucf.json", b"second")
        assert store.read("ucf.json") == b"first"
        assert store.list() == ["ucf.json"]

    def test_a_file_is_replaced_only_where_it_is_still_the_known_one(self, store: Store) -> None:
        assert not store.put_if_unchanged("ucf.json", b"b", b"a")
        assert store.list() == []
        store.put("ucf.json", b"a")
        assert not store.put_if_unchanged("ucf.json", b"c", b"b")
        assert not store.put_if_unchanged("ucf.json", b"c", b"")
        assert store.put_if_unchanged("ucf.json", b"b", b"a")
        assert store.read("ucf.json") == b"b"
        assert store.list() == ["ucf.json"]

    def test_of_several_that_commit_at_once_one_does(self, store: Store) -> None:
        if not store.excludes:
            return
        with ThreadPoolExecutor(4) as pool:
            first = list(pool.map(lambda n: store.put_if_absent("ucf.json", str(n).encode()), range(4)))
            assert first.count(True) == 1
            assert store.read("ucf.json") == str(first.index(True)).encode()
            before = store.read("ucf.json")
            second = list(pool.map(lambda n: store.put_if_unchanged("ucf.json", f"next {n}".encode(), before), range(4)))
        assert second.count(True) == 1
        assert store.read("ucf.json") == f"next {second.index(True)}".encode()

    def test_names_change_in_one_step_where_it_renames(self, store: Store) -> None:
        for path in ("one/x", "two/y"):
            store.put(path, path.encode())
        if not store.renames:
            for call in (store.rename, store.replace, store.exchange, store.link):
                with pytest.raises(UnsupportedError):
                    call("one", "three")
            return
        store.rename("one", "three")
        assert list(store.files()) == ["three/x", "two/y"]
        with pytest.raises(ConflictError):
            store.rename("two", "three")
        store.link("two/y", "two/again")
        store.replace("three/x", "two/y")
        assert (store.read("two/y"), store.read("two/again")) == (b"one/x", b"two/y")
        assert store.identity("two/y") != store.identity("two/again")

    def test_an_identity_tells_a_file_from_the_one_that_took_its_name(self, store: Store) -> None:
        assert store.identity("f") is None
        store.put("f", b"one")
        before = store.identity("f")
        assert store.identity("f") == before
        store.put("f", b"two")
        assert before is None or store.identity("f") != before

    def test_what_is_held_is_not_claimed(self, store: Store) -> None:
        store.put("mark", b"")
        hold = store.hold("mark")
        assert hold.intact()
        if store.holds:
            assert store.claim("mark") is None
        hold.release()
        hold.release()
        claim = store.claim("mark")
        assert claim is not None
        assert claim.intact()
        store.remove("mark")
        assert not (store.holds and claim.intact())
        claim.release()
