"""Optimizers as torch means them: their own state dicts and hooks, groups, lists, and states of another optimizer."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ucformat
from tests.reshard.ranks import same
from ucformat.errors import NamesMismatchError, ShapeMismatchError, UnsupportedError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2) -> None:
    for i in range(steps):
        model.zero_grad()
        (model(torch.full((2, 3), i + 1.0)) ** 2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def first(model: nn.Sequential) -> torch.Tensor:
    return next(model.parameters())


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def assert_equal(a: Any, b: Any, at: str = "") -> None:
    assert type(a) is type(b), at
    if isinstance(a, torch.Tensor):
        assert same(a, b), at
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for key in a:
            assert_equal(a[key], b[key], f"{at}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{at}/{i}")
    else:
        assert a == b, at


def test_hooks_on_state_dicts_are_run(tmp_path: Path) -> None:
    calls: list[str] = []

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.register_state_dict_pre_hook(lambda o: calls.append("save, before"))
        optimizer.register_state_dict_post_hook(lambda o, held: {**held, "clock": [len(calls), torch.ones(2)]})
        optimizer.register_load_state_dict_pre_hook(lambda o, held: calls.append(f"load, before: {held['clock'][0]}"))
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append("load, after"))
        return optimizer

    model, fresh = net(), net()
    optimizer, other = hooked(model), hooked(fresh)
    train(model, optimizer)
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizer})
    assert calls == ["save, before"]
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": other})
    assert calls[-2:] == ["load, before: 1", "load, after"]
    train(model, optimizer, steps=3)
    train(fresh, other, steps=3)
    assert same(first(model), first(fresh))


class Counting(torch.optim.SGD):
    """Keeps what torch's `state_dict` does not know of."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.updates = state_dict.pop("updates")
        super().load_state_dict(state_dict)


def test_an_optimizers_own_state_dict_is_what_is_stored(tmp_path: Path) -> None:
    model, fresh = net(), net()
    optimizer, other = (Counting(m.parameters(), lr=0.1, momentum=0.9) for m in (model, fresh))
    train(model, optimizer)
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizer})
    assert "optimizer/0.weight/momentum_buffer" in ucformat.open(str(tmp_path / "ck"))
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": other})
    assert other.updates == 2
    assert_equal(other.state_dict(), optimizer.state_dict())
    plain = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(NamesMismatchError, match="_extra_state"):
        ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": plain})


class Lookahead(torch.optim.Optimizer):
    """Skips `super().__init__`, and its state dict is not in torch's form."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow, "fast": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow = state_dict["slow"]
        self.inner.load_state_dict(state_dict["fast"])


def test_a_state_dict_of_another_form_is_stored_as_it_is(tmp_path: Path) -> None:
    model, fresh = net(), net()
    optimizer, other = (Lookahead(torch.optim.Adam(m.parameters())) for m in (model, fresh))
    train(model, optimizer)
    for slow in optimizer.slow:
        slow += 1
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizer})
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": other})
    assert_equal(other.state_dict(), optimizer.state_dict())


def test_a_list_with_an_optimizer_of_another_form_is_several(tmp_path: Path) -> None:
    model, fresh = net(), net()
    optimizers, others = (
        [torch.optim.Adam(m[0].parameters(), lr=rate), Lookahead(torch.optim.SGD(m[2].parameters(), lr=0.1))]
        for m, rate in ((model, 0.3), (fresh, 0.4))
    )
    train(model, *optimizers)
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizers})
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": others})
    for a, b in zip(optimizers, others, strict=True):
        assert_equal(a.state_dict(), b.state_dict())


class Bare(torch.optim.Optimizer):
    """Neither is an optimizer nor says so."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def test_a_wrapper_that_shows_no_state_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="optimizer: Bare is an Optimizer without state"):
        ucformat.save(str(tmp_path / "ck"), {"optimizer": Bare(torch.optim.Adam(net().parameters()))})


def groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    return [
        {"params": list(model.parameters()), "weight_decay": decay},
        {"params": [], "lr": decay / 2, "weight_decay": decay / 4},
        {"params": [], "lr": decay / 3},
    ]


def test_hyper_parameters_of_groups_without_parameters_are_restored(tmp_path: Path) -> None:
    model, fresh = net(), net()
    optimizer = torch.optim.AdamW(groups(model, 0.5))
    other = torch.optim.AdamW(groups(fresh, 0.1))
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizer})
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": other})
    assert_equal(other.state_dict(), optimizer.state_dict())


def test_a_group_without_parameters_that_nothing_stored_belongs_to_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, fresh = net(), net()
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)})
    alone: list[dict[str, Any]] = [{"params": list(fresh.parameters())}, {"params": []}]
    other = torch.optim.SGD(alone, lr=0.1)
    with caplog.at_level(logging.WARNING, "ucformat"):
        ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": other})
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.1]
    assert "optimizer: group 1 has no parameters" in caplog.text


def muon_and_adamw(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=lr),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=lr / 2),
    ]


def test_a_list_of_optimizers_of_other_kinds_is_one_optimizer(tmp_path: Path) -> None:
    model, fresh = net(), net()
    optimizers, others = muon_and_adamw(model, 0.1), muon_and_adamw(fresh, 0.9)
    train(model, *optimizers)
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizers})
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": others})
    for a, b in zip(optimizers, others, strict=True):
        assert_equal(a.state_dict(), b.state_dict())
    train(model, *optimizers, steps=3)
    train(fresh, *others, steps=3)
    assert same(first(model), first(fresh))


