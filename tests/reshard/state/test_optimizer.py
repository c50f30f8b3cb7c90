from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.reshard.ranks import Held, assert_same, catalog_of, catalog_of_ranks, held, load, on_ranks, same, union
from ucformat import values
from ucformat.errors import UnsupportedError
from ucformat.reshard.restoring.prepare import prepare


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def weight(m: nn.Sequential) -> torch.Tensor:
    return next(m.parameters())


def groups(m: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in m.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def step(m: nn.Module, optimizer: torch.optim.Optimizer, times: int = 2) -> None:
    for i in range(times):
        optimizer.zero_grad()
        (m(torch.full((2, 3), i + 1.0)) ** 2).sum().backward()
        optimizer.step()


def trained(make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Any]:
    m = model()
    optimizer = make(m)
    step(m, optimizer)
    return {"model": m, "optimizer": optimizer}


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(groups(m), lr=0.01),
    "adam, tensor lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), amsgrad=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "plain sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "lbfgs-like nest": lambda m: Nested(m.parameters()),
}


class Nested(torch.optim.Optimizer):
    """Keeps a history of tensors per parameter, as quasi-Newton methods do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("history", []).append(p.grad.clone())
                state["calls"] = state.get("calls", 0) + 1
                p.sub_(p.grad, alpha=group["lr"])


def assert_equal_states(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    (values_a, tensors_a), (values_b, tensors_b) = (
        values.split(x.state_dict(), lambda leaf: isinstance(leaf, torch.Tensor)) for x in (a, b)
    )
    assert_same(tensors_a, tensors_b)
    for x in (values_a, values_b):
        assert isinstance(x, dict)
        x["state"] = {
            i: {key: repr(item) for key, item in sorted(state.items()) if key == "calls"} for i, state in x["state"].items()
        }
    assert values.encode(values_a) == values.encode(values_b)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_optimizer_continues_exactly_as_the_saved_one(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = trained(OPTIMIZERS[kind])
    catalog = catalog_of_ranks(tmp_path, [held(saved)])
    fresh = model()
    live: dict[str, Any] = {"model": fresh, "optimizer": OPTIMIZERS[kind](fresh)}
    load(live, catalog)
    assert_equal_states(live["optimizer"], saved["optimizer"])
    for state in (saved, live):
        step(state["model"], state["optimizer"], 1)
    assert_same(live["model"].state_dict(), saved["model"].state_dict())
    assert_equal_states(live["optimizer"], saved["optimizer"])


def test_states_and_groups_go_by_parameter_names() -> None:
    found = held(trained(OPTIMIZERS["adamw"]))
    names = {spec.name for spec in found.specs}
    assert {"optimizer/0.weight/exp_avg", "optimizer/2.bias/step", "model/0.weight"} <= names
    stored = found.values["optimizer"]["param_groups"]
    assert [group["params"] for group in stored] == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    assert [group["weight_decay"] for group in stored] == [0.1, 0.0]


def test_states_are_restored_in_place_and_hyper_parameters_follow_the_names(tmp_path: Path) -> None:
    saved = trained(OPTIMIZERS["adamw"])
    catalog = catalog_of_ranks(tmp_path, [held(saved)])
    m = model()
    optimizer = torch.optim.AdamW(list(reversed(groups(m))), lr=1.0)
    step(m, optimizer, 1)
    moment = optimizer.state[weight(m)]["exp_avg"]
    load({"model": m, "optimizer": optimizer}, catalog)
    assert optimizer.state[weight(m)]["exp_avg"] is moment
    assert same(moment, saved["optimizer"].state[weight(saved["model"])]["exp_avg"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]


def test_a_parameter_that_was_stored_without_state_loses_its_own(tmp_path: Path) -> None:
    m = model()
    catalog = catalog_of_ranks(tmp_path, [held({"model": m, "optimizer": torch.optim.Adam(m.parameters())})])
    live = trained(lambda m: torch.optim.Adam(m.parameters()))
    load(live, catalog)
    assert not live["optimizer"].state


def test_merging_groups_of_other_hyper_parameters_is_refused(tmp_path: Path) -> None:
    catalog = catalog_of_ranks(tmp_path, [held(trained(OPTIMIZERS["adamw"]))])
    m = model()
    with pytest.raises(UnsupportedError, match="hyper-parameters"):
        load({"model": m, "optimizer": torch.optim.AdamW(m.parameters())}, catalog)


def test_parameters_that_no_stored_group_had_are_named_before_reading(tmp_path: Path) -> None:
    catalog = catalog_of_ranks(tmp_path, [held(trained(OPTIMIZERS["sgd"]))])
    m = nn.Sequential(*model(), nn.Linear(2, 2))
    loading = prepare({"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.1)}, catalog)
    assert loading.missing == ("optimizer/3.weight", "optimizer/3.bias")


def test_an_optimizer_that_is_not_stored_is_named(tmp_path: Path) -> None:
    m = model()
    catalog = catalog_of_ranks(tmp_path, [held({"model": m})])
    loading = prepare({"model": m, "optimizer": torch.optim.Adam(m.parameters())}, catalog)
    assert loading.missing == ("optimizer/param_groups",)


def test_parameters_of_no_module_go_by_their_own_names_or_their_position(tmp_path: Path) -> None:
    p = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    named = torch.optim.SGD([("first", p[0]), ("second", p[1])], lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(p, lr=0.1, momentum=0.9)
    for optimizer in (named, plain):
        for parameter in p:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    found = held({"named": named, "plain": plain})
    assert {spec.name for spec in found.specs} == {
        "named/first/momentum_buffer", "named/second/momentum_buffer",
        "plain/param_0_0/momentum_buffer", "plain/param_0_1/momentum_buffer",
    }  # fmt: skip
    live: dict[str, Any] = {
        "named": torch.optim.SGD([("second", p[1]), ("first", p[0])], momentum=0.9),
        "plain": copy.deepcopy(plain),
    }
    load(live, catalog_of_ranks(tmp_path, [found]))
    assert same(live["named"].state[p[1]]["momentum_buffer"], named.state[p[1]]["momentum_buffer"])


def test_one_optimizer_over_two_models_keeps_their_names_apart(tmp_path: Path) -> None:
    nets = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
    optimizer = torch.optim.SGD([p for net in nets.values() for p in net.parameters()], lr=0.1, momentum=0.9)
    for net in nets.values():
        net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = held({"nets": nets, "optimizer": optimizer})
    assert "optimizer/nets.g.weight/momentum_buffer" in {spec.name for spec in found.specs}
    load({"nets": nets, "optimizer": optimizer}, catalog_of_ranks(tmp_path, [found]))


def test_master_weights_of_another_engine_are_left_to_the_caller(tmp_path: Path) -> None:
    found = held(trained(OPTIMIZERS["adamw"]))
    tensors = {**union([found]), "optimizer/0.weight/fp32": torch.ones(4, 3)}
    m = model()
    optimizer = torch.optim.AdamW(groups(m))
    loading = load({"model": m, "optimizer": optimizer}, catalog_of(tmp_path, tensors, found.values))
    assert "optimizer/0.weight/fp32" not in loading.names
    assert sorted(optimizer.state[weight(m)]) == ["exp_avg", "exp_avg_sq", "step"]


def test_a_counter_that_was_stored_as_a_number_fills_the_live_tensor(tmp_path: Path) -> None:
    found = held(trained(OPTIMIZERS["adamw"]))
    tensors = {name: t for name, t in union([found]).items() if not name.endswith("/step")}
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        found.values["optimizer"][name] = {"step": 12}
    live = trained(OPTIMIZERS["adamw"])
    load(live, catalog_of(tmp_path, tensors, found.values))
    assert all(float(state["step"]) == 12 for state in live["optimizer"].state.values())


# ---------------------------------------------------------------- several ranks


def stages_worker() -> Held:
    """Rank r has every second layer, as in a pipeline."""
    whole = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    mine = nn.ModuleDict({str(i): whole[i] for i in range(4) if i % 2 == dist.get_rank()})
    optimizer = torch.optim.Adam(mine.parameters())
    for layer in mine.values():
        layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return held({"model": mine, "optimizer": optimizer})


def test_pipeline_stages_unite_to_one_optimizer(tmp_path: Path) -> None:
    ranks = on_ranks(2, stages_worker)
    whole = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.Adam(whole.parameters())
    load({"model": whole, "optimizer": optimizer}, catalog_of_ranks(tmp_path, ranks))
    tensors = union(ranks)
    for name, parameter in whole.named_parameters():
        assert same(optimizer.state[parameter]["exp_avg"], tensors[f"optimizer/{name}/exp_avg"])


def zero_worker(folder: str) -> Held:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of torch.jit's end

    torch.manual_seed(0)
    m = model()
    ddp = DistributedDataParallel(m)
    optimizer = ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, lr=0.05)
    step(ddp, optimizer)
    found = held({"model": ddp, "optimizer": optimizer})
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    directory = Path(folder) / str(dist.get_rank())
    directory.mkdir()
    fresh = DistributedDataParallel(model())
    other = ZeroRedundancyOptimizer(fresh.parameters(), torch.optim.Adam, lr=0.9)
    load({"model": fresh, "optimizer": other}, catalog_of_ranks(directory, ranks))
    step(ddp, optimizer, 1)
    step(fresh, other, 1)
    assert_same(fresh.state_dict(), ddp.state_dict())
    return found


@pytest.mark.filterwarnings("ignore")
def test_zero_redundancy_optimizers_bring_each_state_once(tmp_path: Path) -> None:
    ranks = on_ranks(2, zero_worker, str(tmp_path))
    torch.manual_seed(0)
    m = model()
    optimizer = torch.optim.Adam(m.parameters(), lr=0.05)
    step(m, optimizer)
    found = union(ranks)
    for name, parameter in m.named_parameters():
        torch.testing.assert_close(found[f"optimizer/{name}/exp_avg"], optimizer.state[parameter]["exp_avg"])
    assert sum(piece[0].endswith("exp_avg") for rank in ranks for piece in rank.pieces) == 4
