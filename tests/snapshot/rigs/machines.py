"""Jobs across hosts that lose hosts: what they restore afterwards must be the newest version that all ranks had protected."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.hosts import Machines
from tests.scripts import forked
from tests.snapshot.rigs.parts import Layered
from ucformat.errors import UcformatError
from ucformat.group import current
from ucformat.snapshot.room import Room
from ucformat.snapshot.snapshotter import Snapshotter

PATIENCE_S = 90.0
PORTS = range(20_000, 30_000)


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a job."""

    hosts: tuple[int, ...]
    """Of each rank."""
    dim: int
    protect: str
    slots: int
    pause_s: float
    """Between steps."""


def rank_main(machines: Machines, run: Run, rank: int, port: int, link: Connection) -> None:
    """Restore, and say what; then train until killed, and say which version was the newest that all ranks had protected."""
    torch.set_num_threads(1)
    host = run.hosts[rank]
    machines.enter(host)
    os.environ["MASTER_ADDR"] = machines.address(run.hosts[0])
    os.environ["GLOO_SOCKET_IFNAME"] = machines.interface
    url = f"tcp://{machines.address(run.hosts[0])}:{port}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=len(run.hosts))
    part = Layered(current(), run.dim)
    interface = None if machines.real else machines.address(host)
    snap = Snapshotter(
        part.state, directory=str(machines.memory(host)), protect=run.protect, slots=run.slots, interface=interface
    )
    link.send(("ready", None))
    try:
        found = snap.restore()
    except UcformatError as error:
        link.send(("error", f"{type(error).__name__}: {error}"))
        return
    step = 0 if found is None else found.step
    link.send(("restored", (found, part.is_of(step))))
    settle = Room.hear

    def tell(room: Room, *, fresh: bool = False) -> None:
        """A version is whole once all have protected it: tell before its predecessor's slot can be given away."""
        hear = room.votes.hear

        def heard(*, fresh: bool = False) -> Any:
            fates = hear(fresh=fresh)
            for fate in fates:
                if fate.whole:
                    link.send(("protected", fate.step))
            return fates

        room.votes.hear = heard  # type: ignore[method-assign]
        settle(room, fresh=fresh)
        room.votes.hear = hear  # type: ignore[method-assign]

    Room.hear = tell  # type: ignore[method-assign, assignment]
    while True:
        step += 1
        part.train(snap, step)
        time.sleep(run.pause_s)


@dataclass(slots=True)
class Started:
    """Ranks of a run, and what they have said."""

    ranks: list[ForkServerProcess]
    links: list[Connection]
    protected: int = 0
    restored: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def hear(self, seconds: float) -> None:
        """Listen for some time."""
        limit = time.monotonic() + seconds
        while True:
            for rank, link in enumerate(self.links):
                self._take(rank, link)
            if time.monotonic() >= limit:
                return
            time.sleep(0.002)

    def _take(self, rank: int, link: Connection) -> None:
        try:
            while link.poll():
                kind, fact = link.recv()
                if kind == "protected":
                    self.protected = max(self.protected, fact)
                elif kind == "restored":
                    self.restored[rank] = fact
                elif kind == "error":
                    self.errors[rank] = fact
        except (EOFError, OSError):
            return

    def until(self, condition: Any) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > limit:
                raise TimeoutError(f"restored {self.restored}, errors {self.errors}, protected {self.protected}")
            self.hear(0.005)

    def all_restored(self) -> bool:
        return len(self.restored) == len(self.ranks) or len(self.errors) == len(self.ranks)

    def end(self) -> None:
        """Kill all ranks; hear their last words."""
        for process in self.ranks:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in self.ranks:
            process.join()
        self.hear(0.0)
        for link in self.links:
            link.close()


def launch(machines: Machines, run: Run, port: int) -> Started:
    context = forked()
    started = Started([], [])
    for rank in range(len(run.hosts)):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(machines.portable(), run, rank, port, there), daemon=True)
        process.start()
        there.close()
        started.ranks.append(process)
        started.links.append(here)
    return started


def shapes(chance: random.Random) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Hosts of the ranks before, the host that is lost, hosts of the ranks afterwards."""
    kind = chance.choice(["same", "fewer", "half", "more"])
    if kind == "half":  # two ranks on each of two hosts, then the two of one
        lost = chance.randrange(2)
        return (0, 0, 1, 1), lost, (1 - lost,) * 2
    lost = chance.randrange(3)
    left = [host for host in range(3) if host != lost]
    after = {"same": [*left, lost], "fewer": left, "more": [*left, *left]}[kind]
    chance.shuffle(after)
    return (0, 1, 2), lost, tuple(after)


def lose_a_host(place: Path, chance: random.Random) -> str:
    """One trial; empty or what went wrong."""
    before, lost, after = shapes(chance)
    with Machines(place, max(before) + 1) as machines:
        first = Run(
            before, chance.randrange(2), chance.choice(["xor", "mirror"]), chance.choice([2, 3]), chance.choice([0.0, 0.01, 0.05])
        )
        job = launch(machines, first, chance.choice(PORTS))
        try:
            job.until(lambda: job.protected > 0)
            job.hear(chance.uniform(0.0, 1.0))
            if chance.random() < 0.5:  # the host goes first, the others notice; or all at once
                machines.lose(lost)
                job.hear(chance.uniform(0.0, 0.3))
        finally:
            job.end()
        machines.lose(lost)
        known = job.protected
        told = f"{first}, lost {lost}, then on {after}: protected {known}"
        for host in range(machines.count):
            if host != lost:
                machines.kill(host)  # what a launcher leaves of a job: nothing
        if lost in after:
            machines.start(lost)
        runs = [Run(after, chance.randrange(2), "xor", 2, 0.01) for _ in range(2)]
        if chance.random() < 0.3:
            outcome = _interrupted(machines, runs.pop(), chance)
            if outcome:
                return f"{outcome}: {told}"
        again = launch(machines, runs.pop(), chance.choice(PORTS))
        try:
            again.until(again.all_restored)
        finally:
            again.end()
        return _judge(again, known, told)


def _interrupted(machines: Machines, run: Run, chance: random.Random) -> str:
    """Processes are killed while they restore, memory stays."""
    job = launch(machines, run, chance.choice(PORTS))
    job.hear(chance.uniform(0.0, 1.5))
    job.end()
    for host in set(run.hosts):
        machines.kill(host)
    return ""


def _judge(job: Started, known: int, told: str) -> str:
    if job.errors:
        return f"lost: {job.errors[min(job.errors)]}: {told}"
    steps = {None if found is None else found.step for found, _ in job.restored.values()}
    step = steps.pop() if len(steps) == 1 else None
    if step is None:
        return f"lost: ranks restored {job.restored}: {told}"
    if not all(right for _, right in job.restored.values()):
        return f"wrong: {job.restored[0][0]}: {told}"
    if step < known:
        return f"lost: restored {job.restored[0][0]}: {told}"
    return ""
