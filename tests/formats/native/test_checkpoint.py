"""The native format: what is committed is whole, what is not is not there, and what is damaged says so."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.checkpoints import bits, flip, open_native, shards_of, split_evenly, write_native
from ucformat import formats
from ucformat.box import Box
from ucformat.catalog import Notes, TensorSpec
from ucformat.dtypes import DTYPES
from ucformat.errors import (
    ChecksumError,
    CoverageError,
    ExistsError,
    FormatError,
    MissingFileError,
    NotACheckpointError,
    OverlapError,
    UcformatError,
    VersionError,
)
from ucformat.formats import native
from ucformat.formats.native.shard import hex_digest
from ucformat.formats.source import locate
from ucformat.formats.target import OutputBox, WriteJob
from ucformat.reshard.reading.fill import TensorFill
from ucformat.reshard.reading.lazy import read
from ucformat.storage.open import open_store


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "model/w": torch.randn(40, 30),
        "model/b": torch.randn(30).bfloat16(),
        "n": torch.tensor(7),
        "none": torch.empty(0, 3),
    }


def _save(path: Path, **kwargs: object) -> Path:
    write_native(path, _tensors(), {"model/w": split_evenly((40, 30), 0, 3)}, shards=2, **kwargs)  # type: ignore[arg-type]
    return path


def test_values_aliases_and_notes_come_back(tmp_path: Path) -> None:
    values = {"step": 3, "t": (1, {0: None}), "e": {}}
    notes = Notes("hf", 12, {"dp": 2}, ("a remark",))
    catalog = open_native(
        write_native(tmp_path / "ck", _tensors(), values=values, aliases={"model/tied": "model/w"}, notes=notes)
    )
    assert catalog.values == values
    assert catalog.notes == notes
    assert torch.equal(read(catalog, "model/tied"), _tensors()["model/w"])


def test_shards_open_with_the_safetensors_library(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    seen = 0
    for shard in sorted(shards_of(path).glob("0*")):
        with safe_open(shard, "pt") as file:
            assert file.metadata()["format"] == "pt"
            for name in file.keys():  # noqa: SIM118  # no mapping
                seen += not name.startswith("__ucf__.")
                if name == "model/b":
                    assert torch.equal(file.get_tensor(name), _tensors()["model/b"])
        data_start = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
        assert data_start % 4096 == 0
        assert shard.stat().st_size % 4096 == 0
    assert seen == 6


def test_every_dtype_of_safetensors_round_trips(tmp_path: Path) -> None:
    """F6 too, which torch can't name: as packed bytes."""
    targets, views = [], []
    for kind in DTYPES.values():
        spec = TensorSpec(kind.name, kind.name, (4, 12))
        targets.append(OutputBox(spec, Box.whole(spec.shape)))
        raw = torch.randint(0, 2, (48 * kind.itemsize,), dtype=torch.uint8)
        views.append(raw.view(kind.torch).view(4, 12))
    store = open_store(str(tmp_path / "ck"))
    native.write(WriteJob(store, targets, TensorFill(views, [t.spec.kind for t in targets])))
    catalog = open_native(store)
    assert {spec.dtype for spec in catalog.tensors} == set(DTYPES)
    for target, view in zip(targets, views, strict=True):
        assert catalog.spec(target.name) == target.spec
        assert bits(read(catalog, target.name)) == bits(view)


def test_twenty_thousand_tiny_tensors_round_trip(tmp_path: Path) -> None:
    tensors = {f"t/{i:05d}": torch.full((16,), float(i)) for i in range(20_000)}
    catalog = open_native(write_native(tmp_path / "ck", tensors, shards=2))
    assert len(catalog.tensors) == 20_000
    for i in (0, 1, 777, 19_999):
        assert torch.equal(read(catalog, f"t/{i:05d}"), tensors[f"t/{i:05d}"])


