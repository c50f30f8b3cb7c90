"""Which files make up a Hugging Face checkpoint, and which tensor is in which of them.

Index and files must agree: what an index names must be there, and no name may be in two files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from ucformat.containers.safetensors_header import Header, HeaderEntry, distinct, read_header
from ucformat.errors import FormatError, MissingFileError, UnsupportedError
from ucformat.formats.hf.stems import STEMS
from ucformat.formats.source import Source
from ucformat.storage.store import Store, safe_path

T = TypeVar("T")
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20  # a million names; an index is no place for data
HEADER_THREADS = 8  # headers are small, their latency on object stores is not

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)(?P<suffix>\.safetensors|\.bin)")


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of one checkpoint; `weight_map` (tensor → file) when an index tells."""

    files: tuple[str, ...]
    index: str | None = None
    weight_map: Mapping[str, str] | None = None
    total_size: int | None = None
    remarks: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """What the names of the files have in common: `model` of `model-00001-of-00002.safetensors`."""
        first = self.files[0].rpartition("/")[2] if self.files else ""
        shard = _SHARD.fullmatch(first)
        return shard["stem"] if shard else first.rpartition(".")[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """All files, the index too."""
        return self.files if self.index is None else (*self.files, self.index)

    def within(self, folder: str) -> FileSet:
        """The same set, with paths from the directory that holds `folder`."""
        if not folder:
            return self
        return replace(
            self,
            files=tuple(f"{folder}/{file}" for file in self.files),
            index=None if self.index is None else f"{folder}/{self.index}",
            weight_map=None if self.weight_map is None else {k: f"{folder}/{v}" for k, v in self.weight_map.items()},
            remarks=tuple(f"{folder}: {text}" for text in self.remarks),
        )


def choose(source: Source) -> FileSet:
    """The files at `source`. Raises MissingFileError, FormatError, UnsupportedError when it can't be told which."""
    if source.file is not None:
        return read_index(source.store, source.file) if source.file.endswith(INDEX_SUFFIX) else FileSet((source.file,))
    names = [name for name in source.store.list() if not name.endswith("/")]
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    weights = [name for name in names if name.endswith(SUFFIX)]
    index = _preferred(indices, INDEX_SUFFIX)
    if index is not None:
        chosen = read_index(source.store, index)
        single = index.removesuffix(INDEX_SUFFIX) + SUFFIX
        if single in weights and single not in chosen.files:  # what loaders of the library do, too
            chosen = FileSet((single,), remarks=(f"{index} is not of {single}: ignored",))
        return _mention(chosen, weights)
    shards = shard_set(weights, source.store.url)
    preferred = _preferred(weights, SUFFIX)
    if preferred is not None:
        return _mention(FileSet((preferred,)), weights)
    if shards:
        return _mention(FileSet(shards, remarks=("no index: names are taken from the shards",)), weights)
    found = ", ".join((indices or weights)[:6])
    raise UnsupportedError(source.url, f"several sets of weights ({found}): name one of the files instead of the directory")


def _preferred(names: Sequence[str], suffix: str) -> str | None:
    """The only name, or the one that libraries would take."""
    if len(names) == 1 and not _SHARD.fullmatch(names[0]):
        return names[0]
    return next((stem + suffix for stem in STEMS if stem + suffix in names), None)


def shard_set(names: Sequence[str], url: str, suffix: str = SUFFIX) -> tuple[str, ...]:
    """All files of the one numbered set among `names`; empty when there is none or several.

    Raises MissingFileError when one of them is not there.
    """
    matches = [match for name in names if (match := _SHARD.fullmatch(name)) and match["suffix"] == suffix]
    sets = {(match["stem"], match["count"]) for match in matches}
    stems = [stem for stem in STEMS if stem in {stem for stem, _ in sets}]
    if len(sets) > 1 and stems:
        sets = {(stem, count) for stem, count in sets if stem == stems[0]}
    if len(sets) != 1:
        return ()
    stem, count = sets.pop()
    width, total = len(count), int(count)
    wanted = tuple(f"{stem}-{number:0{width}d}-of-{count}{suffix}" for number in range(1, min(total, len(matches) + 1) + 1))
    missing = next((name for name in wanted if name not in names), None)
    if missing is not None:
        raise MissingFileError(f"{url}/{missing}", f"missing: one of {total} shards")
    return wanted


def _mention(chosen: FileSet, weights: Sequence[str]) -> FileSet:
    """Say which safetensors files of the directory were not taken."""
    others = [name for name in weights if name not in chosen.files]
    if not others:
        return chosen
    remark = f"not part of it: {', '.join(others[:6])}{'…' if len(others) > 6 else ''}"
    return FileSet(chosen.files, chosen.index, chosen.weight_map, chosen.total_size, (*chosen.remarks, remark))


def read_index(store: Store, path: str, suffix: str = SUFFIX) -> FileSet:
    """Read an index of files that end in `suffix`.

    Raises FormatError when it is malformed or names files outside the directory.
    """
    size, where = store.size(path), f"{store.url}/{path}"
    if size > MAX_INDEX_BYTES:
        raise FormatError(where, f"an index of {size} bytes: the limit is {MAX_INDEX_BYTES}")
    try:
        tree = json.loads(store.read(path).decode(), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise FormatError(where, f"malformed index: {error}", 0, size) from error
    weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise FormatError(where, "weight_map is not an object of file names", 0, size)
    files = tuple(sorted(set(weight_map.values())))
    for file in files:
        if not safe_path(file, where).endswith(suffix):
            raise FormatError(where, f"weight_map names {file!r}, which is no {suffix} file", 0, size)
    metadata = tree.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return FileSet(files, path, weight_map, int(total) if isinstance(total, (int, float)) and math.isfinite(total) else None)


def read_each(store: Store, chosen: FileSet, read: Callable[[Store, str], T]) -> list[T]:
    """`read(store, file)` of every file, in order, several at a time.

    Raises MissingFileError for a file that an index names and that is not there.
    """

    def one(file: str) -> T:
        if chosen.index is not None and not store.exists(file):
            raise MissingFileError(f"{store.url}/{file}", f"missing: {chosen.index} names it")
        return read(store, file)

    if len(chosen.files) == 1:
        return [one(chosen.files[0])]
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        return list(pool.map(one, chosen.files))


def read_headers(store: Store, chosen: FileSet) -> list[Header]:
    """The headers of all files, in order. Raises MissingFileError for a file that an index names and is not there."""
    return read_each(store, chosen, read_header)


def owners(
    store: Store, chosen: FileSet, headers: Sequence[Header]
) -> tuple[dict[str, tuple[int, HeaderEntry]], tuple[str, ...]]:
    """Tensor name → (number of its file, entry), and remarks. Raises FormatError when index and files disagree."""
    found: dict[str, tuple[int, HeaderEntry]] = {}
    for number, header in enumerate(headers):
        for entry in header.entries:
            other = found.setdefault(entry.name, (number, entry))
            if other[0] != number:
                why = f"tensor {entry.name!r} is in {headers[other[0]].path} too: which one is right can't be known"
                raise FormatError(f"{store.url}/{header.path}", why, entry.start, entry.stop)
    if chosen.weight_map is None or chosen.index is None:
        return found, ()
    where = f"{store.url}/{chosen.index}"
    for name, file in chosen.weight_map.items():
        if name not in found:
            raise FormatError(where, f"tensor {name!r} is not in {file}, nor in any other file")
        if headers[found[name][0]].path != file:
            raise FormatError(where, f"tensor {name!r} is in {headers[found[name][0]].path}, not in {file}")
    return found, tuple(_index_remarks(chosen, found))


def _index_remarks(chosen: FileSet, found: Mapping[str, tuple[int, HeaderEntry]]) -> list[str]:
    remarks: list[str] = []
    extra = [name for name in found if name not in (chosen.weight_map or {})]
    if extra:
        remarks.append(f"{len(extra)} tensors are not in {chosen.index}, taken all the same: {', '.join(extra[:4])}")
    total = sum(entry.stop - entry.start for _, entry in found.values())
    if chosen.total_size is not None and chosen.total_size != total:
        remarks.append(f"{chosen.index} states total_size {chosen.total_size}, the files hold {total} bytes of tensors")
    return remarks
