"""What ranks learn of one another's versions: the same everywhere, and never by waiting."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.reshard.ranks import on_ranks
from tests.snapshot.rigs.jobs import PATIENCE_S, Job
from ucformat.group import Group, current
from ucformat.snapshot.slots import votes
from ucformat.snapshot.slots.votes import BATCH, VersionOutcome, VersionVotes

VERSIONS = 40


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def hear(peers: VersionVotes, count: int) -> list[VersionOutcome]:
    fates: list[VersionOutcome] = []

    def enough() -> bool:
        fates.extend(peers.hear())
        return len(fates) >= count

    until(enough)
    return fates


def holds(rank: int, step: int) -> bool:
    return random.Random(f"{rank} {step}").random() < 0.8


def exchange() -> list[VersionOutcome]:
    rank, peers = dist.get_rank(), VersionVotes(current())
    chance = random.Random(rank)
    for step in range(VERSIONS):
        time.sleep(chance.choice([0.0, 0.002]))
        peers.tell(step, held=holds(rank, step))
        peers.tell(step, held=not holds(rank, step))  # as when a version that is held is reported on afterwards
    fates = hear(peers, VERSIONS)
    peers.close()
    assert peers.trouble == ""
    return fates


def test_a_version_is_whole_when_all_ranks_hold_it_and_all_ranks_learn_the_same() -> None:
    expected = [VersionOutcome(step, all(holds(rank, step) for rank in range(3))) for step in range(VERSIONS)]
    assert {fate.whole for fate in expected} == {True, False}
    assert on_ranks(3, exchange) == [expected] * 3


def late(flag: str) -> None:
    peers = VersionVotes(current())
    if dist.get_rank() == 0:
        for step in (1, 2, 3):
            peers.tell(step, held=True)
        assert peers.hear() == []
        Path(flag).touch()  # rank 1 says nothing before it sees this
    else:
        until(Path(flag).exists)
        for step in (1, 2, 3):
            peers.tell(step, held=True)
    assert hear(peers, 3) == [VersionOutcome(step, True) for step in (1, 2, 3)]
    peers.close()


def test_nobody_waits_for_a_rank_that_is_late(tmp_path: Path) -> None:
    on_ranks(2, late, str(tmp_path / "flag"))


def lonely(rank: int, link: Connection) -> None:
    peers = VersionVotes(current())
    peers.tell(1, held=True)
    hear(peers, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    peers.tell(2, held=True)
    fates: list[VersionOutcome] = []
    while not peers.trouble:
        fates += peers.hear()
        time.sleep(0.001)
    peers.tell(3, held=True)
    fates += peers.hear()
    peers.close()  # waits for nobody
    link.send((fates, peers.trouble))


def test_without_a_rank_that_died_no_fate_is_made_up_and_nothing_raises_or_waits() -> None:
    job = Job(2, lonely)
    fates, trouble = job.hear(0)
    job.kill()
    assert fates == []
    assert trouble == "1 of 2 ranks have said so far what became of step 2"


def stopped(rank: int, link: Connection) -> None:
    votes.VOTE_S = 0.5
    peers = VersionVotes(current())
    peers.tell(1, held=True)
    fates = hear(peers, 1)
    if rank == 1:
        link.send("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    for step in (2, 3):
        peers.tell(step, held=True)
        fates += hear(peers, 1)
    link.send(fates)
    peers.close()


def test_a_version_on_which_a_rank_says_nothing_for_long_is_withdrawn_on_all_ranks() -> None:
    job = Job(2, stopped)
    assert job.hear(1) == "stopping"
    fates = [VersionOutcome(1, True), VersionOutcome(2, False), VersionOutcome(3, False)]
    assert job.hear(0) == fates  # the other one is stopped all the while
    pid = job.ranks[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    assert job.hear(1) == fates
    job.join()


SERVER = """
import datetime, sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_that_does_not_answer_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(votes, "SILENT_S", 0.1)
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), timeout=timedelta(seconds=PATIENCE_S))
        booth = votes._Booth(2, store)
        booth.tell(1, held=True)
        store.add("1", votes.VOTED + votes.HELD)  # the other rank
        until(lambda: booth.hear(fresh=True) == [VersionOutcome(1, True)])
        server.send_signal(signal.SIGSTOP)
        booth.tell(2, held=True)
        assert booth.hear(fresh=True) == []
        until(lambda: "does not answer" in booth.trouble())
        booth.tell(3, held=True)
        assert booth.hear(fresh=True) == []
        booth.close()
        assert not booth.waits()
        server.kill()


