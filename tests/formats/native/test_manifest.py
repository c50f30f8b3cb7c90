"""The commit record and the index: everything the specification says must be refused, by small edits of a good one.

Edits are signed again, so that it is the rule itself that refuses and not a digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specs.readers.python.ucf_reader import header as read_header
from tests.checkpoints import shards_of
from ucformat.box import Box
from ucformat.catalog import Notes, TensorSpec
from ucformat.containers.envelope import Envelope
from ucformat.containers.safetensors_header import build_header
from ucformat.dtypes import DTYPES
from ucformat.errors import (
    ChecksumError,
    CoverageError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    UcformatError,
    UnrepresentableError,
    VersionError,
)
from ucformat.formats import native, open_catalog
from ucformat.formats.native.manifest import MANIFEST, Record, decode_record, encode_record
from ucformat.formats.native.shard import hex_digest
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.reshard.reading.fill import TensorFill
from ucformat.storage.open import open_store

Columns = dict[str, NDArray[Any]]


def write(root: Path, tensors: dict[str, torch.Tensor], values: object = None) -> None:
    """A native checkpoint; tensors of two dimensions are halved along the first."""
    targets, views = [], []
    for name, x in tensors.items():
        spec = TensorSpec(name, "F32", tuple(x.shape))
        half = [Box((0, 0), (1, x.shape[1])), Box((1, 0), (x.shape[0] - 1, x.shape[1]))] if x.ndim == 2 else [Box.whole(x.shape)]
        targets += [OutputBox(spec, box) for box in half]
        views += [x[box.slices] for box in half]
    fill = TensorFill(views, [DTYPES["F32"]] * len(views))
    native.write(WriteJob(open_store(str(root)), targets, fill, values=values or {}, notes=Notes(step=1)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of `a` [5] and `b` [3, 2], `b` in two fragments."""
    write(tmp_path / "ck", {"a": torch.arange(5.0), "b": torch.ones(3, 2)}, {"x": 1})
    return tmp_path / "ck"


