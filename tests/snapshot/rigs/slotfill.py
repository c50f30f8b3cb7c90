"""Small states that tell their step by every item, and a process that snapshots one for ever until it is killed."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from tests.checkpoints import split_evenly
from ucformat import formats, values
from ucformat.box import Box
from ucformat.catalog import Catalog, TensorSpec
from ucformat.containers import checksums
from ucformat.formats.snapshot import SlotRecord
from ucformat.reshard.reading.lazy import read
from ucformat.snapshot.slots.slot_set import Slot, SlotSet
from ucformat.snapshot.slots.slotfile import attach_table

Pieces = list[tuple[TensorSpec, Box]]
W = TensorSpec("model/w", "F32", (96, 1024))
SMALL = [
    TensorSpec("model/b", "BF16", (33,)),
    TensorSpec("model/q", "F8_E4M3", (7, 3)),
    TensorSpec("optimizer/b/step", "F32", ()),
    TensorSpec("model/none", "F32", (0, 4)),
    TensorSpec("n", "I64", (5,)),
]


def pieces(rank: int = 0, world: int = 1) -> Pieces:
    """Rows of one tensor spread over the ranks; rank 0 has the small ones too."""
    mine = [(W, split_evenly(W.shape, 0, world)[rank])]
    return mine + ([(spec, Box.whole(spec.shape)) for spec in SMALL] if rank == 0 else [])


def fill(slot: Slot, owned: Pieces, step: int) -> None:
    """Every item of every piece is the step (mod 16, which each dtype here holds exactly), row by row."""
    for i in range(len(owned)):
        tensor = slot.tensor(i)
        for row in tensor if tensor.ndim == 2 else [tensor]:
            row.copy_(torch.full(row.shape, float(step % 16)).to(tensor.dtype))


def take(slots: SlotSet, owned: Pieces, step: int, *, settled: bool = True) -> Slot | None:
    """Snapshot `step`, as all other ranks do if it is to be settled."""
    slot = slots.begin()
    if slot is not None:
        fill(slot, owned, step)
        slots.commit(slot, step, values.encode({"step": step}), aliases={"model/tied": "model/w"}, mesh={"dp": slots.world})
        if settled:
            slots.settle(step, whole=True)
    return slot


def opened(directory: Path | str) -> Catalog:
    """The catalog of a snapshot directory, found by its looks."""
    name, catalog = formats.open_named(str(directory))
    assert name == "snapshot"
    return catalog


def assert_is_step(catalog: Catalog, names: Sequence[str] | None = None) -> int:
    """Every item of every tensor and the values are of the catalog's step."""
    step = catalog.notes.step
    assert step is not None
    assert catalog.values == {"step": step}
    for name in names or [W.name, "model/tied", *(spec.name for spec in SMALL)]:
        tensor = read(catalog, name)
        assert bool((tensor.float() == step % 16).all()), (name, step, tensor.float().unique())
    return step


def overwrite_for_ever(directory: str, link: Connection) -> None:
    """Adopt what is there, tell it, then take step after step as fast as possible, telling each that is committed."""
    torch.set_num_threads(1)
    owned = pieces()
    slots = SlotSet.create(directory, 0, 1, owned)
    newest = slots.newest
    link.send(None if newest is None else newest.step)
    step = 0 if newest is None or newest.step is None else newest.step
    while True:
        step += 1
        take(slots, owned, step)
        link.send(step)


def hold_lock(directory: str, link: Connection) -> None:
    """Own the slots until killed."""
    slots = SlotSet.create(directory, 0, 1, pieces())
    link.send(slots.directory)
    link.recv()


def hash_slot(slots: SlotSet, slot: Slot) -> SlotRecord | None:
    """What the keeper does: checksums of the slot's blocks, into its table and its record."""
    record = slots.record(slot)
    assert record is not None
    table = np.zeros(record.size - record.table_start, dtype=np.uint8)
    starts, stops = checksums.blocks(record.data_start, record.table_start, record.block_bytes)
    digests = [checksums.digest("xxh3-64", slot.image[a:b]) for a, b in zip(starts, stops, strict=True)]
    table.view("<u8")[: len(digests)] = np.array(digests, dtype=np.uint64)
    return attach_table(slots.directory, slot.index, record, table)
