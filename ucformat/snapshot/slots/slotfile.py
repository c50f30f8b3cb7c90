"""The file of one slot and its record: made, mapped, cleared, committed.

The trainer fills a slot through its mapping; a record exists only while the slot holds one complete version. The trainer removes
it before the first byte of the next version, and whoever adds checksums (`attach_table`, in another process) does so under
a lock on the slot's file and only if the record is still the one whose bytes it hashed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from ucformat.errors import FormatError, SnapshotMemoryError, StorageError
from ucformat.formats.native.shard import ShardLayout, hex_digest
from ucformat.formats.snapshot import (
    SlotRecord,
    decode_slot,
    encode_slot,
    parity_name,
    parity_record_name,
    rank_name,
    record_name,
    slot_name,
)
from ucformat.snapshot.slots.free_memory import MEMORY_KINDS, PART, filesystem, room
from ucformat.storage.local import ALIGNMENT
from ucformat.storage.regular_file import open_regular
from ucformat.storage.store import Bytes

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux ≥ 5.14: all pages at once, contents kept, an error instead of SIGBUS
_POLL_S = 0.001  # between tries of a lock that is held for moments


class SlotFile:
    """A slot's file, mapped: `image` is all its bytes, shared with every process that maps it."""

    def __init__(self, folder: str, index: int, fd: int, image: Bytes) -> None:
        self.index, self.image = index, image
        self.path = f"{folder}/{slot_name(index)}"
        self.record_path = f"{folder}/{record_name(index)}"
        self._fd = fd

    def clear(self, table_start: int, timeout_s: float = 0.0) -> bool:
        """Remove the record and zero the table; False, and nothing done, while another process holds the slot's lock."""
        try:
            with _locked(self._fd, timeout_s) as locked:
                if not locked:
                    return False
                remove(self.record_path)
                self.image[table_start:] = 0
        except OSError as error:
            raise StorageError(self.record_path, error) from error
        return True

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last view of it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


# -- making ------------------------------------------------------------------------------------------------------------


def reserve(folder: str, index: int, size: int) -> None:
    """Announce a slot of `size` bytes that `make` will take: other ranks' `room` counts it from now on."""
    fd = os.open(f"{folder}/{slot_name(index)}{PART}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def make(folder: str, index: int, layout: ShardLayout) -> SlotFile:
    """Take all pages of a reserved slot, write its header and give it its name. Raises SnapshotMemoryError, StorageError."""
    path = f"{folder}/{slot_name(index)}"
    slot = _map(folder, index, f"{path}{PART}")
    try:
        if len(slot.image) != layout.size:
            raise FormatError(path, f"has {len(slot.image)} bytes instead of {layout.size}")
        slot.image[: layout.data_start] = np.frombuffer(layout.header, dtype=np.uint8)
        os.rename(f"{path}{PART}", path)
    except OSError as error:
        slot.close()
        raise StorageError(path, error) from error
    return slot


def adopt(folder: str, index: int) -> SlotFile:
    """Map the slot that an earlier process left. Raises SnapshotMemoryError, StorageError."""
    return _map(folder, index, f"{folder}/{slot_name(index)}")


def has_layout(folder: str, index: int, layout: ShardLayout) -> bool:
    """Whether the slot's file is one of this layout, byte for byte of its header."""
    try:
        with open(f"{folder}/{slot_name(index)}", "rb", opener=open_regular) as file:
            return os.fstat(file.fileno()).st_size == layout.size and file.read(layout.data_start) == layout.header
    except (OSError, FormatError):
        return False


def _map(folder: str, index: int, path: str) -> SlotFile:
    try:
        fd = open_regular(path, os.O_RDWR)
    except OSError as error:
        raise StorageError(path, error) from error
    size = os.fstat(fd).st_size
    try:
        mapping = mmap.mmap(fd, size)
        _touch(fd, mapping, size, in_memory=filesystem(folder) in MEMORY_KINDS)
    except (OSError, ValueError) as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFAULT):
            left = room(os.path.dirname(folder))
            raise SnapshotMemoryError(folder, size, left.free, left.limit) from error
        raise StorageError(path, error) from error
    return SlotFile(folder, index, fd, np.frombuffer(mapping, dtype=np.uint8))


def _touch(fd: int, mapping: mmap.mmap, size: int, *, in_memory: bool) -> None:
    """Take every page now, writable, so that no copy in the training loop waits for one; bytes stay what they are."""
    if not in_memory:
        os.posix_fallocate(fd, 0, size)  # on a disk, blocks are wanted in one run
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(mapping, mmap.MADV_HUGEPAGE)  # tmpfs has huge pages when mounted with huge=advise
    if _advise(mapping, _POPULATE_WRITE):
        return
    os.posix_fallocate(fd, 0, size)
    pages = np.frombuffer(mapping, dtype=np.uint8)[::ALIGNMENT]
    pages[:] = pages.copy()


