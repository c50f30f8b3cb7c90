"""Every replica is written once: by who has least to write, or by the first rank where replicas may differ."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ucformat
from tests.reshard.ranks import on_ranks
from ucformat.reshard.state.replicas import Offer, Offers, choose


def test_replicas_go_to_the_least_loaded_holder_and_drifting_ones_to_the_first() -> None:
    offers = (
        Offer("large", (0,), (9,), 9, None),
        Offer("drifting", (0,), (8,), 8, None, first_rank_wins=True),
        Offer("small", (0,), (1,), 1, None),
    )
    assert choose([Offers(0, offers), Offers(0, offers)]) == [[True, True, False], [False, False, True]]
    assert choose([Offers(90, offers), Offers(0, offers)]) == [[False, True, False], [True, False, True]]


def save_drifted(path: str) -> None:
    """The ranks' running statistics differ until the next forward, when DDP broadcasts the first rank's."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64)))
    model(torch.full((8, 4), 1.0 + dist.get_rank()).cumsum(0)).sum().backward()
    ucformat.save(path, {"model": model})
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"{path}.pt")


def test_buffers_that_drift_under_ddp_are_those_of_the_first_rank(tmp_path: Path) -> None:
    on_ranks(2, save_drifted, str(tmp_path / "ck"))
    truth, found = torch.load(tmp_path / "ck.pt", weights_only=True), ucformat.open(str(tmp_path / "ck"))
    assert dict.fromkeys(truth, True) == {name: torch.equal(found[f"model/{name}"][...], truth[name]) for name in truth}
