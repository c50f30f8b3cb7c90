"""Does a shard keep to section 4 of specs/format.md, and does the index say what the shard says of itself?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ucformat.catalog import TensorSpec
from ucformat.containers import checksums
from ucformat.containers.envelope import VERSION
from ucformat.containers.safetensors_header import Header
from ucformat.errors import UcformatError
from ucformat.formats.native.shard import (
    BLOCKS_KEY,
    PAD_KEY,
    PAGE,
    ShardChecks,
    ShardPiece,
    ShardRecord,
    hex_digest,
    read_pieces,
)
from ucformat.formats.native.violation import Violation, of_error
from ucformat.storage.store import Store

Rows = Mapping[tuple[str, tuple[int, ...]], tuple[TensorSpec, tuple[int, ...], int]]


def shard_violations(store: Store, shard: ShardRecord, block_bytes: int, rows: Rows | None) -> Iterator[Violation]:
    """What is wrong with a shard. `rows`: its fragments by the index, where that can be read."""
    path = f"{store.url}/{shard.file}"
    try:
        size = store.size(shard.file)
    except UcformatError as error:
        yield of_error(error, path)
        return
    if size != shard.size:
        yield Violation("file.size", path, 0, size, f"has {size} bytes, was committed with {shard.size}")
        return
    yield from _blocks(store, shard, block_bytes, path)
    if hex_digest(store.read(shard.file, 0, shard.data_start)) != shard.header_digest:
        yield Violation("rebuild.header", path, 0, shard.data_start, "its header is not the one that was committed")
    try:
        header, note, pieces = read_pieces(store, shard.file, VERSION)
    except UcformatError as error:
        yield of_error(error, path)
        return
    if header.data_start != shard.data_start or note.block_bytes != block_bytes:
        why = f"says that data starts at {header.data_start} in blocks of {note.block_bytes}, the record says otherwise"
        yield Violation("rebuild.same", path, 0, header.data_start, why)
    yield from _header(header, shard, path)
    yield from _order(header, pieces, path)
    if rows is not None:
        yield from _compare(pieces, rows, path)


def _blocks(store: Store, shard: ShardRecord, block_bytes: int, path: str) -> Iterator[Violation]:
    checks = None
    try:
        checks = ShardChecks(shard, block_bytes).load(store, shard.file)
    except UcformatError as error:
        yield of_error(error, path)
    table = np.frombuffer(store.read(shard.file, shard.table_start, shard.size), "<u8")
    used = -(-(shard.table_start - shard.data_start) // block_bytes)
    if table[used:].any() or table.nbytes % PAGE:
        start = shard.table_start + 8 * used
        yield Violation(
            "table.padding", path, start, shard.size, f"what follows the last word is no zeros up to a multiple of {PAGE}"
        )
    if checks is None:
        return
    for start, stop, word in zip(checks.start.tolist(), checks.stop.tolist(), checks.digest.tolist(), strict=True):
        data = np.frombuffer(store.read(shard.file, start, stop), np.uint8)
        if checksums.digest("xxh3-64", data) != word:
            yield Violation("block.digest", path, start, stop, "the block has another digest than its word in the table")


def _header(header: Header, shard: ShardRecord, path: str) -> Iterator[Violation]:
    if header.data_start % PAGE:
        why = f"its data starts at byte {header.data_start}, no multiple of {PAGE}"
        yield Violation("header.aligned", path, 0, header.data_start, why)
    if header.metadata.get("format") != "pt":
        yield Violation("header.pt", path, 8, header.data_start, '__metadata__ has no "format": "pt"')
    last = header.entries[-1] if header.entries else None
    if last is None or last.name != BLOCKS_KEY or (last.dtype, last.start) != ("U64", shard.table_start):
        why = f"its last entry is not {BLOCKS_KEY!r}, of U64, at byte {shard.table_start}"
        yield Violation("shard.reserved", path, shard.table_start, shard.size, why)
    data = sum(entry.stop - entry.start for entry in header.entries if entry.name not in {PAD_KEY, BLOCKS_KEY})
    pads = [entry for entry in header.entries if entry.name == PAD_KEY]
    due = -data % PAGE
    if len(pads) != bool(due) or any(pad.stop - pad.start != due or pad.stop != shard.table_start for pad in pads):
        why = f"{due} bytes of {PAD_KEY!r} before byte {shard.table_start} are due"
        yield Violation("shard.reserved", path, header.data_start, shard.table_start, why)


def _order(header: Header, pieces: Sequence[ShardPiece], path: str) -> Iterator[Violation]:
    keys = [(-piece.spec.kind.itemsize, piece.spec.name, piece.box.offset) for piece in pieces]
    for at in range(1, len(keys)):
        if keys[at] < keys[at - 1]:
            why = (
                f"{pieces[at].spec.name!r} comes behind {pieces[at - 1].spec.name!r}: larger items first, then names, then boxes"
            )
            yield Violation("shard.order", path, pieces[at - 1].start, pieces[at].start, why)
            return


def _compare(pieces: Sequence[ShardPiece], rows: Rows, path: str) -> Iterator[Violation]:
    """Where the shard says something else of itself than the index does."""
    left = dict(rows)
    for piece in pieces:
        if not piece.box.volume:
            continue
        found = left.pop((piece.spec.name, piece.box.offset), None)
        said = f"{piece.spec.name!r}{piece.box} of {piece.spec.dtype} {list(piece.spec.shape)} at byte {piece.start}"
        if found is None:
            yield Violation("rebuild.same", path, piece.start, None, f"holds {said}, of which the index knows nothing")
        elif found != (piece.spec, piece.box.length, piece.start):
            spec, length, start = found
            why = f"holds {said}; the index has lengths {list(length)} of {spec.dtype} {list(spec.shape)} at byte {start}"
            clause = "rebuild.same" if spec == piece.spec else "rebuild.agree"
            yield Violation(clause, path, piece.start, None, why)
    for name, offset in left:
        yield Violation("rebuild.same", path, why=f"does not say that it holds {name!r} at {list(offset)}, as the index does")
