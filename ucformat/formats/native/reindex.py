"""Repair: an index that was lost or damaged is rebuilt from the shards."""

from __future__ import annotations

from ucformat.catalog import Catalog, FragmentTable, TensorSpec
from ucformat.containers.envelope import VERSION
from ucformat.errors import FormatError, MissingFileError
from ucformat.formats.native.attempt import read_record
from ucformat.formats.native.checkpoint import catalog_of
from ucformat.formats.native.fragments import merge, prove_whole, tabulate
from ucformat.formats.native.manifest import Index, Record, build_index
from ucformat.formats.native.shard import ShardPiece, ShardRecord, hex_digest, read_pieces
from ucformat.storage.store import Store


def reindex(store: Store) -> int:
    """Rebuild a lost or damaged index from the shards; the number of fragments.

    The rebuilt index has to match the digest in `ucf.json`: equal shards give equal bytes.
    Raises ChecksumError when a shard's header is damaged, FormatError when the result is not what was committed.
    """
    record = read_record(store)
    specs, table = _fragments(store, record)
    index = build_index(specs, table)
    if hex_digest(index) != record.index.digest:
        raise FormatError(f"{store.url}/{record.index.file}", "the shards do not give the index that was committed")
    store.put(record.index.file, index)
    return len(table)


def rebuilt(store: Store) -> Catalog:
    """The catalog of a checkpoint by what its shards say of themselves, as if the index were lost. Raises what `reindex` does."""
    record = read_record(store)
    return catalog_of(store, record, Index(*_fragments(store, record)))


def _fragments(store: Store, record: Record) -> tuple[tuple[TensorSpec, ...], FragmentTable]:
    tables = [tabulate(shard, _pieces(store, shard)) for shard in record.shards]
    specs, table = merge(tables, store.url)
    prove_whole(specs, table, [shard.file for shard in record.shards], store.url)
    return specs, table


def _pieces(store: Store, shard: ShardRecord) -> list[ShardPiece]:
    if not store.exists(shard.file):
        raise MissingFileError(f"{store.url}/{shard.file}")
    header, _, pieces = read_pieces(store, shard.file, VERSION)
    if header.data_start != shard.data_start or hex_digest(store.read(shard.file, 0, shard.data_start)) != shard.header_digest:
        raise FormatError(f"{store.url}/{shard.file}", "its header is not the one that was committed", 0, header.data_start)
    return pieces
