"""How tensors become zarr arrays: names of nodes, chunk grids along fragments, and metadata."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from ucformat import values as trees
from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.errors import UnsupportedError
from ucformat.zarr.dtypes import data_type, fill_value, is_bits

CHUNK_BYTES = 1 << 20  # zarr reads whole chunks: small enough for slices, large enough for full speed
SLICE_BYTES = 1 << 16  # a block of checksums: smaller chunks would read as much
CHUNKS = 128  # of a tensor, at least: a slice of 1 % touches two more than it fills, and reads 3 % at most


def node_path(name: str) -> str:
    """The path of a name's array: components that zarr keeps for itself are escaped."""
    return "/".join(map(_component, name.split("/")))


def _component(text: str) -> str:
    if not text:
        return "%00"
    reserved = text.startswith("__") or not text.strip(".") or text in {"zarr.json", "c"}
    text = text.replace("\\", "%5C")  # zarr takes it for a slash
    return f"%{ord(text[0]):02X}{text[1:]}" if reserved else text


def chunk_shape(catalog: Catalog, name: str) -> tuple[int, ...]:
    """Lengths of the chunks of a tensor: those of its fragments where they are a regular grid, cut where they are large."""
    number = catalog.find(name)
    spec = catalog.tensors[number]
    chunk = [max(1, n) for n in _grid(catalog, number) or spec.shape]
    bound = min(CHUNK_BYTES, max(SLICE_BYTES, spec.nbytes // CHUNKS))
    for d in range(len(chunk)):
        rest = math.prod(chunk[d + 1 :]) * spec.kind.itemsize
        if chunk[d] * math.prod(chunk[:d]) * rest <= bound:
            break
        chunk[d] = max(1, bound // (rest * math.prod(chunk[:d])))
    return tuple(chunk)


def _grid(catalog: Catalog, number: int) -> tuple[int, ...] | None:
    """The common box lengths of fragments that are a regular grid; None where they aren't."""
    shape, rows = catalog.tensors[number].shape, catalog.fragments.rows(number)
    offset, length = catalog.fragments.offset[rows, : len(shape)], catalog.fragments.length[rows, : len(shape)]
    if not len(offset):
        return None
    size = length.max(axis=0)
    whole = np.minimum(size, np.array(shape) - offset)
    regular = not (offset % size).any() and (length == whole).all()
    return tuple(map(int, size)) if regular else None


def chunk_box(shape: tuple[int, ...], chunk: tuple[int, ...], index: tuple[int, ...]) -> Box | None:
    """The items of a tensor that lie in a chunk; None for one outside of the grid."""
    offset = tuple(i * n for i, n in zip(index, chunk, strict=True))
    if any(i < 0 or o >= size for i, o, size in zip(index, offset, shape, strict=True)):
        return None
    return Box(offset, tuple(min(n, size - o) for o, n, size in zip(offset, chunk, shape, strict=True)))


def array_metadata(catalog: Catalog, name: str) -> dict[str, Any]:
    """The `zarr.json` of a tensor. Its dimensions are named for it, as xarray wants equal names to be of equal lengths."""
    spec, last = catalog.spec(name), node_path(name).rpartition("/")[2]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": data_type(spec.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape(catalog, name))}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value(spec.dtype),
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "dimension_names": [f"{last}[{d}]" for d in range(len(spec.shape))],
        "attributes": {"ucf:name": name, "ucf:dtype": spec.dtype, **({"ucf:bits": True} if is_bits(spec.dtype) else {})},
    }


def hierarchy(catalog: Catalog) -> dict[str, dict[str, Any]]:
    """Path of each node → its metadata; that of the root ("") is consolidated.

    Raises UnsupportedError for a name that is also the beginning of another, as zarr's arrays have no children.
    """
    arrays = {node_path(name): array_metadata(catalog, name) for name in catalog.names}
    nodes: dict[str, dict[str, Any]] = {}
    for path in arrays:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            if parent in arrays:
                raise UnsupportedError(
                    f"{catalog.url}: {parent}", f"a tensor, and {path} lies below it: zarr has no place for both"
                )
            nodes[parent] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    nodes |= arrays
    attributes = {"ucf:values": json.loads(trees.encode(catalog.values)), "ucf:step": catalog.notes.step}
    consolidated = {"kind": "inline", "must_understand": False, "metadata": dict(sorted(nodes.items()))}
    return {
        "": {"zarr_format": 3, "node_type": "group", "attributes": attributes, "consolidated_metadata": consolidated},
        **nodes,
    }