def apart() -> tuple[list[VersionOutcome], str]:
    peers = VersionVotes(current())
    peers.tell(4 + dist.get_rank(), held=True)
    dist.barrier()
    fates = peers.hear()
    peers.tell(6, held=True)
    fates += hear(peers, 2)
    return fates, peers.trouble


def test_a_version_that_only_some_ranks_took_is_lost() -> None:
    for rank, (fates, trouble) in enumerate(on_ranks(2, apart)):
        assert fates == [VersionOutcome(4 + rank, False), VersionOutcome(6, True)]
        assert trouble == ""


def tidy(rank: int, link: Connection) -> None:
    """Many versions, and a second job after the first in the same store."""
    left: list[int] = []
    for _ in range(2):
        peers = VersionVotes(current())
        for step in range(5 * BATCH):
            peers.tell(step, held=True)
            assert hear(peers, 1) == [VersionOutcome(step, True)]
        dist.barrier()
        store = peers._booth._store
        assert store is not None
        left = [step for step in range(5 * BATCH) if store.check([str(step)])]
        dist.barrier()
        peers.close()
    link.send(left)


def test_the_store_does_not_grow_with_the_number_of_versions() -> None:
    job = Job(2, tidy)
    left = [job.hear(rank) for rank in range(2)]
    job.join()
    assert left[0] == left[1]
    assert len(left[0]) < 2 * BATCH


def halves() -> list[VersionOutcome]:
    """Two jobs in one world, at different times, each in a group of its own."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group = current(groups[rank % 2])
    time.sleep(0.2 * (rank % 2))
    peers = VersionVotes(group)
    peers.tell(1, held=rank != 3)
    fates = hear(peers, 1)
    peers.close()
    return fates


def test_ranks_outside_the_group_have_no_say() -> None:
    assert on_ranks(4, halves) == [[VersionOutcome(1, rank % 2 == 0)] for rank in range(4)]


def test_a_single_rank_knows_at_once() -> None:
    peers = VersionVotes(Group())
    peers.tell(1, held=True)
    peers.tell(2, held=False)
    assert peers.hear() == [VersionOutcome(1, True), VersionOutcome(2, False)]
    peers.tell(1, held=False)
    peers.tell(2, held=True)
    assert peers.hear() == []
    peers.close()


def watching(flag: str) -> None:
    """A rank that has not told of a version yet learns that another one lacks it, and may say of later ones that it does."""
    peers = VersionVotes(current())
    if dist.get_rank() == 0:
        peers.watch(1)
        peers.tell(2, held=False)
        peers.watch(3)
        Path(flag).touch()
        assert hear(peers, 2) == [VersionOutcome(1, False), VersionOutcome(2, False)]
        peers.tell(1, held=False)
        peers.tell(3, held=True)
    else:
        until(Path(flag).exists)
        for step in (1, 2, 3):
            peers.tell(step, held=step > 1)
        assert hear(peers, 2) == [VersionOutcome(1, False), VersionOutcome(2, False)]
    assert hear(peers, 1) == [VersionOutcome(3, True)]
    assert peers.hear() == []
    peers.close()


def test_what_another_rank_lacks_is_known_before_this_one_has_told(tmp_path: Path) -> None:
    on_ranks(2, watching, str(tmp_path / "flag"))
