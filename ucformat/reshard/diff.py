"""What differs between two checkpoints of any formats: names, dtypes, shapes, and values bit for bit or within bounds.

Values are compared in batches of bounded size, so two checkpoints of any size can be compared on any machine.
A tied name that one side lacks is no difference when the tensor is there under another of its names: it is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ucformat import values as trees
from ucformat.box import Box
from ucformat.catalog import Catalog, TensorSpec
from ucformat.containers.file_image import ByteRequest
from ucformat.dtypes import DTYPES
from ucformat.formats.target import OutputBox
from ucformat.reshard.reading.fill import CatalogFill
from ucformat.reshard.reading.numbers import widened
from ucformat.storage.store import Bytes

BATCH_BYTES = 8 << 20  # of each side, compared at a time
BATCH_PARTS = 2048  # tiny tensors compared at a time: enough to make the cost of a plan small

Kind = Literal["only in a", "only in b", "dtype", "shape", "values"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|a - b| <= atol + rtol * |b| counts as equal, as in `torch.isclose`; NaN equals NaN."""

    atol: float = 0.0
    rtol: float = 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """One name, or path of a value, that differs, and how."""

    name: str
    kind: Kind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Diff:
    """All differences, sorted by name; `notes` are remarks that do not make the two unequal."""

    tensors: int
    """Compared."""
    nbytes: int
    """Compared, counted on side a."""
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    values: bool = False
    """Whether values were compared, and there were any."""

    @property
    def nothing(self) -> bool:
        """Whether nothing at all was compared."""
        return not (self.tensors or self.differences or self.values)

    @property
    def equal(self) -> bool:
        """Whether something was compared, and no difference was found."""
        return not self.differences and not self.nothing


