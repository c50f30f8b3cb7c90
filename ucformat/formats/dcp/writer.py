"""Writing a DCP directory that stock `torch.distributed.checkpoint.load` loads.

The whole plan (items, their files and offsets) is known before the first byte and equal on every rank, so ranks write
their files without talking and rank 0 writes `.metadata` last. DCP knows no ties: a tied tensor is stored once under
each of its names, as stock `load` wants every key.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ucformat import values as trees
from ucformat.catalog import TensorSpec
from ucformat.containers.file_image import ByteRequest, stream
from ucformat.containers.zip_write import Outgoing, RecordWriter, pickle_tree, write_head, write_tail, zip_size
from ucformat.dtypes import DTYPES
from ucformat.errors import UnsupportedError
from ucformat.formats import notes_file, sidecar_files
from ucformat.formats.dcp.metadata import FILE
from ucformat.formats.staging import publish
from ucformat.formats.target import OutputBox, WriteJob, shorten
from ucformat.formats.torchsave.writer import in_order, torch_tree
from ucformat.lazy_torch import torch
from ucformat.storage.store import Bytes, Store
from ucformat.values.codec import ArrayRef
from ucformat.values.tree import refs

OUTER_KEY = "dcp:"
"""Before the keys of `torchstate.Outer` in a checkpoint's notes."""
CHUNK_BYTES = 64 << 20  # of one item: stock readers load whole items, so this bounds their memory
_TOP = "archive"  # the folder in each zip, as torch.save names it for buffers
_VERSION = "1.0.0"  # of DCP's metadata


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, stop) of the image of one of the job's targets."""

    piece: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One item to be written: its pickle, and its tensors' bytes. `offset` and `length` are None for a value."""

    key: str
    data_pkl: bytes
    tensors: tuple[tuple[Outgoing, tuple[Range, ...]], ...]
    offset: tuple[int, ...] | None = None
    length: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return zip_size(_TOP, self.data_pkl, [leaf for leaf, _ in self.tensors])


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item at bytes [start, start + size) of file number `file`, which rank `file` modulo the group's size writes."""

    item: Planned
    file: int
    start: int
    size: int


def write(job: WriteJob) -> None:
    """Write `job.store` as a DCP directory. Every rank calls it and writes its share of the files.

    Raises UnsupportedError when two names have the same flat key, for F6 dtypes and for a tensor in a tuple whose pieces
    are no slabs; ExistsError, StorageError, RankFailedError.
    """
    specs, paths, items = plan(job)
    placed = place(job, items)

    def write_mine(store: Store) -> None:
        write_share(job, placed, store)

    def commit(store: Store) -> None:
        sidecar_files.carry(job.companions, store, sidecar_files.PREFIX, job.dtype)
        notes_file.put(store, job.notes)
        store.put(FILE, metadata(specs, paths, placed))

    publish(job, write_mine, commit, last=FILE)


def prepare(job: WriteJob) -> tuple[WriteJob, tuple[str, ...]]:
    """The job, and a remark when keys of its values will come back as text: a DCP path has no others."""
    changed = sorted(_with_other_keys(job.values, ()))
    said = f"DCP has keys of text only: those that are numbers or the like become text in {shorten(changed)}"
    return job, (said,) if changed else ()


def _with_other_keys(value: object, path: tuple[str, ...]) -> Iterator[str]:
    """Paths of the dicts with such keys that become part of a DCP path."""
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            yield "/".join(path)
        for key, below in value.items():
            yield from _with_other_keys(below, (*path, str(key)))
    elif isinstance(value, list) and _descends(value):
        for i, below in enumerate(value):
            yield from _with_other_keys(below, (*path, str(i)))


def _path(file: int) -> str:
    return f"__{file}_0.distcp"


# --- planning ------------------------------------------------------------------------------------------------------


