"""The files of a legacy checkpoint's ranks, opened: which parameters each model part holds, in the order of registration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ucformat.catalog import Catalog, CatalogBuilder, File
from ucformat.containers.zip_read import checks_of
from ucformat.errors import FormatError, MissingFileError, UnsupportedError
from ucformat.formats.megatron import names as canonical
from ucformat.formats.megatron.folders import MODEL_FILE, OPTIMIZER_FILE, rank_of
from ucformat.formats.megatron.settings import Settings
from ucformat.pickles.unpickle import RefusedTensor, StoredTensor, TorchFile, open_torch_zip
from ucformat.storage.store import Store
from ucformat.views import Extent, Rewrite, View, contiguous, strided

_THREADS = 8  # opening is a handful of small reads per file: it waits for latency, not for bandwidth
_COMPARED_BYTES = 4 << 20  # read at a time where no checksum says whether two tensors are equal
_PART = re.compile(r"model(\d*)")


@dataclass(frozen=True, slots=True)
class Part:
    """One model part of one rank (with virtual pipeline stages a rank has several), its parameters as they are registered."""

    file: str
    tensors: Mapping[str, StoredTensor]
    """By Megatron-core's local name, layer norms and experts as modules of their own."""


@dataclass(slots=True)
class RankFile:
    """What one rank's folder holds."""

    numbers: tuple[int, ...]
    """Of the folder's name."""
    path: str
    parts: list[Part]
    rest: dict[str, Any]
    """All other entries of the file."""
    optimizer: str | None = None
    """Path of the distributed optimizer's file."""
    old: bool = False
    """Whether it was written by a release before Megatron-core."""
    tp: int = 0
    pp: int = 0
    ep: int = 0


