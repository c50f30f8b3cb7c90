"""Written torch_dist checkpoints are what Megatron itself writes of the same run, and Megatron loads them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ucformat
from tests.formats.megatron_fixtures import ITERATION, catalog_of, folder, opened, raw, tensors, tensors_of, torch_load
from ucformat.errors import ExistsError, UnsupportedError

LOADER = Path(__file__).parent / "megatron_core_load.py"


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("run", ["tp2dp2", "pp2vp2", "tie"])
def test_keys_and_tensors_are_those_that_megatron_writes(run: str, tmp_path: Path) -> None:
    """Out of the state by buckets, which Megatron can't load into another parallelism, the state by parameter."""
    report = ucformat.convert(folder(run, "dp_reshardable"), tmp_path / "out", "megatron")
    assert not report.left_out
    ours = raw(tmp_path / "out" / ITERATION, tmp_path)
    theirs = raw(folder(run, "fully_reshardable") / ITERATION, tmp_path)
    both = [{key: value for key, value in held.items() if isinstance(value, torch.Tensor)} for held in (ours, theirs)]
    assert_equal(*both)
    assert {key for key in theirs if "_extra_state" in key} <= set(ours)
    mine, other = (torch_load(path / ITERATION / "common.pt") for path in (tmp_path / "out", folder(run, "fully_reshardable")))
    assert mine["optimizer"] == other["optimizer"]
    assert {key: mine[key] for key in other if key not in ("args", "optimizer")} == {
        key: value for key, value in other.items() if key not in ("args", "optimizer")
    }
    assert vars(mine["args"]).keys() == vars(other["args"]).keys()


@pytest.mark.parametrize(("run", "form"), [("tp2dp2", "legacy"), ("pp2vp2", "legacy"), ("single", "")])
def test_what_was_written_reads_as_it_was(run: str, form: str, tmp_path: Path) -> None:
    ucformat.convert(folder(run, form), tmp_path / "out", "megatron")
    assert_equal(tensors(opened(tmp_path / "out")), tensors_of(run, form))


def test_experts_are_stacked_and_come_apart_again(tmp_path: Path) -> None:
    ucformat.convert(folder("moe", "legacy"), tmp_path / "out", "megatron")
    assert_equal(tensors(opened(tmp_path / "out")), tensors_of("moe", "legacy"))
    found = raw(tmp_path / "out" / ITERATION, tmp_path)
    assert found["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (2, 4, 48, 16)


def test_names_that_are_not_megatrons_are_refused_with_advice(tmp_path: Path) -> None:
    ucformat.save(str(tmp_path / "native"), {"model": {"model.norm.weight": torch.ones(4)}})
    with pytest.raises(UnsupportedError, match="family"):
        ucformat.convert(tmp_path / "native", tmp_path / "out", "megatron")
    assert not (tmp_path / "out").exists()


def test_what_is_there_stays_and_only_what_we_wrote_can_be_replaced(tmp_path: Path) -> None:
    ucformat.convert(folder("single"), tmp_path / "out", "megatron")
    with pytest.raises(ExistsError):
        ucformat.convert(folder("single"), tmp_path / "out", "megatron")
    ucformat.convert(folder("tp2dp2", "legacy"), tmp_path / "out", "megatron", overwrite=True)
    assert_equal(tensors(opened(tmp_path / "out")), tensors_of("tp2dp2", "legacy"))
    shutil.copytree(tmp_path / "out" / ITERATION, tmp_path / "out" / "iter_0000020")  # Megatron went on from it
    with pytest.raises(UnsupportedError, match="never replaced"):
        ucformat.convert(folder("single"), tmp_path / "out", "megatron", overwrite=True)
    assert (tmp_path / "out" / "iter_0000020" / ".metadata").exists()


@pytest.mark.slow
def test_megatron_core_loads_it_at_another_parallelism(tmp_path: Path) -> None:
    """Of a run with two tensor and two data ranks, on one tensor rank and two data ranks: weights and optimizer state."""
    ucformat.convert(folder("tp2dp2", "dp_reshardable"), tmp_path / "out", "megatron")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(LOADER)]
    out = tmp_path / "held"
    subprocess.run([*run, str(tmp_path / "out" / ITERATION), str(out), "1"], check=True, capture_output=True, timeout=500)
    assert catalog_of("tp2dp2", "legacy").names
    assert_equal(tensors(opened(out)), tensors_of("tp2dp2", "legacy"))
