"""Many ranks in one process: what the code of each does and sends, without processes or a network.

`real` ranks run the real code, a thread each. A world may be larger: every further rank then does what rank `number % real` does,
so that one rank can be watched among thousands.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ucformat.group import Group

T = TypeVar("T")
WAIT_S = 300.0  # for the slowest rank, on a busy machine


@dataclass
class World:
    """What the threads share."""

    real: int
    size: int
    sent: list[int] = field(default_factory=list)
    """Bytes that each real rank has sent."""
    received: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sent, self.received = [0] * self.real, [0] * self.real
        self._slots: list[Any] = [None] * self.real
        self._barrier = threading.Barrier(self.real)

    def swap(self, rank: int, item: T) -> list[T]:
        """The items of all real ranks."""
        self._slots[rank] = item
        self._barrier.wait(WAIT_S)
        items = list(self._slots)
        self._barrier.wait(WAIT_S)
        return items

    def abort(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True, slots=True)
class Member(Group):
    """One rank of a world."""

    world: World | None = None

    def all_gather(self, item: T, what: str = "") -> list[T]:
        data = self._pack(item)
        items = [pickle.loads(data) for data in self._swap(data, of_each=True)]
        return [items[rank % len(items)] for rank in range(self.size)]

    def gather(self, item: T, what: str = "") -> list[T]:
        items = self._swap(self._pack(item), of_each=self.rank == 0)
        return [pickle.loads(items[rank % len(items)]) for rank in range(self.size)] if self.rank == 0 else []

    def broadcast(self, item: T, what: str = "") -> T:
        data = self._swap(self._pack(item) if self.rank == 0 else b"")[0]
        self._count(received=len(data) if self.rank else 0)
        return pickle.loads(data)  # type: ignore[no-any-return]

    def gather_from(self, item: T | None, ranks: Sequence[int], what: str = "") -> dict[int, T]:
        world = self._world
        speaks = {rank % world.real for rank in ranks}
        items = self._swap(self._pack(item) if self.rank in speaks and (self.rank or self.size == 1) else pickle.dumps(item))
        if self.rank != 0:
            return {}
        self._count(received=sum(len(items[rank % world.real]) for rank in ranks))
        return {rank: pickle.loads(items[rank % world.real]) for rank in ranks}

    def numbers(self, row: Sequence[int], what: str = "") -> NDArray[np.int64]:
        own = np.array([row], dtype=np.int64)
        self._count(sent=own.nbytes, received=own.nbytes * self.size)
        rows = np.concatenate(self._swap(own))
        return np.tile(rows, (-(-self.size // len(rows)), 1))[: self.size]

    def maximum(self, values: NDArray[Any], what: str = "") -> NDArray[Any]:
        self._count(sent=values.nbytes, received=values.nbytes)
        found: NDArray[Any] = np.maximum.reduce(self._swap(values))
        return found

    @property
    def _world(self) -> World:
        assert self.world is not None
        return self.world

    def _swap(self, item: T, *, of_each: bool = False) -> list[T]:
        items = self._world.swap(self.rank, item)
        if of_each:
            self._count(received=sum(len(items[rank % len(items)]) for rank in range(self.size)))  # type: ignore[arg-type, misc]
        return items

    def _pack(self, item: object) -> bytes:
        data = pickle.dumps(item)
        self._count(sent=len(data))
        return data

    def _count(self, sent: int = 0, received: int = 0) -> None:
        world = self._world
        world.sent[self.rank] += sent
        world.received[self.rank] += received


def members(world: World) -> list[Member]:
    """The real ranks."""
    return [Member(rank, world.size, None, world) for rank in range(world.real)]


def run(real: int, function: Callable[[Group], T], size: int = 0) -> list[T]:
    """`function` on every real rank of a world; what each returned. Raises what one raised."""
    return run_in(World(real, size or real), function)


def run_in(world: World, function: Callable[[Group], T]) -> list[T]:
    def one(member: Member) -> T:
        try:
            return function(member)
        except BaseException:
            world.abort()
            raise

    with ThreadPoolExecutor(world.real) as pool:
        futures = [pool.submit(one, member) for member in members(world)]
        errors = [future.exception() for future in futures]
    first = next((error for error in errors if error and not isinstance(error, threading.BrokenBarrierError)), None)
    if first is not None:
        raise first
    return [future.result() for future in futures]
