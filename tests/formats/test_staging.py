"""A directory appears whole or not at all, also when it replaces another."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ucformat.errors import ExistsError, StorageError
from ucformat.formats.staging import publish
from ucformat.formats.target import WriteJob
from ucformat.storage import Store, open_store


def job(url: Path | str, overwrite: bool = False) -> WriteJob:
    return WriteJob(open_store(str(url)), [], lambda parts: None, overwrite=overwrite)


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


def test_object_stores_get_the_commit_last_and_nothing_old_stays() -> None:
    url = "memory://test_staging/out"
    open_store(url).remove()

    def commit(store: Store) -> None:
        assert list(store.list()) == ["a"]
        store.put("b", b"2")

    publish(job(url), put("a", "1"), commit)
    publish(job(url, overwrite=True), put("a", "2"), lambda store: None)
    assert list(open_store(url).list()) == ["a"]
