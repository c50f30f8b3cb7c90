"""One version of one group made safe: this rank's stripe computed from the slots of the other members, in bounded memory.

Slots are read while nobody holds a lock on them, so a stripe counts only if all records are the same before the first byte was
read and after the last one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone

import numpy as np

from ucformat.containers.envelope import VERSION
from ucformat.errors import SnapshotChangedError, SnapshotMemoryError, StorageError, UcformatError
from ucformat.formats.snapshot import HeldShard, SlotRecord, holds, parity_name, parity_record_name, rank_name, read_slot
from ucformat.snapshot.parity.lost_slot import xor_into
from ucformat.snapshot.parity.record import ParityRecord, encode_parity
from ucformat.snapshot.parity.stripes import chunk_bytes, chunk_in
from ucformat.snapshot.slots.free_memory import PART, room
from ucformat.snapshot.slots.slotfile import drop_parity
from ucformat.storage.regular_file import open_regular
from ucformat.storage.store import Bytes, Store

STEP_BYTES = 1 << 20  # of each member at a time; two such are in flight, so memory is 2 (g - 1) MiB
SLOT_NUMBERS = 16  # slots of a rank that are looked at: 2 or 3, and as many of a former layout
LOOK_S, LONGEST_LOOK_S = 0.005, 0.1  # between looks at what other members hold
SPARE_BYTES = 16 << 20  # of memory that is left to others

Tick = Callable[[], None]
"""Called between steps; raises when this version is to be given up."""


@dataclass(frozen=True, slots=True)
class MemberSlot:
    """A member's slot that holds the version, hashed."""

    store: Store
    held: HeldShard

    def prove_unchanged(self) -> None:
        """Raises SnapshotChangedError, StorageError."""
        if not holds(self.store, self.held):
            raise SnapshotChangedError(f"{self.store.url}/{self.held.path}", self.held.record.step)


def await_slot(store: Store, rank: int, mine: SlotRecord, tick: Tick) -> MemberSlot:
    """The slot in which `rank` holds the version of `mine`, once it is there and hashed. `tick` ends the waiting.

    Raises SnapshotChangedError when that rank holds a later version of this run only: it never will hold this one.
    """
    pause = LOOK_S
    while True:
        tick()
        later = False
        for held in _slots(store, rank):
            record = held.record
            if record.run != mine.run or record.world != mine.world:
                continue
            if record.step == mine.step and record.table_digest is not None:
                return MemberSlot(store, held)
            later = later or record.step > mine.step
            if record.step == mine.step:
                later = False
                break
        if later:
            raise SnapshotChangedError(f"{store.url}/{rank_name(rank)}", mine.step)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_LOOK_S)


def _slots(store: Store, rank: int) -> Iterator[HeldShard]:
    """What a rank holds now; slots that are changing are left out."""
    folder = rank_name(rank)
    names = set(store.list(folder))
    for index in range(SLOT_NUMBERS):
        if f"slot-{index}.json" in names:
            try:
                yield read_slot(store, folder, index)
            except StorageError:
                raise
            except UcformatError:
                continue  # given to another version this moment, or damaged: then it does not count


def make_stripe(own: MemberSlot, others: Mapping[int, MemberSlot], directory: str, tick: Tick) -> int:
    """Compute and keep this rank's stripe for the version in its slot; bytes of it. `others` by rank, without this one.

    Raises SnapshotMemoryError when there is no room, SnapshotChangedError when a slot was given to another version, StorageError:
    then there is no stripe.
    """
    members = {own.held.record.rank: own, **others}
    order = sorted(members)
    records = tuple(members[rank].held.record for rank in order)
    chunk, stripe = chunk_bytes([record.size for record in records]), order.index(own.held.record.rank)
    folder, index = f"{directory}/{own.held.folder}", own.held.index
    done = False
    try:
        drop_record(folder, index)
        with _file(directory, folder, index, chunk) as fd:
            sources = [(members[rank], chunk_in(stripe, i) * chunk) for i, rank in enumerate(order) if i != stripe]
            _write_xor(fd, sources, chunk, tick)
        for member in members.values():
            member.prove_unchanged()
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        _put(folder, index, ParityRecord(VERSION, own.held.record.rank, chunk, records, now))
        own.prove_unchanged()  # else the record would stand beside another version
        done = True
    except OSError as error:
        raise StorageError(f"{folder}/{parity_name(index)}", error) from error
    finally:
        if not done:
            drop_record(folder, index)
    return chunk


def drop_record(folder: str, index: int) -> None:
    """What the stripe holds counts for nothing from now on."""
    try:
        os.unlink(f"{folder}/{parity_record_name(index)}")
    except FileNotFoundError:
        pass


def _put(folder: str, index: int, record: ParityRecord) -> None:
    path = f"{folder}/{parity_record_name(index)}"
    with open(path + PART, "wb") as file:
        file.write(encode_parity(record))
    os.replace(path + PART, path)


@contextmanager
def _file(directory: str, folder: str, index: int, nbytes: int) -> Iterator[int]:
    """The stripe's file, of `nbytes`, all of which are there to be written."""
    path = f"{folder}/{parity_name(index)}"
    has = os.stat(path).st_size if os.path.exists(path) else 0
    left = room(directory)
    if nbytes > has and nbytes - has + SPARE_BYTES > left.free:
        drop_parity(folder, index)
        raise SnapshotMemoryError(folder, nbytes, left.free, left.limit, "; it is for parity: snapshots are not protected")
    fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        yield fd
    finally:
        os.close(fd)


def _write_xor(fd: int, sources: Sequence[tuple[MemberSlot, int]], chunk: int, tick: Tick) -> None:
    """Write the XOR of a chunk of each source; the next step is read while one is computed."""
    total = np.empty(STEP_BYTES, dtype=np.uint8)
    buffers = [[np.empty(STEP_BYTES, dtype=np.uint8) for _ in sources] for _ in range(2)]
    with ThreadPoolExecutor(len(sources), thread_name_prefix="ucf-parity") as pool:

        def read(at: int, into: Sequence[Bytes]) -> list[Future[int]]:
            size = min(STEP_BYTES, chunk - at)
            pairs = zip(sources, into, strict=True)
            return [pool.submit(_read, member, start + at, buffer[:size]) for (member, start), buffer in pairs]

        waiting = read(0, buffers[0])
        for turn, at in enumerate(range(0, chunk, STEP_BYTES)):
            tick()
            counts = [future.result() for future in waiting]
            if at + STEP_BYTES < chunk:
                waiting = read(at + STEP_BYTES, buffers[(turn + 1) % 2])
            size = min(STEP_BYTES, chunk - at)
            total[:size] = 0
            for buffer, count in zip(buffers[turn % 2], counts, strict=True):
                xor_into(total[:size], buffer[:count])
            _write(fd, total[:size], at)


def _read(member: MemberSlot, start: int, out: Bytes) -> int:
    """Fill `out` with the bytes of a slot from `start`; how many there are before it ends."""
    count = max(0, min(out.nbytes, member.held.record.size - start))
    if count:
        member.store.read_into(member.held.path, start, out[:count])
    return count


def _write(fd: int, data: Bytes, start: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], start + done)
