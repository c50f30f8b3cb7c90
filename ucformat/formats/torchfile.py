"""Writing torch.save files whose tensors are made of byte ranges of what a conversion writes: cut, joined, padded, converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucformat.containers.file_image import ByteRequest, stream
from ucformat.containers.zip_write import Outgoing, RecordWriter, pickle_tree, write_head, write_tail, zip_size
from ucformat.dtypes import DTYPES
from ucformat.formats.target import WriteJob
from ucformat.lazy_torch import torch
from ucformat.storage.store import Store

_TOP = "archive"
PADDING = -1
"""Instead of a piece: zeros."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, stop) of a leaf's data: of the image of one of the job's targets once it is of dtype `dtype`, or zeros."""

    piece: int
    start: int
    stop: int
    dtype: str = ""
    """The dtype to convert to; empty for the bytes as they are."""


@dataclass(frozen=True, slots=True)
class TorchSaved:
    """A file to be: its tree, and where the bytes of each `Outgoing` leaf in it come from, in the order of their keys."""

    path: str
    tree: Any
    leaves: Mapping[Outgoing, Sequence[Range]]

    @property
    def nbytes(self) -> int:
        """Tensor bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)


class Leaves:
    """Makes the leaves of one file, each with a key of its own."""

    def __init__(self) -> None:
        self.made: dict[Outgoing, Sequence[Range]] = {}

    def add(self, dtype: str, shape: tuple[int, ...], ranges: Sequence[Range]) -> Outgoing:
        leaf = Outgoing(str(len(self.made)), dtype, shape)
        self.made[leaf] = [part for part in ranges if part.stop > part.start]
        return leaf

    def file(self, path: str, tree: Any) -> TorchSaved:
        return TorchSaved(path, tree, self.made)


def write_file(job: WriteJob, store: Store, file: TorchSaved) -> None:
    """Write one file, front to back, in bounded memory. Raises StorageError."""
    ranges = [part for parts in file.leaves.values() for part in parts]
    data_pkl = pickle_tree(file.tree)
    chunks = stream([part.stop - part.start for part in ranges], _source(job, ranges))
    with store.writer(file.path, zip_size(_TOP, data_pkl, file.leaves)) as writer:
        out = RecordWriter(writer.write, _TOP)
        write_head(out, data_pkl)
        for leaf in file.leaves:
            out.add_stream(f"data/{leaf.key}", leaf.nbytes, chunks, job.on_bytes)
        write_tail(out)


def _source(job: WriteJob, ranges: Sequence[Range]) -> Callable[[Sequence[ByteRequest]], None]:
    """The bytes of ranges, by their number."""

    def fill(parts: Sequence[ByteRequest]) -> None:
        plain: list[ByteRequest] = []
        for part in parts:
            of = ranges[part.piece]
            if of.piece == PADDING:
                part.out[:] = 0
                continue
            start, stop = of.start + part.start, of.start + part.stop
            stored = job.targets[of.piece].spec.dtype
            if of.dtype in ("", stored):
                plain.append(ByteRequest(of.piece, start, stop, part.out))
            else:
                _convert(
                    job, of.piece, DTYPES[stored].torch, DTYPES[of.dtype].torch, ByteRequest(of.piece, start, stop, part.out)
                )
        if plain:
            job.fill(plain)

    return fill


def _convert(job: WriteJob, piece: int, stored: torch.dtype, wanted: torch.dtype, part: ByteRequest) -> None:
    """Fill whole items of another dtype than the stored one."""
    first, last = part.start // wanted.itemsize, part.stop // wanted.itemsize
    held = np.empty((last - first) * stored.itemsize, dtype=np.uint8)
    job.fill([ByteRequest(piece, first * stored.itemsize, last * stored.itemsize, held)])
    part.out[:] = torch.from_numpy(held).view(stored).to(wanted).view(torch.uint8).numpy()
