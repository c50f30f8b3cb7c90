"""Who may remove and replace what: nothing of a user's, nothing of another writer's, and everything of a writer that is dead."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import ucformat
from tests.checkpoints import shards_of
from tests.reshard.ranks import on_ranks
from tests.scripts import Script
from ucformat import formats
from ucformat.errors import (
    ConflictError,
    ExistsError,
    MissingFileError,
    NotACheckpointError,
    StorageError,
    UcformatError,
    UnsupportedError,
)
from ucformat.formats import ownership
from ucformat.reshard.verify import verify
from ucformat.storage.local import LocalStore
from ucformat.storage.open import open_store

SIZE = 50_000


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((SIZE,), value), "b": torch.full((SIZE,), value)}


def hf_model(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    save_file({"a": torch.full((SIZE,), value), "b": torch.full((SIZE,), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def value_of(path: Path) -> float:
    """The one value that all items of a checkpoint have, once it is verified."""
    catalog = formats.open_catalog(str(path))
    assert verify(catalog).ok
    values = {float(x) for tensor in ucformat.open(str(path)).values() for x in tensor[...].unique()}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize(
    "name", ["shards/train-0.tar", "companions/x", "index.safetensors", "notes.txt", "shards.1/00000.safetensors"]
)
def test_files_that_no_marker_vouches_for_are_the_users(tmp_path: Path, name: str) -> None:
    src, out = hf_model(tmp_path / "src"), tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    with pytest.raises(ExistsError):
        ucformat.save(str(out), state(1))
    for overwrite in (False, True):
        if overwrite and name == "index.safetensors":
            continue  # a Hugging Face checkpoint, and a user who says that it may go
        with pytest.raises((ExistsError, UnsupportedError)):
            ucformat.convert(str(src), str(out), "native", overwrite=overwrite)
    assert tree(out) == {name: b"mine"}
    ucformat.prune(str(out))
    assert tree(out) == {name: b"mine"}


def test_a_path_is_a_checkpoint_or_a_run_and_never_both(tmp_path: Path) -> None:
    ucformat.save(str(tmp_path / "run"), state(1), step=1)
    with pytest.raises(ExistsError, match="steps of a run"):
        ucformat.save(str(tmp_path / "run"), state(2), overwrite=True)
    ucformat.save(str(tmp_path / "one"), state(1))
    with pytest.raises(ExistsError, match="a checkpoint itself"):
        ucformat.save(str(tmp_path / "one"), state(2), step=1)
    assert (value_of(tmp_path / "run"), value_of(tmp_path / "one")) == (1, 1)


def test_a_step_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    ucformat.save(str(tmp_path / "a"), state(1), step=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/step-00000001").symlink_to(tmp_path / "a/step-00000001")
    with pytest.raises(ExistsError, match="symbolic link"):
        ucformat.save(str(tmp_path / "b"), state(2), step=1, overwrite=True)
    ucformat.save(str(tmp_path / "b"), state(2), step=2, keep=1)
    assert (value_of(tmp_path / "a"), ucformat.steps(str(tmp_path / "b"))) == (1, [2])


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_newest_step_that_cant_be_read_is_an_error_and_no_older_one_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for step in (1, 2):
        ucformat.save(str(tmp_path), state(step), step=step)
    stat = os.stat

    def failing(path: str | int, *args: object, **more: object) -> os.stat_result:
        if "step-00000002" in str(path):
            raise OSError(code, os.strerror(code))
        return stat(path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(StorageError):
        ucformat.load(str(tmp_path))


@pytest.mark.parametrize("extra", ["shards", "step-1", "step-00000001"])
def test_a_hugging_face_folder_with_such_a_folder_beside_it_is_still_one(tmp_path: Path, extra: str) -> None:
    (hf_model(tmp_path / "hf") / extra).mkdir()
    assert formats.open_named(str(tmp_path / "hf"))[0] == "hf"


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "torchsave"])
def test_overwriting_works_where_nothing_is(tmp_path: Path, to: str) -> None:
    ucformat.convert(str(hf_model(tmp_path / "src")), str(tmp_path / "new/out.pt"), to, overwrite=True)
    assert "a" in "".join(ucformat.open(str(tmp_path / "new/out.pt")))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.pt"]


# -- several writers ---------------------------------------------------------------------------------------------------

WRITER = """
import sys, time, pathlib, torch, ucformat
from ucformat.errors import ConflictError, ExistsError
how, folder, value, overwrite = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
state = {name: torch.full((50_000,), float(value)) for name in ("a", "b")}
print("ready", flush=True)
sys.stdin.readline()
try:
    if how == "save":
        ucformat.save(str(folder / "out"), state, overwrite=overwrite)
    else:
        ucformat.convert(str(folder / ("src" + value)), str(folder / "out"), how, overwrite=overwrite, max_file_bytes=1000)
    print("ok")
