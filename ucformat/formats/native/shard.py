"""A shard: the file that one writer fills. Its layout is known before any byte is copied.

A valid safetensors file whose data starts on a page boundary. Entries are ordered by descending item size, then name,
and need no padding between them. Behind them lies the table of block checksums, on a page boundary too, so that the
whole file can be written with direct I/O. `__metadata__["ucf"]` says which box of which tensor each entry is, so that a
lost index can be rebuilt. specs/format.md is the normative text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from ucformat.box import Box, Ints
from ucformat.catalog import Checks, TensorSpec
from ucformat.containers import checksums
from ucformat.containers.file_image import ByteSource, FilePlan, write_image
from ucformat.containers.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, Header, build_header, read_header
from ucformat.dtypes import DTYPES
from ucformat.errors import ChecksumError, FormatError, UnrepresentableError
from ucformat.storage.local import aligned
from ucformat.storage.store import Bytes, Store

PAGE = 4096  # bytes; data and checksum table start at multiples of it
RESERVED = "__ucf__."
PAD_KEY, BLOCKS_KEY = RESERVED + "pad", RESERVED + "blocks"


Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$", description="xxh3-64, 16 hexadecimal digits")]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number of bytes, items or dimensions, or a position."""


class ShardEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the header can't say of an entry; absent when the entry is a whole tensor under its own name and dtype."""

    tensor: str
    """Name of the logical tensor."""
    dtype: str
    """Its dtype."""
    shape: tuple[Count, ...]
    """Its global shape."""
    offset: tuple[Count, ...]
    """Where the entry's box starts; the header gives the lengths."""


class ShardNote(msgspec.Struct, frozen=True):
    """`__metadata__["ucf"]` of a shard, as JSON."""

    version: str
    block_bytes: Count
    """Size of the checksummed blocks, counted from the start of the data."""
    entries: dict[str, ShardEntry]
    """Entry key → what it is."""


class ShardRecord(msgspec.Struct, frozen=True):
    """What the commit record keeps of a shard."""

    file: str
    """Path relative to the checkpoint."""
    size: Count
    """Bytes of the file."""
    data_start: Count
    """Bytes [0, data_start) are the header."""
    table_start: Count
    """Bytes [table_start, size) are the checksum table; [data_start, table_start) are the blocks."""
    header_digest: Digest
    """xxh3-64 of the header, 16 hexadecimal digits."""
    table_digest: Digest
    """xxh3-64 of the checksum table."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where everything lies in a shard that is to be written."""

    header: bytes
    order: Ints
    """Piece index of each entry, in file order."""
    start: Ints
    """File offset of each entry, in file order."""
    nbytes: Ints
    """Bytes of each entry, in file order."""
    table_start: int
    size: int
    block_bytes: int

    @property
    def data_start(self) -> int:
        return len(self.header)

    def starts(self) -> Ints:
        """File offset of each piece, by its index."""
        out = np.zeros(len(self.order), dtype=np.int64)
        out[self.order] = self.start
        return out


def lay_out(pieces: Sequence[tuple[TensorSpec, Box]], version: str, block_bytes: int = checksums.BLOCK_BYTES) -> ShardLayout:
    """The layout of a shard that holds these pieces.

    Raises UnrepresentableError for a reserved name, and for more pieces than the header of one file can name.
    """
    layout = _lay_out(pieces, version, block_bytes)
    if layout.data_start - LENGTH_BYTES > MAX_HEADER_BYTES:
        kind = f"shard of {len(pieces)} pieces"
        raise UnrepresentableError(pieces[0][0].name, kind, f"its header would pass {MAX_HEADER_BYTES} bytes, spread them")
    return layout


