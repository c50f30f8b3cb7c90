"""The catalog: logical tensors, and a table of fragments that says which box of which tensor lies where.

Every reader yields one, whatever the format; planning, loading, converting, comparing are functions on it.
Tensor bytes are never held here: fragments point into files, foreign ones too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ucformat import box as boxes
from ucformat.box import Box, Ints
from ucformat.dtypes import DTYPES, DType
from ucformat.errors import FormatError, UnsupportedError
from ucformat.storage.store import Store
from ucformat.values.codec import Opaque

MAX_BYTES = (1 << 63) - 1  # of a tensor, and of any of its dimensions: offsets are int64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A logical tensor: its name, dtype name and global shape (in stored items, see `dtypes`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def kind(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.kind.itemsize


Algorithm = Literal["xxh3-64", "crc32"]


@dataclass(frozen=True, slots=True)
class Checks:
    """Checksummed byte ranges of one file, ascending and disjoint.

    Ranges of `xxh3-64` are small blocks of one size, the last may be shorter, without gaps: a reader widens its read to
    whole ones. Those of `crc32` are whole zip entries: they are checked whenever all of one has been read.
    Raises ValueError for blocks that are otherwise.
    """

    algorithm: Algorithm
    start: Ints
    stop: Ints
    digest: NDArray[np.uint64]

    def __post_init__(self) -> None:
        if self.algorithm == "xxh3-64" and len(self.start):
            size = self.stop - self.start
            if (size[:-1] != size[0]).any() or not 0 < size[-1] <= size[0] or (self.start[1:] != self.stop[:-1]).any():
                raise ValueError("checksummed blocks are of one size and follow one another")


class CheckSource(Protocol):
    """Where the checks of a file come from; loaded only for files that are read."""

    def load(self, store: Store, path: str) -> Checks: ...


@dataclass(frozen=True, slots=True)
class StaticChecks:
    """Checks that the reader already holds."""

    checks: Checks

    def load(self, store: Store, path: str) -> Checks:
        return self.checks


@dataclass(frozen=True, slots=True)
class File:
    """A file that holds fragments: its path in its store and its size in bytes."""

    path: str
    size: int
    checks: CheckSource | None = None
    inline: bytes | None = None
    """The bytes themselves, for small tensors that a reader had to compute (`path` then says from what)."""
    guard: Callable[[], None] | None = None
    """For a file that others write to: raises CheckpointChangedError once it holds something else than what the catalog says.
    What was read before a call that returns is right."""
    store: Store | None = None
    """Where the file lies; None: in the catalog's store. Files of one catalog may lie on several hosts."""


@dataclass(frozen=True, slots=True)
class FragmentTable:
    """N fragments as columns, sorted by tensor. D is the largest number of dimensions of any tensor.

    Boxes are padded to D dimensions with offset 0 and length 1.
    """

    tensor: NDArray[np.int32]
    """(N,) index into `Catalog.tensors`, ascending."""
    file: NDArray[np.int32]
    """(N,) index into `Catalog.files`."""
    start: Ints
    """(N,) byte offset of the fragment's first item in its file."""
    offset: Ints
    """(N, D) box offsets in the tensor's index space."""
    length: Ints
    """(N, D) box lengths."""
    stride: Ints | None = None
    """(N, D) strides in items, or None when every fragment is row-major and contiguous."""

    def __len__(self) -> int:
        return len(self.tensor)

    def rows(self, tensor: int) -> slice:
        """The rows of one tensor."""
        lo, hi = np.searchsorted(self.tensor, [tensor, tensor + 1])
        return slice(int(lo), int(hi))

    def strides(self, rows: Ints | slice = slice(None)) -> Ints:
        """(len(rows), D) in items, as `stride` says or as row-major ones are; of all fragments by default."""
        return row_major(self.length[rows]) if self.stride is None else self.stride[rows]

    def box(self, row: int, ndim: int) -> Box:
        return Box(tuple(map(int, self.offset[row, :ndim])), tuple(map(int, self.length[row, :ndim])))


