"""A reader of the ucf checkpoint format, made from specs/format.md alone: the standard library, numpy and xxhash.

`Checkpoint(path)` takes a checkpoint, a run directory or a snapshot directory; `read(name, offset, length)` gives items as raw
bytes, every block verified. As a program it answers the requests of the conformance kit, a line each.
"""

from __future__ import annotations

import math
import re
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from specs.readers.python.ucf_json import MAX, TEXT, fits, need, refuse, strict_json
from specs.readers.python.ucf_values import check_value

BYTES = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"], 1),
    **dict.fromkeys(["F4", "F6_E2M3", "F6_E3M2"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32", "C32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
    "C128": 16,
}
PACKED = {"F4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3)}  # so many numbers of a header are so many items
PAIRED = {"C32": "F16", "C128": "F64"}  # stored as pairs of these


def xxh(data: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def fetch(path: Path, start: int = 0, stop: int | None = None, size: int | None = None) -> bytes:
    """Bytes of a file, which has `size` if that is known."""
    need(path.exists(), f"{path} is missing", "missing")
    need(path.is_file() and size in {None, path.stat().st_size}, f"{path} is not the file that was committed")
    with path.open("rb") as file:
        file.seek(start)
        return file.read() if stop is None else file.read(stop - start)


def count(x: Any) -> bool:
    return type(x) is int and 0 <= x < MAX


HEX, INTS = "[0-9a-f]{16}", {"*": int}
FILE = {"file": TEXT, "size": count, "digest": HEX}
SIZES = {"file": TEXT, "size": count, "data_start": count, "table_start": count, "header_digest": HEX}
SHARED = {"block_bytes": count, "values": object, "aliases?": {"*": TEXT}, "mesh?": INTS, "created?": TEXT}
RECORD = SHARED | {"index": FILE, "shards": [SIZES | {"table_digest": HEX}], "step?": (count, type(None)), "origin?": TEXT,
    "remarks?": [TEXT], "origin_layout?": {"*": TEXT}, "companions?": [FILE], "writer?": TEXT}  # fmt: skip
SLOT = SIZES | SHARED | {"version": TEXT, "step": count, "rank": count, "world": count, "run?": TEXT,
    "table_digest?": (HEX, type(None)), "coords?": (INTS, type(None))}  # fmt: skip
ENTRY = {"dtype": TEXT, "shape": [count], "data_offsets": [count]}
NOTE = {
    "version": "1(\\..*)?",
    "block_bytes": count,
    "entries": {"*": {"tensor": TEXT, "dtype": TEXT, "shape": [count], "offset": [count]}},
}
COLUMNS = [f"tensor.{name}" for name in ("name", "name_bytes", "dtype", "ndim", "shape", "fragments")]
COLUMNS += [f"fragment.{name}" for name in ("shard", "start", "offset", "length")]


def unseal(path: Path, kind: Any) -> dict[str, Any]:
    """The record in an envelope (section 3)."""
    data = fetch(path)
    tree = strict_json(data, path)
    need(fits({"ucf": TEXT}, tree), f"{path}: no envelope")
    need(tree["ucf"].split(".")[0] == "1", f"{path}: version {tree['ucf']}", "version")
    need(fits({"digest": HEX, "record": object}, tree) and b'"record":' in data, f"{path}: no envelope")
    raw = data[data.index(b'"record":') + 9 : data.rindex(b"}")]
    need(xxh(raw) == tree["digest"], f"{path}: digest of the record", "checksum")
    need(fits(kind, tree["record"]), f"{path}: a member is missing, or of another type")
    for shard in [tree["record"]] if kind is SLOT else tree["record"].get("shards", ()):
        block, start, table = tree["record"]["block_bytes"], shard["data_start"], shard["table_start"]
        need(block > 0 and block % 4096 == 0, f"{path}: block_bytes is {block}")
        room = shard["size"] - table
        need(
            0 < start <= table and room % 8 == 0 and room // 8 >= -((start - table) // block), f"{path}: sizes of {shard['file']}"
        )
    return dict(tree["record"])


def header(data: bytes, size: int, where: object) -> tuple[Any, dict[str, tuple[str, list[int], int, int]]]:
    """Of the first bytes of a safetensors file: its ucf metadata, and name → dtype, shape, start and stop (section 2)."""
    base = 8 + int.from_bytes(data[:8], "little")
    need(base <= min(100_000_008, size, len(data)) and data[8:9] == b"{", f"{where}: header")
    tree, entries, end = strict_json(data[8:base], where), {}, base
    need(fits({"__metadata__": {"ucf": TEXT}}, tree) and fits({"*": TEXT}, tree["__metadata__"]), f"{where}: no ucf metadata")
    note = strict_json(tree.pop("__metadata__")["ucf"].encode(), where)
    for name, item in tree.items():
        need(fits(ENTRY, item) and len(item["data_offsets"]) == 2 and len(item["shape"]) <= 64, f"{where}: entry {name!r}")
        need(item["dtype"] in BYTES.keys() - PAIRED, f"{where}: dtype of {name!r}")
        numbers, items = PACKED.get(item["dtype"], (1, 1))
        groups, rest = divmod(math.prod(item["shape"]), numbers)
        start, stop = (base + n for n in item["data_offsets"])
        need(rest == 0 and groups * items * BYTES[item["dtype"]] == stop - start, f"{where}: bytes of {name!r}")
        entries[name] = (item["dtype"], item["shape"], start, stop)
    for start, stop in sorted(entry[2:] for entry in entries.values()):
        need(start == end, f"{where}: a gap or an overlap at byte {end}")
        end = stop
    need(end == size, f"{where}: its entries end at byte {end} of {size}")
    return note, entries


class Fragment(NamedTuple):
    """A box, and where its items start in which shard."""

    shard: int
    start: int
    offset: list[int]
    length: list[int]


class Tensor(NamedTuple):
    """What is known of a tensor."""

    dtype: str
    shape: list[int]
    fragments: list[Fragment]


class Checkpoint:
    """A committed checkpoint (sections 3 to 6): `tensors`, `aliases`, `values` as JSON, the commit `record`.

    `rebuild`: from what the shards say of themselves, as if the index were lost.
    """

    def __init__(self, path: Path, *, rebuild: bool = False) -> None:
        self.root, self.tensors, self.verified = path, dict[str, Tensor](), True
        need((path / "ucf.json").exists(), f"{path}: no ucf.json", "not-a-checkpoint")
        self.record = unseal(path / "ucf.json", RECORD)
        self.shards, self.block = self.record["shards"], self.record["block_bytes"]
        for file in (self.record["index"], *self.shards, *self.record.get("companions", [])):
            parts = file["file"].split("/")
            need(not {"", ".", ".."} & {*parts} and not set("\\\0") & {*file["file"]}, f"path {file['file']!r}")
        self.values, self.aliases = check_value(self.record["values"]), self.record.get("aliases", {})
        if rebuild:
            self.rebuild()
        else:
            self.read_index(self.record["index"])
        need(
            all(b in self.tensors and a not in self.tensors for a, b in self.aliases.items()),
            "an alias of nothing, or of a taken name",
        )

    def read_index(self, file: dict[str, Any]) -> None:
        """Section 5."""
        data = fetch(self.root / file["file"], size=file["size"])
        need(xxh(data) == file["digest"], "digest of the index", "checksum")
        note, entries = header(data, len(data), file["file"])
        need(fits({"dtypes": [TEXT]}, note) and {*note["dtypes"]} <= BYTES.keys(), "index: dtypes")
        need(all(entries.get(name, " ")[0] in {"U8", "U16", "U32", "U64"} for name in COLUMNS), "index: a column is missing")
        col = {
            name: np.frombuffer(data[start:stop], f"<u{int(dtype[1:]) // 8}").reshape(shape).tolist()
            for name, (dtype, shape, start, stop) in entries.items()
            if name in COLUMNS
        }
        names, widths, codes, ndims, shapes, counts, shard, starts, offsets, lengths = (col[name] for name in COLUMNS)
        cuts = [[0, *accumulate(part)] for part in (widths, ndims, counts)]
        whole = [len(names), len(shapes), len(shard)] == [cut[-1] for cut in cuts]
        widths_of_boxes = {entries[name][1][1] if len(entries[name][1]) == 2 else -1 for name in COLUMNS[-2:]}
        need(
            whole and len({len(part) for part in (widths, codes, ndims, counts)}) == 1,
            "index: columns of tensors do not fit together",
        )
        need(
            len({len(part) for part in (shard, starts, offsets, lengths)}) == 1, "index: columns of fragments do not fit together"
        )
        need(len(widths_of_boxes) == 1 and max([0, *ndims]) <= max(widths_of_boxes) <= 64, "index: dimensions")
        rows = list(map(Fragment, shard, starts, offsets, lengths))
        try:
            text = [bytes(names[a:b]).decode() for a, b in pairwise(cuts[0])]
        except UnicodeDecodeError:
            refuse("index: a name is not UTF-8")
        need(all(a < b for a, b in pairwise(text)) and max([0, *codes]) < max(1, len(note["dtypes"])), "index: names or dtypes")
        for i, name in enumerate(text):
            shape = shapes[cuts[1][i] : cuts[1][i + 1]]
            self.add(name, Tensor(note["dtypes"][codes[i]], shape, rows[cuts[2][i] : cuts[2][i + 1]]))
        self.check_apart()

    def add(self, name: str, tensor: Tensor) -> None:
        need(max([0, *tensor.shape]) < MAX and math.prod(tensor.shape) < 1 << 59, f"{name!r} has an impossible shape")
        for part in tensor.fragments:
            shape = tensor.shape + [1] * (len(part.offset) - len(tensor.shape))
            need(
                all(n > 0 and o + n <= size for o, n, size in zip(part.offset, part.length, shape, strict=True)),
                f"{name!r}: a box",
            )
            need(part.shard < len(self.shards), f"{name!r}: no such shard")
            shard, stop = self.shards[part.shard], part.start + math.prod(part.length) * BYTES[tensor.dtype]
            need(shard["data_start"] <= part.start and stop <= shard["table_start"], f"{name!r}: bytes outside the shard's data")
        self.tensors[name] = tensor

    def check_apart(self) -> None:
        parts = (
            (p.shard, p.start, p.start + math.prod(p.length) * BYTES[t.dtype]) for t in self.tensors.values() for p in t.fragments
        )
        for (shard, _, stop), (other, start, _) in pairwise(sorted(parts)):
            need(shard != other or stop <= start, f"fragments share bytes of shard {shard}")

    def rebuild(self) -> None:
        """Section 4.3."""
        for number, shard in enumerate(self.shards):
            path, start = self.root / shard["file"], shard["data_start"]
            data = fetch(path, 0, start, shard["size"])
            need(xxh(data) == shard["header_digest"], f"{path}: digest of the header", "checksum")
            note, entries = header(data, shard["size"], path)
            need(
                fits(NOTE, note) and note["block_bytes"] == self.block and len(data) == start,
                f"{path}: not the header of this shard",
            )
            for key, (stored, shape, at, _) in entries.items():
                if key in {"__ucf__.pad", "__ucf__.blocks"}:
                    continue
                said = note["entries"].get(key, {"tensor": key, "dtype": stored, "offset": [0] * len(shape)})
                dtype, tail = said["dtype"], [2] * (said["dtype"] in PAIRED)
                need(
                    dtype in BYTES and PAIRED.get(dtype, dtype) == stored and shape[len(shape) - len(tail) :] == tail,
                    f"{key!r}: dtype",
                )
                length, (numbers, items) = shape[: len(shape) - len(tail)], PACKED.get(dtype, (1, 1))
                need(numbers == 1 or (length and length[-1] % numbers == 0), f"{key!r}: numbers that are no items")
                length = length if numbers == 1 else [*length[:-1], length[-1] // numbers * items]
                shape, known = said.get("shape", length), self.tensors.get(said["tensor"])
                need(len(said["offset"]) == len(length) == len(shape), f"{key!r}: dimensions")
                need(
                    all(o + n <= size for o, n, size in zip(said["offset"], length, shape, strict=True)),
                    f"{key!r}: box outside the shape",
                )
                need(known is None or known[:2] == (dtype, shape), f"{key!r}: another dtype or shape than before", "conflict")
                fragment = [Fragment(number, at, said["offset"], length)] if math.prod(length) else []
                self.add(said["tensor"], Tensor(dtype, shape, (known.fragments if known else []) + fragment))
        for tensor in self.tensors.values():
            self.parts(tensor, [0] * len(tensor.shape), tensor.shape)

    def read(self, name: str, offset: list[int] | None = None, length: list[int] | None = None) -> tuple[str, list[int], bytes]:
        """A box of a tensor, all of it by default: dtype, lengths, and its items in row-major order."""
        need(name in self.tensors or name in self.aliases, f"no tensor {name!r}", "missing")
        tensor = self.tensors[self.aliases.get(name, name)]
        box = (offset or [0] * len(tensor.shape), tensor.shape if length is None else length)
        parts = self.parts(tensor, *box)
        out = np.zeros(box[1], f"V{BYTES[tensor.dtype]}")
        for part, low, high in parts:
            stored = np.frombuffer(self.verified_bytes(part, BYTES[tensor.dtype]), out.dtype).reshape(part.length[: len(low)])
            inside = stored[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, part.offset, strict=False))]
            out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box[0], strict=True))] = inside
        return tensor.dtype, box[1], out.tobytes()

    def parts(self, tensor: Tensor, offset: list[int], length: list[int]) -> list[tuple[Fragment, list[int], list[int]]]:
        """The fragments that hold items of a box, each with the first and one past the last index; proven to cover it once."""
        found = []
        for part in tensor.fragments:
            low = [max(a, b) for a, b in zip(offset, part.offset, strict=False)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, length, part.offset, part.length, strict=False)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                found.append((part, low, high))
        for i, (_, low, high) in enumerate(found):
            for _, start, stop in found[:i]:
                apart = any(b <= c or d <= a for a, b, c, d in zip(low, high, start, stop, strict=True))
                need(apart, "several fragments hold the same item", "overlap")
        held = sum(math.prod(b - a for a, b in zip(low, high, strict=True)) for _, low, high in found)
        need(held == math.prod(length), "items that no fragment holds", "coverage")
        return found

    def verified_bytes(self, part: Fragment, itemsize: int) -> bytes:
        """The bytes of a fragment (section 4.2)."""
        shard, stop = self.shards[part.shard], part.start + math.prod(part.length) * itemsize
        path, first = self.root / shard["file"], (part.start - shard["data_start"]) // self.block
        if shard.get("table_digest") is None:
            return fetch(path, part.start, stop, shard["size"])
        table = fetch(path, shard["table_start"], shard["size"], shard["size"])
        need(xxh(table) == shard["table_digest"], f"{path}: digest of the checksum table", "checksum")
        words, at = np.frombuffer(table, "<u8"), shard["data_start"] + first * self.block
        data = fetch(path, at, min(shard["table_start"], stop + -(stop - shard["data_start"]) % self.block))
        for i in range(0, len(data), self.block):
            word = int(words[first + i // self.block])
            need(xxhash.xxh3_64_intdigest(data[i : i + self.block]) == word, f"{path}, block at byte {at + i}", "checksum")
        return data[part.start - at : stop - at]


def newest_step(path: Path) -> Path:
    """The checkpoint that a run directory stands for (section 2)."""
    steps = [int(m[1]) for item in path.iterdir() if (m := re.fullmatch("step-([0-9]{8}|[1-9][0-9]{8,})", item.name))]
    steps = [step for step in steps if (path / f"step-{step:08d}" / "ucf.json").exists()]
    need(steps, f"{path}: no ucf.json", "not-a-checkpoint")
    rollback = path / "rollback.json"
    last = set(unseal(rollback, {"passed_over": [int]})["passed_over"]) if rollback.exists() else set()
    return path / f"step-{max(set(steps) - last or steps):08d}"
