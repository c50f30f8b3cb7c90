"""Starting a job again: it goes on from the newest version that all its ranks had, whoever they are now, and from no other."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ucformat
from tests.checkpoints import flip
from tests.reshard.ranks import assert_same
from tests.snapshot.rigs.jobs import Job, Training, truth
from tests.snapshot.rigs.slotfill import pieces, take
from ucformat.containers.file_image import ByteRequest
from ucformat.errors import SnapshotInUseError
from ucformat.formats.snapshot import HeldShard, rank_name, survey
from ucformat.reshard.reading.fill import TensorFill
from ucformat.snapshot.slots import restart_fence
from ucformat.snapshot.slots.restart_fence import Fence, abandon, read_fence
from ucformat.snapshot.slots.slot_set import SlotSet
from ucformat.storage.open import open_store


@pytest.fixture
def truths(tmp_path: Path) -> Path:
    """What each step held; a step that is taken again replaces the one that was abandoned."""
    (tmp_path / "truths").mkdir()
    return tmp_path / "truths"


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    return tmp_path / "slots"


def fail_from(step: int, training: Training) -> None:
    """This rank keeps no version from a step on."""
    copy = TensorFill.__call__

    def fails(self: TensorFill, parts: Sequence[ByteRequest]) -> None:
        if training.state["step"] >= step:
            raise OSError("this copy fails")
        copy(self, parts)

    TensorFill.__call__ = fails  # type: ignore[method-assign]


def run(
    rank: int,
    link: Connection,
    truths: Path,
    slots: Path,
    dim: int,
    seed: int,
    steps: int,
    failing: tuple[int, int] | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """Restore, and tell what; train to a step, each version kept before the next begins; tell so, and wait to be killed."""
    training = Training(truths, slots, dim, seed, **{"hash_every": 0, **(options or {})})
    restored = training.snap.restore()
    link.send((restored, training.state["step"], training.tensors()))
    if failing is not None and failing[0] == rank:
        fail_from(failing[1], training)
    while training.state["step"] < steps:
        training.step()
        training.snap.deadline()
        while options is not None and "hash_every" in options and mine(slots, rank)[0].record.table_digest is None:
            time.sleep(0.01)
        dist.barrier()
    link.send((training.snap.report().taken, training.snap.report().failed))
    signal.pause()


def mine(slots: Path, rank: int) -> list[HeldShard]:
    return [held for version in survey(open_store(str(slots)))[0] for held in version.held if held.record.rank == rank]


def go(job: Job, expected: int | None, truths: Path) -> list[tuple[int, int]]:
    """Every rank restores this step, bit for bit, and then trains as it was told; versions taken and failed on each."""
    for rank in range(len(job.ranks)):
        restored, step, tensors = job.hear(rank)
        assert (restored and restored.step, step) == (expected, expected or 0)
        if expected is not None:
            assert restored.source == "memory"
            assert_same(tensors, truth(truths, expected))
    return [job.hear(rank) for rank in range(len(job.ranks))]


def on_disk(slots: Path) -> dict[int, list[int]]:
    """Steps that each rank's directory holds."""
    found: dict[int, list[int]] = {}
    for version in survey(open_store(str(slots)))[0]:
        for held in version.held:
            found.setdefault(held.record.rank, []).append(version.step)
    return {rank: sorted(steps) for rank, steps in found.items()}


def test_four_ranks_that_were_killed_go_on_as_two_of_another_layout_from_memory(truths: Path, slots: Path) -> None:
    job = Job(4, run, truths, slots, 0, 1, 5)
    assert go(job, None, truths) == [(5, 0)] * 4
    job.kill()

    job = Job(2, run, truths, slots, 1, 2, 5)  # dies before it has taken anything: nothing is lost
    assert go(job, 5, truths) == [(0, 0)] * 2
    job.kill()
    assert sorted(path.name for path in slots.iterdir() if path.is_dir()) == [rank_name(rank) for rank in range(4)]

    job = Job(2, run, truths, slots, 1, 3, 6, (1, 6))  # one of the two has taken step 6: the old slots are all there is
    assert go(job, 5, truths) == [(1, 0), (0, 1)]
    job.kill()
    assert {rank: steps[-1] for rank, steps in on_disk(slots).items()} == {0: 6, 1: 5, 2: 5, 3: 5}

    job = Job(2, run, truths, slots, 1, 4, 8)
    assert go(job, 5, truths) == [(3, 0)] * 2
    job.kill()
    assert sorted(path.name for path in slots.iterdir() if path.is_dir()) == [rank_name(0), rank_name(1)]
    assert on_disk(slots) == {0: [7, 8], 1: [7, 8]}
    assert len(list(slots.rglob("*.safetensors"))) == 4

    job = Job(2, run, truths, slots, 1, 5, 8)
    assert go(job, 8, truths) == [(0, 0)] * 2
    job.kill()


