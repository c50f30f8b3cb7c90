"""Universal folders that DeepSpeed's own converter made, against what the live engines held; and what is refused."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.formats.deepspeed_fixtures import DATA, open_kind
from ucformat import formats
from ucformat.catalog import Catalog
from ucformat.errors import MissingFileError, UcformatError, UnsafePickleError
from ucformat.reshard.reading.lazy import read

ROOT = DATA.parent / "ucp"
KINDS = sorted(path.name for path in ROOT.iterdir() if path.is_dir())


def source_of(kind: str) -> Path:
    """The checkpoint that a folder was made from."""
    return next(path for path in (DATA / kind, DATA / "parallel" / kind) if path.exists())


def open_folder(path: Path) -> Catalog:
    name, catalog = formats.open_named(str(path))
    assert name == "ucp"
    return catalog


@pytest.mark.parametrize("kind", KINDS)
def test_state_equals_the_live_one_bit_for_bit(kind: str) -> None:
    catalog = open_folder(ROOT / kind)
    for name, expected in load_file(source_of(kind) / "truth.safetensors").items():
        if not name.startswith("__lp__/"):
            assert torch.equal(read(catalog, f"optimizer/{name}"), expected), name


@pytest.mark.parametrize("kind", KINDS)
def test_it_reads_as_the_checkpoint_that_it_was_made_from(kind: str) -> None:
    """Also frozen weights, which DeepSpeed's converter leaves as shards, or leaves out."""
    universal, source = open_folder(ROOT / kind), open_kind(source_of(kind))
    lost = {"model/1.scale", "model/3.scale"} if "pp2" in kind else set()
    assert set(universal.names) == set(source.names) - lost
    assert all(any(name[6:] in remark for remark in universal.notes.remarks) for name in lost)
    for name in universal.names:
        stored, expected = read(universal, name), read(source, name)
        assert torch.equal(stored.to(expected.dtype), expected), name
        assert stored.dtype == expected.dtype or "pp2" in kind, name  # of a pipeline, the masters alone are copied
    assert isinstance(universal.values, dict)
    assert isinstance(source.values, dict)
    for key in ("step", "optimizer", "client", "scheduler"):
        assert universal.values.get(key) == source.values.get(key), key
    assert universal.notes.step == source.notes.step


@pytest.mark.parametrize("folder", ["run", "tag"])
def test_the_run_folder_or_the_folder_itself_may_be_given(folder: str) -> None:
    path = ROOT / "z2frozen"
    assert open_folder(path if folder == "run" else path / "uni").notes.step == 3


def copy_of(kind: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / kind / "uni", tmp_path / "uni"))


def files_of(kind: str) -> list[str]:
    folder = ROOT / kind / "uni"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt"))
    # needed of other ranks' model files are frozen weights only; buffers and frozen ones are copies of what the model file holds
    copies = ["zero_pp_rank_1", "zero_pp_rank_2", "zero/scale", *(["zero/fc1"] if kind == "z2frozen" else [])]
    return [name for name in files if not any(copy in name for copy in copies)]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in ("z2frozen", "z3two") for name in files_of(kind)])
def test_a_missing_file_of_trained_parameters_is_named(kind: str, name: str, tmp_path: Path) -> None:
    folder = copy_of(kind, tmp_path)
    (folder / name).unlink()
    if name.endswith("model_states.pt") and len(list(folder.glob("*model_states.pt"))) == 0:
        with pytest.raises(UcformatError):
            formats.open_catalog(str(folder))
        return
    with pytest.raises(MissingFileError, match=re.escape(name)):
        formats.open_catalog(str(folder))


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    folder = copy_of("z2tied", tmp_path)
    shutil.rmtree(folder / "zero" / "fc2.bias")
    with pytest.raises(MissingFileError, match=re.escape("zero/fc2.bias")):
        formats.open_catalog(str(folder))


class Bomb:
    """Its pickle runs a command when it is loaded by Python's own unpickler."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/emb.weight/exp_avg.pt"])
def test_a_pickle_that_would_run_code_is_refused_in_every_file(name: str, tmp_path: Path) -> None:
    folder, marker = copy_of("z2tied", tmp_path), tmp_path / "ran"
    torch.save({"param": Bomb(marker)}, folder / name, pickle_module=pickle)
    with pytest.raises(UnsafePickleError, match="system"):
        formats.open_catalog(str(folder))
    assert not marker.exists()


NONSENSE: dict[str, object] = {
    "text": "x",
    "no tensor": {"param": 5},
    "flat of another size": torch.zeros(5),
    "a list": [torch.zeros(1)],
}


@pytest.mark.parametrize("what", sorted(NONSENSE))
def test_nonsense_in_a_state_file_is_a_typed_error_that_names_it(what: str, tmp_path: Path) -> None:
    folder = copy_of("z3two", tmp_path)
    torch.save(NONSENSE[what], folder / "zero" / "emb.weight" / "fp32.pt")
    with pytest.raises(UcformatError, match=r"emb\.weight/fp32\.pt"):
        formats.open_catalog(str(folder))