def lay_out_all(
    pieces: Sequence[tuple[TensorSpec, Box]], version: str, max_header_bytes: int = MAX_HEADER_BYTES
) -> list[tuple[range, ShardLayout]]:
    """The shards that these pieces need, each a run of them: one, unless its header would be longer than readers take.

    Raises UnrepresentableError for a reserved name, and for a piece whose name alone is too long.
    """

    def split(run: range) -> Iterator[tuple[range, ShardLayout]]:
        layout = _lay_out(pieces[run.start : run.stop], version, checksums.BLOCK_BYTES)
        length = layout.data_start - LENGTH_BYTES
        if length <= max_header_bytes:
            yield run, layout
            return
        if len(run) == 1:
            raise UnrepresentableError(pieces[run.start][0].name[:80], "tensor", f"its name takes {length} bytes of header")
        step = -(-len(run) // (length // max_header_bytes + 1))
        for start in range(run.start, run.stop, step):
            yield from split(range(start, min(start + step, run.stop)))

    return list(split(range(len(pieces))))


def _lay_out(pieces: Sequence[tuple[TensorSpec, Box]], version: str, block_bytes: int) -> ShardLayout:
    order = sorted(range(len(pieces)), key=lambda i: (-pieces[i][0].kind.itemsize, pieces[i][0].name, pieces[i][1].offset))
    header_entries: list[tuple[str, str, list[int]]] = []
    notes: dict[str, ShardEntry] = {}
    keys = {"__metadata__"}  # not free for a tensor of that name
    sizes = np.zeros(len(order), dtype=np.int64)
    for at, i in enumerate(order):
        spec, box = pieces[i]
        if spec.name.startswith(RESERVED):
            raise UnrepresentableError(spec.name, "tensor", f"names that start with {RESERVED!r} are reserved")
        kind, whole = spec.kind, box.length == spec.shape
        key = spec.name if whole else f"{spec.name}{box}"
        while key in keys:
            key += "'"
        keys.add(key)
        if not whole or key != spec.name or kind.stored != kind.name:
            notes[key] = ShardEntry(spec.name, spec.dtype, spec.shape, box.offset)
        try:
            header_entries.append((key, kind.stored, kind.header_shape(box.length)))
        except ValueError as error:  # a box that cuts through a group of packed numbers
            raise UnrepresentableError(spec.name, f"box {box}", str(error)) from error
        sizes[at] = box.volume * kind.itemsize
    data = int(sizes.sum())
    pad = -data % PAGE
    blocks = -(-(data + pad) // block_bytes)
    words = -(-blocks // (PAGE // 8)) * (PAGE // 8)
    if pad:
        header_entries.append((PAD_KEY, "U8", [pad]))
    header_entries.append((BLOCKS_KEY, "U64", [words]))
    note = msgspec.json.encode(ShardNote(version, block_bytes, notes)).decode()
    header = build_header(header_entries, {"format": "pt", "ucf": note}, align=PAGE)
    start = len(header) + np.cumsum(sizes) - sizes
    table_start = len(header) + data + pad
    return ShardLayout(header, np.array(order, dtype=np.int64), start, sizes, table_start, table_start + 8 * words, block_bytes)


def write_shard(
    store: Store,
    path: str,
    layout: ShardLayout,
    fill: ByteSource,
    on_bytes: Callable[[int], None] | None = None,
) -> ShardRecord:
    """Write a shard durably; `fill` knows the pieces by their index in what was laid out."""
    image = FilePlan(
        layout.table_start, [(0, layout.header)], layout.order, layout.start, layout.nbytes, origin=layout.data_start
    )
    with store.writer(path, layout.size) as writer:
        digests = write_image(writer, image, fill, block_bytes=layout.block_bytes, on_bytes=on_bytes)
        table = _table(layout, digests)
        writer.write(layout.table_start, table)
    header = np.frombuffer(layout.header, dtype=np.uint8)
    return ShardRecord(path, layout.size, layout.data_start, layout.table_start, hex_digest(header), hex_digest(table))


def _table(layout: ShardLayout, digests: NDArray[np.uint64]) -> Bytes:
    table = aligned(layout.size - layout.table_start)
    table[: 8 * len(digests)] = digests.astype("<u8").view(np.uint8)
    return table


def hex_digest(data: Bytes | bytes) -> str:
    """xxh3-64 as 16 hexadecimal digits."""
    return f"{checksums.digest('xxh3-64', np.frombuffer(data, dtype=np.uint8)):016x}"


@dataclass(frozen=True, slots=True)
class ShardChecks:
    """The block checksums of a shard, read from its end when the shard is first used."""

    record: ShardRecord
    block_bytes: int

    def load(self, store: Store, path: str) -> Checks:
        """Raises FormatError when the file has another size, ChecksumError when the table itself is damaged."""
        record = self.record
        size = store.size(path)
        if size != record.size:
            raise FormatError(f"{store.url}/{path}", f"has {size} bytes, was committed with {record.size}", 0, size, "file.size")
        table = np.empty(record.size - record.table_start, dtype=np.uint8)
        store.read_into(path, record.table_start, table)
        if hex_digest(table) != record.table_digest:
            raise ChecksumError(
                f"{store.url}/{path}", record.table_start, record.size, what="checksum table", clause="table.digest"
            )
        start, stop = checksums.blocks(record.data_start, record.table_start, self.block_bytes)
        digests = table.view("<u8").astype(np.uint64)[: len(start)]
        return Checks("xxh3-64", start, stop, digests)


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """One entry of a shard as it is found in the file."""

    spec: TensorSpec
    box: Box
    start: int


def read_pieces(store: Store, path: str, known: str) -> tuple[Header, ShardNote, list[ShardPiece]]:
    """What a shard says of itself. Raises FormatError when it is no shard of format `known` or contradicts itself."""
    header = read_header(store, path)
    where = f"{store.url}/{path}"
    try:
        note = msgspec.json.decode(header.metadata["ucf"], type=ShardNote)
    except KeyError:
        raise FormatError(where, "has no ucf metadata: not a shard", 0, header.data_start, "header.ucf") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(where, f"malformed ucf metadata: {error}", 0, header.data_start, "header.ucf") from error
    if note.version.split(".", 1)[0] != known.split(".", 1)[0]:
        raise FormatError(where, f"shard of format version {note.version}, expected {known}", 0, header.data_start)
    pieces = []
    for entry in header.entries:
        if entry.name in (PAD_KEY, BLOCKS_KEY):
            continue
        said = note.entries.get(entry.name)
        try:
            if said is None:
                kind = DTYPES[entry.dtype]
                shape = kind.item_shape(entry.shape)
                pieces.append(ShardPiece(TensorSpec(entry.name, entry.dtype, shape), Box.whole(shape), entry.start))
                continue
            kind = DTYPES[said.dtype]
            tail = len(kind.tail)
            length = kind.item_shape(entry.shape[: len(entry.shape) - tail])
            box = Box(said.offset, length)
            if kind.stored != entry.dtype or entry.shape[len(entry.shape) - tail :] != kind.tail or not box.inside(said.shape):
                raise ValueError(f"box {box} of {said.dtype} {list(said.shape)} can't be {entry.dtype} {list(entry.shape)}")
        except (KeyError, ValueError) as error:
            raise FormatError(where, f"entry {entry.name!r}: {error}", entry.start, entry.stop, "rebuild.box") from error
        pieces.append(ShardPiece(TensorSpec(said.tensor, said.dtype, said.shape), box, entry.start))
    return header, note, pieces
