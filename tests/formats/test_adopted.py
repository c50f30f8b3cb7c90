"""Foreign checkpoints with an index beside their files: they open by it as they were, and a changed file is an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import save as save_dcp

import ucformat
from tests.checkpoints import flip
from tests.cli.calls import Program
from tests.formats.deepspeed_fixtures import DATA, MORE, tag_of
from tests.formats.megatron_fixtures import folder
from ucformat import formats
from ucformat.catalog import Catalog
from ucformat.errors import ChecksumError, ExistsError, MissingFileError, SourceChangedError, UcformatError, UnsupportedError
from ucformat.reshard.reading.lazy import read_many

# stock DCP without a process group warns that it runs in a single process
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
SOURCES: dict[str, Callable[[], Path]] = {
    "ZeRO-3": lambda: DATA / "z3two",
    "ZeRO-2 in bf16": lambda: DATA / "z2twobf16n3",
    "ZeRO-0 by number": lambda: DATA / "z0two",
    "tensor parallel": lambda: DATA / "parallel" / "tp2gqabf16",
    "pipeline": lambda: DATA / "parallel" / "pp2tiedbf16",
    "universal": lambda: DATA.parent / "ucp" / "z2tied",
    "Megatron legacy": lambda: folder("tp2pp2", "legacy"),
    "Megatron torch_dist": lambda: folder("tp2pp2", "dp_reshardable"),
    "Megatron experts": lambda: folder("moe", "legacy"),
}


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "run"))


def tensors(catalog: Catalog) -> dict[str, torch.Tensor]:
    return dict(zip(catalog.names, read_many(catalog, [(name, None) for name in catalog.names]), strict=True))


@pytest.mark.parametrize("kind", SOURCES)
def test_it_opens_as_before_and_nothing_is_copied(kind: str, tmp_path: Path) -> None:
    run = copied(SOURCES[kind](), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    direct = formats.open_catalog(str(run))
    expected = tensors(direct)
    report = ucformat.index(run, checksums=kind == "ZeRO-3")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    new = [path for path in run.rglob("*") if path.is_file() and path not in before]
    assert sum(path.stat().st_size for path in new) == report.written_bytes
    assert (run / "ucf.json").exists()
    name, indexed = formats.open_named(str(run))
    assert name == "adopted"
    assert (indexed.notes.origin, indexed.notes.step) == (report.format, direct.notes.step)
    assert indexed.names == direct.names
    assert indexed.values == direct.values
    assert indexed.aliases == direct.aliases
    for key, tensor in tensors(indexed).items():
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(tensor, expected[key]), key
    assert ucformat.verify(run).ok


def test_a_run_is_loaded_by_it_into_a_live_state_and_snapshots_go_on_from_there(tmp_path: Path) -> None:
    run = copied(MORE / "z3n4", tmp_path)
    ucformat.index(run)
    (tag_of(run) / "zero_to_fp32.py").touch()  # what was not read may change
    moved = Path(shutil.move(run, tmp_path / "elsewhere"))
    layer = torch.nn.Linear(8, 12)
    net = torch.nn.ModuleDict({"fc1": layer})
    state: dict[str, Any] = {"model": net}
    report = ucformat.load(moved, into=state, strict=False)
    assert (report.format, report.step) == ("adopted", 3)
    held = tensors(formats.open_catalog(str(MORE / "z3n4")))
    assert torch.equal(layer.weight, held["model/fc1.weight"])
    with ucformat.Snapshotter(state, directory=str(tmp_path / "slots")) as snapshots:
        snapshots.take(4)
        snapshots.deadline()
    assert ucformat.open(tmp_path / "slots")["model/fc1.weight"][:].equal(held["model/fc1.weight"])


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def touch(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


CHANGES: dict[str, tuple[str, Callable[[Path], object], type[UcformatError], str]] = {
    "a file that has grown": ("*rank_1*optim*", grow, SourceChangedError, r"rank_1.*bytes \d+-\d+.*ucconvert index"),
    "a file that was written to": ("*rank_1*optim*", touch, SourceChangedError, r"rank_1.*bytes 0-\d+.*since it was indexed"),
    "a file that is gone": ("*rank_1*optim*", Path.unlink, MissingFileError, "rank_1"),
    "metadata that was written to": ("*rank_0*model*", touch, SourceChangedError, "rank_0"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_files_are_named_with_their_range(what: str, tmp_path: Path) -> None:
    pattern, change, error, message = CHANGES[what]
    run = copied(DATA / "z3two", tmp_path)
    ucformat.index(run)
    change(next(tag_of(run).glob(pattern)))
    with pytest.raises(error, match=message):
        ucformat.load(run)


def test_a_pointer_that_moved_on_is_a_change_and_indexing_again_follows_it(tmp_path: Path) -> None:
    run = copied(DATA / "z3two", tmp_path)
    ucformat.index(run)
    shutil.copytree(tag_of(run), run / "global_step99")
    (run / "latest").write_text("global_step99")
    with pytest.raises(SourceChangedError, match="latest"):
        ucformat.open(run)
    ucformat.index(run)
    assert len(list(run.glob("adopted.*"))) == 1
    ucformat.open(run)
    (run / "ucf.json").unlink()
    assert formats.open_named(str(run))[0] == "deepspeed"


@pytest.mark.parametrize("checksums", [True, False])
def test_damage_within_a_file_is_found_as_it_is_read(checksums: bool, tmp_path: Path) -> None:
    """With digests of blocks, and without them by the crc32 that the files' own format has."""
    run = copied(DATA / "z3two", tmp_path)
    ucformat.index(run, checksums=checksums)
    catalog = formats.open_catalog(str(run))
    row = int(catalog.fragments.file.argmax())
    file = run / catalog.files[catalog.fragments.file[row]].path
    stamp = file.stat().st_mtime_ns
    flip(file, int(catalog.fragments.start[row]))
    os.utime(file, ns=(stamp, stamp))  # as bits rot
    with pytest.raises(ChecksumError, match=file.name):
        ucformat.load(run)
    assert not ucformat.verify(run).ok
    with pytest.raises(ChecksumError):
        ucformat.index(run, checksums=True)


