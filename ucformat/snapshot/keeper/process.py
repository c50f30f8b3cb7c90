"""The keeper's process. `Keeper` starts it with `main` and two inherited ends of pipes.

The main thread takes orders, hashes slots and watches; `Persister` talks to the storage. It never raises: what fails is an
event. It lives as long as the trainer that started it, and finishes what it has begun when that one dies.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from ucformat.errors import MissingFileError, SnapshotInUseError
from ucformat.formats.snapshot import KEEPER_LOCK, rank_name
from ucformat.snapshot.keeper import slot_copy
from ucformat.snapshot.keeper.messages import (
    COMMANDS,
    Begin,
    Command,
    Event,
    Failed,
    Hashed,
    Inbox,
    KeeperOptions,
    Order,
    Skipped,
    Stop,
    Trouble,
    send,
)
from ucformat.snapshot.keeper.worker import Persister, told
from ucformat.snapshot.slots.filelock import FileLock
from ucformat.snapshot.slots.restart_fence import read_fence

OOM_SCORE = 500  # of 1000: when memory is short the keeper goes, not the trainer
TICK_S = 0.5  # between looks whether the trainer lives
ORPHANED_S = 120.0  # for other ranks to hand in their parts when the job is dead: its successor's keepers wait for this one
HUNG = 70  # exit status; a storage that hangs can only be left by leaving the process


class Keeping:
    """One keeper at work."""

    def __init__(self, begin: Begin, inbox: Inbox[Command], events: int) -> None:
        self._options, self._parent, self._inbox, self._events = begin.options, begin.parent, inbox, events
        self._sending = threading.Lock()
        self._persister = Persister(self._options, self._emit)
        self._told_to_leave = False
        self._folder = str(Path(self._options.directory, rank_name(self._options.rank)))
        self._fence = read_fence(self._folder)  # of the start that this keeper serves, or of one before it

    def run(self) -> None:
        """Take orders until told to stop, or the trainer is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides
        signal.signal(signal.SIGTERM, self._leave)
        if not self._lock():
            return
        self._persister.start()
        stopping = False
        while not (stopping or self._orphaned()):
            self._inbox.wait(TICK_S)
            for command in self._inbox.take():
                stopping = stopping or isinstance(command, Stop)
                if isinstance(command, Order):
                    self._obey(command)
            self._watch()
        self._persister.finish(drop=not stopping, within_s=None if stopping else ORPHANED_S)
        while self._persister.is_alive():
            self._persister.join(TICK_S)
            self._watch()

    def _leave(self, _: int, __: FrameType | None) -> None:
        self._told_to_leave = True

    def _orphaned(self) -> bool:
        """Children that the trainer forked may keep the pipe open, so that it is closed proves its death, but not the reverse."""
        return self._told_to_leave or self._inbox.closed or os.getppid() != self._parent

    def _lock(self) -> bool:
        """Wait for the keeper of a former trainer to finish: two at work on one rank would write the same files."""
        while not self._orphaned():
            try:
                self._held = FileLock.take(f"{self._folder}/{KEEPER_LOCK}")  # until this process ends, however it does
            except SnapshotInUseError:
                time.sleep(TICK_S)
            else:
                return True
        return False

    def _emit(self, event: Event) -> None:
        with self._sending:
            send(self._events, event)

    def _obey(self, order: Order) -> None:
        if order.slot is None:
            self._persister.submit(order, None)
            return
        began = time.monotonic()
        try:
            slot = slot_copy.find_slot(self._options.directory, self._options.rank, order.slot, order.step)
            slot = slot_copy.hash_slot(slot)
        except Exception as error:
            # a slot that is only to be hashed is free for another version meanwhile
            lost = isinstance(error, MissingFileError) and not order.persist
            self._emit(Skipped(order.step, told(error), missed=False) if lost else Failed(order.step, told(error)))
            return
        self._emit(Hashed(order.step, order.slot, time.monotonic() - began))
        if order.persist:
            self._persister.submit(order, slot)

    def _watch(self) -> None:
        fence = read_fence(self._folder)
        if fence is not None and fence != self._fence and fence.run != self._options.run:
            self._fence = fence
            self._persister.abandon(fence.step)
        doing = self._persister.hanging()
        if doing is not None:
            kind = Failed if doing.essential else Trouble
            self._emit(kind(doing.step, f"{doing.what}: {self._options.persist_url} does not come back"))
            os._exit(HUNG)


def go_first() -> None:
    """When memory is short, the kernel is to end the keeper, not the trainer."""
    try:
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE), encoding="ascii")
    except OSError:
        pass  # another system, or a container that forbids it


def _begin(inbox: Inbox[Command]) -> Begin | None:
    """The first message; None when the trainer died before it sent it."""
    while not inbox.closed:
        inbox.wait(TICK_S)
        for command in inbox.take(1):
            if isinstance(command, Begin):
                return command
    return None


def _prepare(options: KeeperOptions) -> None:
    for module in options.imports:
        importlib.import_module(module)


def main() -> None:
    """Run with the file descriptors of the two pipes as arguments."""
    orders, events = int(sys.argv[1]), int(sys.argv[2])
    go_first()
    inbox: Inbox[Command] = Inbox(orders, COMMANDS.decode)
    begin = _begin(inbox)
    if begin is not None:
        _prepare(begin.options)
        Keeping(begin, inbox, events).run()
