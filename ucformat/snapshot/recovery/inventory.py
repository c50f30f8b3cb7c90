"""What lies in the memory of each host, in words that tell versions apart, and small: records and headers are read later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ucformat.errors import StorageError, UcformatError
from ucformat.formats.snapshot import HeldShard, SlotRecord, rank_name, rank_of, survey
from ucformat.snapshot.parity.record import RECORD, HeldParity, read_parity
from ucformat.snapshot.slots.restart_fence import Fence, read_fence
from ucformat.storage.store import Store


class SlotKey(NamedTuple):
    """What tells the bytes of one rank's version from all others."""

    rank: int
    step: int
    world: int
    run: str
    created: str
    size: int
    header_digest: str

    @classmethod
    def of(cls, record: SlotRecord) -> SlotKey:
        return cls(record.rank, record.step, record.world, record.run, record.created, record.size, record.header_digest)


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """A version in a slot."""

    key: SlotKey
    index: int
    hashed: bool

    @property
    def rank(self) -> int:
        return self.key.rank

    @classmethod
    def of(cls, held: HeldShard) -> SlotSummary:
        return cls(SlotKey.of(held.record), held.index, held.record.table_digest is not None)


@dataclass(frozen=True, slots=True)
class StripeSummary:
    """A parity stripe."""

    rank: int
    """That keeps it."""
    index: int
    chunk: int
    members: tuple[SlotKey, ...]
    """The slots that it was computed of, in the order of the group."""

    @classmethod
    def of(cls, held: HeldParity) -> StripeSummary:
        record = held.record
        return cls(record.rank, held.index, record.chunk, tuple(map(SlotKey.of, record.members)))


@dataclass(frozen=True, slots=True)
class HostInventory:
    """What one host holds."""

    slots: tuple[SlotSummary, ...] = ()
    stripes: tuple[StripeSummary, ...] = ()
    ranks: frozenset[int] = frozenset()
    """Ranks that have a folder here, with versions in it or not."""
    ignored: tuple[str, ...] = ()
    """Records that can't be used, and why."""
    fences: frozenset[Fence] = frozenset()


def scan(store: Store) -> HostInventory:
    """Look at the directory of this host. Raises StorageError when it can't be looked at."""
    versions, ignored = survey(store)
    ranks = [rank for name in store.list() if (rank := rank_of(name)) is not None]
    fences = (read_fence(f"{store.url}/{rank_name(rank)}") for rank in ranks)
    stripes = [held for rank in ranks for held in _stripes(store, rank_name(rank), ignored)]
    return HostInventory(
        tuple(SlotSummary.of(held) for version in versions for held in version.held),
        tuple(map(StripeSummary.of, stripes)),
        frozenset(ranks),
        tuple(ignored),
        frozenset(fence for fence in fences if fence is not None),
    )


def _stripes(store: Store, folder: str, ignored: list[str]) -> Iterator[HeldParity]:
    for match in filter(None, map(RECORD.fullmatch, store.list(folder))):
        try:
            yield read_parity(store, folder, int(match[1]))
        except StorageError:
            raise
        except UcformatError as error:
            ignored.append(f"ignored: {error}")
