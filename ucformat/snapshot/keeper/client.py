"""The trainer's side of its keeper: starts the process, hands it slots, receives what became of them, restarts it when it dies.

Nothing here waits: not for the process, not for the storage. A keeper that is busy, hanging or dead costs snapshots that are not
hashed or versions that are not persisted, and both are counted; training goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ucformat.formats.snapshot import rank_name
from ucformat.snapshot.keeper.messages import (
    EVENTS,
    Begin,
    Event,
    Failed,
    Hashed,
    Inbox,
    KeeperOptions,
    Order,
    Persisted,
    Restarted,
    Skipped,
    Stop,
    Stored,
    Trouble,
    send,
)

__all__ = ["Keeper", "KeeperOptions"]

STORING = 2  # versions that may wait for the storage at once: one is written, one is ready when that ends
HASHING = 2  # versions that may wait to be hashed: of more, the older ones have lost their slots
WAITING = 8  # versions that may wait for other ranks' parts; they hold no slot
LIVES = 3  # keepers that may die over an order before the order is given up
STEADY_S = 60.0  # a keeper that lived so long did not die of how it was started
LONGEST_PAUSE_S = 60.0  # between starts of keepers that keep dying
NICENESS = 10  # below the trainer, from the first import on
_PROGRAM = f"import os; os.nice({NICENESS}); from ucformat.snapshot.keeper.process import main; main()"
LISTEN_S = 0.2  # between looks whether a keeper that stops has ended
KILL_S = 5.0  # that a killed process may take to end
LOG = "keeper.log"
TOLD_BYTES = 2000  # of what a dead keeper wrote last


@dataclass(slots=True)
class _Taken:
    """An order that has not ended."""

    order: Order
    lives: int = LIVES
    stored: bool = False
    given_up: bool = False
    """Its slot may be filled, or was, before all of it was read: it is not persisted any more, whatever the keeper still does."""

    @property
    def slot(self) -> int | None:
        """The slot that it needs."""
        return None if self.stored or self.given_up else self.order.slot

    @property
    def persists(self) -> bool:
        return self.order.persist and not self.given_up


_left: list[subprocess.Popen[bytes]] = []
"""Keepers that end by themselves."""


class Keeper:
    """One rank's keeper. Methods are called by one thread, `poll` once per step or so."""

    def __init__(self, options: KeeperOptions) -> None:
        url = options.persist_url
        if url is not None and "://" not in url and "::" not in url:
            url = os.path.abspath(os.path.expanduser(url))
        self._options = replace(options, directory=os.path.abspath(options.directory), persist_url=url)
        self._folder = Path(self._options.directory, rank_name(options.rank))
        self._taken: dict[int, _Taken] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._inbox: Inbox[Event] | None = None
        self._fds: tuple[int, int] = (-1, -1)
        self._running = False
        self._why = ""
        self._began, self._pause, self._start_at = 0.0, 0.0, 0.0
        self.refused = 0
        """Orders that were not taken, because the keeper was busy or dead."""
        self.restarts = 0

    # -- giving orders -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process, without waiting until it is ready. Raises OSError when the system can't."""
        if not self._running:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._spawn()
            self._running = True

    def hash_and_maybe_persist(self, slot_index: int, step: int, persist: bool) -> bool:
        """Have a committed slot hashed, and its version persisted if asked. False, at once, when the keeper is busy or dead.

        The slot is among `busy_slots` until the keeper needs it no more. A version that is refused for persisting may still be
        hashed: ask again without. Which steps are persisted has to be decided from the step alone, alike on all ranks.
        """
        if persist and self._options.persist_url is None:
            raise ValueError("there is no persist_url to persist to")
        order = Order(step, slot_index, persist)
        if self._is_busy(order) or not self._send(order):
            self.refused += 1
            return False
        self._taken[step] = _Taken(order)
        return True

    def _is_busy(self, order: Order) -> bool:
        if order.step in self._taken or order.slot in self.needed_slots() or not self.alive():
            return True
        if not order.persist and sum(not taken.order.persist for taken in self._taken.values()) >= HASHING:
            return True
        persisting = [taken for taken in self._taken.values() if taken.order.persist]  # given up or not, the keeper has them
        waiting = sum(taken.stored for taken in persisting)
        return order.persist and (len(persisting) - waiting >= STORING or waiting >= WAITING)

    def _send(self, order: Order | Stop) -> bool:
        return self._fds[0] >= 0 and send(self._fds[0], order)

    def busy_slots(self) -> set[int]:
        """Slots that the keeper reads, or is about to."""
        return {taken.slot for taken in self._taken.values() if taken.slot is not None}

    def needed_slots(self) -> set[int]:
        """Slots that it reads to persist, or is about to."""
        return {taken.slot for taken in self._taken.values() if taken.slot is not None and taken.order.persist}

    def being_written(self) -> Order | None:
        """The order that it persists now, or next, unless that was given up; None while its shard is not read from a slot.

        It persists one after another: while it is stuck in one that was given up, it reads no other.
        """
        first = next((taken for taken in self._taken.values() if taken.order.persist and not taken.stored), None)
        return None if first is None or first.given_up else first.order

    def queued_in(self, slot: int) -> list[int]:
        """Steps that are still to be persisted from a slot."""
        return [step for step, taken in self._taken.items() if taken.order.persist and taken.slot == slot]

    def give_up(self, step: int) -> None:
        """Need the slot of a step no longer, though it is not persisted yet. Of its failure, no event will tell."""
        self._taken[step].given_up = True

    def persists(self) -> bool:
        """Whether there are versions that it was given to persist, has not done with, and may still persist."""
        return any(taken.persists for taken in self._taken.values())

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the process, dead or alive."""
        return None if self._process is None else self._process.pid

    # -- hearing -------------------------------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        """What happened since the last call. A keeper found dead is restarted, and given again what it had not finished."""
        events = self._hear()
        if self._process is not None and not self.alive():
            events += self._hear()  # it may have said something between the first look and its end
            events += self._bury()
        if self._running and self._process is None and time.monotonic() >= self._start_at:
            events += self._revive()
        return events

    def _hear(self) -> list[Event]:
        events = self._inbox.take() if self._inbox is not None else []
        return [event for event in events if self._note(event)]

    def _note(self, event: Event) -> bool:
        """Account for an event; whether it is news."""
        taken = self._taken.get(event.step) if not isinstance(event, Restarted) else None
        if taken is None:
            return True
        if isinstance(event, Stored):
            taken.stored = True
            taken.order = Order(event.step, None, persist=True, nbytes=event.nbytes)
        elif isinstance(event, Persisted | Skipped | Failed) or (isinstance(event, Hashed) and not taken.order.persist):
            del self._taken[event.step]
            return isinstance(event, Persisted) or not taken.given_up
        return True

    # -- life and death ------------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        """A fresh interpreter that imports the keeper alone: nothing of the trainer is forked, run again or pickled."""
        orders, my_orders = os.pipe()
        my_events, events = os.pipe()
        # the trainer's own path, so that the keeper finds what the trainer found; never the current directory by itself
        path = os.pathsep.join(dict.fromkeys(map(os.path.abspath, sys.path)))
        quiet = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            with open(self._folder / LOG, "wb") as log:
                self._process = subprocess.Popen(  # noqa: S603  # our own module, no shell
                    [sys.executable, "-c", _PROGRAM, str(orders), str(events)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(orders, events),
                    env={**os.environ, **quiet},
                    start_new_session=True,  # what ends the trainer's process group must not end the job in hand
                )
        except OSError:
            os.close(my_orders)
            os.close(my_events)
            raise
        finally:
            os.close(orders)
            os.close(events)
        os.set_blocking(my_orders, False)
        self._fds, self._inbox, self._began = (my_orders, my_events), Inbox(my_events, EVENTS.decode), time.monotonic()
        send(my_orders, Begin(self._options, os.getpid()))

    def _bury(self) -> list[Event]:
        """Account for a keeper that died."""
        assert self._process is not None
        self._why = f"the keeper {describe_exit(self._process.returncode)}{self._last_words()}"
        self._release()
        steady = time.monotonic() - self._began > STEADY_S
        self._start_at = time.monotonic() + (0.0 if steady else self._pause)
        self._pause = 1.0 if steady else min(2 * self._pause or 1.0, LONGEST_PAUSE_S)
        events: list[Event] = []
        for step, taken in sorted(self._taken.items()):
            taken.lives -= 1
            if taken.given_up and not taken.stored:
                del self._taken[step]
            elif taken.lives <= 0:
                del self._taken[step]
                events.append(Failed(step, self._why))
        return events

    def _last_words(self) -> str:
        try:
            said = (self._folder / LOG).read_bytes()[-TOLD_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""
        return f": {said}" if said else ""

    def _revive(self) -> list[Event]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._spawn()
        except OSError as error:
            self._pause = min(2 * self._pause or 1.0, LONGEST_PAUSE_S)
            self._start_at = time.monotonic() + self._pause
            return [Trouble(max(self._taken, default=0), f"the keeper could not be started again: {error}")]
        self.restarts += 1
        for _, taken in sorted(self._taken.items()):
            self._send(taken.order)
        return [Restarted(self.restarts, self._why)]

    def _release(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._process, self._inbox, self._fds = None, None, (-1, -1)

    def stop(self, timeout_s: float) -> list[Event]:
        """Let the keeper finish what it was given, kill it when that takes longer; what happened meanwhile."""
        self._running = False
        events = self._hear()
        if self._process is None or self._inbox is None:
            return events + self._abandon("the keeper was dead when it was stopped")
        deadline = time.monotonic() + timeout_s
        self._send(Stop())
        while self.alive() and not self._inbox.closed and time.monotonic() < deadline:
            self._inbox.wait(min(deadline - time.monotonic(), LISTEN_S))
            events += self._hear()
        why = f"the keeper was stopped and had not finished within {timeout_s:g} s"
        try:
            why = f"the keeper {describe_exit(self._process.wait(max(0.0, deadline - time.monotonic())))}{self._last_words()}"
        except subprocess.TimeoutExpired:
            self._kill()
        events += self._hear()
        self._release()
        return events + self._abandon(why)

    def leave(self) -> None:
        """Let the keeper finish what it has begun, and end by itself; what becomes of that is not heard of."""
        self._running = False
        _left[:] = [process for process in (*_left, self._process) if process is not None and process.poll() is None]
        self._release()
        self._taken.clear()

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            pass  # it sits in a call of the kernel that nothing can interrupt, and ends with it

    def _abandon(self, why: str) -> list[Event]:
        steps = sorted(step for step, taken in self._taken.items() if not taken.given_up)
        self._taken.clear()
        return [Failed(step, why) for step in steps]


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