def test_what_no_index_can_say_is_refused_by_name(tmp_path: Path) -> None:
    shared = torch.arange(12.0)
    odd = {"plain": torch.ones(3), "turned": torch.arange(6.0).view(2, 3).t()}
    save_dcp(odd, checkpoint_id=tmp_path / "dcp", no_dist=True)
    catalog = formats.open_catalog(str(tmp_path / "dcp"))
    if catalog.fragments.stride is not None:
        with pytest.raises(UnsupportedError, match=r"turned.*convert to native"):
            ucformat.index(tmp_path / "dcp")
        assert not (tmp_path / "dcp" / "ucf.json").exists()
    torch.save({"a": shared}, tmp_path / "one.pt")
    with pytest.raises(UnsupportedError, match="one file"):
        ucformat.index(tmp_path / "one.pt")


def test_dcp_is_indexed_and_native_checkpoints_are_not(tmp_path: Path) -> None:
    save_dcp({"model": {"w": torch.arange(6.0)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ucformat.index(tmp_path / "dcp")
    assert ucformat.open(tmp_path / "dcp")["model/w"][2:4].tolist() == [2.0, 3.0]
    native = ucformat.save(tmp_path / "native", {"w": torch.ones(2)})
    with pytest.raises(UnsupportedError, match="which has an index"):
        ucformat.index(native)
    with pytest.raises(ExistsError):
        ucformat.save(tmp_path / "dcp", {"w": torch.ones(2)})
    with pytest.raises(ExistsError):
        ucformat.save(tmp_path / "dcp", {"w": torch.ones(2)}, step=1)


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied(DATA / "z3two", tmp_path)
    answer = Program(capsys)("index", run, "--checksums")
    assert (answer.status, "of deepspeed" in answer.out, "checksummed" in answer.out) == (0, True, True)
    assert '"format": "deepspeed"' in Program(capsys)("index", run, "--json").out
