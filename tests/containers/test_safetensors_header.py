"""A header that passes is safe to read by; everything else is one typed error that names file, tensor and bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ucformat.containers.safetensors_header import MAX_HEADER_BYTES, build_header, is_safetensors, nbytes, read_header
from ucformat.dtypes import DTYPES
from ucformat.errors import FormatError, MissingFileError
from ucformat.storage.open import open_store

Tree = dict[str, Any]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Two tensors of 24 and 6 bytes, and metadata."""
    path = tmp_path / "good.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2, 3], dtype=torch.int16)}, path, {"format": "pt"})
    return path


def split(path: Path) -> tuple[Tree, bytes]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(path: Path, header: str | bytes, data: bytes) -> None:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def refused(path: Path) -> FormatError:
    with pytest.raises(FormatError) as caught:
        read_header(open_store(str(path.parent)), path.name)
    assert path.name in str(caught.value)
    return caught.value


def test_reads_what_safetensors_wrote(good: Path) -> None:
    header = read_header(open_store(str(good.parent)), good.name)
    assert header.metadata == {"format": "pt"}
    raw = good.read_bytes()
    values = {entry.name: raw[entry.start : entry.stop] for entry in header.entries}
    assert values["a"] == torch.arange(6.0).numpy().tobytes()
    assert [entry.shape for entry in header.entries if entry.name == "a"] == [(2, 3)]
    assert header.size == len(raw)
    assert header.entries[-1].stop == header.size


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="gone"):
        read_header(open_store(str(tmp_path)), "gone.safetensors")


@pytest.mark.parametrize("keep", [0, 3, 7, 8, 9, 50])
def test_a_file_cut_off_in_its_header_is_refused(good: Path, keep: int) -> None:
    good.write_bytes(good.read_bytes()[:keep])
    refused(good)


def test_a_file_cut_off_in_its_data_is_refused_with_the_tensor(good: Path) -> None:
    good.write_bytes(good.read_bytes()[:-1])
    error = refused(good)
    assert "'b'" in str(error)
    assert error.stop == good.stat().st_size + 1


def test_bytes_behind_the_last_tensor_are_refused(good: Path) -> None:
    size = good.stat().st_size
    good.write_bytes(good.read_bytes() + b"xyz")
    error = refused(good)
    assert (error.start, error.stop) == (size, size + 3)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_huge_header_length_is_refused_before_anything_is_allocated(good: Path, length: int) -> None:
    good.write_bytes(struct.pack("<Q", length) + good.read_bytes()[8:])
    assert "length" in str(refused(good))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        '"a"',
        " {}",
        "{",
        '{"a": }',
        '{"a": NaN}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"\\ud800": 1}',
        "{}{}",
        b"{\xff}",
    ],
)
def test_headers_that_are_no_json_object_are_refused(good: Path, text: str | bytes) -> None:
    join(good, text, b"")
    refused(good)


def test_a_tensor_named_twice_is_refused(good: Path) -> None:
    tree, data = split(good)
    entry = json.dumps(tree["a"])
    join(good, f'{{"a": {entry}, "b": {json.dumps(tree["b"])}, "a": {entry}}}', data)
    assert "'a' appears twice" in str(refused(good))


def test_a_key_named_twice_inside_an_entry_is_refused(good: Path) -> None:
    tree, data = split(good)
    join(good, json.dumps(tree).replace('"shape"', '"dtype": "F32", "shape"', 1), data)
    assert "appears twice" in str(refused(good))


def _set(name: str, key: str, value: object) -> Callable[[Tree], None]:
    def edit(tree: Tree) -> None:
        tree[name][key] = value

    return edit


def _drop(name: str, key: str) -> Callable[[Tree], None]:
    def edit(tree: Tree) -> None:
        del tree[name][key]

    return edit


def _swap(name: str, value: object) -> Callable[[Tree], None]:
    def edit(tree: Tree) -> None:
        tree[name] = value

    return edit


