"""Optimizer states that are stored by number: `optimizer.state_dict()` in files of torch programs."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ucformat
from tests.reshard.ranks import on_ranks
from tests.reshard.state.test_optimizer_forms import assert_equal, muon_and_adamw, net, state_of, train
from tests.reshard.state.test_optimizer_zoo import net as plain_net
from tests.reshard.state.test_optimizer_zoo import train as train_on
from tests.reshard.state.test_optimizer_zoo import wrapped
from ucformat.errors import ShapeMismatchError, UnsupportedError


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def fresh() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.AdamW(groups(model), lr=0.9, weight_decay=0.5)


@pytest.mark.parametrize("place", ["optimizer", "optimizer_state_dict", "optim"])
def test_states_by_number_are_given_in_the_order_of_the_groups(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained()
    path = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), place: optimizer.state_dict(), "epoch": 3}, path)
    other_model, other = fresh()
    state = {"model": other_model, "optimizer": other, "epoch": 0}
    with caplog.at_level(logging.WARNING, "ucformat"):
        ucformat.load(str(path), into=state)
    assert state["epoch"] == 3
    assert "stored by number" in caplog.text
    assert "0.weight, 2.weight" in caplog.text
    assert_equal(other.state_dict(), optimizer.state_dict())
    train(model, optimizer, steps=3)
    train(other_model, other, steps=3)
    assert_equal(other_model.state_dict(), model.state_dict())


def test_a_file_that_is_an_optimizers_state_dict(tmp_path: Path) -> None:
    _, optimizer = trained()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    _, other = fresh()
    ucformat.load(str(tmp_path / "optimizer.pt"), into={"optimizer": other})
    state = other.state_dict()
    assert_equal(state, optimizer.state_dict())


def test_a_list_as_lightning_keeps_it(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "last.ckpt")
    other_model, other = fresh()
    ucformat.load(str(tmp_path / "last.ckpt"), into={"model": other_model, "optimizer": other})
    assert_equal(other.state_dict(), optimizer.state_dict())


def test_a_list_of_optimizers(tmp_path: Path) -> None:
    model, other_model = net(), net()
    optimizers, others = muon_and_adamw(model, 0.1), muon_and_adamw(other_model, 0.9)
    train(model, *optimizers)
    torch.save({"model": model.state_dict(), "optimizer": [o.state_dict() for o in optimizers]}, tmp_path / "x.pt")
    ucformat.load(str(tmp_path / "x.pt"), into={"model": other_model, "optimizer": others})
    for a, b in zip(optimizers, others, strict=True):
        assert_equal(a.state_dict(), b.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_by_number_in_dcp(tmp_path: Path) -> None:
    model, optimizer = trained()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other_model, other = fresh()
    ucformat.load(str(tmp_path / "dcp"), into={"model": other_model, "optimizer": other})
    assert_equal(other.state_dict(), optimizer.state_dict())


def test_states_by_number_of_an_optimizer_with_lists(tmp_path: Path) -> None:
    model, other_model = net(), net()
    optimizer, other = torch.optim.LBFGS(model.parameters()), torch.optim.LBFGS(other_model.parameters())

    def loss() -> float:
        optimizer.zero_grad()
        found: torch.Tensor = (model(torch.ones(2, 3)) ** 2).sum()
        found.backward()
        return float(found.detach())

    optimizer.step(loss)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    ucformat.load(str(tmp_path / "optimizer.bin"), into={"optimizer": other})
    assert_equal(other.state_dict(), optimizer.state_dict())


def test_other_groups_are_refused_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    other_model = net()
    other = torch.optim.AdamW(other_model.parameters())
    before = state_of(other)
    with pytest.raises(UnsupportedError, match=r"by number, with groups of 2, 2 parameters.* has groups of 4"):
        ucformat.load(str(tmp_path / "x.pt"), into={"model": other_model, "optimizer": other})
    assert_equal(other.state_dict(), before)


def test_another_order_is_refused_where_shapes_tell(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    other_model = net()
    reverse = groups(other_model)
    reverse[0]["params"].reverse()
    weights = copy.deepcopy(other_model.state_dict())
    with pytest.raises(ShapeMismatchError, match=r"by position: 2\.weight"):
        ucformat.load(str(tmp_path / "x.pt"), into={"model": other_model, "optimizer": torch.optim.AdamW(reverse)})
    assert_equal(other_model.state_dict(), weights)


def test_the_extra_keys_of_a_state_dict_reach_the_optimizer(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]
            super().load_state_dict({key: x for key, x in state_dict.items() if key != "count"})

    optimizer, other = (Counting(net().parameters(), lr=0.1) for _ in range(2))
    optimizer.count = 7
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    ucformat.load(str(tmp_path / "x.pt"), into={"optimizer": other})
    assert other.count == 7


def into_sharded(path: str, folder: str) -> dict[str, str]:
    """Load the file on two ranks, and save what was loaded: that has names and whole tensors again."""
    warnings.simplefilter("ignore")
    out = {}
    for how in ("ddp", "fsdp2", "fsdp1", "fsdp1, flat"):
        model = wrapped(how)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.9)
        try:
            ucformat.load(path, into={"model": model, "optimizer": optimizer})
            ucformat.save(f"{folder}/{how}", {"model": model, "optimizer": optimizer})
        except UnsupportedError as error:
            out[how] = str(error)
            assert not optimizer.state
        else:
            out[how] = "loaded"
    return out


@pytest.mark.slow
def test_states_by_number_load_into_sharded_optimizers(tmp_path: Path) -> None:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train_on(model, optimizer, 2, 1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    ucformat.save(str(tmp_path / "truth"), {"model": model, "optimizer": optimizer})
    for told in on_ranks(2, into_sharded, str(tmp_path / "x.pt"), str(tmp_path)):
        refused = told.pop("fsdp1, flat")
        assert set(told.values()) == {"loaded"}
        assert "one parameter here is made of several" in refused
    truth: Any = ucformat.load(str(tmp_path / "truth"))
    for how in ("ddp", "fsdp2", "fsdp1"):
        found: Any = ucformat.load(str(tmp_path / how))
        assert_equal(found["model"], truth["model"])
        assert_equal(found["optimizer"], truth["optimizer"])
