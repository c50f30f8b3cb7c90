"""Ranks of several hosts restore from one another's memory, as other ranks on other hosts."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import ucformat
from tests.reshard.ranks import on_ranks
from tests.snapshot.rigs.parts import Part
from ucformat.errors import NotACheckpointError
from ucformat.group import current
from ucformat.snapshot.keeper.handoff import Persist
from ucformat.snapshot.restore import Restored
from ucformat.snapshot.snapshotter import Snapshotter

HOSTS = ("a", "b", "c")


def start(
    place: Path, hosts: str, dim: int, group: dist.ProcessGroup | None = None, *, stored: bool = True
) -> tuple[Part, Snapshotter]:
    """`hosts` names each rank's host."""
    ours = current(group)
    part = Part(ours, dim)
    directory = str(place / hosts[ours.rank])
    persist = Persist(str(place / "run"), every=1000) if stored else None
    return part, Snapshotter(part.state, directory=directory, hash_every=0, persist=persist, interface="lo", process_group=group)


def folders(place: Path, host: str) -> list[str]:
    return sorted(path.name for path in (place / host).iterdir() if path.is_dir())


def story(folder: str) -> list[tuple[str, Restored | str | None, bool]]:
    """What this rank restored in each chapter, and whether every bit was right."""
    place, rank, told = Path(folder), dist.get_rank(), list[tuple[str, Restored | str | None, bool]]()
    three = dist.new_group([0, 1, 2])

    part, snap = start(place, "aabc", 0)
    told.append(("nothing", snap.restore(), part.is_of(0)))
    part.train(snap, 4)
    ucformat.save(str(place / "run"), part.state, step=4)
    part.train(snap, 5, 6)
    snap.close()
    assert snap.report().failed == 0

    part, snap = start(place, "bcaa", 1)  # every rank on another host, the tensor cut the other way
    told.append(("moved", snap.restore(), part.is_of(6)))
    part.train(snap, 7, 8)
    snap.close()

    if rank < 3:
        part, snap = start(place, "cab", 0, three)
        told.append(("fewer", snap.restore(), part.is_of(8)))
        for step in range(9, 30):
            part.train(snap, step)
            time.sleep(0.02)
        snap.close()
        told.append(("folders", " ".join(name for host in HOSTS for name in folders(place, host)), True))
        dist.barrier(three)
        if rank == 0:
            shutil.rmtree(place / "b")
        dist.barrier(three)
        try:
            start(place, "cab", 0, three, stored=False)[1].restore()
        except NotACheckpointError as error:
            told.append(("all lost", str(error), True))
        part, snap = start(place, "cab", 0, three)
        told.append(("lost", snap.restore(), part.is_of(4)))
    dist.barrier()
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Restored | str | None, bool]]]:
    place = str(tmp_path_factory.mktemp("hosts"))
    return [{name: (found, right) for name, found, right in rank} for rank in on_ranks(4, story, place)]


Told = list[dict[str, tuple[Restored | str | None, bool]]]


def test_where_no_host_holds_anything_nothing_is_restored(told: Told) -> None:
    assert [rank["nothing"] for rank in told] == [(None, True)] * 4


def test_ranks_on_other_hosts_and_of_another_layout_restore_from_memory(told: Told) -> None:
    for rank in told:
        found, right = rank["moved"]
        assert isinstance(found, Restored)
        assert (found.step, found.source, found.passed_over, right) == (6, "memory", (), True)


def test_fewer_ranks_restore_from_all_hosts(told: Told) -> None:
    for rank in told[:3]:
        found, right = rank["fewer"]
        assert isinstance(found, Restored)
        assert (found.step, found.source, right) == (8, "memory", True)


def test_it_is_said_which_host_served_how_many_bytes(told: Told) -> None:
    found = told[0]["moved"][0]
    assert isinstance(found, Restored)
    assert all(isinstance(rank["moved"][0], Restored) and rank["moved"][0].served == found.served for rank in told)
    peers = [name for name in found.served if name.startswith("peer://127.0.0.1:")]
    assert len(peers) == 3
    assert {"this host", *peers} == set(found.served)
    assert sum(found.served.values()) >= Part(current(), 0).tensor.nbytes


def test_what_ranks_left_on_hosts_where_they_no_longer_run_is_removed(told: Told) -> None:
    for rank in told[:3]:
        assert rank["folders"][0] == "rank-00001 rank-00002 rank-00000"


def test_a_host_that_is_lost_costs_the_version_and_that_is_said(told: Told) -> None:
    for rank in told[:3]:
        found, right = rank["lost"]
        assert isinstance(found, Restored)
        assert (found.step, found.source, right) == (4, "storage", True)
        assert set(found.served) == {"storage"}
        assert any("ranks 2 have no directory on any of 3 hosts" in why for why in found.passed_over)


def test_a_lost_host_without_storage_is_an_error_that_says_so(told: Told) -> None:
    for rank in told[:3]:
        assert "ranks 2 have no directory on any of 3 hosts" in str(rank["all lost"][0])
