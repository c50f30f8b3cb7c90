"""Records and indices whose digests are right and whose content is not: one typed error, at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ucformat
from ucformat.containers.envelope import seal
from ucformat.containers.safetensors_header import build_header
from ucformat.errors import FormatError
from ucformat.formats.native.shard import hex_digest

WIDTHS = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
DEEP = b'{"a":' * 60_000 + b"1" + b"}" * 60_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ucformat.save(str(tmp_path / "c"), {"model": {"v": torch.arange(8.0), "w": torch.arange(8.0)}})
    return tmp_path / "c"


def record_of(checkpoint: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((checkpoint / "ucf.json").read_bytes())["record"]
    return record


@pytest.mark.parametrize("key", ["values", "extra"])
@pytest.mark.parametrize("deep", [DEEP, b'{"$tuple":[' * 5000 + b"]}" * 5000])
def test_a_record_that_is_nested_without_end_is_a_format_error(checkpoint: Path, key: str, deep: bytes) -> None:
    raw = json.dumps({**record_of(checkpoint), key: "@@"}).encode().replace(b'"@@"', deep)
    (checkpoint / "ucf.json").write_bytes(seal(raw))
    with pytest.raises(FormatError):
        ucformat.open(str(checkpoint))


def test_a_step_below_zero_is_a_format_error(checkpoint: Path) -> None:
    (checkpoint / "ucf.json").write_bytes(seal(json.dumps({**record_of(checkpoint), "step": -5}).encode()))
    with pytest.raises(FormatError, match="step -5"):
        ucformat.open(str(checkpoint))


def reindex(checkpoint: Path, edit: Callable[[dict[str, np.ndarray[Any, Any]]], None]) -> None:
    """Change columns of the index, and make all digests fit."""
    path = next(checkpoint.rglob("index.safetensors"))
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    dtypes = {name: f"<u{width}" for width, name in WIDTHS.items()}
    columns = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            data = raw[8 + length + start : 8 + length + stop]
            columns[name] = np.frombuffer(data, dtypes[entry["dtype"]]).reshape(entry["shape"]).copy()
    edit(columns)
    names = sorted(columns, key=lambda name: (-columns[name].itemsize, name))
    entries = [(name, WIDTHS[columns[name].itemsize], columns[name].shape) for name in names]
    out = build_header(entries, header["__metadata__"], align=4096) + b"".join(columns[name].tobytes() for name in names)
    path.write_bytes(out)
    index = {"file": str(path.relative_to(checkpoint)), "size": len(out), "digest": hex_digest(out)}
    (checkpoint / "ucf.json").write_bytes(seal(json.dumps({**record_of(checkpoint), "index": index}).encode()))


def test_an_index_that_is_put_together_again_is_read(checkpoint: Path) -> None:
    reindex(checkpoint, lambda columns: None)
    assert torch.equal(ucformat.open(str(checkpoint))["model/w"].read(), torch.arange(8.0))


def test_fragments_that_share_bytes_are_refused(checkpoint: Path) -> None:
    def share(columns: dict[str, np.ndarray[Any, Any]]) -> None:
        columns["fragment.start"][1] = columns["fragment.start"][0] + 4

    reindex(checkpoint, share)
    with pytest.raises(FormatError, match=r"'model/v' and 'model/w' share bytes"):
        ucformat.open(str(checkpoint))


@pytest.mark.parametrize("tensors", [True, False])
def test_columns_of_endless_width_are_refused(checkpoint: Path, tensors: bool) -> None:
    def widen(columns: dict[str, np.ndarray[Any, Any]]) -> None:
        for name in list(columns):
            if name.startswith("fragment") or not tensors:
                columns[name] = columns[name][:0]
        for name in ("fragment.offset", "fragment.length"):
            columns[name] = np.empty((0, 1 << 33), dtype=np.uint8)

    reindex(checkpoint, widen)
    with pytest.raises(FormatError):
        ucformat.open(str(checkpoint))


def test_a_box_whose_volume_no_number_holds_is_refused(checkpoint: Path) -> None:
    def widen(columns: dict[str, np.ndarray[Any, Any]]) -> None:
        columns["fragment.offset"] = np.zeros((2, 40), dtype=np.uint8)
        columns["fragment.length"] = np.full((2, 40), (1 << 63) - 1, dtype=np.uint64)

    reindex(checkpoint, widen)
    with pytest.raises(FormatError, match="lies outside"):
        ucformat.open(str(checkpoint))


def test_fragments_in_any_order_of_tensors_are_read_and_shared_bytes_are_found(checkpoint: Path) -> None:
    def swap(columns: dict[str, np.ndarray[Any, Any]]) -> None:
        columns["fragment.start"] = columns["fragment.start"][::-1].copy()

    reindex(checkpoint, swap)
    assert ucformat.open(str(checkpoint)).keys() == {"model/v", "model/w"}

    def share(columns: dict[str, np.ndarray[Any, Any]]) -> None:
        columns["fragment.start"][0] = columns["fragment.start"][1] + 4

    reindex(checkpoint, share)
    with pytest.raises(FormatError, match=r"'model/w' and 'model/v' share bytes"):
        ucformat.open(str(checkpoint))
