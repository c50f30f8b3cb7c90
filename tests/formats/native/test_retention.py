"""What is removed is what was asked for: never what was just saved, never half of a checkpoint, never somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.checkpoints import write_native
from ucformat.errors import StorageError
from ucformat.formats import native
from ucformat.storage.local import LocalStore

STEPS = st.sets(st.integers(0, 60), min_size=1)


def save(run: Path, *steps: int) -> None:
    for step in steps:
        write_native(run / native.step_name(step), {"w": torch.full((3,), float(step))})


@settings(deadline=None)
@given(STEPS, st.data(), st.integers(1, 5), st.none() | st.integers(1, 7))
def test_what_was_just_saved_stays_with_the_k_before_it_and_every_nth(
    steps: set[int], data: st.DataObject, keep: int, every: int | None
) -> None:
    saved = data.draw(st.sampled_from(sorted(steps)))
    passed = data.draw(st.sets(st.sampled_from(sorted(steps)))) - {saved}
    gone = native.expired(steps, saved, keep, every, passed)
    left = sorted(steps - set(gone))
    assert gone == sorted(gone)
    assert saved in left
    assert all(step in left for step in steps if step > saved)
    counted = sorted(step for step in steps if step <= saved and step not in passed)
    assert set(counted[-keep:]) <= set(left)
    assert all(every is None or step % every for step in gone)
    assert native.expired(left, saved, keep, every, passed) == []
    if not passed:
        past = [step for step in left if step <= saved]
        assert all(step in past[-keep:] or (every is not None and step % every == 0) for step in past)


def test_pruned_steps_are_gone_and_the_others_open(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40, 50)
    assert native.prune_steps(LocalStore(str(tmp_path)), 40, 2, 20) == [10]
    assert ucformat.steps(str(tmp_path)) == [20, 30, 40, 50]
    for step in ucformat.steps(str(tmp_path)):
        assert ucformat.open(str(tmp_path), step=step)["w"][0].item() == step


class Interrupted(LocalStore):
    """A store that fails after some removals."""

    left = 0

    def remove(self, path: str = "") -> None:
        if Interrupted.left == 0:
            raise StorageError(self.url, "interrupted")
        Interrupted.left -= 1
        super().remove(path)

    def sub(self, path: str) -> Interrupted:
        return Interrupted(self._full(path))


@pytest.mark.parametrize("after", range(4))
def test_an_interrupted_removal_leaves_a_whole_step_or_none_and_is_finished_later(tmp_path: Path, after: int) -> None:
    save(tmp_path, 10, 20)
    Interrupted.left = after
    with pytest.raises(StorageError, match="interrupted"):
        native.remove_step(Interrupted(str(tmp_path)), 10)
    assert ucformat.steps(str(tmp_path)) == ([20] if after else [10, 20])
    native.clear_steps(LocalStore(str(tmp_path)))
    assert (tmp_path / native.step_name(10)).exists() == (not after)
    assert ucformat.open(str(tmp_path), step=20)["w"][0].item() == 20


def test_a_step_that_is_a_link_is_removed_as_a_link(tmp_path: Path) -> None:
    save(tmp_path / "a", 10)
    save(tmp_path / "b", 20)
    (tmp_path / "b" / native.step_name(10)).symlink_to(tmp_path / "a" / native.step_name(10))
    assert native.prune_steps(LocalStore(str(tmp_path / "b")), 20, 1) == [10]
    assert ucformat.steps(str(tmp_path / "b")) == [20]
    assert ucformat.open(str(tmp_path / "a"))["w"][0].item() == 10


def test_a_removed_step_leaves_files_that_are_not_of_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / native.step_name(10) / "notes.txt").write_text("mine")
    assert native.remove_step(LocalStore(str(tmp_path)), 10)
    assert [path.name for path in (tmp_path / native.step_name(10)).iterdir()] == ["notes.txt"]
