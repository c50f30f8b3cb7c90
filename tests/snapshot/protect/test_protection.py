"""Versions are protected while training goes on, and outlive any one host: real ranks, each a host of its own."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.reshard.ranks import on_ranks
from tests.snapshot.rigs.parts import Part
from ucformat.group import current
from ucformat.snapshot.restore import Restored
from ucformat.snapshot.snapshotter import Snapshotter


def start(place: Path, hosts: str, dim: int, group: dist.ProcessGroup | None = None, **options: Any) -> tuple[Part, Snapshotter]:
    ours = current(group)
    part = Part(ours, dim)
    directory = str(place / hosts[ours.rank])
    return part, Snapshotter(part.state, directory=directory, interface="lo", process_group=group, **options)


def protect_some(part: Part, snap: Snapshotter, first: int, count: int) -> int:
    """Train until this rank has protected `count` more versions; the last step."""
    step, wanted = first, snap.report().protected + count
    for step in range(first, first + 3000):
        part.train(snap, step)
        time.sleep(0.02)
        enough = [None] * dist.get_world_size(snap.group.process_group)
        dist.all_gather_object(enough, snap.report().protected >= wanted, snap.group.process_group)
        if all(enough):
            return step
    return step


def protect_each(part: Part, snap: Snapshotter, first: int, count: int) -> int:
    """Train steps, and wait after each until all ranks have protected it; the last step."""
    room, limit = snap._room, time.monotonic() + 90
    assert room is not None
    snap.deadline()
    room.protect_until(limit)
    room.hear_until(limit)  # nothing is in hand
    for step in range(first, first + count):
        part.train(snap, step)
        snap.deadline()
        while snap.report().restorable != step:
            assert time.monotonic() < limit, snap.report()
            time.sleep(0.01)
    return first + count - 1


def story(folder: str) -> dict[str, Any]:
    """What this rank saw."""
    place, rank, told = Path(folder), dist.get_rank(), dict[str, Any]()
    three = dist.new_group([0, 1, 2])
    part, snap = start(place, "abcd", 0, protect="xor")
    part.train(snap, 1)
    room = snap._room
    assert room is not None
    assert room.protector is not None
    told["started"] = room.protector.await_start(0)
    last = protect_some(part, snap, 2, 3)
    if rank == 1:  # a process that dies is started again, and protects what comes
        os.kill(pid(), signal.SIGKILL)
    last = protect_some(part, snap, last + 1, 3)
    dist.barrier()
    last = protect_each(part, snap, last + 1, 3)
    snap.close()
    told["report"] = snap.report()
    told["restarts"] = room.protector.restarts
    told["steps"] = sorted(path.name for path in (place / "abcd"[rank]).rglob("parity-*.json"))
    dist.barrier()
    if rank == 3:
        shutil.rmtree(place / "d")
    dist.barrier()
    if rank < 3:
        part, snap = start(place, "cab", 1, three, protect="mirror")
        found = snap.restore()
        told["restored"] = found
        told["right"] = found is not None and part.is_of(found.step)
        assert found is not None
        told["last"] = last
        protect_some(part, snap, last + 1, 4)
        snap.close()
        told["folders"] = sorted(path.name for path in (place / "cab"[rank]).iterdir() if path.is_dir())
        dist.barrier(three)
        part, snap = start(place, "cab", 0, three)
        again = snap.restore()
        told["again"] = (again, again is not None and part.is_of(again.step))
    dist.barrier()
    return told


def pid() -> int:
    """Of the process that protects this rank's versions."""
    children: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(parent) == os.getpid() and b"snapshot.protect.process" in command:
                children.append(entry.name)
    return int(children[0])


Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return on_ranks(4, story, str(tmp_path_factory.mktemp("hosts")))


def test_versions_are_protected_on_every_rank_while_training_goes_on(told: Told) -> None:
    for rank in told:
        assert rank["report"].protected >= 6
        assert rank["report"].failed == 0


def test_no_version_is_taken_before_the_process_that_protects_it_has_started(told: Told) -> None:
    assert [rank["started"] for rank in told] == [True] * 4


def test_a_process_that_dies_is_replaced_and_costs_versions_only(told: Told) -> None:
    assert [rank["restarts"] for rank in told] == [0, 1, 0, 0]


def test_the_newest_protected_version_outlives_a_lost_host_on_other_ranks(told: Told) -> None:
    for rank in told[:3]:
        found = rank["restored"]
        assert isinstance(found, Restored)
        assert (found.source, found.verified, found.computed, rank["right"]) == ("memory", True, (3,), True)
        assert found.step == rank["last"]  # all ranks had protected it: nothing is lost


def test_new_ranks_protect_their_own_versions_and_what_was_there_before_goes(told: Told) -> None:
    for rank, number in zip(told[:3], range(3), strict=True):
        assert rank["folders"] == [f"rank-{number:05d}"]
        again, right = rank["again"]
        assert (again.source, again.computed, right) == ("memory", (), True)
