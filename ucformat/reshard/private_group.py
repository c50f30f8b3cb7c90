"""Ranks connected by sockets of their own, for a thread that works beside training.

torch's process groups can't serve there: `destroy_process_group` at the end of a script takes all of them away, also from a
save that is still being written. This connection lasts as long as somebody uses it, and once it is made it needs neither the
process group nor the store that the ranks met in.
"""

from __future__ import annotations

import pickle
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ucformat.group import Group

T = TypeVar("T")
Number = TypeVar("Number", np.int64, np.uint8)
_WHAT = "exchanging metadata between ranks that write"
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""By the process group of the same ranks: when that is gone, so is this one, unless a save still uses it."""


@dataclass(frozen=True, slots=True)
class PrivateGroup(Group):
    """The ranks of a process group, over sockets that torch.distributed does not know of."""

    gloo: dist.ProcessGroup | None = None

    def all_gather(self, item: T, what: str = _WHAT) -> list[T]:
        data = pickle.dumps(item)
        sizes = self.numbers([len(data)], what)[:, 0]
        own, rows = _bytes(data, int(sizes.max())), [_room(int(sizes.max())) for _ in range(self.size)]
        with self._answering(what):
            self._gloo.allgather([rows], [own]).wait()
        return [cast("T", _item(row[:size])) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def gather(self, item: T, what: str = _WHAT) -> list[T]:
        return list(self.gather_from(item, range(self.size), what).values())

    def broadcast(self, item: T, what: str = _WHAT) -> T:
        data = pickle.dumps(item) if self.rank == 0 else b""
        size = int(self.numbers([len(data)], what)[0, 0])
        box = _bytes(data, size)
        with self._answering(what):
            self._gloo.broadcast(box, 0).wait()
        return cast("T", _item(box))

    def gather_from(self, item: T | None, ranks: Sequence[int], what: str = _WHAT) -> dict[int, T]:
        with self._answering(what):
            if self.rank == 0:
                return {rank: cast("T", self._received(rank) if rank else item) for rank in ranks}
            if self.rank in ranks:
                data = pickle.dumps(item)
                self._gloo.send([torch.tensor([len(data)])], 0, 0).wait()
                self._gloo.send([_bytes(data, len(data))], 0, 0).wait()
        return {}

    def numbers(self, row: Sequence[int], what: str = _WHAT) -> NDArray[np.int64]:
        rows = [torch.empty(len(row), dtype=torch.int64) for _ in range(self.size)]
        with self._answering(what):
            self._gloo.allgather([rows], [torch.tensor(row, dtype=torch.int64)]).wait()
        return torch.stack(rows).numpy()

    def maximum(self, values: NDArray[Number], what: str = _WHAT) -> NDArray[Number]:
        merged = torch.from_numpy(values.copy())
        with self._answering(what):
            self._gloo.allreduce([merged], dist.ReduceOp.MAX).wait()
        return cast("NDArray[Number]", merged.numpy())

    @property
    def _gloo(self) -> dist.ProcessGroup:
        assert self.gloo is not None
        return self.gloo

    def _received(self, rank: int) -> object:
        size = torch.empty(1, dtype=torch.int64)
        self._gloo.recv([size], rank, 0).wait()
        box = _room(int(size))
        self._gloo.recv([box], rank, 0).wait()
        return _item(box)

    def _silent_ranks(self) -> tuple[dict[int, str], str]:
        """Where the ranks have left their process group, nobody can be asked: then gloo's own message says which peer is gone."""
        return Group._silent_ranks(self) if dist.is_initialized() else ({}, "")


def private(group: Group) -> Group:
    """The same ranks, over a connection of their own. Every rank calls it: the first call for a process group connects them."""
    if group.size == 1:
        return group
    parent = group.process_group or dist.group.WORLD
    assert parent is not None
    found = _made.get(parent)
    if found is None:
        name = group.broadcast(uuid.uuid4().hex)
        with group.together("connecting the ranks for a save that does not wait"):
            base = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"ucformat/private/{name}", base)
            patience = base.timeout  # type: ignore[attr-defined]  # what `init_process_group` was given
            gloo = dist.ProcessGroupGloo(store, group.rank, group.size, patience)
            found = _made[parent] = cast("dist.ProcessGroup", gloo)  # has its collectives, of which torch's stubs don't know
    assert found is not None
    return PrivateGroup(group.rank, group.size, None, found)


def _room(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _bytes(data: bytes, size: int) -> torch.Tensor:
    box = torch.zeros(size, dtype=torch.uint8)
    box[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    return box


def _item(box: torch.Tensor) -> object:
    return pickle.loads(box.numpy().tobytes())  # noqa: S301, TID251  # from ranks of this job, as torch.distributed does it