def test_a_checkpoint_without_its_commit_record_is_not_there(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    (path / "ucf.json").unlink()
    with pytest.raises(NotACheckpointError, match="nothing was committed"):
        formats.open_catalog(str(path))


def test_the_newest_committed_step_of_a_run_is_opened(tmp_path: Path) -> None:
    for step in (5, 10, 100_000_000):
        write_native(tmp_path / "run" / native.step_name(step), {"s": torch.tensor(step)}, notes=Notes(step=step))
    (tmp_path / "run" / native.step_name(100_000_000) / "ucf.json").unlink()
    catalog = formats.open_catalog(str(tmp_path / "run"))
    assert read(catalog, "s") == 10
    assert native.committed_steps(open_store(str(tmp_path / "run"))) == [5, 10]


def test_a_committed_checkpoint_is_replaced_only_on_demand_and_in_one_step(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    before = {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(ExistsError):
        _save(path)
    assert {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before

    spec = TensorSpec("x", "F32", (3,))
    job = WriteJob(
        open_store(str(path)), [OutputBox(spec, Box.whole((3,)))], TensorFill([torch.ones(3)], [spec.kind]), overwrite=True
    )
    native.write(job)
    catalog = formats.open_catalog(str(path))
    assert [s.name for s in catalog.tensors] == ["x"]
    assert sorted(p.name for p in path.iterdir()) == [shards_of(path).name, "ucf.json"]


def test_a_replacement_that_fails_leaves_the_old_checkpoint_readable(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    spec = TensorSpec("x", "F32", (4,))
    half = WriteJob(
        open_store(str(path)), [OutputBox(spec, Box((0,), (2,)))], TensorFill([torch.ones(2)], [spec.kind]), overwrite=True
    )
    with pytest.raises(CoverageError, match=r"\[2:4\]"):
        native.write(half)
    catalog = formats.open_catalog(str(path))
    assert torch.equal(read(catalog, "model/w"), _tensors()["model/w"])
    _save(tmp_path / "other")
    native.write(WriteJob(open_store(str(path)), [], lambda parts: None, overwrite=True))
    assert sum(p.name.startswith("shards") for p in path.iterdir()) == 1


@pytest.mark.parametrize("boxes", [[Box((0,), (3,))], [Box((0,), (3,)), Box((2,), (3,))]], ids=["hole", "overlap"])
def test_what_does_not_tile_its_tensors_is_never_committed(tmp_path: Path, boxes: list[Box]) -> None:
    with pytest.raises((CoverageError, OverlapError)):
        write_native(tmp_path / "ck", {"w": torch.randn(5)}, {"w": boxes})
    assert not (tmp_path / "ck" / "ucf.json").exists()


def test_a_lost_index_is_rebuilt_from_the_shards(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    index = (shards_of(path) / "index.safetensors").read_bytes()
    (shards_of(path) / "index.safetensors").unlink()
    with pytest.raises(MissingFileError, match=r"index\.safetensors"):
        formats.open_catalog(str(path))
    native.reindex(open_store(str(path)))
    assert (shards_of(path) / "index.safetensors").read_bytes() == index


def test_reindex_refuses_a_damaged_shard_header(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    shard = shards_of(path) / "00000.safetensors"
    flip(shard, shard.read_bytes().index(b'\\"offset\\":[') + 14)
    (shards_of(path) / "index.safetensors").unlink()
    with pytest.raises(UcformatError, match=r"00000\.safetensors"):
        native.reindex(open_store(str(path)))
    assert not (shards_of(path) / "index.safetensors").exists()


def test_any_flipped_bit_in_the_commit_record_or_index_is_found(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    for name in ("ucf.json", f"{shards_of(path).name}/index.safetensors"):
        size = os.path.getsize(path / name)
        for at in np.linspace(0, size - 1, 23).astype(int).tolist():
            flip(path / name, at)
            try:
                catalog = formats.open_catalog(str(path))
            except UcformatError as error:
                assert name in str(error) or "ucf" in str(error)
            else:
                assert name == "ucf.json"
                assert at >= size - 2  # white space at the end carries nothing
                assert len(catalog.tensors) == 4
            flip(path / name, at)


def test_another_major_version_is_refused_and_a_minor_one_read(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck") / "ucf.json"
    text = path.read_text()
    path.write_text(text.replace('"ucf":"1.0"', '"ucf":"2.0"'))
    with pytest.raises(VersionError, match=r"2\.0"):
        formats.open_catalog(str(path.parent))
    path.write_text(text.replace('"ucf":"1.0"', '"ucf":"1.9","later":[1]'))
    assert len(formats.open_catalog(str(path.parent)).tensors) == 4


def _seal(path: Path, raw: bytes) -> None:
    """Put a record in place under a digest that fits, as a hostile writer would."""
    (path / "ucf.json").write_bytes(b'{"ucf":"1.0","digest":"%s","record":%s}' % (hex_digest(raw).encode(), raw))


def _edit(path: Path, **changes: object) -> None:
    """Change fields of the record."""
    tree = json.loads((path / "ucf.json").read_bytes())["record"]
    _seal(path, json.dumps({**tree, **changes}).encode())


def test_hostile_file_names_are_refused(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    shards = json.loads((path / "ucf.json").read_bytes())["record"]["shards"]
    for name in ("../../etc/passwd", "/etc/passwd", "shards/../../x"):
        _edit(path, shards=[{**shards[0], "file": name}, shards[1]])
        with pytest.raises(FormatError, match="does not stay inside"):
            formats.open_catalog(str(path))


@pytest.mark.parametrize("change", [{"data_start": -4096}, {"table_start": 1 << 60}, {"size": -1}, {"table_start": 0}], ids=str)
def test_impossible_shard_geometry_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    path = _save(tmp_path / "ck")
    shards = json.loads((path / "ucf.json").read_bytes())["record"]["shards"]
    _edit(path, shards=[{**shards[0], **change}, shards[1]])
    with pytest.raises(UcformatError):
        catalog = formats.open_catalog(str(path))
        read(catalog, "model/w")


def test_duplicate_keys_in_the_record_are_refused(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    raw = json.dumps(json.loads((path / "ucf.json").read_bytes())["record"])
    twice = raw.replace('"block_bytes"', '"step": 4, "step": 5, "block_bytes"').encode()
    _seal(path, twice)
    with pytest.raises(FormatError, match="twice"):
        formats.open_catalog(str(path))


def test_shards_of_another_checkpoint_are_not_taken_for_its_own(tmp_path: Path) -> None:
    path = _save(tmp_path / "ck")
    other = write_native(
        tmp_path / "other", {k: v + 1 for k, v in _tensors().items()}, {"model/w": split_evenly((40, 30), 0, 3)}, 2
    )
    foreign = shards_of(Path(other.url)) / "00000.safetensors"
    (shards_of(path) / "00000.safetensors").write_bytes(foreign.read_bytes())
    with pytest.raises((ChecksumError, FormatError), match=r"00000\.safetensors"):
        read(formats.open_catalog(str(path)), "model/w")


def test_the_same_works_on_an_object_store() -> None:
    write_native("memory://bucket/run/ck", _tensors(), {"model/w": split_evenly((40, 30), 1, 3)}, shards=2)
    catalog = formats.open_catalog("memory://bucket/run/ck")
    for name, tensor in _tensors().items():
        assert bits(read(catalog, name)) == bits(tensor)
    assert locate("memory://bucket/run/ck").file is None


def test_equal_content_gives_equal_files(tmp_path: Path) -> None:
    """So a rebuilt index can be compared with the digest of the lost one; `created` is all that differs."""
    paths = [_save(tmp_path / name) for name in ("a", "b")]
    contents = [
        {
            p.name: re.sub(rb'"(created|digest)":"[^"]*"|shards\.[0-9a-f]+', b"", p.read_bytes())
            for p in path.rglob("*")
            if p.is_file()
        }
        for path in paths
    ]
    assert contents[0] == contents[1]