def diff(
    a: Catalog,
    b: Catalog,
    *,
    tolerance: Tolerance | None = None,
    any_dtype: bool = False,
    values: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Diff:
    """Compare two checkpoints. Without `tolerance` values must be equal bit for bit.

    `any_dtype`: a difference in dtype is none by itself, and values are compared as numbers. `values`: compare the value
    trees, too. Raises what reading raises: CoverageError, ChecksumError, StorageError…
    """
    both, found, notes = _names(a, b)
    pairs: list[tuple[TensorSpec, TensorSpec, str]] = []
    for name in both:
        left, right = a.spec(name), b.spec(name)
        if left.shape != right.shape:
            found.append(Difference(name, "shape", f"{list(left.shape)} and {list(right.shape)}"))
        elif left.dtype != right.dtype and not (any_dtype and _numeric(left.dtype) and _numeric(right.dtype)):
            found.append(Difference(name, "dtype", f"{left.dtype} and {right.dtype}"))
        else:
            pairs.append((left, right, name))
    found.extend(_Comparison(a, b, pairs, tolerance, on_bytes).run())
    if values:
        found.extend(_values(a.values, b.values, ""))
    found.sort(key=lambda item: item.name)
    any_values = values and bool(a.values or b.values)
    return Diff(len(pairs), sum(left.nbytes for left, _, _ in pairs), tuple(found), tuple(notes), any_values)


def _names(a: Catalog, b: Catalog) -> tuple[list[str], list[Difference], list[str]]:
    """Names on both sides, names on one side, and notes on tied names that only one side spells out."""
    left, right = a.names, b.names
    in_a, in_b = set(left), set(right)
    found: list[Difference] = []
    notes: list[str] = []
    for mine, other, side, kind in ((a, in_b, "a", "only in a"), (b, in_a, "b", "only in b")):
        tied: dict[int, list[str]] = {}
        for name in mine.names:
            tied.setdefault(mine.find(name), []).append(name)
        for name in mine.names:
            if name in other:
                continue
            elsewhere = next((twin for twin in tied[mine.find(name)] if twin in other), None)
            if elsewhere is None:
                found.append(Difference(name, "only in a" if kind == "only in a" else "only in b"))
            else:
                notes.append(f"{name} is only in {side}, tied to {elsewhere}, which is on both sides")
    return [name for name in left if name in in_b], found, notes


class _Comparison:
    """Compares pairs of tensors of equal shape, batch by batch."""

    def __init__(
        self,
        a: Catalog,
        b: Catalog,
        pairs: Sequence[tuple[TensorSpec, TensorSpec, str]],
        tolerance: Tolerance | None,
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self.pairs, self.tolerance, self.on_bytes = pairs, tolerance, on_bytes
        names = [name for _, _, name in pairs]
        self.fills = (
            CatalogFill(a, [OutputBox(left, Box.whole(left.shape)) for left, _, _ in pairs], names, threads=2),
            CatalogFill(b, [OutputBox(right, Box.whole(right.shape)) for _, right, _ in pairs], names, threads=2),
        )
        self.unequal: dict[int, _Tally] = {}

    def run(self) -> Iterator[Difference]:
        for batch in self._batches():
            self._compare(batch)
        for piece, tally in sorted(self.unequal.items()):
            spec = self.pairs[piece][0]
            yield Difference(self.pairs[piece][2], "values", tally.told(spec))

    def _batches(self) -> Iterator[list[tuple[int, int, int]]]:
        """(pair, first item, one past the last item) of items that are compared at a time."""
        batch: list[tuple[int, int, int]] = []
        held = 0
        for piece, (left, right, _) in enumerate(self.pairs):
            width = max(left.kind.itemsize, right.kind.itemsize)
            items, step = left.nbytes // left.kind.itemsize, BATCH_BYTES // width
            for start in range(0, items, step):
                stop = min(start + step, items)
                if batch and (held + (stop - start) * width > BATCH_BYTES or len(batch) >= BATCH_PARTS):
                    yield batch
                    batch, held = [], 0
                batch.append((piece, start, stop))
                held += (stop - start) * width
        if batch:
            yield batch

    def _compare(self, batch: Sequence[tuple[int, int, int]]) -> None:
        left, right = (self._read(side, batch) for side in (0, 1))
        for (piece, start, _), one, other in zip(batch, left, right, strict=True):
            specs = self.pairs[piece]
            if specs[0].dtype == specs[1].dtype and np.array_equal(one, other):
                continue
            wrong, apart = _unequal(one, other, specs[0].dtype, specs[1].dtype, self.tolerance)
            if len(wrong):
                self.unequal.setdefault(piece, _Tally()).add(wrong + start, apart)
        if self.on_bytes is not None:
            self.on_bytes(sum(part.nbytes for part in left))

    def _read(self, side: int, batch: Sequence[tuple[int, int, int]]) -> list[Bytes]:
        """The batch's items of one side, each starting at a multiple of 16 bytes so that it can be viewed."""
        width = [DTYPES[self.pairs[piece][side].dtype].itemsize for piece, _, _ in batch]  # type: ignore[union-attr]
        sizes = [(stop - start) * w for (_, start, stop), w in zip(batch, width, strict=True)]
        starts = np.concatenate([[0], np.cumsum([-(-size // 16) * 16 for size in sizes])])
        memory = np.empty(int(starts[-1]), dtype=np.uint8)
        parts = [
            ByteRequest(piece, start * w, stop * w, memory[at : at + size])
            for (piece, start, stop), w, at, size in zip(batch, width, starts.tolist(), sizes, strict=False)
        ]
        self.fills[side](parts)
        return [part.out for part in parts]


@dataclass(slots=True)
class _Tally:
    """Unequal items of one tensor, as they are found."""

    count: int = 0
    first: int = 0
    apart: float = 0.0
    numeric: bool = True

    def add(self, wrong: np.ndarray[tuple[int], np.dtype[np.int64]], apart: float | None) -> None:
        if not self.count:
            self.first = int(wrong[0])
        self.count += len(wrong)
        self.numeric = self.numeric and apart is not None
        self.apart = max(self.apart, apart or 0.0)

    def told(self, spec: TensorSpec) -> str:
        items = spec.nbytes // spec.kind.itemsize
        index = [int(i) for i in np.unravel_index(self.first, spec.shape)] if spec.shape else []
        most = f", largest difference {self.apart:.3g}" if self.numeric else ""
        return f"{self.count} of {items} items differ, first at {index}{most}"


def _numeric(dtype: str) -> bool:
    """Whether items are single numbers that torch can convert."""
    return DTYPES[dtype].group == (1, 1) and DTYPES[dtype].name != "BOOL"


def _numbers(data: Bytes, dtype: str) -> NDArray[Any]:
    """Items as float64 or complex128."""
    items = widened(data.view(DTYPES[dtype].numpy), dtype)
    return items.astype(np.complex128 if items.dtype.kind == "c" else np.float64)


def _unequal(
    one: Bytes, other: Bytes, left: str, right: str, tolerance: Tolerance | None
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], float | None]:
    """Indices of unequal items, ascending, and the largest difference where there are numbers on both sides."""
    width = DTYPES[left].itemsize
    bits = (one.reshape(-1, width) != other.reshape(-1, width)).any(axis=1) if left == right else None
    if not (_numeric(left) and _numeric(right)):
        assert bits is not None, "other dtypes are only compared with themselves"
        return np.flatnonzero(bits), None
    a, b = _numbers(one, left), _numbers(other, right)
    with np.errstate(all="ignore"):  # infinities and what is no number
        apart = np.abs(a - b)
    if tolerance is None and bits is not None:
        wrong = np.flatnonzero(bits)
    else:
        bound = tolerance or Tolerance()
        with np.errstate(all="ignore"):
            wrong = np.flatnonzero(~np.isclose(a, b, rtol=bound.rtol, atol=bound.atol, equal_nan=True))
    known = np.nan_to_num(apart[wrong])
    return wrong, float(known.max()) if len(wrong) else 0.0


def _values(one: object, other: object, path: str) -> Iterator[Difference]:
    """Paths at which two value trees differ; dicts are descended, anything else is compared as a whole."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            below = f"{path}/{key}" if path else f"values:{key}"
            if key not in other:
                yield Difference(below, "only in a")
            elif key not in one:
                yield Difference(below, "only in b")
            else:
                yield from _values(one[key], other[key], below)
    elif trees.encode(one) != trees.encode(other):
        yield Difference(path or "values", "values", f"{_short(one)} and {_short(other)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
