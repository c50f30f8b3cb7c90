"""The catalog of one version whose slots lie on several hosts: each host reads its own headers, and all ranks get all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ucformat.catalog import Catalog
from ucformat.errors import SnapshotChangedError
from ucformat.formats.native.fragments import ShardTable
from ucformat.formats.snapshot import (
    DescribedShard,
    HeldShard,
    SlotGuard,
    assemble,
    decode_slot,
    describe,
    encode_slot,
    rank_name,
    read_slot,
)
from ucformat.group import Group
from ucformat.snapshot.recovery.hosts import Hosts
from ucformat.snapshot.recovery.inventory import HeldVersion


@dataclass(frozen=True, slots=True)
class _SentShard:
    """What a host tells the others of one of its slots."""

    host: int
    index: int
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
        mine = list(_describe_own(version, hosts)) if hosts.leads else []
    sent = [shard for each in group.all_gather(mine) for shard in each]
    catalog: Catalog | None = None
    with group.together(what):
        shards = sorted((_received(shard, hosts) for shard in sent), key=lambda shard: shard.held.record.rank)
        catalog = assemble(shards, hosts.own)
    assert catalog is not None
    return catalog


def _describe_own(version: HeldVersion, hosts: Hosts) -> Iterator[_SentShard]:
    for placed in version.slots:
        if placed.host == hosts.number:
            held = read_slot(hosts.own, rank_name(placed.slot.rank), placed.slot.index)
            if not placed.slot.is_of(held.record):
                raise SnapshotChangedError(f"{hosts.own.url}/{held.path}", version.step)
            yield _SentShard(placed.host, held.index, encode_slot(held.record), describe(hosts.own, held).table)


def _received(shard: _SentShard, hosts: Hosts) -> DescribedShard:
    record = decode_slot(shard.record, f"record of a slot on host {shard.host}")
    held, store = HeldShard(rank_name(record.rank), shard.index, record), hosts.stores[shard.host]
    return DescribedShard(held, shard.table, store, SlotGuard(store, held))
