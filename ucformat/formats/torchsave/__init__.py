"""torch.save files (.pt, .pth, .bin, .ckpt), zip form: reading. Tensors are found in the zip, nothing is loaded.

Tensors that share a storage with equal shape and strides are one tensor with several names; other views of one storage
are tensors of their own over the same bytes. Writing is in `torchsave.writer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ucformat import dtypes, values
from ucformat.catalog import Catalog, CatalogBuilder, File, Notes
from ucformat.containers.zip_read import checks_of
from ucformat.errors import FormatError, UcformatError, UnsupportedError
from ucformat.formats.contract import Reader, Writer
from ucformat.formats.source import Source
from ucformat.formats.torchmodule import is_module, to_state_dicts
from ucformat.formats.torchsave.writer import OUTER_KEY, one_file, prepare, write
from ucformat.formats.torchstate import to_canonical
from ucformat.pickles.unpickle import StoredStorage, StoredTensor, TorchFile, open_torch_zip, to_values
from ucformat.storage.store import Store
from ucformat.values import bytes_io
from ucformat.values.codec import Opaque

NAME = "torchsave"
__all__ = ["NAME", "READER", "WRITER", "detect", "open_catalog", "write"]

MODEL = "model"
BARE = "value"
"""Name of the top-level thing when a file holds no dict."""
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SNIFF_BYTES = 512  # of a file: the name of its first zip record, the magic number of a pickle or tar


def detect(source: Source) -> bool:
    """Whether the source is a single torch.save file (legacy ones too, which `open_catalog` refuses by name)."""
    if source.file is None:
        return False
    try:
        head = source.store.read(source.file, 0, min(_SNIFF_BYTES, source.store.size(source.file)))
    except UcformatError:
        return False
    if head.startswith(b"PK\x03\x04"):
        return b"/data.pkl" in head[30:] or source.file.endswith(_SUFFIXES)
    return source.file.endswith(_SUFFIXES) and (head[:1] == b"\x80" or head[257:262] == b"ustar")


def open_catalog(source: Source) -> Catalog:
    """The catalog of a torch.save file. Reads its directory, its pickle and the local zip headers.

    Raises UnsupportedError (legacy form, TorchScript), FormatError, ChecksumError,
    UnsafePickleError.
    """
    assert source.file is not None
    opened = open_torch_zip(source.store, source.file)
    modules: list[str] = []
    inner = to_state_dicts(opened.tree, modules, source.file)
    tree = to_values({MODEL: inner} if is_module(opened.tree) else inner, source.file)
    nest, outer = to_canonical(tree, is_tensor) if isinstance(tree, dict) and tree else ({BARE: tree}, {})
    kept, leaves = values.split(nest, is_tensor)
    builder = CatalogBuilder(source.store)
    add_leaves(builder, leaves, {source.file: file_of(source.store, opened)})
    step = kept.get("step") if isinstance(kept, dict) else None
    remarks = [*(f"of a pickled {name} the state dict was read" for name in modules), *placeholders(kept)]
    layout = {OUTER_KEY + key: value for key, value in outer.items()}
    notes = Notes(NAME, step if type(step) is int else None, remarks=tuple(remarks), origin_layout=layout)
    return builder.build(kept, notes)


def file_of(store: Store, opened: TorchFile) -> File:
    """An opened file as a catalog lists it, with the checksums of its records."""
    data = [entry for name, entry in opened.entries.items() if name.startswith("data/")]
    return File(opened.file, store.size(opened.file), checks_of(data))


def is_tensor(leaf: object) -> bool:
    """Whether a leaf of a decoded tree is tensor data in a file."""
    return isinstance(leaf, (StoredTensor, StoredStorage))


def add_leaves(builder: CatalogBuilder, leaves: Mapping[str, Any], files: Mapping[str, File]) -> None:
    """Declare tensors by name: `StoredTensor`s in `files` (by path), numpy arrays inline.

    Raises UnsupportedError for tensors that are no dense array in a file.
    """
    numbers: dict[str, int] = {}
    known: dict[tuple[object, ...], str] = {}
    for name, leaf in sorted(leaves.items(), key=_rank):
        if isinstance(leaf, np.ndarray):
            _add_array(builder, name, leaf)
            continue
        tensor = _dense(builder, name, leaf)
        place = (tensor.file, tensor.storage.start, tensor.start, tensor.dtype, tensor.shape, tensor.stride)
        if 0 not in tensor.shape and known.setdefault(place, name) != name:
            builder.alias(name, known[place])
            continue
        if tensor.file not in numbers:
            numbers[tensor.file] = builder.file(files[tensor.file])
        builder.tensor(name, tensor.dtype, tensor.shape)
        builder.fragment(name, numbers[tensor.file], tensor.start, stride=None if tensor.contiguous else tensor.stride)


def _rank(item: tuple[str, Any]) -> tuple[bool, str]:
    """Order in which one of several names becomes the tensor's own: the model's first, whatever the file's order."""
    return not item[0].startswith("model/"), item[0]


def _dense(builder: CatalogBuilder, name: str, leaf: object) -> StoredTensor:
    if isinstance(leaf, StoredStorage):
        raise UnsupportedError(leaf.file, f"{name!r} is a bare storage: save a tensor of it instead")
    if not isinstance(leaf, StoredTensor):
        raise FormatError(builder.store.url, f"{name!r} is no tensor but a {type(leaf).__name__}")
    return leaf


def _add_array(builder: CatalogBuilder, name: str, array: np.ndarray[Any, Any]) -> None:
    """A numpy array lies inside the pickle: its bytes travel in the catalog."""
    dtype = _array_dtype(array.dtype)
    data = np.ascontiguousarray(array).tobytes()
    number = builder.file(File(f"numpy array {name}", len(data), inline=data))
    builder.tensor(name, dtype, array.shape)
    builder.fragment(name, number, 0)


def _array_dtype(dtype: np.dtype[Any]) -> str:
    import torch

    return dtypes.from_torch(torch.from_numpy(np.empty(0, dtype)).dtype).name


def placeholders(tree: object) -> Iterator[str]:
    """A remark for every class of which the values hold only a stand-in."""
    names = sorted({x.class_name for x in values.nodes(tree) if isinstance(x, Opaque) and not bytes_io.is_one(x)})
    if names:
        yield f"not loaded, kept as opaque values: {', '.join(names)}"


READER = Reader(name=NAME, detect=detect, open_catalog=open_catalog)
WRITER = Writer(name=NAME, write=write, values="plain", single_file=True, prepare=prepare, file_sizes=one_file)