@dataclass(slots=True)
class Opened:
    """Opens files, and gives views of the tensors in them."""

    store: Store
    rewrite: Rewrite = field(init=False)
    remarks: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)
    _sums: dict[tuple[str, int], tuple[int, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rewrite = Rewrite(CatalogBuilder(self.store).build())

    def start_from(self, raw: Catalog) -> None:
        """Take the tensors and files of a catalog, before anything else."""
        self.rewrite = Rewrite(raw)
        self._numbers = {file.path: i for i, file in enumerate(raw.files)}

    def trees(self, paths: Sequence[str]) -> list[Any]:
        """The decoded contents of torch.save files, opened side by side. Raises what `open_torch_zip` raises."""
        with ThreadPoolExecutor(_THREADS) as pool:
            opened = list(pool.map(lambda path: open_torch_zip(self.store, path), paths))
        for path, found in zip(paths, opened, strict=True):
            self._add(path, found)
        return [found.tree for found in opened]

    def _add(self, path: str, found: TorchFile) -> None:
        if path in self._numbers:
            return
        self._numbers[path] = len(self.rewrite.files)
        self.rewrite.files.append(File(path, self.store.size(path), checks_of(found.entries.values())))
        self._sums.update(((path, entry.start), (entry.size, entry.crc)) for entry in found.entries.values())

    def file_of(self, path: str) -> File:
        return self.rewrite.files[self._numbers[path]]

    def view(self, tensor: StoredTensor) -> View:
        return strided(tensor.dtype, tensor.shape, tensor.stride, Extent(self._numbers[tensor.file], tensor.start))

    def flat(self, tensor: StoredTensor, first: int, shape: tuple[int, ...]) -> View:
        """Items of a contiguous tensor from item `first` on, as a tensor of `shape`."""
        start = tensor.start + first * self.view(tensor).itemsize
        return contiguous(tensor.dtype, shape, Extent(self._numbers[tensor.file], start))

    def same(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Whether two tensors hold the same bytes: by the checksums that their files have of them, else by reading both."""
        if (one.dtype, one.shape, one.stride) != (other.dtype, other.shape, other.stride):
            return False
        a, b = self._sum(one), self._sum(other)
        return a == b if a is not None and b is not None else self._read_same(one, other)

    def _sum(self, tensor: StoredTensor) -> tuple[int, int] | None:
        """Size and CRC-32 of the record that is this tensor."""
        size, crc = self._sums.get((tensor.file, tensor.start), (0, None))
        return (size, crc) if crc is not None and tensor.contiguous and size == self._nbytes(tensor) else None

    def _nbytes(self, tensor: StoredTensor) -> int:
        """Bytes from the first item to the last."""
        if 0 in tensor.shape:
            return 0
        items = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        return items * self.view(tensor).itemsize

    def _read_same(self, one: StoredTensor, other: StoredTensor) -> bool:
        for at in range(0, self._nbytes(one), _COMPARED_BYTES):
            n = min(_COMPARED_BYTES, self._nbytes(one) - at)
            a, b = (self.store.read(t.file, t.start + at, t.start + at + n) for t in (one, other))
            if a != b:
                return False
        return True


def open_ranks(opened: Opened) -> list[RankFile]:
    """All ranks' files. Raises MissingFileError and FormatError naming what is missing or malformed."""
    store = opened.store
    folders = [(numbers, name.rstrip("/")) for name in store.list() if (numbers := rank_of(name)) is not None]
    if len({len(numbers) for numbers, _ in folders}) > 1:
        raise FormatError(
            store.url, f"folders {folders[0][1]} and {folders[-1][1]} are of different runs: names of one form only"
        )
    held = {folder: set(store.list(folder)) for _, folder in folders}
    for folder, files in held.items():
        if MODEL_FILE not in files:
            raise MissingFileError(
                f"{store.url}/{folder}/{MODEL_FILE}", f"missing; there is {', '.join(sorted(files)) or 'nothing'}"
            )
    paths = [f"{folder}/{MODEL_FILE}" for _, folder in folders]
    ranks = []
    for (numbers, folder), path, tree in zip(folders, paths, opened.trees(paths), strict=True):
        if not isinstance(tree, dict):
            raise FormatError(path, "holds no dict")
        found = f"{folder}/{OPTIMIZER_FILE}" if OPTIMIZER_FILE in held[folder] else None
        others = sorted(name for name in held[folder] if name not in (MODEL_FILE, OPTIMIZER_FILE))
        if others:
            opened.remarks.append(f"not read: {', '.join(f'{folder}/{name}' for name in others)}")
        ranks.append(_rank(opened, numbers, path, tree, found))
    return ranks


def _rank(opened: Opened, numbers: tuple[int, ...], path: str, tree: Mapping[Any, Any], optimizer: str | None) -> RankFile:
    models = {key: match for key in tree if isinstance(key, str) and (match := _PART.fullmatch(key))}
    if not models:
        raise FormatError(path, "has no entry `model`, nor `model0`")
    expected = ["model"] if "model" in models else [f"model{i}" for i in range(len(models))]
    if sorted(models) != sorted(expected):
        raise FormatError(path, f"has the model parts {', '.join(sorted(models))}")
    parts = [_part(opened, tree[key], path, key) for key in expected]
    rest = {str(key): value for key, value in tree.items() if key not in models}
    old = any(canonical.is_old(tree[key]) for key in expected)
    return RankFile(numbers, path, parts, rest, optimizer, old)


def _part(opened: Opened, tree: object, path: str, key: str) -> Part:
    if not isinstance(tree, dict):
        raise FormatError(path, f"its entry {key!r} is no dict")
    old = canonical.is_old(tree)
    language = tree.get("language_model") if old else None
    two_stacks = isinstance(language, dict) and {"encoder", "decoder"} <= set(map(str, language))
    tensors: dict[str, StoredTensor] = {}
    states = 0
    for name, value in canonical.flattened(tree):
        if isinstance(value, RefusedTensor):
            raise UnsupportedError(path, f"{name} is {value.kind}")
        if not isinstance(value, StoredTensor):
            states += value is not None
            continue
        if name.endswith("_extra_state"):
            states += 0 not in value.shape
            continue
        short = canonical.plain(canonical.modern(name, two_stacks=two_stacks) if old else name.removeprefix("module."))
        if short in tensors and short != "output_layer.weight":
            raise FormatError(path, f"two parameters of {key!r} are {short}")
        tensors[short] = value
    if states:
        opened.remarks.append(f"{path}: {states} states that layers keep for themselves (_extra_state) are not read")
    return Part(path, tensors)


def settings_of(ranks: Sequence[RankFile]) -> Settings:
    """The arguments that the first file has."""
    return Settings.of(ranks[0].rest.get("args"))
