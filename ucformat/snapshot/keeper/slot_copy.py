"""One slot on its way to storage: hash it, copy it, hand it in. Runs in the keeper, beside the trainer.

A slot is read while nobody holds a lock on it: its record is taken away before the first byte of another version goes into
it, so a copy counts only if the record was the same before the first byte was read and after the last one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ucformat.containers import checksums
from ucformat.containers.checksums import BLOCK_BYTES
from ucformat.errors import ChecksumError, FormatError, MissingFileError, UnsupportedError
from ucformat.formats.native.shard import hex_digest
from ucformat.formats.snapshot import SlotRecord, rank_name, read_slot
from ucformat.snapshot.slots.slotfile import attach_table, holds
from ucformat.storage.local import LocalStore
from ucformat.storage.regular_file import open_regular
from ucformat.storage.store import Bytes, Store, Writer

CHUNK_BYTES = 4 << 20  # a multiple of every block size in use; long enough for full disk speed
LOOK_EVERY = 32  # blocks hashed between looks whether the version is still there: what is gone need not be read
THREADS = 2  # one writes while the other verifies; more would take the trainer's cores

Tick = Callable[[], None]
"""Called between chunks; raises when the time for them is over."""


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """A slot and the record that was found to be valid for it."""

    store: LocalStore
    """The snapshot directory."""
    folder: str
    index: int
    record: SlotRecord

    @property
    def file(self) -> str:
        return f"{self.store.url}/{self.folder}/{self.record.file}"

    def image(self) -> Bytes:
        """The whole slot, mapped read-only. Reading it costs no copy, and direct I/O can write it out as it lies."""
        try:
            fd = open_regular(self.file, os.O_RDONLY)
        except FileNotFoundError:
            raise MissingFileError(self.file) from None
        try:
            size = os.fstat(fd).st_size
            if size != self.record.size:
                raise FormatError(self.file, f"has {size} bytes, was committed with {self.record.size}", 0, size)
            return np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), dtype=np.uint8)
        finally:
            os.close(fd)

    def prove_unchanged(self) -> None:
        """Raises MissingFileError when the slot has been given to another version since its record was read."""
        if not holds(self.store.url, self.record, self.index):
            raise self.taken()

    def taken(self) -> MissingFileError:
        return MissingFileError(self.file, f"the slot was given to another version while step {self.record.step} was read")


def find_slot(directory: str, rank: int, index: int, step: int) -> HeldSlot:
    """The slot of a version. Raises MissingFileError when it holds another or none, FormatError when it is damaged."""
    store, folder = LocalStore(directory), rank_name(rank)
    record = read_slot(store, folder, index).record
    if record.step != step:
        raise MissingFileError(f"{store.url}/{folder}/{record.file}", f"holds step {record.step}, no longer step {step}")
    if record.block_bytes != BLOCK_BYTES:
        raise UnsupportedError(f"{store.url}/{folder}/{record.file}", f"blocks of {record.block_bytes} bytes are not persisted")
    return HeldSlot(store, folder, index, record)


def hash_slot(slot: HeldSlot) -> HeldSlot:
    """Fill in the table of block checksums, and replace the record by one that vouches for it.

    Nothing is done for a slot that has them. Raises ChecksumError for a damaged header, MissingFileError when the slot was taken.
    """
    record = slot.record
    if record.table_digest is not None:
        return slot
    image = slot.image()
    _prove_header(slot, image)
    start, stop = checksums.blocks(record.data_start, record.table_start, record.block_bytes)
    table = np.zeros(record.size - record.table_start, dtype=np.uint8)
    words = table.view("<u8")
    for i, (a, b) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        if i % LOOK_EVERY == 0:
            slot.prove_unchanged()
        words[i] = checksums.digest("xxh3-64", image[a:b])
    done = attach_table(slot.store.url, slot.index, record, table)
    if done is None:
        raise slot.taken()
    return replace(slot, record=done)


def _prove_header(slot: HeldSlot, image: Bytes) -> None:
    record = slot.record
    if hex_digest(image[: record.data_start]) != record.header_digest:
        slot.prove_unchanged()
        raise ChecksumError(slot.file, 0, record.data_start, what="header of the slot")


def copy_slot(slot: HeldSlot, store: Store, path: str, tick: Tick) -> None:
    """Copy a hashed slot to `path` as it is. Every block is verified on the way, so damage in memory is never persisted.

    Raises ChecksumError naming the bytes of the slot, MissingFileError when it was taken, StorageError. Then nothing is
    at `path`.
    """
    record, image = slot.record, slot.image()
    _prove_header(slot, image)
    table = image[record.table_start :]
    if hex_digest(table) != record.table_digest:
        slot.prove_unchanged()
        raise ChecksumError(slot.file, record.table_start, record.size, what="checksum table of the slot")
    words: Sequence[int] = table.view("<u8").tolist()

    def chunk(writer: Writer, start: int, stop: int) -> None:
        tick()
        for at in range(start, stop, record.block_bytes):
            upto = min(at + record.block_bytes, stop)
            if checksums.digest("xxh3-64", image[at:upto]) != words[(at - record.data_start) // record.block_bytes]:
                slot.prove_unchanged()
                raise ChecksumError(slot.file, at, upto, what="block of the slot")
        writer.write(start, image[start:stop])

    with store.writer(path, record.size) as writer:
        writer.write(0, image[: record.data_start])
        cuts = [(a, min(a + CHUNK_BYTES, record.table_start)) for a in range(record.data_start, record.table_start, CHUNK_BYTES)]
        _run_chunks(lambda cut: chunk(writer, *cut), cuts, 1 if writer.ordered else THREADS)
        writer.write(record.table_start, table)
        slot.prove_unchanged()


def _run_chunks(chunk: Callable[[tuple[int, int]], None], cuts: Sequence[tuple[int, int]], threads: int) -> None:
    if threads == 1 or len(cuts) < 2:
        for cut in cuts:
            chunk(cut)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="ucf-persist") as pool:
        futures = [pool.submit(chunk, cut) for cut in cuts]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
