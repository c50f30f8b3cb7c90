"""A directory appears whole or not at all, also when it replaces another."""

from __future__ import annotations

import ctypes
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import ucformat
from ucformat.containers.envelope import seal
from ucformat.errors import ConflictError, ExistsError, StorageError, UnsupportedError
from ucformat.formats import beside, ownership, partial, staging
from ucformat.formats.target import WriteJob
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.open import open_store
from ucformat.storage.store import Store

SHARD, LAST = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
OTHER = "model-00002-of-00002.safetensors"  # of a checkpoint, too


def job(url: Path | str, overwrite: bool = False) -> WriteJob:
    return WriteJob(open_store(str(url)), [], lambda parts: None, overwrite=overwrite)


def publish(job: WriteJob, write: Callable[[Store], None], commit: Callable[[Store], None]) -> None:
    staging.publish(job, write, commit, last=LAST)


def put(name: str, text: str) -> Callable[[Store], None]:
    return lambda store: store.put(name, text.encode())


def fail(store: Store) -> None:
    store.put("half", b"")
    raise OSError("broken")


def test_what_is_written_is_visible_only_at_the_end(tmp_path: Path) -> None:
    def commit(store: Store) -> None:
        assert not (tmp_path / "out").exists()
        store.put(LAST, b"2")

    publish(job(tmp_path / "out"), put(SHARD, "1"), commit)
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == [SHARD, LAST]


def test_the_old_directory_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    publish(job(tmp_path / "out"), put(SHARD, "old"), put(LAST, "old"))

    def commit(store: Store) -> None:
        assert (tmp_path / "out" / SHARD).read_text() == "old"

    with pytest.raises(ExistsError):
        publish(job(tmp_path / "out"), put(SHARD, "new"), commit)
    publish(job(tmp_path / "out", overwrite=True), put(SHARD, "new"), commit)
    assert sorted(os.listdir(tmp_path / "out")) == [SHARD]
    assert (tmp_path / "out" / SHARD).read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_replacing_works_where_names_cant_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(job(tmp_path / "out"), put(SHARD, "old"), put(LAST, "old"))
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **more: object())
    publish(job(tmp_path / "out", overwrite=True), put(SHARD, "new"), put(OTHER, "new"))
    assert sorted(os.listdir(tmp_path / "out")) == [SHARD, OTHER]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("when", ["write", "commit"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, overwrite: bool, when: str) -> None:
    if overwrite:
        publish(job(tmp_path / "out"), put(SHARD, "old"), put(LAST, "old"))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(OSError, match="broken"):
        publish(job(tmp_path / "out", overwrite), *((fail, put(LAST, "new")) if when == "write" else (put(SHARD, "new"), fail)))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_what_a_killed_attempt_left_is_cleared_away(tmp_path: Path) -> None:
    attempt = beside.begin(open_store(str(tmp_path / "out")), overwrite=False)
    attempt.staging.put("half", b"half")
    attempt.claim.hold.release()  # as the end of a process does
    (tmp_path / ".out.partial").mkdir()  # not ours: no marker vouches for it
    publish(job(tmp_path / "out"), put(SHARD, "1"), put(LAST, "2"))
    assert sorted(os.listdir(tmp_path / "out")) == [SHARD, LAST]
    assert sorted(os.listdir(tmp_path)) == [".out.partial", "out"]


def test_an_empty_directory_may_stand_there_and_a_file_may_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    publish(job(tmp_path / "empty"), put(SHARD, "1"), put(LAST, "2"))
    assert sorted(os.listdir(tmp_path / "empty")) == [SHARD, LAST]
    (tmp_path / "file").write_text("text")
    with pytest.raises(StorageError, match="in the way"):
        publish(job(tmp_path / "file"), put(SHARD, "1"), put(LAST, "2"))
    assert (tmp_path / "file").read_text() == "text"


def old_model(folder: Path) -> Path:
    """A model of five shards, pickled weights and a tokenizer beside it, and files that are none of its business."""
    folder.mkdir(parents=True)
    model = [f"model-{i:05d}-of-00005.safetensors" for i in range(1, 6)]
    for name in (*model, LAST, "pytorch_model.bin", "config.json", "tokenizer.json"):
        (folder / name).write_text("old")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("old")
    for name in ("notes.txt", "README.md", "optimizer.pt", "adapter_model.safetensors"):
        (folder / name).write_text("mine")
    (folder / "logs/deep").mkdir(parents=True)
    (folder / "logs/deep/a.log").write_text("mine")
    (folder / "logs/config.json").write_text("mine")
    return folder


MINE = ["README.md", "adapter_model.safetensors", "logs/config.json", "logs/deep/a.log", "notes.txt", "optimizer.pt"]


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_replacing_keeps_files_that_are_no_part_of_the_checkpoint_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(job(old_model(tmp_path / "out"), overwrite=True), put("model.safetensors", "new"), put("config.json", "new"))
    new = {"model.safetensors": "new", "config.json": "new"}
    assert files(tmp_path / "out") == {**dict.fromkeys(MINE, "mine"), **new}
    assert os.listdir(tmp_path) == ["out"]
    assert "kept, being no part of the checkpoint that was replaced: README.md, adapter_model.safetensors, logs/" in caplog.text


def test_a_failed_replacement_leaves_every_file(tmp_path: Path) -> None:
    before = files(old_model(tmp_path / "out"))
    with pytest.raises(OSError, match="broken"):
        publish(job(tmp_path / "out", overwrite=True), put("model.safetensors", "new"), fail)
    assert files(tmp_path / "out") == before


def test_a_file_that_is_no_part_of_the_checkpoint_is_not_written_over_but_for_documents(tmp_path: Path) -> None:
    before = files(old_model(tmp_path / "out"))
    with pytest.raises(UnsupportedError, match=r"notes\.txt.*no part of the checkpoint"):
        publish(job(tmp_path / "out", overwrite=True), put(SHARD, "new"), put("notes.txt", "new"))
    assert (files(tmp_path / "out"), os.listdir(tmp_path)) == (before, ["out"])
    publish(job(tmp_path / "out", overwrite=True), put(SHARD, "new"), put("README.md", "new"))
    assert (tmp_path / "out/README.md").read_text() == "new"


def test_links_beside_a_checkpoint_stay_links_and_are_never_followed(tmp_path: Path) -> None:
    out, outside = old_model(tmp_path / "a/out"), tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("mine")
    (outside / "blob").write_text("mine")
    (out / "2_Linked").symlink_to(outside)  # looks like a part of the model, and is a link to somewhere else
    (out / "gone").symlink_to("nowhere")
    (out / "log.txt").symlink_to("../../outside/blob")
    (out / "model.safetensors").symlink_to(outside / "blob")
    publish(job(out, overwrite=True), put("model.safetensors", "new"), put(LAST, "new"))
    assert files(outside) == {"config.json": "mine", "blob": "mine"}
    assert [os.readlink(out / name) for name in ("2_Linked", "gone", "log.txt")] == [
        str(outside),
        "nowhere",
        "../../outside/blob",
    ]
    assert not (out / "model.safetensors").is_symlink()
    assert (out / "log.txt").read_text() == "mine"


def test_a_directory_that_is_named_by_a_link_is_replaced_where_it_is(tmp_path: Path) -> None:
    old_model(tmp_path / "real/out")
    (tmp_path / "link").symlink_to(tmp_path / "real/out")
    publish(job(tmp_path / "link", overwrite=True), put("model.safetensors", "new"), put("config.json", "new"))
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path / "real")) == ["out"]
    assert (tmp_path / "real/out/model.safetensors").read_text() == "new"


