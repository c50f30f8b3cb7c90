"""The ranks that act together: exchange of small things and shared failure over torch.distributed, or a single process.

Structure, digests and errors travel here; tensor data never does. Every call is bounded by the timeout of the process group. A
single process, such as a keeper of snapshots, gets along without torch.

At thousands of ranks an object of every rank on every rank is too much. So ranks exchange a few numbers each (`numbers`), reduce
them (`any_rank`, `maximum`), and let objects that many of them have alike travel once (`distinct`, `gather_from`).
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from ucformat.errors import RankFailedError, UcformatError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")
Number = TypeVar("Number", np.int64, np.uint8)
ANSWER_S = 5.0  # after a collective failed: ranks that are alive have met the same failure by then, and say so
RECENT_S = 120.0  # an answer given longer ago was about another failure; hosts' clocks differ by less
_EXCHANGE = "exchanging metadata between ranks"


@dataclass(frozen=True, slots=True)
class Group:
    """`size` ranks, of which this one is `rank`. `process_group` is None for the default group or a single process."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    def all_gather(self, item: T, what: str = _EXCHANGE) -> list[T]:
        """Every rank's item, in rank order, on every rank. Raises RankFailedError when a rank does not take part."""
        if self.size == 1:
            return [item]
        import torch.distributed as dist

        items: list[T | None] = [None] * self.size
        with self._answering(what):
            dist.all_gather_object(items, item, group=self.process_group)
        return cast("list[T]", items)  # every slot was filled by its rank

    def gather(self, item: T, what: str = _EXCHANGE) -> list[T]:
        """Every rank's item, in rank order, on rank 0; an empty list elsewhere. Raises as `all_gather`."""
        if self.size == 1:
            return [item]
        import torch.distributed as dist

        items: list[T | None] | None = [None] * self.size if self.rank == 0 else None
        with self._answering(what):
            dist.gather_object(item, items, group=self.process_group, group_dst=0)
        return cast("list[T]", items or [])  # every slot was filled by its rank

    def broadcast(self, item: T, what: str = _EXCHANGE) -> T:
        """Rank 0's item on every rank. Raises as `all_gather`."""
        if self.size == 1:
            return item
        import torch.distributed as dist

        box = [item]
        with self._answering(what):
            dist.broadcast_object_list(box, group=self.process_group, group_src=0)
        return box[0]

    def gather_from(self, item: T | None, ranks: Sequence[int], what: str = _EXCHANGE) -> dict[int, T]:
        """The items of `ranks`, on rank 0; nothing elsewhere. All ranks call it with the same `ranks`. Raises as `all_gather`."""
        if self.rank != 0:
            if self.rank in ranks:
                with self._answering(what):
                    self._send(item)
            return {}
        with self._answering(what):
            return {rank: cast("T", item if rank == 0 else self._receive(rank)) for rank in ranks}

    def distinct(self, item: T, key: bytes | None = None, what: str = _EXCHANGE) -> list[T]:
        """All different items, on every rank, in the order of the first ranks that have them. Each travels once.

        Items are alike when their `key` is; by default it is their pickle, which may differ for items that are equal: then they
        travel more than once.
        """
        if self.size == 1:
            return [item]
        digest = words(xxhash.xxh3_128_intdigest(pickle.dumps(item) if key is None else key))
        first = first_of_each(self.numbers(digest, what))
        found = self.gather_from(item if self.rank in first else None, first, what)
        return self.broadcast(list(found.values()), what)

    def numbers(self, row: Sequence[int], what: str = _EXCHANGE) -> NDArray[np.int64]:
        """(size, len(row)) every rank's row of 64-bit integers, on every rank. Raises as `all_gather`."""
        own = np.array([row], dtype=np.int64)
        if self.size == 1:
            return own
        import torch
        import torch.distributed as dist

        mine = torch.from_numpy(own).to(self._device())
        rows = mine.new_empty((self.size, len(row)))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        with self._answering(what):
            gather(rows, mine, group=self.process_group)
        return rows.cpu().numpy()

    def maximum(self, values: NDArray[Number], what: str = _EXCHANGE) -> NDArray[Number]:
        """The largest of the ranks' values at each place; all bring as many, int64 or uint8. Raises as `all_gather`."""
        if self.size == 1:
            return values
        import torch
        import torch.distributed as dist

        merged = torch.from_numpy(values.copy()).to(self._device())
        with self._answering(what):
            dist.all_reduce(merged, dist.ReduceOp.MAX, group=self.process_group)
        return cast("NDArray[Number]", merged.cpu().numpy())

    def any_rank(self, flag: bool, what: str = _EXCHANGE) -> bool:
        """Whether any rank says so. Raises as `all_gather`."""
        return bool(self.maximum(np.array([flag], dtype=np.uint8), what)[0])

    def resolve(self, what: str, error: Exception | None) -> None:
        """Meet all ranks, each with its error if it has one: when any rank has, all raise, and all the same class.

        That is the error of the lowest rank that has one where it is one of ucformat's, else RankFailedError. Where all ranks
        bring the same class, each raises its own.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        if not self.any_rank(error is not None, what):
            return
        failures = self.all_gather(None if error is None else _Failure.of(error), what)
        failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
        first = min(failed)
        alike = len({failure.kind for failure in failed.values()}) == 1 and len(failed) == self.size
        if error is not None and (alike or (first == self.rank and isinstance(error, UcformatError))):
            raise error
        messages = {rank: failure.message for rank, failure in failed.items()}
        met = failed[first].error
        raise RankFailedError(what, messages) if met is None else met.of_rank(first, messages) from error

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the block on all ranks; a failure on any of them raises on every one (see `resolve`)."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.resolve(what, error)

    def _device(self) -> torch.device:
        """Where the backend takes tensors from."""
        import torch
        import torch.distributed as dist

        kinds = str(dist.get_backend(self.process_group))
        return torch.device("cuda", torch.cuda.current_device()) if kinds == "nccl" else torch.device("cpu")

    def _send(self, item: object) -> None:
        import torch.distributed as dist

        dist.send_object_list([item], group=self.process_group, group_dst=0, device=self._device())

    def _receive(self, rank: int) -> object:
        import torch.distributed as dist

        box: list[object] = [None]
        dist.recv_object_list(box, group=self.process_group, group_src=rank, device=self._device())
        return box[0]

    @contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        """A collective. Its failure becomes RankFailedError, with the ranks that are suspected to have died."""
        try:
            yield
        except RuntimeError as error:  # torch.distributed's errors are of this class, gloo's and NCCL's among them
            suspects, why = self._silent_ranks()
            raise RankFailedError(what, suspects, why or _first_line(error)) from error

    def _silent_ranks(self) -> tuple[dict[int, str], str]:
        """Ranks that say nothing after a collective failed, and what else is known. Takes little more than `ANSWER_S`."""
        roll = _RollCall("world" if self.process_group is None else self.process_group.group_name, self.rank, self.size)
        thread = threading.Thread(target=roll.run, name="ucf-roll-call", daemon=True)
        thread.start()  # a store whose host hangs answers when it wants to
        thread.join(ANSWER_S + 1)
        why = roll.why or ("it does not answer" if thread.is_alive() and len(roll.silent) == self.size - 1 else "")
        if why:
            told = "suspected to have died, as it serves the store that the ranks meet in unless torchrun does"
            return {0: told} if self.rank else {}, f"the store that the ranks meet in can't be reached ({why})"
        return dict.fromkeys(sorted(roll.silent), f"no answer within {ANSWER_S:.0f} s, suspected to have died"), ""


class _RollCall:
    """Who of the ranks is alive, asked through the store that torch.distributed was initialised with."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank = name, rank
        self.silent = set(range(size)) - {rank}
        self.why = ""
        """Why the store can't be reached."""

    def run(self) -> None:
        """Answer, and wait for answers. Over the open connection: torch tries for minutes to make one to a dead server."""
        import torch.distributed as dist

        try:
            store = dist.PrefixStore(f"ucformat/alive/{self.name}", dist.distributed_c10d._get_default_store())
            store.set(str(self.rank), str(time.time()))
            deadline = time.monotonic() + ANSWER_S
            while self.silent and time.monotonic() < deadline:
                time.sleep(0.05)
                self.silent = {rank for rank in self.silent if not _has_answered(store, rank)}
        except (RuntimeError, ValueError) as error:
            self.why = _first_line(error)


