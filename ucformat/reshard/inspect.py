"""What is in a checkpoint, from its metadata alone: the report of `ucformat.inspect` and `ucconvert inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ucformat.catalog import Catalog
from ucformat.reshard.selection.select import expect_matches, narrow


@dataclass(frozen=True, slots=True)
class FragmentInfo:
    """Where one box of a tensor is stored."""

    file: str
    """Path in the checkpoint."""
    start: int
    """Byte offset of its first item in the file."""
    offset: tuple[int, ...]
    """Where the box begins in the tensor, one number per dimension."""
    length: tuple[int, ...]
    """Its size, one number per dimension."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor."""

    name: str
    dtype: str
    """Name as in safetensors: F32, BF16, I64…"""
    shape: tuple[int, ...]
    """Global shape."""
    nbytes: int
    fragments: int
    """Number of boxes that it is stored in."""
    boxes: tuple[FragmentInfo, ...] = ()
    """These boxes, if they were asked for."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file that holds tensors."""

    path: str
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in a checkpoint."""

    path: str
    """As it was given."""
    format: str
    """The checkpoint's format: `native`, `hf`, `dcp`…"""
    origin: str
    """The format that it was converted from, if it was."""
    origin_layout: Mapping[str, str]
    """How the origin arranged what it holds, for a conversion back to it."""
    step: int | None
    """The step that it was saved at, where it is known."""
    mesh: Mapping[str, int]
    """Mesh axes and their sizes, as far as they are known."""
    tensors: tuple[TensorInfo, ...]
    """Sorted by name."""
    aliases: Mapping[str, str]
    """Further names of tied tensors → name of the tensor."""
    values: object
    """Everything that is no tensor, as a nest of dicts; placeholders stand for tensors in lists and the like."""
    files: tuple[FileInfo, ...]
    fragments: int
    """Number of stored boxes of all tensors."""
    nbytes: int
    """Bytes of all tensors, tied ones counted once."""
    remarks: tuple[str, ...]
    """What was assumed or left out, and what else a user should know."""


def inspect(catalog: Catalog, path: str, format_name: str, select: Sequence[str] = (), *, boxes: bool = False) -> Inspection:
    """The report on an open checkpoint. Raises UnsupportedError for a pattern that matches nothing."""
    if select:
        expect_matches(select, [catalog], path, values=True)
        catalog = narrow(catalog, select, ())
    notes = catalog.notes
    return Inspection(
        path=path,
        format=format_name,
        origin=notes.origin,
        origin_layout=notes.origin_layout,
        step=notes.step,
        mesh=notes.mesh,
        tensors=tuple(_tensors(catalog, boxes)),
        aliases=dict(sorted(catalog.aliases.items())),
        values=catalog.values,
        files=tuple(FileInfo(file.path, file.size) for file in catalog.files),
        fragments=len(catalog.fragments),
        nbytes=catalog.nbytes,
        remarks=notes.remarks,
    )


def _tensors(catalog: Catalog, boxes: bool) -> Iterator[TensorInfo]:
    count = np.bincount(catalog.fragments.tensor, minlength=len(catalog.tensors))
    for index, spec in enumerate(catalog.tensors):
        held = tuple(_boxes(catalog, index)) if boxes else ()
        yield TensorInfo(spec.name, spec.dtype, spec.shape, spec.nbytes, int(count[index]), held)


def _boxes(catalog: Catalog, index: int) -> Iterator[FragmentInfo]:
    table, rows = catalog.fragments, catalog.fragments.rows(index)
    for row in range(rows.start, rows.stop):
        box = table.box(row, len(catalog.tensors[index].shape))
        yield FragmentInfo(catalog.files[int(table.file[row])].path, int(table.start[row]), box.offset, box.length)