def test_tensor_hyper_parameters_that_groups_share_are_set_apart(tmp_path: Path) -> None:
    model, fresh = net(), net()
    a, b = ([list(m[i].parameters()) for i in (0, 2)] for m in (model, fresh))
    optimizer = torch.optim.AdamW([{"params": a[0], "lr": torch.tensor(0.5)}, {"params": a[1], "lr": torch.tensor(0.25)}])
    one = torch.tensor(0.1)
    other = torch.optim.AdamW([{"params": b[0], "lr": one}, {"params": b[1], "lr": one}])
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizer})
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": other})
    assert [float(group["lr"]) for group in other.param_groups] == [0.5, 0.25]


def saved(path: Path, kind: type[torch.optim.Optimizer], model: nn.Module, **options: Any) -> str:
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer)
    return ucformat.save(str(path), {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize(
    ("stored", "live", "names"),
    [
        (torch.optim.SGD, torch.optim.Adam, "momentum_buffer"),
        (torch.optim.Adam, torch.optim.Adafactor, "row_var"),
        (torch.optim.Adafactor, torch.optim.Adam, "row_var"),
        (torch.optim.RMSprop, torch.optim.Adadelta, "acc_delta"),
    ],
)
def test_states_of_another_optimizer_are_refused_and_nothing_changes(
    stored: type[torch.optim.Optimizer], live: type[torch.optim.Optimizer], names: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "ck", stored, net(), lr=0.1, **({"momentum": 0.9} if stored is torch.optim.SGD else {}))
    fresh = net()
    other = live(fresh.parameters(), lr=0.1)  # type: ignore[call-arg]
    before, weights = state_of(other), copy.deepcopy(fresh.state_dict())
    with pytest.raises(UnsupportedError, match=f"optimizer/0.weight.*{names}.*another optimizer"):
        ucformat.load(path, into={"model": fresh, "optimizer": other})
    assert_equal(other.state_dict(), before)
    assert_equal(fresh.state_dict(), weights)
    train(fresh, other)


def test_flat_states_are_not_taken_for_factored_ones(tmp_path: Path) -> None:
    """Adafactor of ZeRO or FSDP1 sees flat parameters, and keeps a variance for every element."""
    state = {f"{name}": {"step": torch.tensor(2.0), "variance": torch.ones_like(p)} for name, p in net().named_parameters()}
    reference = torch.optim.Adafactor(net().parameters())
    hyper = {**reference.state_dict()["param_groups"][0], "params": list(state)}
    ucformat.save(str(tmp_path / "ck"), {"model": net(), "optimizer": {**state, "param_groups": [hyper]}})
    fresh = net()
    with pytest.raises(UnsupportedError, match=r"variance.*flat \(ZeRO, FSDP1\)"):
        ucformat.load(str(tmp_path / "ck"), into={"model": fresh, "optimizer": torch.optim.Adafactor(fresh.parameters())})


def test_a_refused_load_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", torch.optim.Adam, net())
    wider = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    for optimizer in (torch.optim.Adam(wider.parameters()), torch.optim.Adam(wider.parameters(), amsgrad=True)):
        with pytest.raises(ShapeMismatchError):
            ucformat.load(path, into={"model": wider, "optimizer": optimizer})
        assert not optimizer.state
        train(wider, optimizer)


def test_parameters_that_were_added_later_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", torch.optim.Adam, net())
    model = nn.Sequential(*net(), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(NamesMismatchError, match=r"optimizer/3\.bias, optimizer/3\.weight"):
        ucformat.load(path, into={"model": model, "optimizer": optimizer})
    assert not optimizer.state
    ucformat.load(path, into={"model": model, "optimizer": optimizer}, strict=False)
    assert len(optimizer.state) == 4


def test_states_of_unfrozen_parameters_begin_anew(tmp_path: Path) -> None:
    model, fresh = net(), net()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    path = saved(tmp_path / "ck", torch.optim.Adam, model)
    other = torch.optim.Adam(fresh.parameters())
    train(fresh, other)
    ucformat.load(path, into={"model": fresh, "optimizer": other})
    assert len(other.state) == 2
    train(fresh, other)
    assert len(other.state) == 4


class OfMine(torch.optim.Optimizer):
    """Nobody knows what it keeps before its first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "memory": 0.9})


def test_hyper_parameters_of_another_optimizer_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path / "ck", torch.optim.RMSprop, net())
    fresh = net()
    with caplog.at_level(logging.WARNING, "ucformat"):
        ucformat.load(path, into={"model": fresh, "optimizer": OfMine(fresh.parameters())})
    assert "OfMine knows no alpha, centered" in caplog.text
    assert "stay as they are in group 0: memory" in caplog.text


def test_states_unlike_those_that_an_optimizer_has_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", torch.optim.RMSprop, net())
    fresh = net()
    optimizer = OfMine(fresh.parameters())
    optimizer.state[first(fresh)]["trace"] = torch.ones(4, 3)
    with pytest.raises(UnsupportedError, match=r"states square_avg, step, .*OfMine has trace: they are of another optimizer"):
        ucformat.load(path, into={"model": fresh, "optimizer": optimizer})


def test_hyper_parameters_that_are_not_stored_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    del optimizer.param_groups[0]["eps"]
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizer})
    with caplog.at_level(logging.WARNING, "ucformat"):
        ucformat.load(str(tmp_path / "ck"), into={"model": model, "optimizer": torch.optim.AdamW(model.parameters(), eps=0.1)})
    assert "stay as they are in group 0: eps" in caplog.text
