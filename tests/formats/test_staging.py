"""A directory appears whole or not at all, also when it replaces another."""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ucformat.errors import ExistsError, StorageError
from ucformat.formats import staging
from ucformat.formats.target import WriteJob
from ucformat.objectstore import FsspecStore
from ucformat.storage import Store, open_store


def job(url: Path | str, overwrite: bool = False) -> WriteJob:
    return WriteJob(open_store(str(url)), [], lambda parts: None, overwrite=overwrite)


def publish(job: WriteJob, write: Callable[[Store], None], commit: Callable[[Store], None]) -> None:
    staging.publish(job, write, commit, last="b")


def put(name: str, text: str) -> Callable[[Store], None]:
    return lambda store: store.put(name, text.encode())


def fail(store: Store) -> None:
    store.put("half", b"")
    raise OSError("broken")


def test_what_is_written_is_visible_only_at_the_end(tmp_path: Path) -> None:
    def commit(store: Store) -> None:
        assert not (tmp_path / "out").exists()
        store.put("b", b"2")

    publish(job(tmp_path / "out"), put("a", "1"), commit)
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "b"]


def test_the_old_directory_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    publish(job(tmp_path / "out"), put("a", "old"), put("b", "old"))

    def commit(store: Store) -> None:
        assert (tmp_path / "out/a").read_text() == "old"

    with pytest.raises(ExistsError):
        publish(job(tmp_path / "out"), put("a", "new"), commit)
    publish(job(tmp_path / "out", overwrite=True), put("a", "new"), commit)
    assert sorted(os.listdir(tmp_path / "out")) == ["a"]
    assert (tmp_path / "out/a").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_replacing_works_where_names_cant_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(job(tmp_path / "out"), put("a", "old"), put("b", "old"))
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **more: object())
    publish(job(tmp_path / "out", overwrite=True), put("a", "new"), put("c", "new"))
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "c"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("when", ["write", "commit"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, overwrite: bool, when: str) -> None:
    if overwrite:
        publish(job(tmp_path / "out"), put("a", "old"), put("b", "old"))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(OSError, match="broken"):
        publish(job(tmp_path / "out", overwrite), *((fail, put("b", "new")) if when == "write" else (put("a", "new"), fail)))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_what_a_killed_attempt_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/half").write_text("half")
    publish(job(tmp_path / "out"), put("a", "1"), put("b", "2"))
    assert sorted(os.listdir(tmp_path / "out")) == ["a", "b"]
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_directory_may_stand_there_and_a_file_may_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    publish(job(tmp_path / "empty"), put("a", "1"), put("b", "2"))
    assert sorted(os.listdir(tmp_path / "empty")) == ["a", "b"]
    (tmp_path / "file").write_text("text")
    with pytest.raises(StorageError, match="in the way"):
        publish(job(tmp_path / "file"), put("a", "1"), put("b", "2"))
    assert (tmp_path / "file").read_text() == "text"


# -- object stores, which have no rename -------------------------------------------------------------------------------


@pytest.fixture
def url() -> str:
    return f"memory://test_staging/{uuid.uuid4().hex}"


def contents(url: str) -> dict[str, str]:
    store = open_store(url)
    return {name: store.read(name).decode() for name in store.list() if not name.endswith("/")}


def test_object_stores_get_the_commit_last(url: str) -> None:
    def commit(store: Store) -> None:
        assert list(store.list()) == ["a"]
        store.put("b", b"2")

    publish(job(url), put("a", "1"), commit)
    assert contents(url) == {"a": "1", "b": "2"}


def test_what_is_replaced_on_an_object_store_is_there_until_the_new_one_is_complete(url: str) -> None:
    publish(job(url), put("a", "old"), put("b", "old"))

    def commit(store: Store) -> None:
        assert contents(url) == {"a": "old", "b": "old"}
        store.put("sub/c", b"new")

    with pytest.raises(ExistsError):
        publish(job(url), put("b", "new"), commit)
    publish(job(url, overwrite=True), put("b", "new"), commit)
    store = open_store(url)
    assert (list(store.list()), contents(url), store.read("sub/c")) == (["b", "sub/"], {"b": "new"}, b"new")


@pytest.mark.parametrize("when", ["write", "commit"])
def test_a_failure_leaves_what_was_there_on_an_object_store(url: str, when: str) -> None:
    publish(job(url), put("a", "old"), put("b", "old"))
    with pytest.raises(OSError, match="broken"):
        publish(job(url, overwrite=True), *((fail, put("b", "new")) if when == "write" else (put("a", "new"), fail)))
    assert list(open_store(url).list()) == ["a", "b"]
    assert contents(url) == {"a": "old", "b": "old"}


@pytest.mark.parametrize("broken", ["a", "b"])
def test_a_failure_in_the_very_switch_loses_nothing_and_says_where_it_is(
    url: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(job(url), put("a", "old"), put("b", "old"))
    copy = FsspecStore.copy

    def copying(self: FsspecStore, path: str, to: str) -> None:
        if to == broken:
            raise StorageError(to, "broken")
        copy(self, path, to)

    monkeypatch.setattr(FsspecStore, "copy", copying)
    with pytest.raises(StorageError, match=r"broken.*the new checkpoint is complete in .*\.partial"):
        publish(job(url, overwrite=True), put("a", "new"), put("b", "new"))
    assert "b" not in contents(url)
    assert contents(f"{url}/.partial") == {"a": "new", "b": "new"}
    monkeypatch.undo()
    publish(job(url, overwrite=True), put("a", "newer"), put("b", "newer"))
    assert contents(url) == {"a": "newer", "b": "newer"}


def test_a_file_is_replaced_only_when_the_new_one_is_complete(url: str, tmp_path: Path) -> None:
    for store in (open_store(url), open_store(str(tmp_path))):
        store.put("x.pt", b"old")
        with pytest.raises(OSError, match="broken"), staging.replacing(store, "x.pt", 3) as writer:
            writer.write(0, np.frombuffer(b"ne", dtype=np.uint8))
            raise OSError("broken")
        assert (list(store.list()), store.read("x.pt")) == (["x.pt"], b"old")
        with staging.replacing(store, "x.pt", 3) as writer:
            writer.write(0, np.frombuffer(b"new", dtype=np.uint8))
        assert (list(store.list()), store.read("x.pt")) == (["x.pt"], b"new")
