"""A small writer, made from specs/format.md alone, that can also break every rule: hooks change each thing before it is sealed.

Equal drafts give equal bytes: golden checkpoints are compared with what is written anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import xxhash

from specs.readers.python.ucf_reader import BYTES, PACKED, PAIRED

PAGE = 4096
Tree = dict[str, Any]
Column = tuple[str, list[int], list[int]]  # dtype, shape, numbers
Files = dict[str, bytes]


def xxh(data: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def compact(tree: object) -> bytes:
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def seal(raw: bytes, version: str = "1.0") -> bytes:
    """The bytes of a record in its envelope."""
    return b'{"ucf":"%s","digest":"%s","record":%s}\n' % (version.encode(), xxh(raw).encode(), raw)


@dataclass(frozen=True)
class Tensor:
    """A tensor with its items, and the boxes that it is cut into, each with the number of its shard."""

    dtype: str
    shape: tuple[int, ...]
    items: bytes
    boxes: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...] = ()

    def cut(self, offset: Sequence[int], length: Sequence[int]) -> bytes:
        """The items of a box, row-major."""
        size, out = BYTES[self.dtype], bytearray()
        rows = product(*(range(o, o + n) for o, n in zip(offset[:-1], length[:-1], strict=True)))
        for row in rows if self.shape else [()]:
            index, at = (*row, *offset[-1:]), 0
            for i, n in zip(index, self.shape, strict=True):
                at = at * n + i
            out += self.items[at * size : (at + (length[-1] if length else 1)) * size]
        return bytes(out)


def tensor(
    dtype: str, shape: Sequence[int], seed: int = 0, boxes: Sequence[tuple[int, Sequence[int], Sequence[int]]] = ()
) -> Tensor:
    """Items that look like noise, the same every time; whole in shard 0 unless it is cut into `boxes`."""
    size = math.prod(shape) * BYTES[dtype]
    noise = b"".join(xxhash.xxh3_64_digest(b"item", seed * 65537 + i) for i in range(-(-size // 8)))[:size]
    items = bytes(byte % 2 for byte in noise) if dtype == "BOOL" else noise
    whole = (0, (0,) * len(shape), tuple(shape))
    return Tensor(dtype, tuple(shape), items, tuple((n, tuple(o), tuple(k)) for n, o, k in boxes) or (whole,))


def nothing(*_: Any) -> None:
    return None


def same(raw: bytes) -> bytes:
    return raw


@dataclass(frozen=True)
class Hooks:
    """What an attack changes, before digests are computed over it."""

    order: Callable[[int, list[Any]], None] = nothing
    shard_header: Callable[[int, Tree], None] = nothing
    note: Callable[[int, Tree], None] = nothing
    table: Callable[[int, list[int]], None] = nothing
    columns: Callable[[dict[str, Column]], None] = nothing
    index_note: Callable[[Tree], None] = nothing
    index_header: Callable[[Tree], None] = nothing
    index_raw: Callable[[bytes], bytes] = same
    record: Callable[[Tree], None] = nothing
    raw: Callable[[bytes], bytes] = same
    sealed: Callable[[bytes], bytes] = same


@dataclass(frozen=True)
class Draft:
    """A checkpoint to be written."""

    tensors: dict[str, Tensor]
    values: object = field(default_factory=dict)
    fields: Tree = field(default_factory=dict)
    """More members of the commit record."""
    companions: dict[str, bytes] = field(default_factory=dict)
    shard_names: tuple[str, ...] = ("00000",)
    token: str = "3f9c2a71d04b"  # noqa: S105  # no secret: see section 3.2
    block: int = PAGE
    version: str = "1.0"


def header(entries: Sequence[tuple[str, str, list[int], int]], note: Tree, change: Callable[[Tree], None]) -> bytes:
    """Length and JSON of (key, dtype, shape, bytes) that follow one another."""
    tree: Tree = {"__metadata__": {"format": "pt", "ucf": compact(note).decode()}}
    at = 0
    for key, dtype, shape, size in entries:
        tree[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    change(tree)
    text = compact(tree)
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Placed:
    """A fragment, and where it starts in the file of its shard."""

    name: str
    shard: int
    start: int
    offset: tuple[int, ...]
    length: tuple[int, ...]


def write_shard(draft: Draft, number: int, hooks: Hooks) -> tuple[bytes, Tree, list[Placed]]:
    """A shard's bytes, its record without `file`, and its fragments (section 4)."""
    held = [(name, t, offset, length) for name, t in draft.tensors.items() for n, offset, length in t.boxes if n == number]
    held.sort(key=lambda one: (-BYTES[one[1].dtype], one[0], one[2]))
    hooks.order(number, held)
    entries: list[tuple[str, str, list[int], int]] = []
    note: Tree = {"version": draft.version, "block_bytes": draft.block, "entries": {}}
    data, places = b"", []
    for name, t, offset, length in held:
        whole = length == t.shape
        key = name if whole else f"{name}[{', '.join(f'{o}:{o + n}' for o, n in zip(offset, length, strict=True))}]"
        while key in {"__metadata__", *(entry[0] for entry in entries)}:
            key += "'"
        if not whole or key != name or t.dtype in PAIRED:
            note["entries"][key] = {"tensor": name, "dtype": t.dtype, "shape": list(t.shape), "offset": list(offset)}
        numbers, items = PACKED.get(t.dtype, (1, 1))
        shape = [*length[:-1], length[-1] // items * numbers] if t.dtype in PACKED else [*length, *[2] * (t.dtype in PAIRED)]
        stored = t.cut(offset, length) if math.prod(length) else b""
        entries.append((key, PAIRED.get(t.dtype, t.dtype), shape, len(stored)))
        places.append((name, len(data), offset, length))
        data += stored
    pad = -len(data) % PAGE
    data += bytes(pad)
    words = [xxhash.xxh3_64_intdigest(data[at : at + draft.block]) for at in range(0, len(data), draft.block)]
    words += [0] * (-len(words) % (PAGE // 8))
    hooks.table(number, words)
    entries += [("__ucf__.pad", "U8", [pad], pad)] * bool(pad) + [("__ucf__.blocks", "U64", [len(words)], 8 * len(words))]
    hooks.note(number, note)
    head = header(entries, note, lambda tree: hooks.shard_header(number, tree))
    table = b"".join(word.to_bytes(8, "little") for word in words)
    record = {
        "size": len(head) + len(data) + len(table),
        "data_start": len(head),
        "table_start": len(head) + len(data),
        "header_digest": xxh(head),
        "table_digest": xxh(table),
    }
    return head + data + table, record, [Placed(name, number, len(head) + at, o, n) for name, at, o, n in places]


def narrowest(numbers: Sequence[int]) -> str:
    return next(dtype for dtype, bits in (("U8", 8), ("U16", 16), ("U32", 32), ("U64", 64)) if max([0, *numbers]) < 1 << bits)


def write_index(draft: Draft, placed: Sequence[Placed], hooks: Hooks) -> bytes:
    """The fragment table (section 5)."""
    names = sorted(draft.tensors)
    dtypes = sorted({draft.tensors[name].dtype for name in names})
    ndim = max((len(t.shape) for t in draft.tensors.values()), default=0)
    rows = sorted((p for p in placed if math.prod(p.length)), key=lambda p: (names.index(p.name), p.offset))
    numbers: dict[str, list[int]] = {
        "tensor.name": list("".join(names).encode("utf-8", "surrogatepass")),
        "tensor.name_bytes": [len(name.encode("utf-8", "surrogatepass")) for name in names],
        "tensor.dtype": [dtypes.index(draft.tensors[name].dtype) for name in names],
        "tensor.ndim": [len(draft.tensors[name].shape) for name in names],
        "tensor.shape": [n for name in names for n in draft.tensors[name].shape],
        "tensor.fragments": [sum(row.name == name for row in rows) for name in names],
        "fragment.shard": [row.shard for row in rows],
        "fragment.start": [row.start for row in rows],
        "fragment.offset": [n for row in rows for n in (*row.offset, *[0] * (ndim - len(row.offset)))],
        "fragment.length": [n for row in rows for n in (*row.length, *[1] * (ndim - len(row.length)))],
    }
    wide = ("fragment.offset", "fragment.length")
    columns: dict[str, Column] = {
        name: (narrowest(column), [len(rows), ndim] if name in wide else [len(column)], column)
        for name, column in numbers.items()
    }
    hooks.columns(columns)
    note: Tree = {"version": draft.version, "dtypes": dtypes}
    hooks.index_note(note)
    ordered = sorted(columns.items(), key=lambda one: (-BYTES[one[1][0]], one[0]))
    entries = [(name, dtype, shape, BYTES[dtype] * len(column)) for name, (dtype, shape, column) in ordered]
    data = b"".join(n.to_bytes(BYTES[dtype], "little") for _, (dtype, _, column) in ordered for n in column)
    return hooks.index_raw(header(entries, note, hooks.index_header) + data)


def write(draft: Draft, hooks: Hooks = Hooks()) -> Files:
    """All files of a checkpoint: path → bytes."""
    files: Files = {}
    shards, placed = [], list[Placed]()
    for number, name in enumerate(draft.shard_names):
        data, record, places = write_shard(draft, number, hooks)
        path = f"shards.{draft.token}/{name}.safetensors"
        files[path] = data
        shards.append({"file": path, **record})
        placed += places
    index = write_index(draft, placed, hooks)
    path = f"shards.{draft.token}/index.safetensors"
    files[path] = index
    fields = dict(draft.fields)
    for name, data in draft.companions.items():
        files[f"companions.{draft.token}/{name}"] = data
        fields.setdefault("companions", []).append(
            {"file": f"companions.{draft.token}/{name}", "size": len(data), "digest": xxh(data)}
        )
    tree: Tree = {
        "index": {"file": path, "size": len(index), "digest": xxh(index)},
        "shards": shards,
        "block_bytes": draft.block,
        "values": draft.values,
        **fields,
        "writer": "the conformance kit",
    }
    hooks.record(tree)
    return {**files, "ucf.json": hooks.sealed(seal(hooks.raw(compact(tree)), draft.version))}


def write_slot(draft: Draft, rank: int, fields: Tree, hooks: Hooks = Hooks(), *, slot: int = 0) -> Files:
    """A slot of a rank that holds the pieces of shard `rank`, and its record (section 7). `fields` has step, world…."""
    data, record, _ = write_shard(draft, rank, hooks)
    tree: Tree = {
        "version": "1.0",
        "rank": rank,
        "file": f"slot-{slot}.safetensors",
        **record,
        "block_bytes": draft.block,
        **fields,
    }
    hooks.record(tree)
    folder = f"rank-{rank:05d}"
    return {f"{folder}/slot-{slot}.safetensors": data, f"{folder}/slot-{slot}.json": hooks.sealed(seal(hooks.raw(compact(tree))))}


def contents(draft: Draft) -> Tree:
    """What a reader must find, as the conformance kit states it."""
    return {
        "tensors": {
            name: {"dtype": t.dtype, "shape": list(t.shape), "items": t.items.hex()} for name, t in sorted(draft.tensors.items())
        },
        "aliases": draft.fields.get("aliases", {}),
        "values": draft.values,
        "step": draft.fields.get("step"),
        "mesh": draft.fields.get("mesh", {}),
        "companions": {name: data.hex() for name, data in draft.companions.items()},
        "verified": True,
    }
