"""Which parameter a master weight belongs to, proven by value: rounded to the model's dtype it must be the stored weight.

An optimizer numbers its parameters in the order in which the training script listed them, which need not be the order of the
model. So a number gets a name only when shapes and values leave no other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ucformat.dtypes import DTYPES
from ucformat.errors import FormatError
from ucformat.formats.deepspeed.flat import Pieces
from ucformat.formats.deepspeed.records import Opened, numel
from ucformat.lazy_torch import torch
from ucformat.pickles.unpickle import StoredTensor

HEAD_ITEMS = 4 << 10  # enough to tell a weight from others unless both are constant there
_CHUNK_ITEMS = 1 << 20  # compared at a time where heads are equal
_SAMPLE_ITEMS = 64  # of each run of a flat buffer: position is checked, not integrity
_SPANS_AT_A_TIME = 8  # that a thread reads: a turn for each costs more than a small read
_THREADS = 8
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Span:
    """Items [at, at + items) of a stored tensor, in row-major order."""

    tensor: StoredTensor
    at: int
    items: int


def items_of(opened: Opened, span: Span) -> torch.Tensor:
    """The items of a span. Of a tensor that is not contiguous, everything between the first and the last of them is read."""
    tensor = span.tensor
    kind = DTYPES[tensor.dtype]
    at = torch.arange(span.at, span.at + span.items)
    if not tensor.contiguous:
        at, flat = torch.zeros_like(at), at
        for n, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
            at += flat % n * step
            flat = flat // n
    if not span.items:
        return torch.empty(0, dtype=kind.torch)
    low, high = int(at.min()), int(at.max())
    data = opened.store.read(tensor.file, tensor.start + low * kind.itemsize, tensor.start + (high + 1) * kind.itemsize)
    return torch.frombuffer(bytearray(data), dtype=kind.torch)[at - low]


def read_spans(opened: Opened, spans: Sequence[Span]) -> list[torch.Tensor]:
    """The items of each span, read side by side."""
    some = [spans[at : at + _SPANS_AT_A_TIME] for at in range(0, len(spans), _SPANS_AT_A_TIME)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [items for found in pool.map(lambda part: [items_of(opened, span) for span in part], some) for items in found]


def same_values(opened: Opened, one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors of one shape hold the same bytes."""
    for at in range(0, numel(one), _CHUNK_ITEMS):
        n = min(_CHUNK_ITEMS, numel(one) - at)
        a, b = read_spans(opened, [Span(one, at, n), Span(other, at, n)])
        if a.dtype != b.dtype or rounded(a, a.dtype) != rounded(b, b.dtype):
            return False
    return True


def rounded(master: torch.Tensor, dtype: torch.dtype) -> bytes:
    """The bytes of master weights once they are rounded to the model's dtype."""
    return master.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()


class Weights:
    """The model's weights, to be compared with master weights. Each head is read once."""

    def __init__(self, opened: Opened, module: Mapping[str, StoredTensor]) -> None:
        self.opened, self.module = opened, module
        items = {name: numel(tensor) for name, tensor in module.items()}
        spans = [Span(tensor, 0, min(items[name], HEAD_ITEMS)) for name, tensor in module.items()]
        heads = zip(module, read_spans(opened, spans), strict=True)
        self._by_head: dict[tuple[int, str, bytes], list[str]] = {}
        for name, head in heads:
            self._by_head.setdefault((items[name], module[name].dtype, rounded(head, head.dtype)), []).append(name)
        self.sizes = {(n, dtype) for n, dtype, _ in self._by_head}

    def rounding_of(self, span: Span, head: torch.Tensor) -> list[str]:
        """Names of the weights with as many items as `span` that it rounds to, in the order of the model."""
        found = [
            name
            for dtype in {dtype for n, dtype in self.sizes if n == span.items}
            for name in self._by_head.get((span.items, dtype, rounded(head, DTYPES[dtype].torch)), ())
        ]
        if len(found) > 1 and span.items > HEAD_ITEMS:
            found = [name for name in found if self._same(span, self.module[name])]
        return found

    def _same(self, span: Span, weight: StoredTensor) -> bool:
        for at in range(0, span.items, _CHUNK_ITEMS):
            n = min(_CHUNK_ITEMS, span.items - at)
            master, stored = read_spans(self.opened, [Span(span.tensor, span.at + at, n), Span(weight, at, n)])
            if rounded(master, stored.dtype) != rounded(stored, stored.dtype):
                return False
        return True


