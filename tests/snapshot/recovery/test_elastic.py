"""Processes that outlive their process group: they leave it, form another, and restore from one another's memory."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ucformat
from tests.scripts import forked
from tests.snapshot.rigs.parts import Layered
from ucformat.group import current
from ucformat.snapshot.keeper import client

WORLD = 4
VICTIMS = (3, 0)  # one after the other
PATIENCE_S = 90.0
TIMEOUT = timedelta(seconds=8)  # of a collective: long enough on a busy machine


def train_until_it_fails(snap: ucformat.Snapshotter, part: Layered, step: int, die: bool) -> int:
    """Take steps; where a version was protected, die or wait for the one that does. The step that was protected."""
    limit = time.monotonic() + PATIENCE_S
    while True:
        step += 1
        part.train(snap, step)
        safe = snap.report().restorable or 0
        if die and safe and snap.report().protected > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError:
            return safe
        assert time.monotonic() < limit
        time.sleep(0.02)


def member(link: Connection, host: int, place: str, ports: list[int]) -> None:
    """A process on a host of its own. Says which steps were protected, restored, and right."""
    alive, step = list(range(WORLD)), 0
    torch.set_num_threads(1)
    for life in range(len(VICTIMS) + 1):
        rank = alive.index(host)
        store = dist.TCPStore("127.0.0.1", ports[life], is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(alive), timeout=TIMEOUT)
        part = Layered(current(), life % 2)
        snap = ucformat.Snapshotter(part.state, directory=f"{place}/host{host}", protect="xor", interface="lo")
        if life:
            restored = snap.restore()
            assert restored is not None
            link.send((restored.source, step, restored.step, part.is_of(restored.step), restored.computed))
            step = restored.step
        if life < len(VICTIMS):
            step = train_until_it_fails(snap, part, step, host == VICTIMS[life])
            alive.remove(VICTIMS[life])
            snap.close(wait=False)
        else:
            part.train(snap, step + 1)
            snap.deadline()
            snap.close()
            link.send(snap.report().restorable)
            dist.barrier()
        dist.destroy_process_group()


def test_survivors_go_on_in_the_same_processes_after_a_host_is_lost(tmp_path: Path) -> None:
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(len(VICTIMS) + 1)]
    ports = [store.port for store in stores]
    context, jobs = forked(), []
    for host in range(WORLD):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=member, args=(there, host, str(tmp_path), ports), daemon=True)
        process.start()
        there.close()
        jobs.append((process, here))
    for host, (process, link) in enumerate(jobs):
        process.join(PATIENCE_S)
        assert process.exitcode == (-signal.SIGKILL if host in VICTIMS else 0)
        if host in VICTIMS:
            continue
        step = 0
        for victim in VICTIMS:
            source, known, step, right, computed = link.recv()
            assert (source, right, computed) == ("memory", True, (victim,))
            assert step >= known > 0
        assert link.recv() == step + 1  # protected again, from the first step on


def test_a_keeper_that_is_not_waited_for_finishes_what_it_has_begun(tmp_path: Path) -> None:
    part = Layered(current(), 0)
    persist = ucformat.Persist(str(tmp_path / "run"), every=1)
    snap = ucformat.Snapshotter(part.state, directory=str(tmp_path / "slots"), persist=persist)
    part.train(snap, 1)
    snap.deadline()
    limit = time.monotonic() + PATIENCE_S
    while not any((tmp_path / "run").rglob("*")):  # it has begun
        assert time.monotonic() < limit
        time.sleep(0.001)
    snap.close(wait=False)
    while (found := ucformat.latest(str(tmp_path / "run"))) is None:
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert ucformat.verify(str(tmp_path / "run"), step=found).ok
    assert client._left.pop().wait(PATIENCE_S) == 0


def test_a_version_in_hand_that_has_changed_is_not_kept(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    snap = ucformat.Snapshotter({"model": model}, directory=str(tmp_path), mode="overlap", hash_every=0)
    for step in range(1, 9):
        snap.deadline()
        snap.take(step)
        time.sleep(0.05)  # a plan of how to copy beside it
    limit = time.monotonic() + PATIENCE_S
    while ucformat.open(str(tmp_path)).step != step:  # all is copied, and the deadline not met
        assert time.monotonic() < limit
        time.sleep(0.01)
    torch.nn.init.zeros_(model.weight)
    snap.close(wait=False)
    assert ucformat.open(str(tmp_path)).step == step - 1


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
