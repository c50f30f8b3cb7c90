"""What is no tensor keeps its type through PyTorch DCP, and nothing of ucformat's own gets into the pickles."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ucformat
from tests.reshard.ranks import on_ranks


def own(rank: int) -> dict[str, Any]:
    held = {"keys": np.full(3, rank, dtype=np.uint32), "deep": [np.full(2, rank + 0.5), torch.full((2,), rank)]}
    return {"own": ucformat.rank_local(held), "args": argparse.Namespace(weights=np.arange(2)), "all": {"a": np.arange(4)}}


def _through(path: str) -> list[str]:
    rank = dist.get_rank()
    ucformat.save(f"{path}/ck", own(rank))
    ucformat.convert(f"{path}/ck", f"{path}/dcp", to="dcp")
    live = own(9)
    ucformat.load(f"{path}/dcp", into=live)
    held = live["own"].value
    assert held["keys"].tolist() == [rank] * 3
    assert held["deep"][0].tolist() == [rank + 0.5] * 2
    assert live["args"].weights.tolist() == [0, 1]
    return [type(x).__name__ for x in (held["keys"], *held["deep"], live["args"].weights, live["all"]["a"])]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_numpy_arrays_stay_numpy_arrays_rank_local_ones_too(tmp_path: Path) -> None:
    expected = ["ndarray", "ndarray", "Tensor", "ndarray", "ndarray"]
    assert on_ranks(2, _through, str(tmp_path)) == [expected, expected]
    whole = ucformat.load(tmp_path / "dcp")["own"]
    assert [type(item["keys"]) for item in whole.values] == [np.ndarray] * 2  # type: ignore[attr-defined]
    stock: dict[str, Any] = {"all": {"a": np.zeros(0)}}
    dcp.load(stock, checkpoint_id=tmp_path / "dcp")
    assert stock["all"]["a"].tolist() == [0, 1, 2, 3]


def test_tensors_in_a_namespace_come_along(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "args": argparse.Namespace(x=torch.arange(3), l=[torch.ones(2)])}, tmp_path / "a.pt")
    ucformat.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    found: Any = ucformat.load(tmp_path / "dcp")["args"]
    assert type(found) is argparse.Namespace
    assert found.x.tolist() == [0, 1, 2]
    assert found.l[0].tolist() == [1, 1]
    assert not any(b"ucformat" in file.read_bytes() for file in (tmp_path / "dcp").rglob("*.distcp"))


def test_keys_that_become_text_are_said(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "by_rank": {0: {"seed": 1}, 1: {"seed": 2}}, "kept": ({1: 2},)}, tmp_path / "a.pt")
    report = ucformat.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp")
    assert [text for text in report.remarks if "become text in by_rank" in text] == list(report.remarks)
    found = ucformat.load(tmp_path / "dcp")
    assert (found["by_rank"], found["kept"]) == ({"0": {"seed": 1}, "1": {"seed": 2}}, ({1: 2},))
