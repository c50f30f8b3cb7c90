"""`io.BytesIO` as extra state of a module: what goes in comes back, from every format and into every one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import ucformat

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # what stock DCP says to one process


class Recipe(nn.Module):
    """Keeps what a Transformer Engine module keeps: a stream with something pickled in it."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), scale))
        self.scale = scale

    def get_extra_state(self) -> io.BytesIO:
        stream = io.BytesIO()
        torch.save({"scale": self.scale}, stream)
        return stream

    def set_extra_state(self, state: Any) -> None:
        assert type(state) is io.BytesIO
        state.seek(0)
        self.scale = torch.load(state)["scale"]


def net(scale: float) -> nn.Module:
    return nn.Sequential(Recipe(scale), nn.Linear(2, 2))


def source(kind: str, path: Path) -> str:
    state = {"model": net(3.0).state_dict()}
    if kind == "torchsave":
        path = path / "net.pt"
        torch.save(state, path)
    elif kind == "dcp":
        state_dict_saver.save(state, checkpoint_id=path / "dcp", no_dist=True)
        path = path / "dcp"
    else:
        path = path / "native"
        ucformat.save(str(path), {"model": net(3.0)})
    return str(path)


@pytest.mark.parametrize("kind", ["native", "torchsave", "dcp"])
def test_a_live_module_gets_its_stream_back(kind: str, tmp_path: Path) -> None:
    live = net(1.0)
    ucformat.load(source(kind, tmp_path), into={"model": live})
    assert live[0].scale == 3.0  # type: ignore[index]


@pytest.mark.parametrize("kind", ["native", "torchsave", "dcp"])
def test_a_stream_survives_conversions_there_and_back(kind: str, tmp_path: Path) -> None:
    src = source(kind, tmp_path)
    ucformat.convert(src, str(tmp_path / "one"), "native")
    ucformat.convert(str(tmp_path / "one"), str(tmp_path / "two"), "dcp")
    report = ucformat.convert(str(tmp_path / "two"), str(tmp_path / "three.pt"), "torchsave")
    assert not report.values_left_out
    assert any("weights_only" in remark and "model/0._extra_state" in remark for remark in report.remarks)
    state = torch.load(tmp_path / "three.pt", weights_only=False)["model"]
    live = net(1.0)
    live.load_state_dict(state)
    assert live[0].scale == 3.0  # type: ignore[index]


def test_stock_dcp_loads_the_stream(tmp_path: Path) -> None:
    ucformat.convert(source("torchsave", tmp_path), str(tmp_path / "out"), "dcp")
    live = net(1.0)
    state = {"model": live.state_dict()}
    state_dict_loader.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    live.load_state_dict(state["model"])
    assert live[0].scale == 3.0  # type: ignore[index]


def test_a_stream_among_values_is_saved_and_loaded(tmp_path: Path) -> None:
    stream = io.BytesIO(b"0123456789")
    stream.seek(4)
    ucformat.save(str(tmp_path / "x"), {"w": torch.ones(1), "stream": stream})
    loaded: Any = ucformat.load(str(tmp_path / "x"))["stream"]
    assert type(loaded) is io.BytesIO
    assert (loaded.tell(), loaded.getvalue()) == (4, b"0123456789")