def edit_record(root: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of the record, and sign it again."""
    record = json.loads((root / MANIFEST).read_text())["record"]
    edit(record)
    raw = json.dumps(record, separators=(",", ":")).encode()
    (root / MANIFEST).write_bytes(msgspec.json.encode(Envelope("1.0", hex_digest(raw), msgspec.Raw(raw))))


def edit_index(root: Path, edit: Callable[[Columns], object], dtypes: list[str] | None = None) -> None:
    """Change columns of the index, and sign it again."""
    data = (shards_of(root) / "index.safetensors").read_bytes()
    note, entries = read_header(data, len(data), root)
    columns: Columns = {
        name: np.frombuffer(data[start:stop], f"<u{int(dtype[1:]) // 8}").reshape(shape).astype(np.uint64)
        for name, (dtype, shape, start, stop) in entries.items()
    }
    text = columns["tensor.name"].astype(np.uint8)
    edit(columns)
    if dtypes is not None:
        note["dtypes"] = dtypes
    columns["tensor.name"] = columns["tensor.name"].astype(np.uint8) if "tensor.name" in columns else text
    kinds = {name: "U8" if name == "tensor.name" else "U64" for name in columns}
    names = sorted(columns, key=lambda name: (kinds[name] == "U8", name))
    header = build_header([(n, kinds[n], columns[n].shape) for n in names], {"format": "pt", "ucf": json.dumps(note)}, 4096)
    changed = header + b"".join(columns[name].tobytes() for name in names)
    (shards_of(root) / "index.safetensors").write_bytes(changed)
    edit_record(root, lambda r: r["index"].update(size=len(changed), digest=hex_digest(changed)))


def put(column: str, at: Any, value: int) -> Callable[[Columns], object]:
    return lambda columns: columns[column].__setitem__(at, value)


def test_an_untouched_checkpoint_opens_and_so_does_one_that_was_signed_again(root: Path) -> None:
    before = open_catalog(str(root))
    edit_index(root, lambda _: None)
    after = open_catalog(str(root))
    assert before.tensors == after.tensors
    assert (before.fragments.start == after.fragments.start).all()
    assert [spec.name for spec in after.tensors] == ["a", "b"]
    assert len(after.fragments) == 3


def test_a_checkpoint_without_tensors_opens(tmp_path: Path) -> None:
    write(tmp_path / "ck", {}, {"only": "values"})
    catalog = open_catalog(str(tmp_path / "ck"))
    assert (catalog.names, catalog.values) == ([], {"only": "values"})


def test_a_checkpoint_of_empty_and_0d_tensors_opens(tmp_path: Path) -> None:
    write(tmp_path / "ck", {"empty": torch.zeros(0), "zero-d": torch.tensor(1.0)})
    catalog = open_catalog(str(tmp_path / "ck"))
    assert [spec.shape for spec in catalog.tensors] == [(0,), ()]
    assert len(catalog.fragments) == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda r: r.pop("index"),
        lambda r: r.pop("shards"),
        lambda r: r.pop("values"),
        lambda r: r.pop("block_bytes"),
        lambda r: r.update(block_bytes=0),
        lambda r: r.update(block_bytes=4097),
        lambda r: r.update(block_bytes=-4096),
        lambda r: r.update(shards={}),
        lambda r: r.update(values={"$unknown": 1}),
        lambda r: r.update(aliases={"c": "nothing"}),
        lambda r: r.update(aliases={"a": "b"}),
        lambda r: r.update(aliases={"c": 1}),
        lambda r: r["shards"][0].update(data_start=0),
        lambda r: r["shards"][0].update(size=-1),
        lambda r: r["shards"][0].update(size=1 << 70),
        lambda r: r["shards"][0].update(table_start=0),
        lambda r: r["shards"][0].update(table_start=r["shards"][0]["size"]),
        lambda r: r["shards"][0].update(table_start=r["shards"][0]["size"] - 4),
        lambda r: r["shards"][0].update(table_digest="xyz"),
        lambda r: r["shards"][0].update(file="../outside"),
        lambda r: r["shards"][0].update(file="/etc/passwd"),
        lambda r: r["shards"][0].update(file="shards/../../outside"),
        lambda r: r["shards"][0].update(file="shards\\..\\outside"),
        lambda r: r["shards"][0].update(file=""),
        lambda r: r["index"].update(file="./index.safetensors"),
        lambda r: r.update(companions=[{"file": "../x", "size": 1, "digest": "0" * 16}]),
        lambda r: r["index"].update(size=1),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused(root: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    edit_record(root, edit)
    with pytest.raises(FormatError):
        open_catalog(str(root))


def test_fields_of_later_minor_versions_are_ignored(root: Path) -> None:
    edit_record(root, lambda r: r.update(novelty={"a": 1}))
    edit_index(root, lambda c: c.update({"tensor.novelty": np.zeros(2, np.uint64)}))
    assert open_catalog(str(root)).names == ["a", "b"]


def test_a_later_major_version_is_refused_by_name_whatever_else_is_there(root: Path) -> None:
    (root / MANIFEST).write_text('{"ucf": "2.0", "digest": "0000000000000000", "record": {"unknown": 1}}')
    with pytest.raises(VersionError, match=r"format version 2\.0, this release understands 1\.0"):
        open_catalog(str(root))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"ucf":"1.0","digest":"0000000000000000"}',
        b'{"ucf":1,"digest":"0000000000000000","record":{}}',
        b'{"ucf":"1.0","digest":"0","record":{}}',
        b'{"ucf":"1.0","digest":"' + hex_digest(b"{}").encode() + b'","record":{}}',
        b'{"ucf":"1.0","digest":"' + hex_digest(b"[]").encode() + b'","record":[]}',
    ],
    ids=str,
)
def test_a_file_that_is_no_record_is_refused(root: Path, data: bytes) -> None:
    (root / MANIFEST).write_bytes(data)
    with pytest.raises((FormatError, NotACheckpointError), match=r"ucf\.json"):
        open_catalog(str(root))


def test_a_key_that_stands_twice_is_refused(root: Path) -> None:
    data = (root / MANIFEST).read_bytes()
    record = decode_record(data, "f")
    raw = msgspec.json.encode(record)
    twice = raw.replace(b'"values":', b'"block_bytes":8192,"values":')
    (root / MANIFEST).write_bytes(msgspec.json.encode(Envelope("1.0", hex_digest(twice), msgspec.Raw(twice))))
    with pytest.raises(FormatError, match="same key twice"):
        open_catalog(str(root))


def test_every_flipped_bit_and_every_truncation_of_the_record_is_noticed(root: Path) -> None:
    good = (root / MANIFEST).read_bytes()
    for at in range(0, len(good) - 1, 7):
        for bad in (good[:at], good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]):
            with pytest.raises(UcformatError):
                decode_record(bad, "ucf.json")


@pytest.mark.parametrize("size", [0, 7, 8, 100, 4096, 4100, -1])
def test_a_damaged_index_is_noticed(root: Path, size: int) -> None:
    path = shards_of(root) / "index.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:size] if size >= 0 else good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises((FormatError, ChecksumError), match=r"index\.safetensors"):
        open_catalog(str(root))


def test_a_missing_index_is_named(root: Path) -> None:
    (shards_of(root) / "index.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"index\.safetensors"):
        open_catalog(str(root))


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c.pop("tensor.shape"),
        lambda c: c.pop("fragment.start"),
        put("tensor.name", 0, ord("b")),  # not unique
        put("tensor.name", 0, ord("c")),  # not ascending
        put("tensor.name", 0, 0xFF),  # not UTF-8
        put("tensor.name_bytes", 0, 2),
        put("tensor.name_bytes", 0, 1 << 63),
        put("tensor.dtype", 0, 200),
        put("tensor.dtype", 0, (1 << 64) - 1),
        put("tensor.ndim", 0, 2),
        put("tensor.ndim", 0, 1 << 62),
        put("tensor.shape", 0, 1 << 63),
        put("tensor.shape", 0, (1 << 63) - 1),
        put("tensor.fragments", 0, 2),
        put("tensor.fragments", 0, 1 << 40),
        put("tensor.fragments", 0, 1 << 63),
        put("fragment.shard", 0, 1),
        put("fragment.shard", 0, 1 << 31),
        put("fragment.shard", 0, 1 << 32),
        put("fragment.start", 0, 0),  # in the header
        put("fragment.start", 0, 1 << 40),
        put("fragment.start", 0, 1 << 63),
        put("fragment.offset", (0, 0), 1),
        put("fragment.offset", (0, 1), 1),
        put("fragment.offset", (0, 0), (1 << 64) - 1),
        put("fragment.length", (0, 0), 6),
        put("fragment.length", (0, 0), 0),
        put("fragment.length", (0, 0), 1 << 62),
        lambda c: c.update({"fragment.start": c["fragment.start"][:-1]}),
        lambda c: c.update({"fragment.offset": c["fragment.offset"][:, :1]}),
        lambda c: c.update({"fragment.offset": c["fragment.offset"].reshape(-1)}),
        lambda c: c.update({"fragment.offset": c["fragment.offset"][:, :1], "fragment.length": c["fragment.length"][:, :1]}),
    ],
)
def test_an_index_that_breaks_a_rule_is_refused(root: Path, edit: Callable[[Columns], object]) -> None:
    edit_index(root, edit)
    with pytest.raises(FormatError, match=r"index\.safetensors"):
        open_catalog(str(root))


def test_an_unknown_dtype_is_refused(root: Path) -> None:
    edit_index(root, lambda _: None, dtypes=[f"NEW{i}" for i in range(30)])
    with pytest.raises(FormatError, match="NEW0"):
        open_catalog(str(root))


def test_writing_what_does_not_tile_is_refused_and_nothing_is_committed(tmp_path: Path) -> None:
    spec = TensorSpec("w", "F32", (4,))
    target = OutputBox(spec, Box((0,), (3,)))
    with pytest.raises(CoverageError, match=r"'w': box \[3:4\]"):
        native.write(WriteJob(open_store(str(tmp_path / "ck")), [target], TensorFill([torch.zeros(3)], [DTYPES["F32"]])))
    assert not (tmp_path / "ck" / MANIFEST).exists()


def test_a_record_comes_back_as_it_was(root: Path) -> None:
    record = decode_record((root / MANIFEST).read_bytes(), "f")
    assert isinstance(record, Record)
    assert decode_record(encode_record(record), "f") == record


def test_a_box_that_cuts_through_packed_numbers_is_refused(tmp_path: Path) -> None:
    spec = TensorSpec("w", "F6_E2M3", (6,))
    targets = [OutputBox(spec, Box((0,), (2,))), OutputBox(spec, Box((2,), (4,)))]
    fill = TensorFill([torch.zeros(2, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)], [DTYPES["F6_E2M3"]] * 2)
    with pytest.raises(UnrepresentableError, match="packs 4 numbers into 3 bytes"):
        native.write(WriteJob(open_store(str(tmp_path / "ck")), targets, fill))
