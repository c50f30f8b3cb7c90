"""A job that goes back to an older step begins another history: what it took of the one that it left is never restored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ucformat
from tests.reshard.ranks import on_ranks
from tests.snapshot.keeper.test_closing import Counting
from ucformat.formats.snapshot import rank_name
from ucformat.snapshot.keeper.handoff import Persist
from ucformat.snapshot.restore import Restored
from ucformat.snapshot.slots.restart_fence import Fence, write_fence
from ucformat.snapshot.snapshotter import Snapshotter

OTHER = 100.0  # weights of the second history begin here


def train(training: Counting, steps: int) -> None:
    for _ in range(steps):
        training.step()
        training.snap.deadline()


def go_back(training: Counting, step: int) -> None:
    with torch.no_grad():
        training.weight.fill_(OTHER)
    training.state["step"] = step


def restored(place: Path, persist: Persist | None = None) -> tuple[Restored, float]:
    """What a process that starts now would go on from. It is not this place that is touched."""
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    training = Counting(str(copy), persist=persist)
    found = training.snap.restore()
    training.snap.close()
    shutil.rmtree(copy)
    assert found is not None
    return found, float(training.weight.detach()[0, 0])


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("how", ["same engine", "new engine", "one step"])
def test_versions_of_a_history_that_was_left_are_not_restored(
    tmp_path: Path, how: str, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    place, base = tmp_path / "slots", 5 if how == "one step" else 3
    training = Counting(str(place), slots=slots, hash_every=0, mode="blocking")
    train(training, 6)
    assert restored(place)[1] == -6
    if how == "new engine":
        training.snap.close()
        training = Counting(str(place), slots=slots, hash_every=0, mode="blocking")
    go_back(training, base)
    for step in range(base + 1, 9):
        train(training, 1)
        found, weight = restored(place)
        assert (found.step, weight) == (step, OTHER - (step - base))
        assert ucformat.open(str(place)).step == step
    training.snap.close()
    report = training.snap.report()
    assert (report.failed, report.went_back) == (0, [] if how == "new engine" else [base + 1])
    assert caplog.text.count("earlier ones are abandoned") == len(report.went_back)


def test_a_step_that_is_taken_twice_without_an_update_is_an_error_and_the_first_stays(tmp_path: Path) -> None:
    training = Counting(str(tmp_path / "slots"), hash_every=0)
    train(training, 2)
    training.snap.take(3)
    with pytest.raises(ValueError, match="taken already"):
        training.snap.take(3)
    training.snap.close()
    assert training.snap.report().went_back == []


def test_steps_in_storage_that_the_job_has_gone_back_from_are_not_preferred_to_memory(tmp_path: Path) -> None:
    place, persist = tmp_path / "slots", Persist(str(tmp_path / "run"), every=3)
    training = Counting(str(place), persist=persist, slots=3)
    train(training, 6)
    training.snap.close()
    assert ucformat.steps(persist.url) == [3, 6]
    training = Counting(str(place), persist=persist, slots=3)
    go_back(training, 3)
    train(training, 2)
    found, weight = restored(place, persist)
    assert (found.step, found.source, weight) == (5, "memory", OTHER - 2)
    assert "step 6 in storage was saved before the job went back" in found.passed_over
    train(training, 4)
    training.snap.close()
    report = training.snap.report()
    assert (report.persisted, report.persist_failed) == ([9], 1)
    assert "step 6" in report.failures[0]
    assert "committed already" in report.failures[0]
    assert ucformat.latest(persist.url) == 9
    shutil.rmtree(place)
    again = Snapshotter(training.state, directory=str(place), persist=persist).restore()
    assert again is not None
    assert (again.step, float(training.weight.detach()[0, 0])) == (9, OTHER - 6)


def test_a_clock_that_was_set_back_makes_no_version_an_abandoned_one(tmp_path: Path) -> None:
    """A job that is started without `restore`, after one that had restored step 1 when the clock was ahead."""
    place = tmp_path / "slots"
    training = Counting(str(place), hash_every=0, mode="blocking")
    train(training, 1)
    training.snap.close()
    write_fence(str(place / rank_name(0)), Fence("before", 1, "9999-01-01T00:00:00.000000+00:00"))
    training = Counting(str(place), hash_every=0, mode="blocking")
    go_back(training, 1)
    train(training, 2)
    training.snap.close()
    found, weight = restored(place)
    assert (found.step, weight) == (3, OTHER - 2)


def both_go_back(place: str) -> list[tuple[int | None, float]]:
    training = Counting(place, hash_every=0, mode="blocking")
    seen: list[tuple[int | None, float]] = []
    for step in range(1, 8):
        if step == 5:
            go_back(training, 1)
        train(training, 1)
        dist.barrier()
        found = ucformat.open(place)
        seen.append((found.step, float(found[f"model/{training.name}"][0, 0])))
        dist.barrier()
    training.snap.close()
    assert training.snap.report().failed == 0
    return seen


def test_ranks_go_back_together(tmp_path: Path) -> None:
    first = [(step, -float(step)) for step in range(1, 5)]
    then = [(step, OTHER - (step - 1)) for step in range(2, 5)]
    assert on_ranks(2, both_go_back, str(tmp_path / "slots")) == [first + then] * 2
