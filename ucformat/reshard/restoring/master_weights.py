"""Master weights of mixed-precision training: what they mean to a live state that keeps none.

DeepSpeed trains a bf16 or fp16 model on fp32 copies, `optimizer/<parameter>/fp32`, of which `model/<parameter>` is the
rounded image. A module in fp32 continues from the master, exactly; a module in less continues from the rounded weight,
and has no place for the master. So does a conversion: weights that change their dtype are made of the master.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ucformat import formats
from ucformat.catalog import Catalog, FragmentTable
from ucformat.naming import MASTER

if TYPE_CHECKING:
    from ucformat.reshard.state.walk import Piece
_MODEL, _OPTIMIZER = "model/", "optimizer/"


def from_masters(pieces: Sequence[Piece], catalog: Catalog) -> list[Piece]:
    """The pieces, of which those take the master that want the master's dtype and not that of the stored weight."""
    return [_from_master(piece, catalog) for piece in pieces]


def _from_master(piece: Piece, catalog: Catalog) -> Piece:
    master = master_of(piece.spec.name, catalog)
    if master is None or catalog.spec(piece.spec.name).dtype == piece.spec.dtype:
        return piece
    spec = catalog.spec(master)
    fits = (spec.dtype, spec.shape) == (piece.spec.dtype, piece.spec.shape)
    return replace(piece, spec=replace(piece.spec, name=master)) if fits else piece


def master_of(name: str, catalog: Catalog) -> str | None:
    """The stored master of the weight `name`, where the weights that were trained on are rounded from it."""
    return _stored_master(name, catalog) if formats.has_masters(catalog.notes.origin) else None


def _stored_master(name: str, catalog: Catalog) -> str | None:
    """The stored master of the weight `name`, whoever wrote it: the state `fp32` means that under canonical names."""
    if not name.startswith(_MODEL):
        return None
    master = f"{_OPTIMIZER}{name.removeprefix(_MODEL)}/{MASTER}"
    try:
        catalog.find(master)
    except KeyError:
        return None
    return master


def converted_weights(catalog: Catalog, dtype: str | None) -> dict[str, str]:
    """Weight → its master, for the weights that converting the model to `dtype` changes."""
    if dtype is None:
        return {}
    pairs = ((spec, _stored_master(spec.name, catalog)) for spec in catalog.tensors if spec.dtype != dtype)
    return {
        spec.name: master
        for spec, master in pairs
        if master is not None and catalog.spec(master).name != spec.name and catalog.spec(master).shape == spec.shape
    }


def from_their_masters(catalog: Catalog, masters: Mapping[str, str]) -> Catalog:
    """The catalog in which each weight of `masters` (weight → its master) is what its master is, dtype and bytes."""
    if not masters:
        return catalog
    numbers = {catalog.find(weight): catalog.find(master) for weight, master in masters.items()}
    table = catalog.fragments
    rows = [np.flatnonzero(~np.isin(table.tensor, list(numbers)))]
    owner = [table.tensor[rows[0]]]
    for weight, master in numbers.items():
        held = np.arange(len(table))[table.rows(master)]
        rows.append(held)
        owner.append(np.full(len(held), weight, dtype=np.int32))
    tensor = np.concatenate(owner)
    order = np.argsort(tensor, kind="stable")
    row = np.concatenate(rows)[order]
    stride = None if table.stride is None else table.stride[row]
    fragments = FragmentTable(tensor[order], table.file[row], table.start[row], table.offset[row], table.length[row], stride)
    tensors = list(catalog.tensors)
    for weight, master in numbers.items():
        tensors[weight] = replace(tensors[weight], dtype=tensors[master].dtype)
    return replace(catalog, tensors=tuple(tensors), fragments=fragments, _index={})


def without_taken(
    left_out: Sequence[str], kept: Collection[str], masters: Mapping[str, str], catalog: Catalog
) -> tuple[str, ...]:
    """The names of `left_out` but for masters that go over after all, as a weight among `kept`: see `from_their_masters`."""
    taken = {catalog.find(masters.get(name, name)) for name in kept if name.startswith(_MODEL)}
    return tuple(name for name in left_out if not (name.endswith(f"/{MASTER}") and catalog.find(name) in taken))


def placeless(used: Collection[str], catalog: Catalog) -> Iterator[str]:
    """Names of masters whose weight is among the names `used`: they are no leftovers when nobody wants them."""
    for name in used:
        master = master_of(name, catalog)
        if master is not None:
            yield master


def rounded(pieces: Sequence[Piece], wanted: Collection[str], catalog: Catalog) -> list[str]:
    """A remark when weights continue from their rounded images."""
    lost = {
        piece.spec.name
        for piece in pieces
        if (master := master_of(piece.spec.name, catalog)) is not None
        and master not in wanted
        and catalog.spec(master).dtype != piece.spec.dtype
    }
    if not lost:
        return []
    example = min(lost)
    count = f"{len(lost)} weights ({example}…)"
    return [
        f"{count} go on from their rounded values: this state has no place for the master weights ({master_of(example, catalog)})"
    ]