@dataclass(frozen=True, slots=True)
class Notes:
    """What is known of a checkpoint beside its state."""

    origin: str = ""
    """Name of the format it was read from: `native`, `hf`, `dcp`, `torchsave`, `deepspeed`…"""
    step: int | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    """Mesh axes (`dp`, `tp`, `pp`, …) to sizes, as far as known."""
    remarks: tuple[str, ...] = ()
    """What a user should know: classes shown as placeholders, parts left out, unusual choices of the reader."""
    origin_layout: Mapping[str, str] = field(default_factory=dict)
    """How the origin arranges what it holds, for a writer of the same format: each format has keys of its own, with its name
    and a colon in front (`hf:unet` → `diffusion_pytorch_model`, the name of the weight files in that folder)."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """Tensor specs, fragment table, files, values, aliases and notes."""

    tensors: tuple[TensorSpec, ...]
    """Sorted by name, names unique."""
    fragments: FragmentTable
    files: tuple[File, ...]
    store: Store
    values: object = field(default_factory=dict)
    """The value tree (see `values`): everything that is no tensor."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """alias name → name of the tensor that it is (tied weights)."""
    notes: Notes = field(default_factory=Notes)
    file: str | None = None
    """Path in the store of the one file that is the checkpoint; None when the whole directory is."""
    _index: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def url(self) -> str:
        """Path or URL of the checkpoint: its directory, or its one file."""
        return self.store.url if self.file is None else f"{self.store.url.rstrip('/')}/{self.file}"

    def store_of(self, file: int) -> Store:
        """Where a file lies, by its index."""
        return self.files[file].store or self.store

    def find(self, name: str) -> int:
        """Index of a tensor, by its name or an alias. Raises KeyError, UnsupportedError as `refuse_opaque`."""
        if not self._index:
            self._index.update((spec.name, i) for i, spec in enumerate(self.tensors))
        index = self._index.get(self.aliases.get(name, name))
        if index is None:
            self.refuse_opaque(name)
            raise KeyError(name)
        return index

    def refuse_opaque(self, name: str) -> None:
        """Raise UnsupportedError when `name` is stored, but not as a dense tensor: as an `Opaque` among the values."""
        node = self.values
        for part in name.split("/"):
            if isinstance(node, Opaque) or not isinstance(node, dict):
                break
            node = node.get(part.replace("%2F", "/").replace("%25", "%"))
        if isinstance(node, Opaque):
            raise UnsupportedError(f"{self.url}: {name}", f"can't be read as a tensor: it is stored as {node.class_name}")

    def spec(self, name: str) -> TensorSpec:
        return self.tensors[self.find(name)]

    @property
    def names(self) -> list[str]:
        """All names, aliases too, sorted."""
        return sorted([*(spec.name for spec in self.tensors), *self.aliases])

    @property
    def nbytes(self) -> int:
        """Bytes of all logical tensors, each tied one once."""
        return sum(spec.nbytes for spec in self.tensors)

    def stops(self, rows: Ints | slice = slice(None)) -> Ints:
        """(len(rows),) one past each fragment's last byte in its file; of all fragments by default."""
        table = self.fragments
        size = np.array([spec.kind.itemsize for spec in self.tensors], dtype=np.int64)[table.tensor[rows]]
        stops: Ints = table.start[rows] + (((table.length[rows] - 1) * table.strides(rows)).sum(axis=1) + 1) * size
        return stops

    def filter(self, keep: Callable[[str], bool]) -> Catalog:
        """The catalog of those names (aliases too) that `keep` accepts; values and files stay.

        When only an alias of a tensor is kept, the tensor takes its name.
        """
        renames: dict[str, str] = {spec.name: spec.name for spec in self.tensors if keep(spec.name)}
        aliases: dict[str, str] = {}
        for alias, target in self.aliases.items():
            if keep(alias):
                owner = renames.setdefault(target, alias)
                if owner != alias:
                    aliases[alias] = owner
        return self._renamed(renames, aliases)

    def rename(self, new: Callable[[str], str]) -> Catalog:
        """The same catalog with every name passed through `new`. Raises FormatError when that gives two names alike."""
        taken: dict[str, str] = {}
        for old in self.names:
            other = taken.setdefault(new(old), old)
            if other != old:
                raise FormatError(self.store.url, f"{other!r} and {old!r} would both get the name {new(old)!r}")
        return self._renamed(
            {spec.name: new(spec.name) for spec in self.tensors},
            {new(alias): new(target) for alias, target in self.aliases.items()},
        )

    def _renamed(self, renames: Mapping[str, str], aliases: Mapping[str, str]) -> Catalog:
        kept = sorted((renames[spec.name], i) for i, spec in enumerate(self.tensors) if spec.name in renames)
        position = np.full(len(self.tensors), -1, dtype=np.int32)
        for new, (_, old) in enumerate(kept):
            position[old] = new
        moved = position[self.fragments.tensor]
        rows = np.flatnonzero(moved >= 0)
        rows = rows[np.argsort(moved[rows], kind="stable")]
        table = self.fragments
        return replace(
            self,
            tensors=tuple(replace(self.tensors[old], name=name) for name, old in kept),
            fragments=FragmentTable(
                moved[rows],
                table.file[rows],
                table.start[rows],
                table.offset[rows],
                table.length[rows],
                None if table.stride is None else table.stride[rows],
            ),
            aliases=dict(aliases),
            _index={},
        )