def test_what_was_taken_after_the_restored_step_is_forgotten_and_never_mixed_in(truths: Path, slots: Path) -> None:
    job = Job(2, run, truths, slots, 0, 1, 10, (1, 9), {"slots": 3})
    (taken, failed), other = go(job, None, truths)
    assert other == (8, 2)
    assert (taken in (8, 9, 10), failed) == (True, 0)  # less, as soon as it is known that the other rank lacks a version
    job.kill()
    assert on_disk(slots)[0][-1] == 10
    assert on_disk(slots)[1][-1] == 8
    first = truth(truths, 10)

    job = Job(2, run, truths, slots, 0, 2, 9, (0, 9), {"slots": 3})  # now the other rank alone has step 9
    assert go(job, 8, truths) == [(0, 1), (1, 0)]
    job.kill()
    assert on_disk(slots)[0][-1] == 8
    assert on_disk(slots)[1][-1] == 9

    job = Job(2, run, truths, slots, 0, 3, 10, None, {"slots": 3})
    assert go(job, 8, truths) == [(2, 0)] * 2
    job.kill()
    assert any(bool((truth(truths, 10)[name] != tensor).any()) for name, tensor in first.items())

    job = Job(2, run, truths, slots, 0, 4, 10, None, {"slots": 3})
    assert go(job, 10, truths) == [(0, 0)] * 2
    job.kill()


def test_a_whole_version_that_is_damaged_is_left_behind_for_good(truths: Path, slots: Path) -> None:
    options = {"slots": 3, "hash_every": 1}
    job = Job(2, run, truths, slots, 0, 1, 10, None, options)
    assert go(job, None, truths) == [(10, 0)] * 2
    job.kill()
    damaged = mine(slots, 1)[0]
    assert damaged.record.step == 10
    flip(slots / damaged.path, damaged.record.data_start)

    job = Job(2, run, truths, slots, 0, 2, 10, None, options)
    assert go(job, 9, truths) == [(1, 0)] * 2
    job.kill()
    job = Job(2, run, truths, slots, 0, 3, 10, None, options)
    assert go(job, 10, truths) == [(0, 0)] * 2
    job.kill()


# -- abandoning ----------------------------------------------------------------------------------------------------------


def test_versions_newer_than_the_fence_are_forgotten_those_of_former_ranks_too(slots: Path) -> None:
    for rank in (0, 1, 2):
        with SlotSet.create(slots, rank, 3, pieces(rank, 3), 3) as held:
            for step in (4, 5, 6):
                take(held, pieces(rank, 3), step)
    new = Fence("new", 4)
    assert abandon(str(slots), 0, range(2), new) == [5, 5, 6, 6]
    assert on_disk(slots) == {0: [4], 1: [4, 5, 6], 2: [4]}
    assert [read_fence(str(slots / rank_name(rank))) for rank in range(3)] == [new, None, new]
    assert abandon(str(slots), 1, range(2), new) == [5, 6]
    assert ucformat.open(str(slots)).step == 4
    with SlotSet.create(slots, 0, 3, pieces(0, 3), 3) as held:
        take(held, pieces(0, 3), 5)
        assert held.steps == [4, 5]


def test_slots_that_a_living_job_fills_are_not_abandoned(slots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_fence, "BESIDE_S", 0.0)
    with SlotSet.create(slots, 0, 1, pieces()) as held:
        take(held, pieces(), 6)
        with pytest.raises(SnapshotInUseError):
            abandon(str(slots), 0, range(1), Fence("other", 4))
        assert held.steps == [6]
        assert ucformat.open(str(slots)).step == 6
