"""PyTorch Distributed Checkpoint (DCP): reading by byte range. Writing is in `dcp.writer`.

`.metadata` says which chunk of which tensor is which item of which `.distcp` file; each item is a small torch.save zip
(see `dcp.items`). Paths come from the planner's data, so keys with dots stay whole; then torch's optimizer nest
becomes the canonical one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ucformat import values
from ucformat.catalog import Catalog, CatalogBuilder, Notes
from ucformat.errors import FormatError, UcformatError, UnsupportedError
from ucformat.formats import notes_file, owned
from ucformat.formats.contract import Reader, Writer
from ucformat.formats.dcp.fragments import add_tensor, files_of
from ucformat.formats.dcp.items import Item, open_items
from ucformat.formats.dcp.metadata import FILE, Chunk, Metadata, StoredKey, read_metadata
from ucformat.formats.dcp.writer import OUTER_KEY, prepare, write
from ucformat.formats.source import Source
from ucformat.formats.torchsave import add_leaves, is_tensor, placeholders
from ucformat.formats.torchstate import Nest, to_canonical
from ucformat.pickles.unpickle import Inert, RefusedTensor, to_values
from ucformat.values.codec import Opaque

NAME = "dcp"
__all__ = ["NAME", "READER", "WRITER", "detect", "open_catalog", "write"]

_MEGATRON = frozenset({"metadata.json", "common.pt"})  # Megatron's distributed checkpoints keep other things beside DCP's
_MAX_HOLES = 10_000  # of all lists together: list items that vanished because they were empty dicts


def detect(source: Source) -> bool:
    """Whether this is a directory with DCP's metadata (or the per-rank metadata, which `open_catalog` refuses)."""
    if source.file is not None:
        return False
    try:
        names = source.store.list()
    except UcformatError:
        return False
    if _MEGATRON.issubset(names):
        return False
    return FILE in names or (any(map(_is_rank_metadata, names)) and any(name.endswith(".distcp") for name in names))


def _is_rank_metadata(name: str) -> bool:
    return name.startswith("__") and name.endswith(".metadata")


def open_catalog(source: Source) -> Catalog:
    """The catalog of a DCP directory. Reads the metadata, and the first and last few KiB of each item.

    Raises FormatError, UnsafePickleError, MissingFileError, ChecksumError, DTypeMismatchError (an item's dtype is not that
    of the metadata), UnsupportedError (per-rank metadata, compressed items).
    """
    store = source.store
    names = store.list()
    if FILE not in names and any(map(_is_rank_metadata, names)):
        raise UnsupportedError(
            store.url,
            "saved with use_collectives=False: there is no global .metadata, so where shards belong is not recorded; "
            "load and save it again with collectives",
        )
    metadata = read_metadata(store)
    opened = open_items(store, metadata)
    nest, outer = to_canonical(_nest(metadata, opened), _is_leaf)
    kept, leaves = values.split(nest, _is_leaf)
    builder = CatalogBuilder(store)
    files = files_of(store.size, opened)
    numbers = {path: builder.file(file) for path, file in files.items()}
    add_leaves(builder, {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, StoredKey)}, files)
    for name, leaf in leaves.items():
        if isinstance(leaf, StoredKey):
            add_tensor(builder, name, leaf, opened, numbers)
    step = kept.get("step") if isinstance(kept, dict) else None
    layout = {**notes_file.read_origin_layout(store), **{OUTER_KEY + key: value for key, value in outer.items()}}
    notes = Notes(NAME, step if type(step) is int else None, remarks=tuple(placeholders(kept)), origin_layout=layout)
    return builder.build(kept, notes)


def _is_leaf(x: object) -> bool:
    return isinstance(x, StoredKey) or is_tensor(x)


# --- the nest ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Node:
    """A dict, or a list whose keys are all integers, while the nest is being put together."""

    held: dict[str | int, Any]


def _nest(metadata: Metadata, opened: Mapping[Chunk, Item]) -> Nest:
    """The state as it was saved: `StoredKey`s for tensors, decoded values for the rest."""
    root = _Node({})
    for key in metadata.tensors:
        _insert(root, metadata.paths.get(key.name, (key.name,)), _odd(key, opened) or key)
    for name, what in metadata.odd.items():
        _insert(root, metadata.paths.get(name, (name,)), Opaque(what, None))
    for chunk in metadata.blobs:
        item = opened.get(chunk)
        if item is None:
            raise FormatError(FILE, f"value {chunk.key!r} is listed, and its place is not")
        _insert(root, metadata.paths.get(chunk.key, (chunk.key,)), to_values(item.tree, item.path))
    tree = _collapse(root, [_MAX_HOLES])
    return cast(Nest, tree) if isinstance(tree, dict) else {"value": tree}


def _odd(key: StoredKey, opened: Mapping[Chunk, Item]) -> Opaque | None:
    """The stand-in for a tensor whose items hold something else than dense ones; None for every other."""
    items = (opened.get(chunk) for chunk in key.chunks)
    odd = next((item for item in items if item is not None and isinstance(item.tree, (RefusedTensor, Inert))), None)
    found = None if odd is None else to_values(odd.tree, odd.path)
    return found if isinstance(found, Opaque) else None


def _insert(root: _Node, path: tuple[str | int, ...], leaf: object) -> None:
    node = root
    for part in path[:-1]:
        below = node.held.setdefault(part, _Node({}))
        if not isinstance(below, _Node):
            raise FormatError(FILE, f"path {path} leads through a value")
        node = below
    if path[-1] in node.held:
        raise FormatError(FILE, f"two items have the path {path}")
    node.held[path[-1]] = leaf


def _collapse(node: object, holes: list[int]) -> object:
    """The nest without its nodes; `holes` is how many more items of lists may be missing."""
    if not isinstance(node, _Node):
        return node
    if not all(isinstance(key, int) for key in node.held):
        return {str(key): _collapse(value, holes) for key, value in node.held.items()}
    numbers = cast("dict[int, Any]", node.held)
    length = max(numbers, default=-1) + 1
    holes[0] -= length - len(numbers)
    if min(numbers, default=0) < 0 or holes[0] < 0:
        raise FormatError(FILE, f"a list of {length} items of which {len(numbers)} are stored")
    return [_collapse(numbers[i], holes) if i in numbers else {} for i in range(length)] if numbers else {}


READER = Reader(
    name=NAME,
    detect=detect,
    open_catalog=open_catalog,
    owned_files=owned.by_pattern(r"\.metadata|__[^/]*\.metadata|[^/]*\.distcp|companions(/.*)?|ucf_notes\.json"),
)
WRITER = Writer(name=NAME, write=write, values="plain", takes_layout=True, staged=True, prepare=prepare)
