"""The zip directory of torch.save files: every record found where it is, every damaged or hostile zip refused."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torchfiles import rewrite, without_crc
from ucformat.containers.zip_read import checks_of, zip_entries
from ucformat.containers.zip_write import RecordWriter
from ucformat.errors import FormatError, UcformatError, UnsupportedError
from ucformat.pickles.unpickle import open_torch_zip
from ucformat.storage.open import open_store
from ucformat.storage.store import Bytes


def _save(path: Path, tensors: int = 3) -> bytes:
    torch.save({f"w{i}": torch.full((5,), float(i)) for i in range(tensors)}, path)
    return path.read_bytes()


def test_records_are_where_they_lie(tmp_path: Path) -> None:
    raw = _save(tmp_path / "x.pt")
    entries = zip_entries(open_store(str(tmp_path)), "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert set(entries) == set(archive.namelist())
        for name, entry in entries.items():
            assert raw[entry.start : entry.stop] == archive.read(name)
            assert entry.crc == zlib.crc32(archive.read(name))


def test_zip_inside_a_larger_file_is_found_by_its_range(tmp_path: Path) -> None:
    raw = _save(tmp_path / "x.pt")
    (tmp_path / "y").write_bytes(b"before" * 7 + raw + b"PK\x05\x06 behind")
    store = open_store(str(tmp_path))
    alone = zip_entries(store, "x.pt")
    inside = zip_entries(store, "y", 42, 42 + len(raw))
    assert {n: (e.start + 42, e.size, e.crc) for n, e in alone.items()} == {
        n: (e.start, e.size, e.crc) for n, e in inside.items()
    }


def test_file_saved_without_crc_opens_without_checks(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        _save(tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    opened = open_torch_zip(open_store(str(tmp_path)), "x.pt")
    assert {entry.crc for entry in opened.entries.values()} == {None}
    assert checks_of(opened.entries.values()) is None
    assert opened.tree["w1"].shape == (5,)


def test_checks_are_ascending_ranges_of_whole_records(tmp_path: Path) -> None:
    raw = _save(tmp_path / "x.pt")
    held = checks_of(zip_entries(open_store(str(tmp_path)), "x.pt").values())
    assert held is not None
    checks = held.checks
    assert (np.diff(checks.start) > 0).all()
    for start, stop, digest in zip(checks.start, checks.stop, checks.digest, strict=True):
        assert zlib.crc32(raw[start:stop]) == digest


def test_70000_records_need_and_get_zip64(tmp_path: Path) -> None:
    out = bytearray()

    def put(start: int, data: Bytes) -> None:
        assert start == len(out)
        out.extend(data.tobytes())

    writer = RecordWriter(put, "top")
    for i in range(70_000):
        writer.add(f"data/{i}", b"%d" % i)
    writer.close()
    (tmp_path / "x.pt").write_bytes(out)
    entries = zip_entries(open_store(str(tmp_path)), "x.pt")
    assert len(entries) == 70_000
    entry = entries["top/data/69999"]
    assert out[entry.start : entry.stop] == b"69999"
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.read("top/data/69999") == b"69999"


def test_records_beyond_4_gib_need_and_get_zip64(tmp_path: Path) -> None:
    big = 5 << 30
    with open(tmp_path / "x.pt", "wb") as file:

        def put(start: int, data: Bytes) -> None:
            os.pwrite(file.fileno(), data.data, start)

        writer = RecordWriter(put, "top")
        for name in ("a", "b"):  # the data stay holes of a sparse file
            writer.begin(name, big)
            writer.skip()
            writer.end()
        writer.add("c", b"last")
        writer.close()
    entries = zip_entries(open_store(str(tmp_path)), "x.pt")
    assert [entries[f"top/{name}"].size for name in "abc"] == [big, big, 4]
    assert entries["top/c"].start > 2 * big
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.read("top/c") == b"last"
        assert archive.getinfo("top/b").header_offset > big


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "x.pt")
    rewrite(tmp_path / "x.pt", lambda records: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedError, match="compressed"):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")


@pytest.mark.parametrize("name", ["../evil", "x/../../evil", "/abs", "x/..", "a\\b"])
def test_names_that_leave_the_archive_are_refused(tmp_path: Path, name: str) -> None:
    _save(tmp_path / "x.pt")
    rewrite(tmp_path / "x.pt", lambda records: records.update({name: b"x"}))
    with pytest.raises(FormatError, match="leaves the archive"):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")


def test_record_named_twice_is_refused(tmp_path: Path) -> None:
    raw = _save(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(raw.replace(b"x/data/1", b"x/data/0"))
    with pytest.raises(FormatError, match="twice"):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")


def test_big_endian_file_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "x.pt")
    rewrite(tmp_path / "x.pt", lambda records: records.update({"x/byteorder": b"big"}))
    with pytest.raises(UnsupportedError, match="big"):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")


def test_torchscript_archive_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "x.pt")
    rewrite(tmp_path / "x.pt", lambda records: records.update({"x/constants.pkl": b"N."}))
    with pytest.raises(UnsupportedError, match="TorchScript"):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")


def test_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(FormatError, match=r"none that torch\.save writes"):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")


def _central_edit(raw: bytes, record: int, field: int, value: int) -> bytes:
    """The zip with one 32-bit field of a directory line changed, CRCs off."""
    data = bytearray(without_crc(raw))
    at = struct.unpack_from("<I", data, data.rfind(b"PK\x05\x06") + 16)[0]
    for _ in range(record):
        name, extra, comment = struct.unpack_from("<3H", data, at + 28)
        at += 46 + name + extra + comment
    struct.pack_into("<I", data, at + field, value)
    return bytes(data)


PACKED, SIZE, HEADER = 20, 24, 42  # byte offsets in a directory line


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: _central_edit(raw, 4, HEADER, 0),
        lambda raw: _central_edit(raw, 4, HEADER, len(raw) + 5),
        lambda raw: _central_edit(raw, 4, HEADER, 0xFFFFFFFF),
        lambda raw: _central_edit(raw, 4, SIZE, 21),
        lambda raw: _central_edit(_central_edit(raw, 4, SIZE, 400), 4, PACKED, 400),
        lambda raw: _central_edit(_central_edit(raw, 4, SIZE, 1 << 30), 4, PACKED, 1 << 30),
    ],
    ids=["overlap", "outside", "no zip64 field", "two sizes", "into the next", "size outside"],
)
def test_records_outside_or_over_others_are_refused(tmp_path: Path, edit: Callable[[bytes], bytes]) -> None:
    raw = _save(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(edit(raw))
    with pytest.raises(FormatError):
        open_torch_zip(open_store(str(tmp_path)), "x.pt")


def test_every_truncation_is_one_typed_error(tmp_path: Path) -> None:
    raw = _save(tmp_path / "x.pt")
    store = open_store(str(tmp_path))
    for length in [*range(0, len(raw), 7), len(raw) - 1]:
        (tmp_path / "x.pt").write_bytes(raw[:length])
        with pytest.raises(UcformatError):
            open_torch_zip(store, "x.pt")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_zips_never_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("zips")
    raw = bytearray(_save(folder / "x.pt", tensors=1))
    at = data.draw(st.one_of(st.integers(0, len(raw) - 1), st.integers(len(raw) - 600, len(raw) - 1)))
    noise = data.draw(st.binary(min_size=1, max_size=5))
    raw[at : at + len(noise)] = noise
    (folder / "x.pt").write_bytes(raw)
    try:
        open_torch_zip(open_store(str(folder)), "x.pt")
    except UcformatError:
        pass
