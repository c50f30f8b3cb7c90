"""Whether tensors of several ranks hold the same values, read from the catalogs that are being joined."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ucformat import box as boxes
from ucformat.box import Box, flat_range
from ucformat.catalog import Catalog
from ucformat.lazy_torch import torch

_WHOLE_BYTES = 8 << 20  # tensors up to this size are compared byte by byte
_SAMPLE_ITEMS = 16 << 10  # of a larger one, at each of so many places:
_SAMPLES = 8
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor of one catalog."""

    catalog: Catalog
    name: str
    box: Box


def differing(pairs: Sequence[tuple[Part, Part]]) -> list[int]:
    """Indices of the pairs whose parts hold different bytes. Of large ones, samples are compared."""

    def differs(pair: tuple[Part, Part]) -> bool:
        one, other = pair
        samples = zip(_samples(one), _samples(other), strict=True)
        return any(not np.array_equal(read_part(a), read_part(b)) for a, b in samples)

    with ThreadPoolExecutor(_THREADS) as pool:
        return [i for i, found in enumerate(pool.map(differs, pairs)) if found]


def _samples(part: Part) -> list[Part]:
    itemsize, volume = part.catalog.spec(part.name).kind.itemsize, part.box.volume
    if volume * itemsize <= _WHOLE_BYTES:
        return [part]
    step = (volume - _SAMPLE_ITEMS) // (_SAMPLES - 1)
    found: list[Part] = []
    for i in range(_SAMPLES):
        for inner in flat_range(part.box.length, i * step, i * step + _SAMPLE_ITEMS):
            offset = tuple(a + b for a, b in zip(part.box.offset, inner.offset, strict=True))
            found.append(Part(part.catalog, part.name, Box(offset, inner.length)))
    return found


def is_constant(part: Part) -> bool:
    """Whether all items of a part, or of samples of a large one, are the same: such bytes prove nothing."""
    itemsize = part.catalog.spec(part.name).kind.itemsize
    items = np.concatenate([read_part(sample).reshape(-1, itemsize) for sample in _samples(part)])
    return not len(items) or bool((items == items[0]).all())


def read_part(part: Part) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The bytes of a box, row-major, as uint8 of shape (*box, itemsize); bytes that no fragment holds are 0."""
    catalog, box = part.catalog, part.box
    index = catalog.find(part.name)
    spec, table = catalog.tensors[index], catalog.fragments
    ndim, itemsize = len(spec.shape), spec.kind.itemsize
    out = np.zeros((*box.length, itemsize), dtype=np.uint8)
    rows = table.rows(index)
    offset, length, strides = table.offset[rows, :ndim], table.length[rows, :ndim], table.strides(rows)[:, :ndim]
    want_offset, want_length = (np.array([values], dtype=np.int64).reshape(1, ndim) for values in (box.offset, box.length))
    low, size = boxes.clip(offset, length, want_offset, want_length)
    for i in np.flatnonzero((size > 0).all(axis=1)):
        start = int(table.start[rows][i] + ((low[i] - offset[i]) * strides[i]).sum() * itemsize)
        span = (int(((size[i] - 1) * strides[i]).sum()) + 1) * itemsize
        file = catalog.files[table.file[rows][i]]
        data = catalog.store.read(file.path, start, start + span) if file.inline is None else file.inline[start : start + span]
        flat = np.frombuffer(data, dtype=np.uint8)
        steps = (*(int(step) * itemsize for step in strides[i]), 1)
        view = np.lib.stride_tricks.as_strided(flat, (*map(int, size[i]), itemsize), steps, writeable=False)
        at = tuple(slice(int(a - o), int(a - o + n)) for a, o, n in zip(low[i], box.offset, size[i], strict=True))
        out[at] = view
    return out


def mean(parts: Sequence[Part]) -> bytes:
    """The bytes of the mean of equal boxes of floating-point tensors, summed in their own dtype as DeepSpeed does."""
    kind = parts[0].catalog.spec(parts[0].name).kind
    total: torch.Tensor | None = None
    for part in parts:
        items = torch.from_numpy(read_part(part).reshape(-1)).view(kind.torch)
        total = items if total is None else total + items
    assert total is not None
    found: bytes = (total / len(parts)).contiguous().view(torch.uint8).numpy().tobytes()
    return found
