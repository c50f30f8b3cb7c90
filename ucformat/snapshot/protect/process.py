"""The process that protects one rank's versions. `Protector` starts it with `main`, two ends of pipes and a listening socket.

It serves this host's slots to the other hosts all the while, and makes this rank's stripe of each version it is told of. It
ends with its trainer: a restart reads slots through servers of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import deque

from ucformat.errors import SnapshotChangedError, StorageError
from ucformat.formats.snapshot import HeldShard
from ucformat.snapshot.keeper import slot_copy
from ucformat.snapshot.keeper.messages import Inbox, send
from ucformat.snapshot.keeper.process import TICK_S, go_first
from ucformat.snapshot.peers.server import PeerServer
from ucformat.snapshot.peers.store import Address, PeerStore
from ucformat.snapshot.protect.make import MemberSlot, await_slot, make_stripe
from ucformat.snapshot.protect.messages import (
    COMMANDS,
    Begin,
    Cancel,
    Command,
    Event,
    Protect,
    Protected,
    Ready,
    Stranger,
    Unprotected,
    Working,
)
from ucformat.storage.local import LocalStore

BEAT_S = 5.0  # between signs of life


class _OrphanedError(Exception):
    """The trainer is gone."""


class Guarding:
    """One process at work."""

    def __init__(self, begin: Begin, inbox: Inbox[Command], events: int, listener: socket.socket) -> None:
        self._options, self._parent, self._inbox, self._events = begin.options, begin.parent, inbox, events
        self._orders: deque[Protect] = deque()
        self._cancelled = -1
        options = self._options
        self._server = PeerServer(options.directory, options.key, listener, on_stranger=lambda why: self._emit(Stranger(why)))
        self._peers = {
            member.rank: PeerStore(Address(member.host, member.port), options.key)
            for member in options.members
            if member.rank != options.rank
        }

    def run(self) -> None:
        """Protect versions, one after another, until the trainer is gone or closes the pipe."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides
        self._server.start()
        self._emit(Ready())
        try:
            while True:
                self._look()
                if self._orders:
                    self._protect(self._orders.popleft())
                else:
                    self._inbox.wait(TICK_S)
        except _OrphanedError:
            pass
        finally:
            self._server.stop()

    def _look(self) -> None:
        """Take orders. Raises _OrphanedError."""
        for command in self._inbox.take():
            if isinstance(command, Protect):
                self._orders.append(command)
            elif isinstance(command, Cancel):  # versions are lost in the order of their steps
                self._cancelled = max(self._cancelled, command.step)
        if self._inbox.closed or os.getppid() != self._parent:
            raise _OrphanedError

    def _protect(self, order: Protect) -> None:
        began = time.monotonic()
        try:
            nbytes = self._make(order)
        except _OrphanedError:
            raise
        except Exception as error:  # this version is not protected, and nothing else is wrong
            self._emit(Unprotected(order.step, f"{type(error).__name__}: {error}"))
        else:
            self._emit(Protected(order.step, time.monotonic() - began, nbytes))

    def _make(self, order: Protect) -> int:
        options, said = self._options, time.monotonic()
        patient_until = said + options.timeout_s

        def tick() -> None:
            nonlocal said
            self._look()
            if order.step <= self._cancelled:
                raise SnapshotChangedError(options.directory, order.step)
            if time.monotonic() > said + BEAT_S:
                said = time.monotonic()
                self._emit(Working(order.step))

        def wait() -> None:
            tick()
            if time.monotonic() > patient_until:
                raise StorageError(options.directory, f"other ranks do not hold it after {options.timeout_s:g} s")

        found = slot_copy.find_slot(options.directory, options.rank, order.slot, order.step)
        hashed = slot_copy.hash_slot(found)
        own = MemberSlot(LocalStore(options.directory), HeldShard(hashed.folder, hashed.index, hashed.record))
        others = {rank: await_slot(store, rank, hashed.record, wait) for rank, store in self._peers.items()}
        return make_stripe(own, others, options.directory, tick)

    def _emit(self, event: Event) -> None:
        send(self._events, event)


def main() -> None:
    """Run with the file descriptors of the two pipes and of the listening socket as arguments."""
    orders, events, listener = map(int, sys.argv[1:4])
    go_first()
    inbox: Inbox[Command] = Inbox(orders, COMMANDS.decode)
    while not inbox.closed:
        inbox.wait(TICK_S)
        for command in inbox.take(1):
            if isinstance(command, Begin):
                Guarding(command, inbox, events, socket.socket(fileno=listener)).run()
                return
