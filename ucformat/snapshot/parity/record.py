"""What a parity file holds: stripe of which slots of which version. Its record says so, and stands while it is true.

    <directory>/rank-00000/parity-0.xor    a stripe of the slots of rank 0's group, for the version in rank 0's slot 0
    <directory>/rank-00000/parity-0.json   its record: there only while the stripe is complete

The number is that of the slot, so parity lives as long as the version that it belongs to. The record holds the records of all
members' slots: those of a lost one are found there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from ucformat.containers.envelope import seal, unseal
from ucformat.errors import FormatError
from ucformat.formats.native.manifest import check_sizes
from ucformat.formats.native.shard import Count
from ucformat.formats.snapshot import SlotRecord, parity_name, parity_record_name, rank_name
from ucformat.snapshot.parity.stripes import chunk_bytes
from ucformat.storage.store import Store

RECORD = re.compile(r"parity-(\d+)\.json")


class ParityRecord(msgspec.Struct, frozen=True):
    """What a stripe is made of."""

    version: str
    rank: Count
    """The rank that keeps it."""
    chunk: Count
    """Bytes of the stripe."""
    members: tuple[SlotRecord, ...]
    """Records of the group's slots as they were when they were read, all hashed, in the order of the group."""
    created: str = ""

    @property
    def stripe(self) -> int:
        """Number of the stripe, which is that of the keeping member."""
        return next(i for i, member in enumerate(self.members) if member.rank == self.rank)


def encode_parity(record: ParityRecord) -> bytes:
    return seal(msgspec.json.encode(record))


def decode_parity(data: bytes, file: str) -> ParityRecord:
    """The record in the bytes of `file`. Raises VersionError, ChecksumError, FormatError."""
    raw = unseal(data, file)
    try:
        record = msgspec.json.decode(raw, type=ParityRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(file, f"malformed parity record: {error}", 0, len(data)) from error
    ranks = [member.rank for member in record.members]
    versions = {(member.step, member.world, member.run) for member in record.members}
    if len(ranks) < 2 or len(set(ranks)) != len(ranks) or record.rank not in ranks or len(versions) != 1:
        raise FormatError(file, f"parity of rank {record.rank} over slots of ranks {ranks[:8]} that are no group of one version")
    for member in record.members:
        check_sizes(member.shard(), member.block_bytes, file)
        if member.table_digest is None or member.rank >= member.world:
            raise FormatError(file, f"parity over a slot of rank {member.rank} that can't be verified")
    if record.chunk != chunk_bytes([member.size for member in record.members]):
        raise FormatError(file, f"chunks of {record.chunk} bytes are not what its slots are cut into")
    return record


@dataclass(frozen=True, slots=True)
class HeldParity:
    """A stripe in a rank's directory."""

    folder: str
    index: int
    record: ParityRecord

    @property
    def path(self) -> str:
        """The stripe's file, in the snapshot directory."""
        return f"{self.folder}/{parity_name(self.index)}"


def read_parity(store: Store, folder: str, index: int) -> HeldParity:
    """The stripe beside a slot. Raises MissingFileError when there is none, FormatError when record and file do not fit."""
    name = f"{folder}/{parity_record_name(index)}"
    where = f"{store.url}/{name}"
    record = decode_parity(store.read(name), where)
    if folder != rank_name(record.rank):
        raise FormatError(where, f"is the parity record of {rank_name(record.rank)}")
    size = store.size(f"{folder}/{parity_name(index)}")
    if size != record.chunk:
        raise FormatError(where, f"{parity_name(index)} has {size} bytes instead of {record.chunk}")
    return HeldParity(folder, index, record)
