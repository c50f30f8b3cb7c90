"""The ranks that act together: object exchange and shared failure over torch.distributed, or a single process.

Only small objects travel here (structure, digests, errors); tensor data never does. Every call is bounded by the
timeout of the process group. A single process, such as a keeper of snapshots, gets along without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from ucformat.errors import RankFailedError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """`size` ranks, of which this one is `rank`. `process_group` is None for the default group or a single process."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    def all_gather(self, item: T) -> list[T]:
        """Every rank's item, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        import torch.distributed as dist

        items: list[T | None] = [None] * self.size
        dist.all_gather_object(items, item, group=self.process_group)
        return cast("list[T]", items)  # every slot was filled by its rank

    def gather(self, item: T) -> list[T]:
        """Every rank's item, in rank order, on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [item]
        import torch.distributed as dist

        items: list[T | None] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(item, items, group=self.process_group, group_dst=0)
        return cast("list[T]", items or [])  # every slot was filled by its rank

    def broadcast(self, item: T) -> T:
        """Rank 0's item on every rank."""
        if self.size == 1:
            return item
        import torch.distributed as dist

        box = [item]
        dist.broadcast_object_list(box, group=self.process_group, group_src=0)
        return box[0]

    def settle(self, what: str, error: BaseException | None) -> None:
        """Meet all ranks; when any brings an error, raise: its own on the rank that has one, RankFailedError elsewhere."""
        told = self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failures = {rank: message for rank, message in enumerate(told) if message is not None}
        if failures:
            raise RankFailedError(what, failures)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the block on all ranks; a failure on any of them raises on every one (see `settle`)."""
        error: BaseException | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.settle(what, error)


def current(process_group: dist.ProcessGroup | None = None) -> Group:
    """The given or default process group when torch.distributed is initialised, else a single process."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Group()
    return Group(dist.get_rank(process_group), dist.get_world_size(process_group), process_group)
