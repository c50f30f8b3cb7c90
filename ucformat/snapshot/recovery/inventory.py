"""What lies in the memory of each host, and which versions that makes. Pure, but for `scan`, which looks at one directory.

A host says of its slots only what tells versions apart; records and headers are read of the version that is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ucformat.formats.snapshot import HeldShard, SlotRecord, survey
from ucformat.snapshot.slots.restart_fence import Fence, read_fence
from ucformat.storage.store import Store

_RANK = re.compile(r"rank-(\d{5,})/")
_TOLD = 8  # ranks that a message names


@dataclass(frozen=True, slots=True)
class SlotSummary:
    """A version in a slot."""

    rank: int
    index: int
    step: int
    world: int
    run: str
    created: str
    hashed: bool
    size: int
    header_digest: str

    @classmethod
    def of(cls, held: HeldShard) -> SlotSummary:
        record = held.record
        hashed = record.table_digest is not None
        return cls(
            record.rank,
            held.index,
            record.step,
            record.world,
            record.run,
            record.created,
            hashed,
            record.size,
            record.header_digest,
        )

    def is_of(self, record: SlotRecord) -> bool:
        """Whether `record` is the record of this version."""
        return (self.rank, self.step, self.world, self.run, self.created, self.size, self.header_digest) == (
            record.rank,
            record.step,
            record.world,
            record.run,
            record.created,
            record.size,
            record.header_digest,
        )


@dataclass(frozen=True, slots=True)
class HostInventory:
    """What one host holds."""

    slots: tuple[SlotSummary, ...] = ()
    ranks: frozenset[int] = frozenset()
    """Ranks that have a folder here, with versions in it or not."""
    ignored: tuple[str, ...] = ()
    """Records that can't be used, and why."""
    fences: frozenset[Fence] = frozenset()


def scan(store: Store) -> HostInventory:
    """Look at the directory of this host. Raises StorageError when it can't be looked at."""
    versions, ignored = survey(store)
    folders = [match for name in store.list() if (match := _RANK.fullmatch(name))]
    fences = (read_fence(f"{store.url}/{match[0]}") for match in folders)
    return HostInventory(
        tuple(SlotSummary.of(held) for version in versions for held in version.held),
        frozenset(int(match[1]) for match in folders),
        tuple(ignored),
        frozenset(fence for fence in fences if fence is not None),
    )


@dataclass(frozen=True, slots=True)
class PlacedSlot:
    """A slot of a version, and the host that holds it."""

    host: int
    slot: SlotSummary


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """What the hosts hold of one version, by rank."""

    step: int
    world: int
    run: str
    slots: tuple[PlacedSlot, ...]

    @property
    def complete(self) -> bool:
        return len(self.slots) == self.world

    @property
    def hashed(self) -> bool:
        """Whether all of its slots have checksums."""
        return all(item.slot.hashed for item in self.slots)

    @property
    def created(self) -> str:
        return max(item.slot.created for item in self.slots)

    def missing(self) -> list[int]:
        """The first ranks whose slots no host holds; `world` may be any number that a record claims."""
        there = {item.slot.rank for item in self.slots}
        return list(islice((rank for rank in range(self.world) if rank not in there), _TOLD))


def versions(hosts: Sequence[HostInventory]) -> list[HeldVersion]:
    """All versions that any host holds a part of, the newest first; without those that a restart has abandoned.

    Of a slot that two hosts hold, as after a rank has moved, the newer version counts, and of the same one the first host's.
    """
    fences = {fence for host in hosts for fence in host.fences}
    found: dict[tuple[int, int, str], dict[int, PlacedSlot]] = {}
    for number, host in enumerate(hosts):
        for slot in host.slots:
            if any(_abandoned(slot, fence) for fence in fences):
                continue
            ranks = found.setdefault((slot.step, slot.world, slot.run), {})
            before = ranks.get(slot.rank)
            if before is None or before.slot.created < slot.created:
                ranks[slot.rank] = PlacedSlot(number, slot)
    made = [HeldVersion(*key, tuple(ranks[rank] for rank in sorted(ranks))) for key, ranks in found.items()]
    return sorted(made, key=lambda version: (version.step, version.created), reverse=True)


def _abandoned(slot: SlotSummary, fence: Fence) -> bool:
    """Whether another start of the job went on from an older step: the host of this slot was away when that was made known."""
    return slot.run != fence.run and slot.step > fence.step and slot.created < fence.created


def lost(version: HeldVersion, hosts: Sequence[HostInventory]) -> str:
    """Why an incomplete version can't be used, in words; empty when all ranks are seen here, and some had not finished it."""
    seen = frozenset[int]().union(*(host.ranks for host in hosts))
    missing = version.missing()
    absent = [rank for rank in missing if rank not in seen]
    if not absent and len(hosts) == 1:
        return ""
    ranks = ", ".join(map(str, absent or missing))
    here = "here" if len(hosts) == 1 else f"on any of {len(hosts)} hosts"
    why = f"have no directory {here}" if absent else f"do not hold it {here}"
    return f"step {version.step} of {version.world} ranks lies in part elsewhere (ranks {ranks} {why})"


def troubles(hosts: Sequence[HostInventory], found: Sequence[HeldVersion]) -> Iterator[str]:
    """What else is there and can't be used."""
    for host in hosts:
        yield from host.ignored
    yield from filter(None, (lost(version, hosts) for version in found if not version.complete))