except (ConflictError, ExistsError) as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("how", ["save", "native", "hf", "dcp", "torchsave"])
def test_of_several_writers_one_wins_and_its_checkpoint_is_whole(tmp_path: Path, how: str, overwrite: bool) -> None:
    for value in (1, 2, 3):
        hf_model(tmp_path / f"src{value}", value)
    if overwrite:
        if how == "save":
            ucformat.save(str(tmp_path / "out"), state(9))
        else:
            ucformat.convert(str(hf_model(tmp_path / "src9", 9)), str(tmp_path / "out"), how)
    writers = [Script(WRITER, how, tmp_path, value, overwrite) for value in (1, 2, 3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.send()
    told = [writer.end()[1] for writer in writers]
    winners = [value for value, word in zip((1, 2, 3), told, strict=True) if word == "ok"]
    assert len(winners) == 1 if not overwrite else winners, told  # with overwrite, one may begin when another is done
    assert value_of(tmp_path / "out") in winners
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("src")) == ["out"]
    if how in ("save", "native"):
        assert sorted(path.name for path in (tmp_path / "out").iterdir() if "companions" not in path.name) == sorted(
            [shards_of(tmp_path / "out").name, "ucf.json"]
        )


def _convert(folder: str, to: str) -> None:
    ucformat.convert(f"{folder}/src", f"{folder}/{to}", to, max_file_bytes=1000)


@pytest.mark.parametrize("to", ["native", "hf", "dcp", "torchsave"])
def test_all_ranks_convert_together(tmp_path: Path, to: str) -> None:
    hf_model(tmp_path / "src")
    assert not any(on_ranks(2, _convert, str(tmp_path), to))
    assert value_of(tmp_path / to) == 1


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_writer_that_was_killed_while_it_wrote_its_marker_is_in_nobodys_way(tmp_path: Path, to: str, overwrite: bool) -> None:
    ucformat.save(tmp_path / "source", state(1))
    out = tmp_path / "out"
    out.mkdir()
    (out / ".ucf.3378aa85824e.json.25fd0a718372.part").write_bytes(b'{"tok')
    ucformat.convert(tmp_path / "source", out, to, overwrite=overwrite)
    assert value_of(out) == 1
    ucformat.convert(tmp_path / "source", out, to, overwrite=True)
    assert value_of(out) == 1


DEAD = """
import sys
from ucformat.formats import ownership
from ucformat.storage.open import open_store
import msgspec
print(msgspec.json.encode(ownership.begin(open_store("memory://x"), "save", token=sys.argv[1]).marker).decode())
"""


@pytest.mark.parametrize("kind", ["save", "convert"])
def test_where_there_are_no_locks_a_living_writers_marker_is_no_other_writers_to_take(kind: str) -> None:
    store = open_store(f"memory://test_ownership/{uuid.uuid4().hex}")
    assert not store.holds
    claim = ownership.begin(store, kind)
    assert ownership.claim(store, claim.marker) is None
    (found,) = ownership.markers(store)
    assert ownership.claim(store, found) is None
    (left,) = ucformat.prune(store.url)
    assert left.in_use
    assert claim.intact()


def test_where_there_are_no_locks_a_dead_writers_marker_is_taken_at_once_and_another_machines_after_hours() -> None:
    store = open_store(f"memory://test_ownership/{uuid.uuid4().hex}")
    token = ownership.new_token()
    done = subprocess.run([sys.executable, "-c", DEAD, token], capture_output=True, text=True, check=True)
    dead = msgspec.json.decode(done.stdout, type=ownership.Marker)
    store.put(dead.path, b"")
    assert ownership.claim(store, dead) is not None
    elsewhere = msgspec.structs.replace(dead, machine="another")
    assert ownership.claim(store, elsewhere) is None
    for hours, taken in ((1, False), (7, True)):
        created = (datetime.now(timezone.utc) - timedelta(hours=hours)).isoformat(timespec="seconds")
        store.put(dead.path, b"")
        assert (ownership.claim(store, msgspec.structs.replace(elsewhere, created=created)) is not None) == taken


def test_a_marker_says_who_wrote_it_where_and_when(tmp_path: Path) -> None:
    marker = ownership.begin(open_store(str(tmp_path)), "save").marker
    assert (marker.machine, marker.process) == (ownership.this_machine(), ownership.this_process())
    assert marker.age_s < 60
    assert not ownership.has_ended(marker.process)


def test_a_writer_that_is_killed_while_it_writes_a_marker_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    link = os.link

    def watched(*args: Any, **more: Any) -> None:
        seen.append(os.listdir(tmp_path))
        link(*args, **more)

    monkeypatch.setattr(os, "link", watched)
    ownership.begin(open_store(str(tmp_path)), "save")
    assert seen == [[]]


def test_a_zombie_does_no_harm_to_the_checkpoint_of_its_successor(tmp_path: Path) -> None:
    """Stopped in the middle of a save, continued when another process has saved the same step."""
    code = TORN.format(signal="SIGSTOP")
    with subprocess.Popen([sys.executable, "-c", code, "save", str(tmp_path), "7"], stdout=subprocess.PIPE, text=True) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WSTOPPED | os.WNOWAIT)
        ucformat.save(str(tmp_path / "out"), state(3))
        before = tree(tmp_path / "out")
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.communicate(timeout=120)[0].strip() == "ConflictError"
    assert value_of(tmp_path / "out") == 3
    assert {name: data for name, data in before.items() if "ucf.json" in name}.items() <= tree(tmp_path / "out").items()
    assert len(list((tmp_path / "out").iterdir())) == 2


