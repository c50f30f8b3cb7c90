"""The catalog of one version whose slots lie on several hosts: each host reads its own headers, and all ranks get all of them.

A slot that is lost is a file in a store that computes it; the rest of the product does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ucformat.catalog import Catalog
from ucformat.errors import ChecksumError, FormatError, MissingFileError, SnapshotChangedError
from ucformat.formats.native.fragments import ShardTable
from ucformat.formats.snapshot import (
    DescribedShard,
    HeldShard,
    SlotGuard,
    SlotRecord,
    assemble,
    decode_slot,
    describe,
    encode_slot,
    parity_name,
    rank_name,
    read_slot,
    slot_name,
)
from ucformat.group import Group
from ucformat.snapshot.parity.lost_slot import FileAt, LostSlot, LostSlotStore
from ucformat.snapshot.parity.record import read_parity
from ucformat.snapshot.recovery.hosts import Hosts
from ucformat.snapshot.recovery.inventory import SlotKey, StripeSummary
from ucformat.snapshot.recovery.versions import ComputedSlot, HeldVersion, PlacedSlot, PlacedStripe
from ucformat.storage.store import Store


@dataclass(frozen=True, slots=True)
class _SentShard:
    """What a host tells the others of one slot: one of its own, or one that it has looked at through parity."""

    record: bytes
    table: ShardTable


def open_version(version: HeldVersion, hosts: Hosts, group: Group) -> Catalog:
    """The catalog of a complete version, alike on every rank. Every rank of `group` calls it.

    Raises SnapshotChangedError when a slot holds something else by now, and what `describe` and `assemble` raise: the same class
    on every rank.
    """
    mine: list[_SentShard] = []
    what = f"opening step {version.step} in memory"
    with group.together(what):
        mine = list(describe_own(version, hosts)) if hosts.leads else []
    sent = [shard for each in group.all_gather(mine) for shard in each]
    catalog: Catalog | None = None
    with group.together(what):
        catalog = assemble(_received(version, sent, hosts), hosts.own)
    assert catalog is not None
    return catalog


def describe_own(version: HeldVersion, hosts: Hosts) -> Iterator[_SentShard]:
    """What this host has of a version. Raises SnapshotChangedError, ChecksumError, FormatError."""
    for placed in version.slots:
        if isinstance(placed, ComputedSlot):
            if placed.stripes[0].host == hosts.number:  # which also has the record of the lost slot
                record = _record_of(placed, hosts.own)
                store = LostSlotStore(_lost_slot(placed, record, hosts.stores))
                yield _SentShard(encode_slot(record), describe(store, _held(record, 0)).table)
        elif placed.host == hosts.number:
            held = _read_placed(placed, hosts.own)
            yield _SentShard(encode_slot(held.record), describe(hosts.own, held).table)


def describe_placed(placed: PlacedSlot | ComputedSlot, stores: Mapping[int, Store]) -> DescribedShard:
    """A slot of a version whose hosts this process can read, each in `stores`.

    Raises SnapshotChangedError, ChecksumError, FormatError.
    """
    if not isinstance(placed, ComputedSlot):
        store = stores[placed.host]
        return describe(store, _read_placed(placed, store))
    record = _record_of(placed, stores[placed.stripes[0].host])
    lost = _lost_slot(placed, record, stores)
    held, computed = _held(record, 0), LostSlotStore(lost)
    return DescribedShard(held, describe(computed, held).table, computed, lost.guard)


def _read_placed(placed: PlacedSlot, store: Store) -> HeldShard:
    """The slot as it is now. Raises SnapshotChangedError when it holds something else than it did."""
    held = read_slot(store, rank_name(placed.slot.rank), placed.slot.index)
    if SlotKey.of(held.record) != placed.slot.key:
        raise SnapshotChangedError(f"{store.url}/{held.path}", placed.slot.key.step)
    return held


def _record_of(placed: ComputedSlot, store: Store) -> SlotRecord:
    """The record of a lost slot, as the first stripe of its group has it. Raises SnapshotChangedError."""
    stripe = placed.stripes[0].stripe
    held = read_parity(store, rank_name(stripe.rank), stripe.index)
    if StripeSummary.of(held) != stripe:
        raise SnapshotChangedError(f"{store.url}/{held.path}", placed.slot.key.step)
    return held.record.members[placed.member]


def _received(version: HeldVersion, sent: list[_SentShard], hosts: Hosts) -> list[DescribedShard]:
    """The slots of all ranks, in their order, each with the store that it is read from. Raises FormatError."""
    decoded = [(decode_slot(shard.record, "record of a slot"), shard) for shard in sent]
    records = {record.rank: (record, shard) for record, shard in decoded}
    shards: list[DescribedShard] = []
    for placed in version.slots:
        if placed.slot.rank not in records:
            raise FormatError(hosts.own.url, f"no host told of the slot of rank {placed.slot.rank} of step {version.step}")
        record, shard = records[placed.slot.rank]
        if isinstance(placed, ComputedSlot):
            lost = _lost_slot(placed, record, hosts.stores)
            shards.append(DescribedShard(_held(record, 0), shard.table, LostSlotStore(lost), lost.guard))
        else:
            held, store = _held(record, placed.slot.index), hosts.stores[placed.host]
            shards.append(DescribedShard(held, shard.table, store, SlotGuard(store, held)))
    return shards


def _held(record: SlotRecord, index: int) -> HeldShard:
    return HeldShard(rank_name(record.rank), index, record)


def _lost_slot(placed: ComputedSlot, record: SlotRecord, stores: Mapping[int, Store]) -> LostSlot:
    """A lost slot by what is left of its group."""
    others = [number for number in range(len(placed.slots) + 1) if number != placed.member]
    slots: dict[int, tuple[FileAt, int]] = {}
    stripes: dict[int, FileAt] = {}
    guards = []
    for number, slot, kept in zip(others, placed.slots, placed.stripes, strict=True):
        path = f"{rank_name(slot.slot.rank)}/{slot_name(slot.slot.index)}"
        slots[number] = FileAt(stores[slot.host], path), slot.slot.key.size
        guards.append(_KeyGuard(stores[slot.host], slot.slot.index, slot.slot.key))
        stripe = kept.stripe
        stripes[number] = FileAt(stores[kept.host], f"{rank_name(stripe.rank)}/{parity_name(stripe.index)}")
    return LostSlot(
        record,
        placed.member,
        placed.stripes[0].stripe.chunk,
        slots,
        stripes,
        (*guards, *(_StripeGuard(stores, kept) for kept in placed.stripes)),
    )


@dataclass(frozen=True, slots=True)
class _KeyGuard:
    """Raises SnapshotChangedError once a slot holds something else."""

    store: Store
    index: int
    key: SlotKey

    def __call__(self) -> None:
        folder = rank_name(self.key.rank)
        try:
            same = SlotKey.of(read_slot(self.store, folder, self.index).record) == self.key
        except (MissingFileError, FormatError, ChecksumError):
            same = False
        if not same:
            raise SnapshotChangedError(f"{self.store.url}/{folder}/{slot_name(self.index)}", self.key.step)


@dataclass(frozen=True, slots=True)
class _StripeGuard:
    """Raises SnapshotChangedError once a stripe is another one."""

    stores: Mapping[int, Store]
    kept: PlacedStripe

    def __call__(self) -> None:
        stripe, store = self.kept.stripe, self.stores[self.kept.host]
        folder = rank_name(stripe.rank)
        try:
            same = StripeSummary.of(read_parity(store, folder, stripe.index)) == stripe
        except (MissingFileError, FormatError, ChecksumError):
            same = False
        if not same:
            raise SnapshotChangedError(f"{store.url}/{folder}/{parity_name(stripe.index)}", stripe.members[0].step)
