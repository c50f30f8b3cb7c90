"""Byte ranges of chunks as boxes: what a partial read has to fetch, and no more."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest

from ucformat.box import Box


def bounds(size: int, part: ByteRequest | None) -> tuple[int, int]:
    """First byte and end of a request within a value of `size` bytes, clipped to it as slices are.

    Raises TypeError for what is no request of zarr's.
    """
    if part is None:
        return 0, size
    if isinstance(part, RangeByteRequest):
        start, stop = part.start, part.end
    elif isinstance(part, OffsetByteRequest):
        start, stop = part.offset, size
    elif isinstance(part, SuffixByteRequest):
        start, stop = size - part.suffix, size
    else:
        raise TypeError(f"Unexpected byte_range, got {part}.")
    start, stop = min(max(0, start), size), min(max(0, stop), size)
    return start, max(start, stop)


def boxes_of_items(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The items `start` to `stop` of a row-major array, in order, as the fewest boxes: at most 2 for each dimension, less one."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_items(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.length))