# -- writers that are killed -------------------------------------------------------------------------------------------

TORN = """
import os, signal, sys, pathlib, torch, ucformat
from ucformat.errors import UcformatError
from ucformat.storage import atomic, local
how, folder, left = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
def counted(function):
    def call(*args, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.{signal})
        return function(*args, **more)
    return call
for name in ("open", "unlink", "rename", "replace", "link", "rmdir", "fsync", "mkdir"):
    setattr(os, name, counted(getattr(os, name)))
atomic._renameat2 = counted(atomic._renameat2)
try:
    if how == "save":
        state = {{name: torch.full((50_000,), 2.0) for name in ("a", "b")}}
        ucformat.save(str(folder / "out"), state, overwrite=(folder / "out/ucf.json").exists())
    else:
        ucformat.convert(str(folder / "src2"), str(folder / "out"), how, overwrite=(folder / "out").exists())
    print("ok", left)
except UcformatError as error:
    print(type(error).__name__)
"""


def run_torn(how: str, folder: Path, calls: int) -> tuple[int, str]:
    return Script(TORN.format(signal="SIGKILL"), how, folder, calls).end()


def save_again(folder: Path) -> None:
    ucformat.save(str(folder / "out"), state(3), overwrite=(folder / "out/ucf.json").exists())


def convert_again(to: str) -> Callable[[Path], object]:
    return lambda folder: ucformat.convert(str(folder / "src3"), str(folder / "out"), to, overwrite=(folder / "out").exists())


@pytest.mark.parametrize("old", ["", "same", "hf"])
@pytest.mark.parametrize("how", ["save", "native", "hf", "torchsave"])
def test_what_a_killed_writer_left_is_removed_by_the_next_and_the_old_one_stays_whole(tmp_path: Path, how: str, old: str) -> None:
    if (how in ("save", "torchsave") and old == "hf") or (how == "hf" and old == "same"):
        pytest.skip("not replaced, or the same as another case")
    for value in (1, 2, 3):
        hf_model(tmp_path / f"src{value}", value)
    total: int | None = None
    for calls in (10_000, 2, 6, 11, 17, 24):
        folder = tmp_path / str(calls)
        folder.mkdir()
        for value in (1, 2, 3):
            (folder / f"src{value}").symlink_to(tmp_path / f"src{value}")
        if old:
            kind = "native" if how == "save" else "hf" if old == "hf" else how
            ucformat.convert(str(folder / "src1"), str(folder / "out"), kind)
        code, said = run_torn(how, folder, calls)
        if calls == 10_000:
            total = calls - int(said.split()[1])
            assert (code, value_of(folder / "out")) == (0, 2)
            continue
        assert total is not None
        assert code == (-signal.SIGKILL if calls <= total else 0)
        if old or (folder / "out").exists():
            try:
                assert value_of(folder / "out") in ((1, 2) if old else (2,))
            except (NotACheckpointError, MissingFileError):  # the latter where the folder is empty still
                assert not old
        (save_again if how == "save" else convert_again(how))(folder)
        assert value_of(folder / "out") == 3
        left = {path.name for path in folder.iterdir() if not path.name.startswith("src")}
        assert left == {"out"}, f"killed at call {calls} of {total}"
        if how in ("save", "native"):
            kinds = sorted(path.name.partition(".")[0] for path in (folder / "out").iterdir())
            assert kinds in (["shards", "ucf"], ["companions", "shards", "ucf"]), f"killed at call {calls} of {total}"


