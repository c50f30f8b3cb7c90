"""Weights in torch.save files: `pytorch_model.bin`, or numbered `.bin` shards with an index.

Every file is opened as `torchsave` opens it: nothing in it is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ucformat.catalog import File
from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.hf.files import FileSet, read_each, read_index, shard_set
from ucformat.formats.hf.stems import PICKLED_STEMS
from ucformat.formats.source import Source
from ucformat.formats.torchsave import file_of
from ucformat.pickles.unpickle import TorchFile, open_torch_zip, to_values
from ucformat.storage.store import Store

SUFFIX = ".bin"
INDEX_SUFFIX = ".bin.index.json"


def has_weights(names: Sequence[str]) -> bool:
    """Whether a directory with these names holds `.bin` weights: a Trainer puts others there, too (`training_args.bin`)."""
    return any(name.endswith((INDEX_SUFFIX, SUFFIX)) and _stem(name) in PICKLED_STEMS for name in names)


def _stem(name: str) -> str:
    """`pytorch_model` of `pytorch_model-00001-of-00002.bin`."""
    return name.split(".", 1)[0].split("-", 1)[0]


def choose(source: Source) -> FileSet:
    """The files of the checkpoint; of a single file and an index, the file: so do the loaders of the library."""
    if source.file is not None:
        return read_index(source.store, source.file, SUFFIX)
    names = [name for name in source.store.list() if not name.endswith("/")]
    for stem in PICKLED_STEMS:
        if stem + SUFFIX in names:
            return FileSet((stem + SUFFIX,))
        if stem + INDEX_SUFFIX in names:
            return read_index(source.store, stem + INDEX_SUFFIX, SUFFIX)
    shards = shard_set([name for name in names if _stem(name) in PICKLED_STEMS], source.store.url, SUFFIX)
    if not shards:
        raise UnsupportedError(source.url, "several sets of weights: name an index or a file instead of the directory")
    return FileSet(shards, remarks=("no index: names are taken from the shards",))


def read_state(store: Store, chosen: FileSet) -> tuple[dict[str, Any], dict[str, File], Sequence[str]]:
    """The state dict in all files, what a catalog says of each file by its path, and remarks.

    Raises MissingFileError for a missing shard, FormatError (malformed, index and shards disagree), UnsupportedError (legacy
    form, sparse and quantised tensors), ChecksumError, UnsafePickleError.
    """
    opened = read_each(store, chosen, open_torch_zip)
    state: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for file in opened:
        for name, leaf in _state_dict(file, store).items():
            if owner.setdefault(name, file.file) != file.file:
                raise FormatError(
                    f"{store.url}/{file.file}", f"{name!r} is in {owner[name]} too: which one is right can't be known"
                )
            state[name] = leaf
    remarks = [*chosen.remarks, *_compare(chosen, owner, store)]
    return state, {file.file: file_of(store, file) for file in opened}, remarks


def _state_dict(opened: TorchFile, store: Store) -> Mapping[str, Any]:
    tree = to_values(opened.tree, opened.file)
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise FormatError(f"{store.url}/{opened.file}", "holds no state dict: a dict from names to tensors")
    return tree


def _compare(chosen: FileSet, owner: Mapping[str, str], store: Store) -> Sequence[str]:
    """Remarks on names that an index leaves out. Raises FormatError when it says what is not so."""
    if chosen.weight_map is None or chosen.index is None:
        return ()
    for name, file in chosen.weight_map.items():
        if owner.get(name) != file:
            found = f"but in {owner[name]}" if name in owner else "nor in any other file"
            raise FormatError(f"{store.url}/{chosen.index}", f"tensor {name!r} is not in {file}, {found}")
    extra = [name for name in owner if name not in chosen.weight_map]
    return [f"{len(extra)} names are not in {chosen.index}, taken all the same: {', '.join(extra[:4])}"] if extra else ()
