"""Writing torch.save files whose tensors are made of byte ranges of what a conversion writes: cut, joined, padded, converted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucformat.containers.file_image import ByteRequest, Filled, stream
from ucformat.containers.zip_template import ZipTemplate
from ucformat.containers.zip_write import Outgoing, RecordWriter, pickle_tree, write_head, write_tail, zip_size
from ucformat.dtypes import DTYPES
from ucformat.formats.target import WriteJob
from ucformat.lazy_torch import torch
from ucformat.storage.store import Bytes, Store

_TOP = "archive"
_SMALL_BYTES = 256 << 10  # of tensors; files below are made in memory
_CLOSING = 2  # files at a time that are written, and not durable yet
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


def write_files(job: WriteJob, store: Store, files: Sequence[TorchSaved]) -> None:
    """Write files of a directory that nobody reads yet, in bounded memory. Raises StorageError.

    Small ones are read many at a time and made durable together: universal folders have thousands.
    """
    small = [file for file in files if file.nbytes < _SMALL_BYTES]
    large = [file for file in files if file.nbytes >= _SMALL_BYTES]
    if small:
        store.put_all(_images(job, small))
    chunks = _stream(job, large)
    closing: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="ucf-close") as pool:  # the disk catches up while the next one is written
        for file in large:
            data_pkl = pickle_tree(file.tree)
            writer = store.writer(file.path, zip_size(_TOP, data_pkl, file.leaves))
            try:
                _put(job, file, data_pkl, writer.write, chunks)
            except BaseException:
                writer.abort()
                raise
            closing.append(pool.submit(writer.close))
            if len(closing) > _CLOSING:
                closing.popleft().result()
        while closing:
            closing.popleft().result()


def _stream(job: WriteJob, files: Sequence[TorchSaved]) -> Iterator[Filled]:
    """The bytes of all leaves of files, one after another."""
    ranges = [part for file in files for parts in file.leaves.values() for part in parts]
    return stream([part.stop - part.start for part in ranges], _source(job, ranges)) if ranges else iter(())


def _images(job: WriteJob, files: Sequence[TorchSaved]) -> Iterator[tuple[str, bytes]]:
    """Path and bytes of each file. Most of thousands are alike but for the bytes of their tensors."""
    chunks = _stream(job, files)
    made: dict[object, ZipTemplate] = {}
    for file in files:
        key, leaves = _form(file.tree), list(file.leaves)
        template = made.get(key) if key is not None else None
        if template is None:
            template = ZipTemplate.of(_TOP, pickle_tree(file.tree), leaves)
            if key is not None:
                made[key] = template
        yield file.path, template.filled([_taken(chunks, leaf.nbytes, job.on_bytes) for leaf in leaves])


def _taken(chunks: Iterator[Filled], nbytes: int, on_bytes: Callable[[int], None] | None) -> list[Bytes]:
    """The next bytes, copied: their buffers are used again."""
    found: list[Bytes] = []
    while nbytes:
        part = next(chunks)
        found.append(part.data.copy())
        nbytes -= len(part.data)
        if on_bytes is not None:
            on_bytes(len(part.data))
    return found


def _form(tree: object) -> object:
    """What is equal for trees that give the same pickle; None where that is not known."""
    if isinstance(tree, Outgoing):
        return Outgoing, tree.key, tree.dtype, tree.shape
    if isinstance(tree, (str, int, float, bool, type(None))):
        return type(tree), repr(tree)
    if type(tree) is not dict:
        return None
    items = [(key, _form(value)) for key, value in tree.items()]
    return None if any(type(key) is not str or form is None for key, form in items) else (dict, *items)


def _put(job: WriteJob, file: TorchSaved, data_pkl: bytes, put: Callable[[int, Bytes], None], chunks: Iterator[Filled]) -> None:
    """Put a file, front to back, through `put(start, bytes)`; the bytes of its leaves are the next of `chunks`."""
    out = RecordWriter(put, _TOP)
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