def test_what_killed_saves_left_in_a_run_is_removed_by_its_next_save_and_by_prune(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = tmp_path / f"run/step-{step:08d}"
        folder.mkdir(parents=True)
        assert run_torn("save", tmp_path, 12)[0] == -signal.SIGKILL
        folder.rmdir()
        (tmp_path / "out").rename(folder)
    listed = ucformat.prune(str(tmp_path / "run"), dry_run=True)
    assert [(Path(item.path).name, item.what, item.in_use) for item in listed] == [
        (f"step-{step:08d}", "unfinished save", False) for step in (1, 2)
    ]
    assert listed[0].nbytes > SIZE * 4
    (tmp_path / "run/step-00000002/notes.txt").write_text("mine")
    ucformat.prune(str(tmp_path / "run"))
    assert tree(tmp_path / "run") == {"step-00000002/notes.txt": b"mine"}
    (tmp_path / "run/step-00000002/notes.txt").unlink()
    assert run_torn("save", tmp_path, 12)[0] == -signal.SIGKILL
    (tmp_path / "out").rename(tmp_path / "run/step-00000003")
    ucformat.save(str(tmp_path / "run"), state(4), step=4)
    assert not (tmp_path / "run/step-00000003").exists()


def test_prune_leaves_what_a_living_process_writes(tmp_path: Path) -> None:
    code = TORN.format(signal="SIGSTOP")
    with subprocess.Popen([sys.executable, "-c", code, "save", str(tmp_path), "12"], stdout=subprocess.PIPE, text=True) as writer:
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
        assert [item.in_use for item in ucformat.prune(str(tmp_path / "out"))] == [True]
        os.kill(writer.pid, signal.SIGCONT)
        assert writer.communicate(timeout=120)[0].startswith("ok")
    assert value_of(tmp_path / "out") == 2


def test_a_failed_save_removes_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = LocalStore.put_if_absent

    def full(self: LocalStore, path: str, data: bytes, part: str = "") -> bool:
        if path == "ucf.json":
            raise StorageError(path, "no space left on device")
        return put(self, path, data, part)

    monkeypatch.setattr(LocalStore, "put_if_absent", full)
    with pytest.raises(StorageError, match="no space left"):
        ucformat.save(str(tmp_path / "run"), state(1), step=1)
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_what_fails_after_the_commit_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ucformat.save(str(tmp_path), state(1), step=1)

    def broken(self: LocalStore, path: str = "") -> None:
        raise StorageError(path, "input/output error")

    monkeypatch.setattr(LocalStore, "remove", broken)
    ucformat.save(str(tmp_path), state(2), step=2, keep=1)
    assert "step 2 is committed, but tidying up failed" in caplog.text
    monkeypatch.undo()
    assert value_of(tmp_path) == 2
    ucformat.prune(str(tmp_path), keep=1)
    assert ucformat.steps(str(tmp_path)) == [2]
    assert sorted(path.name.partition(".")[0] for path in (tmp_path / "step-00000002").iterdir()) == ["shards", "ucf"]


# -- readers beside writers --------------------------------------------------------------------------------------------

OVERWRITER = """
import sys, torch, ucformat
print("ready", flush=True)
for value in range(25):
    state = {name: torch.full((50_000,), float(value)) for name in ("a", "b")}
    ucformat.save(sys.argv[1], state, **({"overwrite": True} if sys.argv[2] == "overwrite" else {"step": value + 1, "keep": 1}))
"""


@pytest.mark.parametrize("how", ["overwrite", "keep"])
def test_a_reader_beside_a_writer_always_finds_a_whole_checkpoint(tmp_path: Path, how: str) -> None:
    ucformat.save(str(tmp_path / "x"), state(-1), step=None if how == "overwrite" else 0)
    writer = Script(OVERWRITER, tmp_path / "x", how)
    assert writer.stdout.readline() == "ready\n"
    seen = set()
    while writer.process.is_alive():
        found = ucformat.load(str(tmp_path / "x"))
        values = {float(x) for name in ("a", "b") for x in found[name].unique()}  # type: ignore[attr-defined]
        assert len(values) == 1
        seen |= values
    assert writer.wait() == 0
    assert seen
    assert issubclass(ConflictError, UcformatError)