def _advise(mapping: mmap.mmap, advice: int) -> bool:
    """Whether the kernel knows this advice and took it."""
    while True:
        try:
            mapping.madvise(advice)
        except OSError as error:
            if error.errno == errno.EINTR:
                continue
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                return False
            raise
        return True


# -- records -----------------------------------------------------------------------------------------------------------


def write_record(path: str, record: SlotRecord) -> None:
    """Put a record in place in one step. The slots live in memory, so nothing is synced. Raises StorageError."""
    part = path + PART
    try:
        with open(part, "wb") as file:
            file.write(encode_slot(record))
        os.replace(part, path)
    except OSError as error:
        raise StorageError(path, error) from error


def read_record(path: str) -> SlotRecord | None:
    """The record at `path`, or None where there is none. Raises what `decode_slot` raises, StorageError."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return decode_slot(file.read(), path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(path, error) from error


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def forget(folder: str, index: int, timeout_s: float = 5.0) -> None:
    """Remove the record of a slot that nobody fills: it holds no version from now on. Raises StorageError."""
    with _alone(folder, index, timeout_s) as locked:
        if not locked:  # a keeper that adds checksums would put the record back
            raise StorageError(f"{folder}/{slot_name(index)}", f"its lock was not to be had within {timeout_s:g} s")
        remove(f"{folder}/{record_name(index)}")


def drop(folder: str, index: int, timeout_s: float = 1.0) -> None:
    """Remove a slot that nobody maps: its record first, so that it is gone before its bytes are. Raises StorageError."""
    path = f"{folder}/{slot_name(index)}"
    remove(f"{path}{PART}")
    with _alone(folder, index, timeout_s):  # should a dying keeper hold it for longer, it finds no record afterwards
        remove(f"{folder}/{record_name(index)}")
        remove(path)
    drop_parity(folder, index)


def drop_parity(folder: str, index: int) -> None:
    """Remove the parity that belongs to the version in a slot, its record first."""
    remove(f"{folder}/{parity_record_name(index)}")
    remove(f"{folder}/{parity_name(index)}")


@contextmanager
def _alone(folder: str, index: int, timeout_s: float) -> Iterator[bool]:
    """Whether the slot is locked inside: not if another process keeps it so. Without a file there is nothing to lock."""
    path = f"{folder}/{slot_name(index)}"
    try:
        fd = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    except OSError as error:
        raise StorageError(path, error) from error
    try:
        with _locked(fd, timeout_s) as locked:
            yield locked
    except OSError as error:
        raise StorageError(path, error) from error
    finally:
        os.close(fd)


def holds(directory: str, record: SlotRecord, index: int) -> bool:
    """Whether slot `index` of the record's rank still holds this version: bytes read before the call are then its bytes."""
    now = read_record(f"{directory}/{rank_name(record.rank)}/{record_name(index)}")
    return now is not None and now.same_version(record)


def attach_table(directory: str, index: int, record: SlotRecord, table: Bytes, timeout_s: float = 10.0) -> SlotRecord | None:
    """Write the checksum table of a slot whose blocks were hashed while it held `record`; the record that then stands.

    `table` is the whole table region (table_start to size). None: the slot holds something else by now, nothing was written.
    Raises StorageError.
    """
    if table.nbytes != record.size - record.table_start:
        raise ValueError(f"a table of {table.nbytes} bytes where {record.size - record.table_start} belong")
    folder = f"{directory}/{rank_name(record.rank)}"
    path = f"{folder}/{slot_name(index)}"
    try:
        fd = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(path, error) from error
    try:
        with _locked(fd, timeout_s) as locked:
            if not locked:
                raise StorageError(path, f"its lock was not to be had within {timeout_s:g} s")
            if not holds(directory, record, index):
                return None
            _write_all(fd, table, record.table_start)
            done = msgspec.structs.replace(record, table_digest=hex_digest(table))
            write_record(f"{folder}/{record_name(index)}", done)
            return done
    except OSError as error:
        raise StorageError(path, error) from error
    finally:
        os.close(fd)


def _write_all(fd: int, data: Bytes, start: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], start + done)


@contextmanager
def _locked(fd: int, timeout_s: float) -> Iterator[bool]:
    """Hold the exclusive lock of an open slot file; False when it could not be had in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                yield False
                return
            time.sleep(_POLL_S)
    try:
        yield True
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
