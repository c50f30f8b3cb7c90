"""The slots of one rank: shard images on tmpfs that hold versions of the state and outlive the process.

    slots = SlotSet.create(directory, rank, world, pieces)
    slot = slots.begin()                          # its old version is gone now, the newest stays in another slot
    slot.tensor(i).copy_(live piece i)            # straight to its place in the file
    slots.commit(slot, step, values)
    slots.settle(step, whole=True)                # all ranks have it: what is older may go

All memory is taken by `create`. One version is in the making at a time; `begin` again gives up one that was not committed.
Whenever the process dies, each slot holds one whole version or none: a record is there only while nothing writes.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from itertools import count as count_from

import msgspec
import torch

from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.containers.envelope import VERSION
from ucformat.errors import SnapshotMemoryError, StorageError
from ucformat.formats.native.shard import ShardLayout, hex_digest, lay_out
from ucformat.formats.snapshot import LOCK, SlotRecord, rank_name
from ucformat.snapshot.slots.filelock import FileLock
from ucformat.snapshot.slots.free_memory import room
from ucformat.snapshot.slots.inventory import Found, Inventory, scan_slots
from ucformat.snapshot.slots.restart_fence import Fence, read_fence, remove_others, write_fence
from ucformat.snapshot.slots.slotfile import SlotFile, adopt, drop, make, read_record, reserve, write_record
from ucformat.storage.store import Bytes

Version = tuple[int, str]
"""Step, and the run that took it."""
SPARE_BYTES = 4 << 20  # records, and the rest of each slot's last huge page
_COUNTING_S = 60.0  # for all ranks of a host to count the room one after another; each takes milliseconds
_LOOKED_AT_S = 0.25  # for `ucconvert slots` to look whether the lock is held, which takes microseconds
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_CLEARING_S = 5.0  # for a keeper of a process that died to finish with a slot


class Slot:
    """One shard image. `tensor(i)` is the place of piece i in it."""

    def __init__(self, file: SlotFile, layout: ShardLayout, pieces: Sequence[tuple[TensorSpec, Box]]) -> None:
        self.index, self.path, self.image = file.index, file.path, file.image
        self.step: int | None = None
        """Of the version that it holds; None while there is none, and while one is in the making."""
        self.run = ""
        """The start of the job that took that version."""
        self.needed = False
        """Its version is, or may become, the newest that all ranks hold."""
        self.file = file
        self.holds = 0
        self._tensors = [_place(file.image, int(at), *piece) for at, piece in zip(layout.starts(), pieces, strict=True)]

    @property
    def held(self) -> bool:
        """Someone reads it: it is not to be begun."""
        return self.holds > 0

    def tensor(self, piece: int) -> torch.Tensor:
        """Piece `piece` of those that `create` was given, of its dtype and its box's shape; shares the file's memory."""
        return self._tensors[piece]


def _place(image: Bytes, start: int, spec: TensorSpec, box: Box) -> torch.Tensor:
    if not box.volume:
        return spec.kind.empty(box.length)
    stop = start + box.volume * spec.kind.itemsize
    return torch.from_numpy(image[start:stop]).view(spec.kind.torch).view(box.length)


class SlotSet:
    """A rank's slots. Its methods may be called from any thread."""

    def __init__(self, stock: Inventory, lock: FileLock, rank: int, world: int, run: str, layout: ShardLayout) -> None:
        self.directory, self.rank, self.world, self.run = os.path.dirname(stock.folder), rank, world, run
        self.folder, self.layout = stock.folder, layout
        self.slots: tuple[Slot, ...] = ()
        self.remarks: list[str] = list(stock.remarks)
        """What a user should know of how the slots came to be."""
        self._lock = lock
        self._guard = threading.RLock()
        self._earlier: list[Found] = list(stock.earlier)
        self._whole = stock.whole
        records = [found.record for found in stock.adopted if found.record is not None]
        self.adopted: list[Version] = [(record.step, record.run) for record in records if record.world == world]
        """Versions that an earlier process of a job of as many ranks left in these slots."""
        self._fresh, self._here = tuple[int, ...](), tuple(range(world))
        self._ticks = count_from(1)
        self._age: dict[int, int] = {}
        self._replaced: int | None = None
        self._retired = self._fenced = False
        self._registered: list[Slot] = []
        self._header_digest = hex_digest(layout.header)

    @staticmethod
    def bytes_needed(pieces: Sequence[tuple[TensorSpec, Box]], count: int = 2) -> int:
        """Memory that `count` slots of these pieces take, records included."""
        return count * lay_out(pieces, VERSION).size + SPARE_BYTES

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        rank: int,
        world: int,
        pieces: Sequence[tuple[TensorSpec, Box]],
        count: int = 2,
        *,
        run: str = "",
        here: Collection[int] | None = None,
    ) -> SlotSet:
        """Make `count` slots for `pieces`, or adopt those of the same layout that an earlier process left, versions included.

        Versions of another layout stay until one of this layout is there (see `begin`). `run` is any text that all ranks agree
        on for this start of the job: versions of two starts are never read as one. `here` are the ranks that share the
        directory, all by default: the lowest removes what other ranks left there, once it is replaced.

        Raises SnapshotMemoryError before anything is allocated, SnapshotInUseError, UnrepresentableError, StorageError.
        """
        if count < 2 or not 0 <= rank < world:
            raise ValueError(f"count ({count}) must be at least 2, and rank ({rank}) below world ({world})")
        layout = lay_out(pieces, VERSION)
        folder = os.path.join(os.path.abspath(os.fspath(directory)), rank_name(rank))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise StorageError(folder, error) from error
        lock = FileLock.take(f"{folder}/{LOCK}", _LOOKED_AT_S)
        files: list[SlotFile] = []
        try:
            stock = scan_slots(folder, layout, count)
            _open(stock, layout, count, files)
        except BaseException:
            for file in files:
                file.close()
            lock.release()
            raise
        slots = cls(stock, lock, rank, world, run, layout)
        slots.slots = tuple(Slot(file, layout, pieces) for file in sorted(files, key=lambda file: file.index))
        slots._here = slots._here if here is None else tuple(here)
        slots._fresh = tuple({slot.index for slot in slots.slots} - {found.index for found in stock.adopted})
        for found in stock.adopted:
            if found.record is not None:
                slots._note(slots.slot(found.index), found.record.step, found.record.run)
        if slots.newest is not None:
            slots.newest.needed = True
        return slots

    # -- using ---------------------------------------------------------------------------------------------------------

    def slot(self, index: int) -> Slot:
        """The slot whose file has this number (after a change of layout, numbers do not start at 0). Raises KeyError."""
        for slot in self.slots:
            if slot.index == index:
                return slot
        raise KeyError(index)

    @property
    def newest(self) -> Slot | None:
        """The slot that was committed last; after a restart that of the newest version that all ranks hold, if that is known."""
        with self._guard:
            return max(self._valid(), key=lambda slot: self._age[slot.index], default=None)

    @property
    def versions(self) -> list[Version]:
        """Those in these slots, the one of `newest` last."""
        with self._guard:
            ordered = sorted(self._valid(), key=lambda slot: self._age[slot.index])
            return [(slot.step, slot.run) for slot in ordered if slot.step is not None]

    @property
    def steps(self) -> list[int]:
        """Steps of the versions in these slots, the one of `newest` last."""
        return [step for step, _ in self.versions]

    def begin(self) -> Slot | None:
        """A slot to fill, without a version from now on; None when each is held, or needed as `settle` tells.

        What an earlier layout left is removed when a version of this one has replaced it. Raises StorageError.
        """
        with self._guard:
            self._retire()
            free = [slot for slot in self.slots if not slot.held and not slot.needed]
            for slot in sorted(free, key=lambda slot: (slot.step is not None, self._age.get(slot.index, 0))):
                if slot.file.clear(self.layout.table_start):
                    slot.step = None
                    return slot
            return None

    def settle(self, step: int, *, whole: bool) -> None:
        """Learn what became of a version: all ranks hold it, so the ones before it may go; or not all do, so it may go itself.

        Until it is settled, a version stays: ranks commit one after another, and the version before is what a crash falls back
        to as long as a single rank lacks this one. A rank that is alone need not call it.
        """
        with self._guard:
            settled = next((slot for slot in self._valid() if (slot.step, slot.run) == (step, self.run)), None)
            if settled is None:
                return  # this rank has no such version, or it was superseded meanwhile
            if not whole:
                settled.needed = False
                return
            self._replaced = step
            for slot in self._valid():
                slot.needed = slot.needed and self._age[slot.index] >= self._age[settled.index]

    def agree(self, adopted: Sequence[Sequence[Version]]) -> None:
        """After `create`, before the first `begin`: rely on the newest version that all ranks hold, of those that each `adopted`.

        Of ranks that adopted the same, one is enough.

        Where a version is complete in this very directory, that one is relied on: an earlier job may have had other ranks.
        """
        common = set.intersection(*map(set, adopted))
        with self._guard:
            for slot in self._valid() if common and not self._whole else ():
                slot.needed = (slot.step, slot.run) == max(common)

    def commit(
        self,
        slot: Slot,
        step: int,
        values: bytes = b"{}",
        aliases: Mapping[str, str] | None = None,
        mesh: Mapping[str, int] | None = None,
        coords: Mapping[str, int] | None = None,
    ) -> SlotRecord:
        """Declare that all pieces in a begun slot are those of `step`. `values` is this rank's tree as `values.encode` gives it.

        On return a crash keeps this version, and it is needed until it is settled. Versions of other runs with
        this step or a later one are forgotten before: the job has gone back. Raises StorageError; then the slot has no version.
        """
        if step < 0 or slot not in self.slots or slot.step is not None:
            raise ValueError(f"slot {slot.index} was not begun, or step {step} is no step")
        layout = self.layout
        record = SlotRecord(
            VERSION,
            step,
            self.rank,
            self.world,
            os.path.basename(slot.path),
            layout.size,
            layout.data_start,
            layout.table_start,
            layout.block_bytes,
            self._header_digest,
            values=msgspec.Raw(values),
            aliases=dict(aliases or {}),
            mesh=dict(mesh or {}),
            coords=None if coords is None else dict(coords),
            created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            run=self.run,
        )
        with self._guard:
            self._abandon_from(step)
            write_record(slot.file.record_path, record)
            self._note(slot, step, self.run)
            slot.needed = True
            if self.world == 1:
                self.settle(step, whole=True)
        return record

    def withdraw(self, slot: Slot, step: int) -> None:
        """Take back version `step`, which is torn; the one before it is needed again. Raises StorageError."""
        with self._guard:
            if not slot.file.clear(self.layout.table_start, _CLEARING_S):
                raise StorageError(slot.path, f"the torn version of step {step} can't be removed: another process holds its lock")
            slot.step, slot.needed, self._replaced = None, False, None
            if (newest := self.newest) is not None:
                newest.needed = True

    def record(self, slot: Slot) -> SlotRecord | None:
        """The record of a slot as it stands now: hashed, once the keeper has done so."""
        return read_record(slot.file.record_path)

    def hold(self, slot: Slot) -> None:
        """Keep a slot from being begun until as many calls of `release`."""
        with self._guard:
            slot.holds += 1

    def release(self, slot: Slot) -> None:
        with self._guard:
            slot.holds = max(0, slot.holds - 1)

    def pin(self) -> bool:
        """Register the slots with CUDA, so that copies from a device run at full speed and on their own; False without CUDA."""
        if self._registered or not torch.cuda.is_available():
            return bool(self._registered)
        for slot in self.slots:
            failed = int(torch.cuda.cudart().cudaHostRegister(slot.image.ctypes.data, slot.image.nbytes, _PORTABLE))
            if failed:
                self.remarks.append(f"{slot.path}: CUDA can't pin this memory (error {failed}): copies from devices are slower")
                self._unpin()
                return False
            self._registered.append(slot)
        return True

    def close(self, remove: bool = False) -> None:
        """Let go of the slots; their versions stay for the next process unless `remove`. Tensors of slots stay usable."""
        with self._guard:
            self._unpin()
            for slot in self.slots:
                slot.file.close()
            self.slots = ()
            if remove:
                shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.release()
            if remove and os.path.isdir(self.directory) and os.listdir(self.directory) == [LOCK]:
                shutil.rmtree(self.directory, ignore_errors=True)  # the last rank of this host tidies up

    def undo(self) -> None:
        """Close, and remove what `create` made."""
        for index in self._fresh:
            drop(self.folder, index)
        self.close()

    def __enter__(self) -> SlotSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _valid(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.step is not None]

    def _note(self, slot: Slot, step: int, run: str) -> None:
        slot.step, slot.run = step, run
        self._age[slot.index] = next(self._ticks)

    def _unpin(self) -> None:
        for slot in self._registered:
            torch.cuda.cudart().cudaHostUnregister(slot.image.ctypes.data)
        self._registered = []

    def _abandon_from(self, step: int) -> None:
        """Forget what other runs hold from a step on, which is about to be committed: they must not pass for newer."""
        newer = [slot for slot in self._valid() if slot.run != self.run and slot.step is not None and slot.step >= step]
        earlier = [found for found in self._earlier if found.step >= step]
        fence, self._fenced = None if self._fenced else read_fence(self.folder), True
        if newer or earlier or (fence is not None and fence.run != self.run):  # by that one, these would count as abandoned
            write_fence(self.folder, Fence.now(self.run, step - 1))
        for slot in newer:
            if not slot.file.clear(self.layout.table_start, _CLEARING_S):
                raise StorageError(
                    slot.path, f"step {slot.step} is abandoned and can't be removed: another process holds its lock"
                )
            slot.step, slot.needed = None, False
        for found in earlier:
            drop(self.folder, found.index)
            self._earlier.remove(found)

    def _retire(self) -> None:
        """Once: remove what an earlier layout, a larger world or another start left, when it has been replaced."""
        if self._retired or self._replaced is None:
            return
        self._retired = True
        for found in self._earlier:
            drop(self.folder, found.index)
        self._earlier = []
        if self.rank == min(self._here):
            remove_others(self._here, self.directory)