@pytest.mark.parametrize("done", [0, 1, 2])
def test_an_exchange_in_steps_that_was_interrupted_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    out = old_model(tmp_path / "out")
    rename, calls = os.rename, [0]

    def killed(path: str, to: str) -> None:
        calls[0] += 1
        if calls[0] > done:
            raise KeyboardInterrupt  # as abrupt as a process can be stopped from within: nothing is cleared up
        rename(path, to)

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **more: object())
    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        publish(job(out, overwrite=True), put("model.safetensors", "new"), put("config.json", "new"))
    monkeypatch.setattr(os, "rename", rename)
    publish(job(out, overwrite=True), put("model.safetensors", "newer"), put("config.json", "newer"))
    new = {"model.safetensors": "newer", "config.json": "newer"}
    assert files(out) == {**dict.fromkeys(MINE, "mine"), **new}
    assert os.listdir(tmp_path) == ["out"]


# -- object stores, which have no rename -------------------------------------------------------------------------------


@pytest.fixture
def url() -> str:
    return f"memory://test_staging/{uuid.uuid4().hex}"


def contents(url: str) -> dict[str, str]:
    store = open_store(url)
    return {name: store.read(name).decode() for name in store.list() if not name.endswith("/")}


def test_object_stores_get_the_commit_last(url: str) -> None:
    def commit(store: Store) -> None:
        assert list(open_store(url).list()) == [".partial/"]
        assert SHARD in store.list()
        store.put(LAST, b"2")

    publish(job(url), put(SHARD, "1"), commit)
    assert contents(url) == {SHARD: "1", LAST: "2"}