EDITS: dict[str, Callable[[Tree], None]] = {
    "unknown dtype": _set("a", "dtype", "F33"),
    "a dtype that is a number": _set("a", "dtype", 7),
    "negative dimension": _set("a", "shape", [-2, -3]),
    "fractional dimension": _set("a", "shape", [2.0, 3]),
    "dimension true": _set("a", "shape", [True, 6]),
    "overflowing dimension": _set("a", "shape", [2**63, 2]),
    "product that overflows 64 bits": _set("a", "shape", [2**32, 2**32]),
    "too many dimensions": _set("a", "shape", [1] * 65),
    "a shape that is no list": _set("a", "shape", 6),
    "shape and bytes that disagree": _set("a", "shape", [2, 4]),
    "negative offset": _set("a", "data_offsets", [-8, 16]),
    "offsets backwards": _set("a", "data_offsets", [24, 0]),
    "offset beyond the file": _set("a", "data_offsets", [2**62, 2**62 + 24]),
    "one offset": _set("a", "data_offsets", [24]),
    "no offsets": _drop("a", "data_offsets"),
    "no dtype": _drop("a", "dtype"),
    "an entry that is a list": _swap("a", []),
    "overlap": _set("b", "data_offsets", [18, 24]),
    "metadata that is a list": _swap("__metadata__", []),
    "metadata that holds a number": _swap("__metadata__", {"format": 1}),
    "metadata that holds an object": _swap("__metadata__", {"format": {}}),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_header_is_refused(good: Path, what: str) -> None:
    tree, data = split(good)
    EDITS[what](tree)
    join(good, json.dumps(tree), data)
    error = refused(good)
    assert error.start is not None
    assert error.stop is not None
    if "metadata" not in what:
        assert "'a'" in str(error) or "'b'" in str(error)


def test_a_hole_between_tensors_is_refused_with_its_bytes(good: Path) -> None:
    tree, data = split(good)
    tree["b"]["data_offsets"] = [28, 34]
    join(good, json.dumps(tree), data[:24] + b"\0" * 4 + data[24:])
    error = refused(good)
    assert error.stop is not None
    assert error.start is not None
    assert error.stop - error.start == 4


def test_half_a_byte_is_refused(good: Path) -> None:
    tree, data = split(good)
    tree["b"] = {"dtype": "F4", "shape": [13], "data_offsets": [24, 30]}
    join(good, json.dumps(tree), data)
    assert "'b'" in str(refused(good))


def test_empty_and_0d_tensors_are_fine(tmp_path: Path) -> None:
    save_file({"empty": torch.empty(0, 3), "scalar": torch.tensor(3.5), "more": torch.empty(2, 0)}, tmp_path / "x.safetensors")
    header = read_header(open_store(str(tmp_path)), "x.safetensors")
    assert {entry.name: entry.stop - entry.start for entry in header.entries} == {"empty": 0, "scalar": 4, "more": 0}


def test_a_file_without_tensors_is_fine(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors")
    assert read_header(open_store(str(tmp_path)), "x.safetensors").entries == ()


def test_a_hundred_thousand_entries_are_read(tmp_path: Path) -> None:
    entries = [(f"layers.{i}.weight", "F32", [i % 3]) for i in range(100_000)]
    header = build_header(entries, {}, 8)
    data = sum(4 * (i % 3) for i in range(100_000))
    (tmp_path / "x.safetensors").write_bytes(header + b"\0" * data)
    assert len(read_header(open_store(str(tmp_path)), "x.safetensors").entries) == 100_000


@pytest.mark.parametrize("align", [1, 8, 4096])
def test_what_is_built_is_read_by_safetensors_and_starts_aligned(tmp_path: Path, align: int) -> None:
    header = build_header([("ä/b", "F64", [2]), ("c", "U8", [])], {"format": "pt", "note": "“quoted”"}, align)
    assert len(header) % align == 0
    (tmp_path / "x.safetensors").write_bytes(header + b"\0" * 17)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded["ä/b"].tolist() == [0.0, 0.0]
    assert loaded["c"].shape == ()


@given(
    st.lists(
        st.tuples(
            st.text(min_size=1).filter(lambda name: name != "__metadata__"),
            st.sampled_from([kind.name for kind in DTYPES.values() if kind.stored == kind.name]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        unique_by=lambda entry: entry[0],
        max_size=6,
    ),
    st.dictionaries(st.text(), st.text(), max_size=3),
)
def test_any_header_that_is_built_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str, list[int]]], metadata: dict[str, str]
) -> None:
    whole = [(name, dtype, [*shape, 4]) for name, dtype, shape in entries]
    header = build_header(whole, metadata, 8)
    folder = tmp_path_factory.mktemp("header")
    (folder / "x.safetensors").write_bytes(header + b"\0" * sum(nbytes(dtype, shape) for _, dtype, shape in whole))
    found = read_header(open_store(str(folder)), "x.safetensors")
    assert sorted((e.name, e.dtype, list(e.shape)) for e in found.entries) == sorted(whole)
    assert found.metadata == metadata


def test_other_files_are_told_apart_by_nine_bytes(tmp_path: Path, good: Path) -> None:
    (tmp_path / "short").write_bytes(b"\0")
    (tmp_path / "text").write_bytes(b"just a text that is no checkpoint")
    store = open_store(str(tmp_path))
    assert is_safetensors(store, good.name)
    assert not is_safetensors(store, "short")
    assert not is_safetensors(store, "text")