@dataclass(frozen=True, slots=True)
class _Failure:
    """What one rank tells the others of its error."""

    kind: str
    message: str
    error: UcformatError | None
    """The error itself where it is one of ucformat's."""

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        return cls(name, f"{type(error).__name__}: {error}", error if isinstance(error, UcformatError) else None)


def words(digest: int) -> tuple[int, int]:
    """A digest of 128 bits as two numbers for `Group.numbers`."""
    return word(digest >> 64), word(digest & ((1 << 64) - 1))


def word(digest: int) -> int:
    """A digest of 64 bits as a number for `Group.numbers`."""
    return digest - (1 << 64) if digest >> 63 else digest


def leaders(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """(size,) for each rank, the first of those that have the same row."""
    if (rows == rows[0]).all():
        return np.zeros(len(rows), dtype=np.int64)
    _, first, of = np.unique(rows[:, 0], return_index=True, return_inverse=True)
    if not (rows == rows[first[of]]).all():
        _, first, of = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first[of.reshape(-1)]


def first_of_each(rows: NDArray[np.int64]) -> list[int]:
    """The first rank of those that have the same row, for each different row, ascending."""
    found: list[int] = np.unique(leaders(rows)).tolist()
    return found


def current(process_group: dist.ProcessGroup | None = None) -> Group:
    """The given or default process group when torch.distributed is initialised, else a single process."""
    if "torch" not in sys.modules:  # then nobody has initialised it
        return Group()
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Group()
    return Group(dist.get_rank(process_group), dist.get_world_size(process_group), process_group)


def connection() -> dist.Store:
    """The store that torch.distributed was initialised with, which has no public name, over a connection of its own."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    clone = getattr(store, "clone", None)
    found: dist.Store = store if clone is None else clone()
    return found


def _has_answered(store: dist.Store, rank: int) -> bool:
    return store.check([str(rank)]) and abs(time.time() - float(store.get(str(rank)))) < RECENT_S


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
