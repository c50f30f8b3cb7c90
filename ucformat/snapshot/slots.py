"""The slots of one rank: shard images on tmpfs that hold versions of the state and outlive the process.

    slots = SlotSet.create(directory, rank, world, pieces)
    slot = slots.begin()                          # its old version is gone now, the newest stays in another slot
    slot.tensor(i).copy_(live piece i)            # straight to its place in the file
    slots.commit(slot, step, values)

All memory is taken by `create`. One version is in the making at a time; `begin` again gives up one that was not committed.
Whenever the process dies, each slot holds one whole version or none: a record is there only while nothing writes.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import count as count_from

import msgspec
import torch

from ucformat.box import Box
from ucformat.catalog import TensorSpec
from ucformat.errors import SnapshotInUseError, SnapshotMemoryError, StorageError
from ucformat.formats.snapshot import LOCK, SlotRecord, rank_name
from ucformat.manifest import VERSION
from ucformat.shard import ShardLayout, hex_digest, lay_out
from ucformat.snapshot.filelock import FileLock
from ucformat.snapshot.inventory import Found, Inventory, take_stock
from ucformat.snapshot.room import room
from ucformat.snapshot.slotfile import SlotFile, adopt, drop, make, read_record, reserve, write_record
from ucformat.storage import Bytes

SPARE_BYTES = 4 << 20  # records, and the rest of each slot's last huge page
_COUNTING_S = 60.0  # for all ranks of a host to count the room one after another; each takes milliseconds
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_CLEARING_S = 5.0  # for a keeper of a process that died to finish with a slot


class Slot:
    """One shard image. `tensor(i)` is the place of piece i in it."""

    def __init__(self, file: SlotFile, layout: ShardLayout, pieces: Sequence[tuple[TensorSpec, Box]]) -> None:
        self.index, self.path, self.image = file.index, file.path, file.image
        self.step: int | None = None
        """Of the version that it holds; None while there is none, and while one is in the making."""
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
        self._ticks = count_from(1)
        self._age: dict[int, int] = {}
        self._committed = self._retired = False
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
    ) -> SlotSet:
        """Make `count` slots for `pieces`, or adopt those of the same layout that an earlier process left, versions included.

        Versions of another layout stay until one of this layout is there (see `begin`); their memory counts until then. `run`
        is any text that all ranks agree on for this start of the job: versions of two starts are then never read as one.

        Raises SnapshotMemoryError before anything is allocated, SnapshotInUseError while another living process has them,
        UnrepresentableError for a reserved name, StorageError.
        """
        if count < 2 or not 0 <= rank < world:
            raise ValueError("two slots at least, or there is none to fill while one is kept; and a rank of its world")
        layout = lay_out(pieces, VERSION)
        folder = os.path.join(os.path.abspath(os.fspath(directory)), rank_name(rank))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise StorageError(folder, error) from error
        lock = FileLock.take(f"{folder}/{LOCK}")
        files: list[SlotFile] = []
        try:
            stock = take_stock(folder, layout, count)
            _open(stock, layout, count, files)
        except BaseException:
            for file in files:
                file.close()
            lock.release()
            raise
        slots = cls(stock, lock, rank, world, run, layout)
        slots.slots = tuple(sorted((Slot(file, layout, pieces) for file in files), key=lambda slot: slot.index))
        for found in stock.adopted:
            if found.record is not None:
                slots._note(slots.slot(found.index), found.record.step)
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
            valid = [slot for slot in self.slots if slot.step is not None]
            return max(valid, key=lambda slot: self._age[slot.index], default=None)

    @property
    def steps(self) -> list[int]:
        """Steps of the versions in these slots, the one of `newest` last."""
        with self._guard:
            valid = [slot for slot in self.slots if slot.step is not None]
            return [slot.step for slot in sorted(valid, key=lambda slot: self._age[slot.index]) if slot.step is not None]

    def begin(self, complete: int | None = None) -> Slot | None:
        """A slot to fill, without a version from now on; None when each is the newest, held, or of step `complete`.

        `complete` is the newest step that all ranks are known to hold: ranks commit one after another, so a rank's newest version
        may be useless without its peers', and the one before is then what a crash falls back to. None relies on the
        newest alone, which is right for a single rank. What an earlier layout left is removed when this layout has
        step `complete`, or with None when it has any new version. Raises StorageError.
        """
        with self._guard:
            self._retire(complete)
            newest = self.newest
            free = [slot for slot in self.slots if slot is not newest and not slot.held]
            free = [slot for slot in free if slot.step is None or slot.step != complete]
            for slot in sorted(free, key=lambda slot: (slot.step is not None, self._age.get(slot.index, 0))):
                if slot.file.clear(self.layout.table_start):
                    slot.step = None
                    return slot
            return None

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

        On return a crash keeps this version. Raises StorageError; the slot then has no version.
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
            write_record(slot.file.record_path, record)
            self._note(slot, step)
            self._committed = True
        return record

    def record(self, slot: Slot) -> SlotRecord | None:
        """The record of a slot as it stands now: hashed, once the keeper has done so."""
        return read_record(slot.file.record_path)

    def forget(self, newer_than: int) -> list[int]:
        """Remove versions of later steps, those of an earlier layout too; their steps.

        Every rank calls this after restoring an older version, so that what was computed afterwards and abandoned is
        not taken for the newest, nor mixed with the same steps taken again.
        """
        gone: list[int] = []
        with self._guard:
            for slot in self.slots:
                if slot.step is not None and slot.step > newer_than:
                    if not slot.file.clear(self.layout.table_start, _CLEARING_S):
                        raise StorageError(slot.path, "another process keeps its lock")
                    gone.append(slot.step)
                    slot.step = None
            for found in [item for item in self._earlier if item.step > newer_than]:
                drop(self.folder, found.index)
                gone.append(found.step)
                self._earlier.remove(found)
        return sorted(gone)

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

    def __enter__(self) -> SlotSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _note(self, slot: Slot, step: int) -> None:
        slot.step = step
        self._age[slot.index] = next(self._ticks)

    def _unpin(self) -> None:
        for slot in self._registered:
            torch.cuda.cudart().cudaHostUnregister(slot.image.ctypes.data)
        self._registered = []

    def _retire(self, complete: int | None) -> None:
        """Once: remove what an earlier layout or a larger world left, when it has been replaced."""
        replaced = self._committed if complete is None else any(slot.step == complete for slot in self.slots)
        if self._retired or not replaced:
            return
        self._retired = True
        for found in self._earlier:
            drop(self.folder, found.index)
        self._earlier = []
        if self.rank == 0:
            _remove_ranks_from(self.world, self.directory)


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


def _remove_ranks_from(world: int, directory: str) -> None:
    """Remove the directories of ranks that this world does not have, unless a living process fills them."""
    for name in os.listdir(directory):
        folder = f"{directory}/{name}"
        if not name.startswith("rank-") or not name[5:].isdigit() or int(name[5:]) < world:
            continue
        try:
            with FileLock.take(f"{folder}/{LOCK}"):
                shutil.rmtree(folder, ignore_errors=True)
        except (SnapshotInUseError, StorageError):
            continue
