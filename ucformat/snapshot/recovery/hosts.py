"""The hosts of a job while it restores: which ranks share a directory, and how each rank reads what lies on the others.

The lowest rank of each host looks at its directory and serves it to the others meanwhile. Ranks of one host alone need no
server, and nothing listens.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ucformat.errors import StorageError
from ucformat.group import Group
from ucformat.snapshot.peers.handshake import new_key
from ucformat.snapshot.peers.interface import listen
from ucformat.snapshot.peers.server import PeerServer
from ucformat.snapshot.peers.store import Address, PeerStore
from ucformat.storage.local import LocalReader, LocalStore
from ucformat.storage.store import Bytes, Reader, Store

OWN = "this host"
"""Name of a rank's own memory among the sources of a restored state."""


class CountedStore(LocalStore):
    """A directory of this host; `nbytes` counts what was read of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.nbytes = 0
        self._lock = threading.Lock()

    def count(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes

    def reader(self, path: str) -> Reader:
        return _CountedReader(self, path, self._full(path))


class _CountedReader(LocalReader):
    def __init__(self, store: CountedStore, path: str, full: str) -> None:
        super().__init__(store, path, full)
        self._counted = store

    def read_parts(self, start: int, parts: Sequence[Bytes]) -> None:
        super().read_parts(start, parts)
        self._counted.count(sum(part.nbytes for part in parts))


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts, numbered by their lowest ranks, and this rank's way to the memory of each."""

    number: int
    """Of this rank's host."""
    leads: bool
    """Whether this rank looks after its host's directory."""
    ranks: tuple[tuple[int, ...], ...]
    """By host, ranks of this job that run there."""
    own: CountedStore
    stores: Mapping[int, Store] = field(default_factory=dict)
    """By host, its directory; without hosts that can't be reached."""
    unreachable: Mapping[int, str] = field(default_factory=dict)
    """By host, why its memory is out of reach."""

    @property
    def here(self) -> tuple[int, ...]:
        """Ranks of this host."""
        return self.ranks[self.number]

    def read(self) -> dict[str, int]:
        """Bytes that this rank has read so far, by source."""
        found = {OWN: self.own.nbytes}
        for store in self.stores.values():
            if isinstance(store, PeerStore):
                found[store.url] = store.nbytes
        return found


def identity(directory: str) -> str:
    """What tells the directories of different hosts apart, whatever they are called; makes it if it is not there.

    Raises StorageError.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        status = os.stat(directory)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{status.st_dev}/{status.st_ino}"
    except OSError as error:
        raise StorageError(directory, error) from error


def ranks_by_host(places: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host from the identities of all ranks' directories; hosts in the order of their lowest ranks."""
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place, []).append(rank)
    return tuple(map(tuple, found.values()))


def ranks_here(directory: str, group: Group) -> tuple[int, ...]:
    """The ranks of this rank's host. Every rank of `group` calls it. Raises StorageError when a directory can't be made."""
    return next(there for there in _ranks(directory, group) if group.rank in there)


def _ranks(directory: str, group: Group) -> tuple[tuple[int, ...], ...]:
    place = ""
    with group.together("looking for the hosts of the job"):
        place = identity(directory)
    return ranks_by_host(group.all_gather(place))


@contextmanager
def meet(directory: str, group: Group, interface: str | None = None) -> Iterator[Hosts]:
    """The hosts of the job, whose memory can be read inside. Every rank of `group` enters and leaves together.

    Raises StorageError when a directory can't be made.
    """
    ranks = _ranks(directory, group)
    number = next(i for i, there in enumerate(ranks) if group.rank in there)
    own, leads = CountedStore(directory), ranks[number][0] == group.rank
    if len(ranks) == 1:
        yield Hosts(number, leads, ranks, own, {0: own})
        return
    with _serving(directory, group, interface, leads) as (key, addresses):
        stores: dict[int, Store] = {}
        unreachable: dict[int, str] = {}
        for host, there in enumerate(ranks):
            address = addresses[there[0]]
            if not isinstance(address, Address):  # out of everybody's reach: all ranks decide by what all can read
                unreachable[host] = f"memory of the host of rank {there[0]} can't be reached: {address}"
            else:
                stores[host] = own if host == number else PeerStore(address, key)
        try:
            yield Hosts(number, leads, ranks, own, stores, unreachable)
        finally:
            for store in stores.values():
                if isinstance(store, PeerStore):
                    store.close()


@contextmanager
def _serving(
    directory: str, group: Group, interface: str | None, leads: bool
) -> Iterator[tuple[bytes, list[Address | str | None]]]:
    """Serve the directory of this host until all ranks have left; the job's key, and each rank's address or why it has none."""
    key = group.broadcast(new_key() if group.rank == 0 else b"")
    server: PeerServer | None = None
    address: Address | str | None = None
    if leads:
        try:
            listener, address = listen(interface)
            server = PeerServer(directory, key, listener)
            server.start()
        except (StorageError, RuntimeError) as error:  # no such interface, or no thread to be had
            address = str(error)
    try:
        yield key, group.all_gather(address)
        group.resolve("restoring from memory", None)  # others may still read here
    finally:
        if server is not None:
            server.stop()