class CatalogBuilder:
    """Collects tensors, files and fragments one by one, for readers whose metadata is small.

    Checks what every reader must: boxes inside their tensor, bytes inside their file, one dtype and shape per name.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.files: list[File] = []
        self.specs: dict[str, TensorSpec] = {}
        self.aliases: dict[str, str] = {}
        self._rows: list[tuple[str, int, int, Box, tuple[int, ...] | None]] = []

    def file(self, file: File) -> int:
        """Add a file; its index is what `fragment` wants."""
        self.files.append(file)
        return len(self.files) - 1

    def tensor(self, name: str, dtype: str, shape: Sequence[int]) -> TensorSpec:
        """Declare a tensor; declaring it again must agree. Raises FormatError when it does not, or can't exist."""
        spec = TensorSpec(name, dtype, tuple(map(int, shape)))
        if dtype not in DTYPES:
            raise FormatError(self.store.url, f"tensor {name!r} has an unknown dtype {dtype!r}")
        if any(not 0 <= n <= MAX_BYTES for n in spec.shape) or spec.nbytes > MAX_BYTES:
            raise FormatError(self.store.url, f"tensor {name!r} has an impossible shape {list(spec.shape)}")
        known = self.specs.setdefault(name, spec)
        if known != spec:
            raise FormatError(
                self.store.url,
                f"tensor {name!r} is {known.dtype} {list(known.shape)} in one place and {dtype} {list(spec.shape)} in another",
            )
        return spec

    def fragment(self, name: str, file: int, start: int, box: Box | None = None, stride: Sequence[int] | None = None) -> None:
        """Add a fragment of a declared tensor: `box` (default: all of it) at byte `start` of `file`.

        `stride` in items, when it is not row-major contiguous. Empty boxes are dropped: they never shadow real ones.
        """
        spec, entry = self.specs[name], self.files[file]
        box = Box.whole(spec.shape) if box is None else box
        if not box.inside(spec.shape):
            raise FormatError(entry.path, f"tensor {name!r}: box {box} is not inside shape {list(spec.shape)}", start)
        if box.volume == 0:
            return
        steps = None if stride is None else tuple(map(int, stride))
        if steps is not None and len(steps) != len(box.length):
            raise FormatError(entry.path, f"tensor {name!r}: {len(steps)} strides for {len(box.length)} dimensions", start)
        if steps is not None and any(step < 0 for step in steps):
            raise FormatError(entry.path, f"tensor {name!r}: negative stride {list(steps)}", start)
        items = box.volume if steps is None else 1 + sum((n - 1) * s for n, s in zip(box.length, steps, strict=True))
        stop = start + items * spec.kind.itemsize
        if start < 0 or stop > entry.size:
            raise FormatError(entry.path, f"tensor {name!r}: box {box} lies outside the file of {entry.size} bytes", start, stop)
        self._rows.append((name, file, start, box, steps))

    def alias(self, name: str, target: str) -> None:
        """Record that `name` is the tensor `target` (itself an alias or not)."""
        self.aliases[name] = self.aliases.get(target, target)

    def build(self, values: object = None, notes: Notes | None = None) -> Catalog:
        """The catalog. Coverage is proven when it is read, not here. Raises FormatError for an alias that can't be one."""
        for alias, target in self.aliases.items():
            if alias in self.specs or target not in self.specs:
                why = "a tensor of its own" if alias in self.specs else f"said to be {target!r}, which is not there"
                raise FormatError(self.store.url, f"alias {alias!r} is {why}")
        tensors = tuple(self.specs[name] for name in sorted(self.specs))
        ids = {spec.name: i for i, spec in enumerate(tensors)}
        rows = sorted(self._rows, key=lambda row: ids[row[0]])
        ndim = max((len(spec.shape) for spec in tensors), default=0)
        stride: Ints | None = None
        if any(row[4] is not None for row in rows):
            stride = boxes.pad([_row_major(row[3].length) if row[4] is None else row[4] for row in rows], ndim, 0)
        table = FragmentTable(
            np.array([ids[row[0]] for row in rows], dtype=np.int32),
            np.array([row[1] for row in rows], dtype=np.int32),
            np.array([row[2] for row in rows], dtype=np.int64),
            boxes.pad([row[3].offset for row in rows], ndim, 0),
            boxes.pad([row[3].length for row in rows], ndim, 1),
            stride,
        )
        return Catalog(
            tensors,
            table,
            tuple(self.files),
            self.store,
            {} if values is None else values,
            dict(self.aliases),
            notes or Notes(),
        )


def _row_major(length: Iterable[int]) -> tuple[int, ...]:
    """Strides in items of a contiguous row-major array."""
    strides: list[int] = []
    step = 1
    for n in reversed(tuple(length)):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def row_major(length: Ints) -> Ints:
    """Row-wise strides in items of contiguous row-major boxes, (N, D) → (N, D)."""
    out = np.ones_like(length)
    if length.shape[1] > 1:
        out[:, :-1] = np.cumprod(length[:, :0:-1], axis=1)[:, ::-1]
    return out
