"""A reader written from specs/format.md alone, without ucformat: what it can read, the specification tells.

It covers committed checkpoints (sections 3 to 5) and snapshot directories (section 7), and checks every digest on its way;
values stay JSON.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

ITEM_BYTES = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"], 1),
    **dict.fromkeys(["F4", "F6_E2M3", "F6_E3M2"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32", "C32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
    "C128": 16,
}


def xxh(data: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def read_record(root: Path, name: str = "ucf.json") -> dict[str, Any]:
    """The record in ucf.json, verified (section 3)."""
    data = (root / name).read_bytes()
    envelope = json.loads(data)
    assert envelope["ucf"].split(".")[0] == "1"
    raw = data[data.index(b'"record":') + len(b'"record":') : data.rindex(b"}")]
    assert xxh(raw) == envelope["digest"]
    record: dict[str, Any] = json.loads(raw)
    return record


def safetensors(data: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, list[int], int, int]]]:
    """A safetensors file: `__metadata__.ucf`, and name → dtype, shape, start and stop in the file (section 2)."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    note = json.loads(header.pop("__metadata__")["ucf"])
    base = 8 + length
    return note, {
        name: (entry["dtype"], entry["shape"], base + entry["data_offsets"][0], base + entry["data_offsets"][1])
        for name, entry in header.items()
    }


def read_shard(root: Path, shard: dict[str, Any], block: int) -> bytes:
    """The bytes of a shard, every block verified (section 4)."""
    data: bytes = (root / shard["file"]).read_bytes()
    start, stop = shard["data_start"], shard["table_start"]
    assert len(data) == shard["size"]
    assert xxh(data[:start]) == shard["header_digest"]
    if shard.get("table_digest") is None:
        return data  # a slot without checksums
    assert xxh(data[stop:]) == shard["table_digest"]
    table = np.frombuffer(data, "<u8", offset=stop)
    for i, at in enumerate(range(start, stop, block)):
        assert xxhash.xxh3_64_intdigest(data[at : min(at + block, stop)]) == table[i]
    return data


def read_checkpoint(root: Path) -> tuple[dict[str, tuple[str, NDArray[np.void]]], dict[str, Any]]:
    """Tensor name → dtype and items as raw bytes in the global shape; and the record."""
    record = read_record(root)
    shards = [read_shard(root, shard, record["block_bytes"]) for shard in record["shards"]]
    data = (root / record["index"]["file"]).read_bytes()
    assert (len(data), xxh(data)) == (record["index"]["size"], record["index"]["digest"])
    note, entries = safetensors(data)
    col = {
        name: np.frombuffer(data[start:stop], f"<u{int(dtype[1:]) // 8}").reshape(shape).astype(np.int64)
        for name, (dtype, shape, start, stop) in entries.items()
    }
    text, shape = col["tensor.name"].astype(np.uint8).tobytes(), col["tensor.shape"].tolist()
    tensors: dict[str, tuple[str, NDArray[np.void]]] = {}
    row = 0
    for name_bytes, code, ndim, fragments in zip(
        *(col[f"tensor.{key}"].tolist() for key in ("name_bytes", "dtype", "ndim", "fragments")), strict=True
    ):
        name, text = text[:name_bytes].decode(), text[name_bytes:]
        dims, shape = shape[:ndim], shape[ndim:]
        dtype = note["dtypes"][code]
        size = ITEM_BYTES[dtype]
        items = np.zeros(dims, dtype=f"V{size}")
        filled = np.zeros(dims, dtype=bool)
        for _ in range(fragments):
            offset, length = col["fragment.offset"][row, :ndim].tolist(), col["fragment.length"][row, :ndim].tolist()
            box = tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))
            count = int(np.prod(length, dtype=np.int64))
            stored = np.frombuffer(shards[col["fragment.shard"][row]], f"V{size}", count, col["fragment.start"][row])
            assert not filled[box].any()
            items[box], filled[box] = stored.reshape(length), True
            row += 1
        assert filled.all()
        tensors[name] = (dtype, items)
    for alias, target in record.get("aliases", {}).items():
        tensors[alias] = tensors[target]
    return tensors, record


def versions(root: Path) -> dict[tuple[int, int, str], dict[int, tuple[Path, dict[str, Any]]]]:
    """(step, world, run) → rank → directory and record of the slot that holds its part (section 7)."""
    found: dict[tuple[int, int, str], dict[int, tuple[Path, dict[str, Any]]]] = {}
    for path in root.glob("rank-*/slot-*.json"):
        record = read_record(path.parent, path.name)
        if path.parent.name != f"rank-{record['rank']:05d}" or record["file"] != f"{path.stem}.safetensors":
            continue
        ranks = found.setdefault((record["step"], record["world"], record.get("run", "")), {})
        if record["rank"] not in ranks or ranks[record["rank"]][1]["created"] < record["created"]:
            ranks[record["rank"]] = path.parent, record
    return found


def read_snapshot(root: Path) -> tuple[dict[str, tuple[str, NDArray[np.void]]], list[dict[str, Any]]]:
    """The newest complete version: tensors as `read_checkpoint` gives them, and the ranks' records."""
    whole = {key: ranks for key, ranks in versions(root).items() if sorted(ranks) == list(range(key[1]))}
    newest = max(whole, key=lambda key: (key[0], max(record["created"] for _, record in whole[key].values())))
    slots = [whole[newest][rank] for rank in range(newest[1])]
    tensors: dict[str, tuple[str, NDArray[np.void]]] = {}
    filled: dict[str, NDArray[np.bool_]] = {}
    for folder, record in slots:
        data = read_shard(folder, record, record["block_bytes"])
        note, entries = safetensors(data)
        for key, (dtype, shape, start, stop) in entries.items():
            if key.startswith("__ucf__."):
                continue
            whole_entry = {"tensor": key, "dtype": dtype, "shape": shape, "offset": [0] * len(shape)}
            said = note["entries"].get(key, whole_entry)
            size = ITEM_BYTES[said["dtype"]]
            items = tensors.setdefault(said["tensor"], (said["dtype"], np.zeros(said["shape"], f"V{size}")))[1]
            there = filled.setdefault(said["tensor"], np.zeros(said["shape"], dtype=bool))
            box = tuple(slice(o, o + n) for o, n in zip(said["offset"], shape, strict=True))
            assert not there[box].any()
            items[box] = np.frombuffer(data[start:stop], f"V{size}").reshape(shape)
            there[box] = True
    assert all(there.all() for there in filled.values())
    for _, record in slots:
        for alias, target in record.get("aliases", {}).items():
            tensors[alias] = tensors[target]
    return tensors, [record for _, record in slots]
