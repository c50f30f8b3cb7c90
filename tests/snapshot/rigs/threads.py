"""Ranks that are threads of this process: what takes seconds to start as processes is tried a thousand times here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ucformat.group import Group, Number

T = TypeVar("T")
R = TypeVar("R")
PATIENCE_S = 120.0


@dataclass(slots=True)
class _Meeting:
    """Where threads exchange items."""

    barrier: threading.Barrier
    items: list[Any]
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class ThreadGroup(Group):
    """A group whose ranks are threads. What is built on these exchanges is the product's own."""

    meeting: _Meeting | None = None

    def all_gather(self, item: T, what: str = "") -> list[T]:
        if self.size == 1:
            return [item]
        assert self.meeting is not None
        self.meeting.items[self.rank] = item
        self.meeting.barrier.wait(PATIENCE_S)
        found = list(self.meeting.items)
        self.meeting.barrier.wait(PATIENCE_S)
        return cast("list[T]", found)

    def gather(self, item: T, what: str = "") -> list[T]:
        found = self.all_gather(item, what)
        return found if self.rank == 0 else []

    def gather_from(self, item: T | None, ranks: Sequence[int], what: str = "") -> dict[int, T]:
        found = self.all_gather(item, what)
        return {rank: cast("T", found[rank]) for rank in ranks} if self.rank == 0 else {}

    def numbers(self, row: Sequence[int], what: str = "") -> NDArray[np.int64]:
        return np.array(self.all_gather(list(row), what), dtype=np.int64)

    def maximum(self, values: NDArray[Number], what: str = "") -> NDArray[Number]:
        merged: NDArray[Number] = np.max(self.all_gather(values, what), axis=0)
        return merged

    def broadcast(self, item: T, what: str = "") -> T:
        return self.all_gather(item, what)[0]


def on_threads(world: int, function: Callable[[Group], R]) -> list[R]:
    """`function` on every rank; what each returned, or the first error."""
    meeting = _Meeting(threading.Barrier(world), [None] * world)

    def run(rank: int) -> R:
        try:
            return function(ThreadGroup(rank, world, None, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(run, rank) for rank in range(world)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