def plan(job: WriteJob) -> tuple[dict[str, TensorSpec], dict[str, tuple[str | int, ...]], list[Planned]]:
    """(tensor specs by flat key, path of every flat key, items); values come first, as in torch's own files."""
    pieces: dict[str, list[tuple[int, OutputBox]]] = {}
    for index, target in enumerate(job.targets):
        pieces.setdefault(target.name, []).append((index, target))
        if target.spec.dtype.startswith("F6_"):
            raise UnsupportedError(job.store.url, f"tensor {target.name!r}: torch has no dtype {target.spec.dtype}")
    # what was a numpy array goes into the pickles, being small
    arrays = {name: _array(job, pieces[name]) for name in set(refs(job.values, (ArrayRef,))) if name in pieces}
    leaves: dict[str, Any] = {name: arrays.get(name, _Tensor(name, held[0][1].spec)) for name, held in pieces.items()}
    tree = torch_tree(job, leaves, prefix=OUTER_KEY, exact=True)
    flat: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for path, leaf in _flatten((), tree):
        key = ".".join(map(str, path))
        if key in flat:
            raise UnsupportedError(job.store.url, f"{'/'.join(map(str, path))!r} and another name have the flat key {key!r}")
        flat[key], paths[key] = leaf, path
    specs = {key: leaf.spec for key, leaf in flat.items() if isinstance(leaf, _Tensor)}
    ordered: Mapping[str, Sequence[tuple[int, OutputBox]]] = {}
    if any(_tensors_in(leaf) for key, leaf in flat.items() if key not in specs):
        ordered = in_order(job)
    values = [value_item(key, leaf, ordered) for key, leaf in flat.items() if key not in specs]
    chunks = [item for key, leaf in flat.items() if key in specs for item in tensor_items(key, pieces[leaf.name])]
    return specs, paths, [*values, *chunks]


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A leaf of the nest: the tensor `name` of the job."""

    name: str
    spec: TensorSpec


def _array(job: WriteJob, held: Sequence[tuple[int, OutputBox]]) -> np.ndarray[Any, Any]:
    spec = held[0][1].spec
    whole = torch.empty(spec.shape, dtype=spec.kind.torch)
    for index, target in held:
        image = np.empty(target.nbytes, dtype=np.uint8)
        if target.nbytes:
            job.fill([ByteRequest(index, 0, target.nbytes, image)])
        whole[target.box.slices] = torch.from_numpy(image).view(spec.kind.torch).view(target.box.length)
    array: np.ndarray[Any, Any] = whole.numpy()
    return array


def _flatten(path: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Leaves with their paths, by the rule of stock DCP: dicts always descend, lists when they hold tensors or dicts.

    But for empty dicts, of which stock DCP keeps nothing: they are values here, so that they come back.
    """
    if isinstance(value, dict) and (value or not path):
        for key, below in value.items():
            yield from _flatten((*path, str(key)), below)
    elif isinstance(value, list) and _descends(value):
        for i, below in enumerate(value):
            yield from _flatten((*path, i), below)
    else:
        yield path, value


def _descends(items: Sequence[Any]) -> bool:
    return any(isinstance(x, (dict, _Tensor)) or (isinstance(x, list) and _descends(x)) for x in items)


def _tensors_in(value: object) -> bool:
    return any(isinstance(x, _Tensor) for x in trees.nodes(value))


def value_item(key: str, value: Any, ordered: Mapping[str, Sequence[tuple[int, OutputBox]]]) -> Planned:
    """A value, with the tensors that lie in its tuples and namespaces."""
    tensors: list[tuple[Outgoing, tuple[Range, ...]]] = []

    def outgoing(x: object) -> object:
        if not isinstance(x, _Tensor):
            return x
        leaf = Outgoing(str(len(tensors)), x.spec.dtype, x.spec.shape)
        tensors.append((leaf, tuple(Range(index, 0, target.nbytes) for index, target in ordered[x.name])))
        return leaf

    data_pkl = pickle_tree(trees.changed(value, outgoing))
    return Planned(key, data_pkl, tuple(tensors))


