"""Set-up of protection, by all ranks together: who forms a group, where each is reached, and a process for each that has one."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from ucformat.group import Group
from ucformat.snapshot.parity.groups import MAX_MEMBERS, Grouping, form_groups
from ucformat.snapshot.peers.handshake import new_key
from ucformat.snapshot.peers.interface import listen
from ucformat.snapshot.peers.store import Address
from ucformat.snapshot.protect.client import Done, Protector
from ucformat.snapshot.protect.messages import GroupMember, ProtectOptions
from ucformat.snapshot.recovery.hosts import identity
from ucformat.snapshot.report import SnapshotReport

Warn = Callable[[str, str], None]
"""Logs the first failure of each kind: its kind, and what happened."""

_XOR = re.compile(r"xor(?::(\d{1,4}))?")
_TOLD = 8  # ranks that a message names
_START_S = 20.0  # for a process to start: one or two on a busy machine, and training waits for it


def group_size(protect: str) -> int:
    """Members of a group; 0 for `none`. Raises ValueError for anything but `none`, `auto`, `mirror`, `xor`, `xor:<members>`."""
    if protect == "none":
        return 0
    if protect in ("auto", "mirror"):
        return MAX_MEMBERS if protect == "auto" else 2
    match = _XOR.fullmatch(protect)
    members = int(match[1] or MAX_MEMBERS) if match else 0
    if members < 2:
        raise ValueError(
            f"protect={protect!r} must be 'none', 'auto', 'mirror', 'xor' or 'xor:<members>' with at least 2 members"
        )
    return members


@dataclass(frozen=True, slots=True)
class Protection:
    """How a rank takes part; equal on all ranks but for `directory` and `domain`. Raises ValueError for an unknown `protect`."""

    protect: str
    directory: str
    domain: str | None = None
    """What is lost together: the host, unless the user names something larger, such as a rack."""
    interface: str | None = None

    def __post_init__(self) -> None:
        group_size(self.protect)

    def start(self, group: Group, run: str, report: SnapshotReport, warn: Warn, done: Done) -> Protector | None:
        """Start this rank's process; None where nothing is protected. Every rank of `group` calls it.

        Waits until it has started, within bounds. Warns of ranks that have no partner. Raises StorageError, on all ranks, when
        one can't listen; then nothing was started.
        """
        members = group_size(self.protect)
        if not members:
            return None
        here = ""
        with group.together("looking for the hosts of the job"):
            here = self.domain or identity(self.directory)
        grouping = form_groups(group.all_gather(here), members)
        self._warn_of(grouping, group, warn)
        if not grouping.groups:
            return None
        mine = grouping.of(group.rank)
        key = group.broadcast(new_key() if group.rank == 0 else b"")
        with ExitStack() as undo:
            listener: socket.socket | None = None
            address: Address | None = None
            with group.together("listening for the other hosts of the job"):
                if mine:
                    listener, address = listen(self.interface)
                    undo.callback(listener.close)
            addresses = group.all_gather(address)
            peers = tuple(GroupMember(rank, at.host, at.port) for rank in mine if (at := addresses[rank]) is not None)
            if listener is None:
                return None
            options = ProtectOptions(self.directory, group.rank, run, key, peers)
            protector = Protector(options, listener, partial(_count, report, warn, done), warn)
            protector.start()
            undo.pop_all()  # the listener is the protector's to close
            if not protector.await_start(_START_S):
                warn("protect", "the process that protects versions has not started yet: they are protected once it has")
            return protector

    def _warn_of(self, grouping: Grouping, group: Group, warn: Warn) -> None:
        if grouping.alone and group.rank == 0 and not (self.protect == "auto" and not grouping.groups):
            ranks = ", ".join(map(str, grouping.alone[:_TOLD])) + (" and more" if len(grouping.alone) > _TOLD else "")
            warn("unprotected", f"nothing protects the snapshots of ranks {ranks}: no rank of another host is left to pair with")


def _count(report: SnapshotReport, warn: Warn, done: Done, step: int, why: str) -> None:
    """A version that this rank has done its part to protect, or could not."""
    if why:
        report.unprotected += 1
        report.failures.append(f"step {step} is not protected: {why}")
        warn("protect", f"step {step} is not protected: {why}")
    else:
        report.protected += 1
    done(step, why)
