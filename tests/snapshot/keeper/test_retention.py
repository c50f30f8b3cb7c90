"""What is removed is what was asked for: never the newest, never half of a committed one, never somebody else's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ucformat
from tests.checkpoints import write_native
from ucformat.errors import StorageError
from ucformat.formats import native
from ucformat.formats.native.manifest import MANIFEST
from ucformat.snapshot.keeper.retention import clear_abandoned, doomed, prune, tidy
from ucformat.storage.local import LocalStore

STEPS = st.sets(st.integers(0, 60), min_size=1)


def save(run: Path, *steps: int) -> None:
    for step in steps:
        write_native(run / native.step_name(step), {"w": torch.full((3,), float(step))})


@given(STEPS, st.data(), st.integers(1, 5), st.none() | st.integers(1, 7))
def test_the_newest_k_and_every_nth_stay(steps: set[int], data: st.DataObject, keep: int, every: int | None) -> None:
    newest = data.draw(st.sampled_from(sorted(steps)))
    gone = doomed(steps, newest, keep, every)
    left = sorted(steps - set(gone))
    assert gone == sorted(gone)
    assert newest in left
    assert all(step in left for step in steps if step > newest)
    past = sorted(step for step in steps if step <= newest)
    assert past[-keep:] == [step for step in left if step <= newest][-len(past[-keep:]) :]
    assert all(step in past[-keep:] or (every is not None and step % every == 0) for step in left if step <= newest)
    assert all(every is None or step % every for step in gone)
    assert doomed(left, newest, keep, every) == []
    assert doomed(steps, newest, None, every) == []


def test_pruned_versions_are_gone_and_the_others_open(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40, 50)
    run = LocalStore(str(tmp_path))
    assert prune(run, 40, 2, 20) == [10]
    assert ucformat.steps(str(tmp_path)) == [20, 30, 40, 50]
    assert prune(run, 40, None, None) == []
    for step in ucformat.steps(str(tmp_path)):
        assert ucformat.open(str(tmp_path), step=step)["w"][0].item() == step


class Interrupted(LocalStore):
    """A store that fails to remove whole directories."""

    def remove(self, path: str = "") -> None:
        if not path:
            raise StorageError(self.url, "interrupted")
        super().remove(path)

    def sub(self, path: str) -> Interrupted:
        return Interrupted(self._full(path))


def test_an_interrupted_removal_leaves_nothing_that_opens_and_is_finished_later(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    with pytest.raises(StorageError, match="interrupted"):
        prune(Interrupted(str(tmp_path)), 20, 1, None)
    assert ucformat.steps(str(tmp_path)) == [20]
    assert (tmp_path / native.step_name(10)).exists()
    assert clear_abandoned(LocalStore(str(tmp_path)), 20) == {10}
    assert not (tmp_path / native.step_name(10)).exists()


def test_only_what_keepers_abandoned_is_cleared(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 50)
    run = LocalStore(str(tmp_path))
    (tmp_path / native.step_name(20) / MANIFEST).unlink()  # a save of the user, under way
    run.put("step-00000011/parts/run-1/00000.json", b"{}")
    run.put("step-00000012/shards/00001-run-1.safetensors.part", b"")
    run.put("step-00000013/parts/run-1/00000.json", b"{}")
    run.put("step-00000060/parts/run-1/00000.json", b"{}")
    run.put("other/parts/run-1/00000.json", b"{}")
    assert clear_abandoned(run, 50, but={13}) == {10, 11, 12, 20}
    left = ["other/", *(f"{native.step_name(step)}/" for step in (10, 13, 20, 50, 60))]
    assert list(run.list()) == left
    shutil.rmtree(tmp_path / native.step_name(13))
    assert clear_abandoned(run, 50, but={10, 11, 12, 20}) == set()


def test_a_committed_version_is_left_with_what_its_record_lists(tmp_path: Path) -> None:
    save(tmp_path, 10)
    store = LocalStore(str(tmp_path / native.step_name(10)))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    store.put("shards/00007-run-0.safetensors", b"")
    store.put("parts/run-1/00000.json", b"{}")
    tidy(store, [shard.file for shard in native.read_record(store).shards])
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