def settle(candidates: Sequence[Sequence[Sequence[str]]]) -> list[list[str | None]]:
    """The name of each entry of each param group, given what it may be called: None where that is not one name alone."""
    owners = Counter(names[0] for group in candidates for names in group if len(names) == 1)
    return [[names[0] if len(names) == 1 and owners[names[0]] == 1 else None for names in group] for group in candidates]


def complete(names: Sequence[Sequence[str | None]]) -> list[list[str]] | None:
    """The names, when every entry has one."""
    found = [[name for name in group if name is not None] for group in names]
    return found if list(map(len, found)) == list(map(len, names)) else None


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def check_positions(
    opened: Opened, names: Sequence[str], parts: Sequence[StoredTensor], pieces: Pieces, weights: Mapping[str, StoredTensor]
) -> None:
    """Compare samples of master weights in ranks' flat buffers with the stored weights that they should round to.

    Raises FormatError when a master is another parameter's: the buffers are then not in the order that the files say. A master
    that is nobody's rounded weight is put into the remarks.
    """
    odd = [name for name in mismatches(opened, names, parts, pieces, weights) if name in weights]
    if not odd:
        return
    heads = {name: _first_piece(names, parts, pieces, name) for name in odd}
    known = Weights(opened, {name: weights[name] for name in odd})
    for name, span in heads.items():
        if span is None or span.items != numel(weights[name]):
            continue
        head = items_of(opened, Span(span.tensor, span.at, min(span.items, HEAD_ITEMS)))
        owner = next((other for other in known.rounding_of(span, head) if other != name), None)
        if owner is not None and len(torch.unique(head)) > 1:
            why = f"the master weight at the place of {name!r} is that of {owner!r}: param_shapes is not the order of the buffers"
            raise FormatError(span.tensor.file, why)
    opened.remarks.append(
        f"the stored weights of {_shorten(odd)} are not their rounded master weights: changed without the optimizer, or saved at "
        "another time; model/* is what the model file holds, optimizer/*/fp32 what training continues from"
    )


def mismatches(
    opened: Opened, names: Sequence[str], parts: Sequence[StoredTensor], pieces: Pieces, weights: Mapping[str, StoredTensor]
) -> list[str]:
    """Names whose master weights differ from the stored weight once rounded, as far as samples show."""
    checked: list[str] = []
    spans: list[Span] = []
    for i, n in enumerate(pieces.length.prod(axis=1)):
        name = names[int(pieces.param[i])]
        weight = weights.get(name)
        if weight is None or not weight.contiguous:
            continue
        items = min(int(n), _SAMPLE_ITEMS)
        checked.append(name)
        spans += [
            Span(parts[int(pieces.rank[i])], int(pieces.at[i]), items),
            Span(weight, _element(weight.shape, pieces.offset[i].tolist()), items),
        ]
    read = read_spans(opened, spans)
    pairs = zip(checked, read[::2], read[1::2], strict=True)
    return list(dict.fromkeys(name for name, master, own in pairs if rounded(master, own.dtype) != rounded(own, own.dtype)))


def _element(shape: Sequence[int], offset: Sequence[int]) -> int:
    """The row-major element at an offset; `offset` may be padded with zeros."""
    at = 0
    for n, i in zip(shape, offset, strict=False):
        at = at * n + i
    return at


def _first_piece(names: Sequence[str], parts: Sequence[StoredTensor], pieces: Pieces, name: str) -> Span | None:
    """Where a parameter's master weight lies, when it lies whole in one buffer."""
    rows = [i for i, param in enumerate(pieces.param) if names[int(param)] == name]
    if not rows or len({int(pieces.rank[i]) for i in rows}) > 1:
        return None
    return Span(
        parts[int(pieces.rank[rows[0]])],
        min(int(pieces.at[i]) for i in rows),
        sum(math.prod(pieces.length[i].tolist()) for i in rows),
    )