def tensor_items(key: str, held: Sequence[tuple[int, OutputBox]]) -> Iterator[Planned]:
    """The tensor's pieces, each cut along dimension 0 into chunks of at most CHUNK_BYTES where rows allow it."""
    real = [pair for pair in held if pair[1].nbytes] or held[:1]
    for index, target in real:
        offset, length = target.box.offset, target.box.length
        if not length or not target.nbytes:
            yield _chunk(key, target, index, offset, length, 0)
            continue
        row = math.prod(length[1:]) * DTYPES[target.spec.dtype].itemsize
        step = max(1, CHUNK_BYTES // row)
        for first in range(0, length[0], step):
            rows = min(step, length[0] - first)
            yield _chunk(key, target, index, (offset[0] + first, *offset[1:]), (rows, *length[1:]), first * row)


def _chunk(key: str, target: OutputBox, piece: int, offset: tuple[int, ...], length: tuple[int, ...], start: int) -> Planned:
    leaf = Outgoing("0", target.spec.dtype, length)
    return Planned(key, pickle_tree(leaf), ((leaf, (Range(piece, start, start + leaf.nbytes),)),), offset, length)


def place(job: WriteJob, items: Sequence[Planned]) -> list[PlacedItem]:
    """Items to files: as the job's layout says, else consecutive ones, as equal in bytes as whole items allow.

    Without a layout there is at least one file per rank, and none is much larger than `max_file_bytes`.
    """
    sizes = [item.nbytes for item in items]
    share = max(1, min(-(-sum(sizes) // job.group.size), job.max_file_bytes))
    laid = {piece: file for file, part in enumerate(job.layout or ()) for piece in part}
    placed: list[PlacedItem] = []
    ends: dict[int, int] = {}
    before = 0
    for item, size in zip(items, sizes, strict=True):
        pieces = [r.piece for _, ranges in item.tensors for r in ranges]
        file = before // share if job.layout is None else laid.get(pieces[0], 0) if pieces else 0
        placed.append(PlacedItem(item, file, ends.get(file, 0), size))
        ends[file] = ends.get(file, 0) + size
        before += size
    return placed


# --- writing -------------------------------------------------------------------------------------------------------


def write_share(job: WriteJob, placed: Sequence[PlacedItem], store: Store) -> None:
    """Write this rank's share of the files."""
    for file in range(job.group.rank, 1 + max((p.file for p in placed), default=-1), job.group.size):
        held = [p for p in placed if p.file == file]
        with store.writer(_path(file), sum(p.size for p in held)) as writer:
            _write_items(job, held, writer.write)


def _write_items(job: WriteJob, placed: Sequence[PlacedItem], put: Callable[[int, Bytes], None]) -> None:
    """One file, front to back; the next bytes are filled while the last are written."""
    ranges = [r for p in placed for _, held in p.item.tensors for r in held]

    def fill(parts: Sequence[ByteRequest]) -> None:
        job.fill(
            [
                ByteRequest(ranges[p.piece].piece, ranges[p.piece].start + p.start, ranges[p.piece].start + p.stop, p.out)
                for p in parts
            ]
        )

    chunks = stream([r.stop - r.start for r in ranges], fill)
    for p in placed:
        out = RecordWriter(put, _TOP, p.start)
        write_head(out, p.item.data_pkl)
        for leaf, _ in p.item.tensors:
            out.add_stream(f"data/{leaf.key}", leaf.nbytes, chunks, job.on_bytes)
        write_tail(out)


def metadata(specs: Mapping[str, TensorSpec], paths: Mapping[str, tuple[str | int, ...]], placed: Sequence[PlacedItem]) -> bytes:
    """The pickled Metadata, of torch's own classes."""
    from torch.distributed.checkpoint import metadata as torch_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for p in placed:
        key, info = p.item.key, _StorageInfo(_path(p.file), p.start, p.size)
        if p.item.offset is None or p.item.length is None:
            entries[key] = torch_metadata.BytesStorageMetadata()
            storage[torch_metadata.MetadataIndex(key)] = info
            continue
        if key not in entries:
            properties = torch_metadata.TensorProperties(dtype=specs[key].kind.torch)
            entries[key] = torch_metadata.TensorStorageMetadata(properties, torch.Size(specs[key].shape), [])
        chunks = entries[key].chunks
        storage[torch_metadata.MetadataIndex(key, p.item.offset, len(chunks))] = info
        chunks.append(torch_metadata.ChunkStorageMetadata(torch.Size(p.item.offset), torch.Size(p.item.length)))
    tree = torch_metadata.Metadata(entries, dict(paths), storage, torch_metadata.StorageMeta(), version=_VERSION)
    out = io.BytesIO()
    pickle.dump(tree, out, protocol=4)
    return out.getvalue()
