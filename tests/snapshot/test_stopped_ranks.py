"""A rank that is stopped, or dies, costs the others versions that are counted, never their training."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.snapshot.keeper.test_closing import Counting, assert_holds
from tests.snapshot.rigs.jobs import Job
from ucformat.errors import RankFailedError
from ucformat.snapshot.cadence import EARLY
from ucformat.snapshot.slots import votes

LAST = 8  # the next take in which ranks meet


def train(training: Counting, steps: int) -> None:
    while training.state["step"] < steps:
        training.step()
        training.snap.deadline()


def run(rank: int, link: Connection, slots: Path) -> None:
    """One rank is stopped behind a step that all have; the other goes on alone."""
    votes.VOTE_S = 0.2
    training = Counting(str(slots), hash_every=0, mode="blocking")
    for step in range(1, EARLY + 1):
        train(training, step)
        dist.barrier()
    time.sleep(0.1)  # that all have the last one is known by now, as a rule
    if rank == 1:
        link.send(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        train(training, LAST - 1)
    else:
        train(training, LAST - 2)
        time.sleep(1.0)  # what it holds alone is withdrawn
        train(training, LAST - 1)
        time.sleep(1.0)
        link.send("alone")
    dist.barrier()
    train(training, LAST)
    training.snap.close()
    report = training.snap.report()
    link.send(([line.step for line in report.done()], report.failed))


def test_a_rank_that_is_stopped_holds_up_no_other_and_what_it_missed_is_counted_on_all(tmp_path: Path) -> None:
    job = Job(2, run, tmp_path / "slots")
    pid = job.hear(1)
    assert job.hear(0) == "alone"
    assert_holds(str(tmp_path / "slots"), EARLY, 2)  # what all have stays
    os.kill(pid, signal.SIGCONT)
    taken = [job.hear(rank) for rank in range(2)]
    job.join()
    assert taken == [([*range(1, EARLY + 1), LAST], 0)] * 2
    assert_holds(str(tmp_path / "slots"), LAST, 2)


def plan_alone(rank: int, link: Connection, slots: Path) -> None:
    """One rank is stopped before the optimizer step in which all exchange what they measured."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    training = Counting(str(slots), hash_every=0, mode="blocking", process_group=group)
    for step in range(1, EARLY + 1):
        training.step()
        if step < EARLY:
            training.snap.deadline()
            dist.barrier()
    if rank == 1:
        link.send(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
    while training.state["step"] < LAST - 1:
        training.step()
    with pytest.raises(RankFailedError):  # as asked for; skipped and counted otherwise
        training.step()
    link.send(list(training.snap.report().failures))
    signal.pause()


def test_a_rank_that_is_stopped_is_named_in_bounded_time_and_no_optimizer_step_raises_for_it(tmp_path: Path) -> None:
    job = Job(2, plan_alone, tmp_path / "slots")
    job.hear(1)
    first, *_, last = job.hear(0)
    job.kill()
    assert "planned without the other ranks" in first
    assert "rank 1" in last