def test_what_is_replaced_on_an_object_store_is_there_until_the_new_one_is_complete(url: str) -> None:
    publish(job(url), put(SHARD, "old"), put(LAST, "old"))

    def commit(store: Store) -> None:
        assert contents(url) == {SHARD: "old", LAST: "old"}
        store.put("1_sub/c", b"new")

    with pytest.raises(ExistsError):
        publish(job(url), put(LAST, "new"), commit)
    publish(job(url, overwrite=True), put(LAST, "new"), commit)
    store = open_store(url)
    assert (list(store.list()), contents(url), store.read("1_sub/c")) == (["1_sub/", LAST], {LAST: "new"}, b"new")


@pytest.mark.parametrize("when", ["write", "commit"])
def test_a_failure_leaves_what_was_there_on_an_object_store(url: str, when: str) -> None:
    publish(job(url), put(SHARD, "old"), put(LAST, "old"))
    with pytest.raises(OSError, match="broken"):
        publish(job(url, overwrite=True), *((fail, put(LAST, "new")) if when == "write" else (put(SHARD, "new"), fail)))
    assert list(open_store(url).list()) == [SHARD, LAST]
    assert contents(url) == {SHARD: "old", LAST: "old"}


@pytest.mark.parametrize("broken", [SHARD, LAST])
def test_a_failure_in_the_very_switch_loses_nothing_and_says_where_it_is(
    url: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(job(url), put(SHARD, "old"), put(LAST, "old"))
    copy = FsspecStore.copy

    def copying(self: FsspecStore, path: str, to: str) -> None:
        if to == broken:
            raise StorageError(to, "broken")
        copy(self, path, to)

    monkeypatch.setattr(FsspecStore, "copy", copying)
    with pytest.raises(StorageError, match=r"broken.*run it again; the new checkpoint lies in .*\.partial"):
        publish(job(url, overwrite=True), put(SHARD, "new"), put(LAST, "new"))
    assert LAST not in contents(url)
    (token,) = [name for name in open_store(f"{url}/.partial").list() if name.endswith("/")]
    assert contents(f"{url}/.partial/{token}") == {SHARD: "new", LAST: "new"}
    assert ucformat.prune(url) == []  # the new one is whole nowhere else
    monkeypatch.undo()
    publish(job(url, overwrite=True), put(SHARD, "newer"), put(LAST, "newer"))
    assert contents(url) == {SHARD: "newer", LAST: "newer"}


def test_of_two_conversions_to_one_place_on_an_object_store_the_second_gives_way(url: str) -> None:
    def commit(store: Store) -> None:
        for overwrite in (False, True):
            with pytest.raises(ConflictError, match="may be converting to here"):
                publish(job(url, overwrite), put(SHARD, "second"), put(LAST, "second"))
        store.put(LAST, b"first")

    publish(job(url), put(SHARD, "first"), commit)
    assert contents(url) == {SHARD: "first", LAST: "first"}
    assert list(open_store(url).list()) == [SHARD, LAST]


def test_a_conversion_whose_marker_was_taken_away_puts_nothing_into_place(url: str) -> None:
    def commit(store: Store) -> None:
        store.put(LAST, b"late")
        open_store(url).remove(".partial")

    with pytest.raises(ConflictError, match="abandoned"):
        publish(job(url), put(SHARD, "late"), commit)
    assert contents(url) == {}


def test_a_conversion_that_lives_says_so_and_one_on_another_machine_is_dead_after_a_while(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "RENEW_S", 0.02)
    attempt = partial.begin(open_store(url), overwrite=False)
    folder = open_store(f"{url}/.partial")
    attempt.renewal.change(created="2020-01-01T00:00:00+00:00", machine="another")
    limit = time.monotonic() + 60
    while ownership.markers(folder)[0].age_s > 60:
        assert time.monotonic() < limit
        time.sleep(0.01)
    with pytest.raises(ConflictError):
        partial.begin(open_store(url), overwrite=False)
    attempt.renewal.stop()
    attempt.renewal.change(created="2020-01-01T00:00:00+00:00")
    partial.begin(open_store(url), overwrite=False).discard()
    with pytest.raises(ConflictError, match="abandoned"):
        attempt.finish(LAST)


def test_what_an_interrupted_conversion_staged_on_an_object_store_is_listed_and_removed_by_prune(url: str) -> None:
    begun = partial.begin(open_store(url), overwrite=False)
    begun.staging.put(SHARD, b"half")
    (living,) = ucformat.prune(url)
    assert living.in_use
    dead = msgspec.structs.replace(begun.claim.marker, process="", created="")
    open_store(f"{url}/.partial").put(dead.path, seal(msgspec.json.encode(dead)))
    (left,) = ucformat.prune(url)
    assert (left.path, left.what, left.in_use) == (url, "unfinished conversion", False)
    assert open_store(url).list() == []


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