def _open(stock: Inventory, layout: ShardLayout, count: int, files: list[SlotFile]) -> None:
    """Map the adopted slots and make what is lacking of `count`, into `files`; what can't be finished is removed again."""
    for found in stock.adopted:
        files.append(adopt(stock.folder, found.index))
        if found.record is None:
            files[-1].clear(layout.table_start, _CLEARING_S)  # of a record that is damaged
    fresh = _reserve(stock, layout.size, count - len(files))
    try:
        files.extend(make(stock.folder, index, layout) for index in fresh)
    except BaseException:
        for index in fresh:
            drop(stock.folder, index)
        raise


def _reserve(stock: Inventory, size: int, count: int) -> list[int]:
    """Numbers of `count` new slots, counted as taken from now on. Raises SnapshotMemoryError when there is no room."""
    if not count:
        return []
    directory = os.path.dirname(stock.folder)
    fresh = [index for index in range(count + len(stock.kept)) if index not in stock.kept][:count]
    with FileLock.take(f"{directory}/{LOCK}", _COUNTING_S):
        found, needed = room(directory), count * size + SPARE_BYTES
        if needed > found.free:
            old = sum(item.size for item in stock.earlier)
            hint = f"; versions of another layout take {old:,} bytes of it: remove {stock.folder} to give them up" if old else ""
            raise SnapshotMemoryError(stock.folder, needed, found.free, found.limit, hint)
        if not found.is_memory:
            stock.remarks.append(f"{directory} is on {found.kind or 'a disk'}, not tmpfs: every snapshot goes through its disk")
        try:
            for index in fresh:
                reserve(stock.folder, index, size)
        except OSError as error:
            raise StorageError(stock.folder, error) from error
    return fresh
