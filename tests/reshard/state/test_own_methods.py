"""Modules with state-dict methods and hooks of their own are saved and loaded through these, as torch does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ucformat
from ucformat.errors import NamesMismatchError, ShapeMismatchError, UnsupportedError, ValueConflictError

Round = Callable[[nn.Module, nn.Module], nn.Module]


@pytest.fixture
def go(tmp_path: Path) -> Round:
    """Save one module as part of a model, and load it into another."""

    def both(saved: nn.Module, fresh: nn.Module) -> nn.Module:
        ucformat.save(str(tmp_path / "ck"), {"model": nn.Sequential(nn.Linear(2, 2), saved)}, overwrite=True)
        ucformat.load(str(tmp_path / "ck"), into={"model": nn.Sequential(nn.Linear(2, 2), fresh)})
        return fresh

    return both


class Counter(nn.Module):
    """Keeps state that is neither a parameter nor a buffer, as torchmetrics does."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.total = torch.zeros(2)
        self.seen: list[torch.Tensor] = []

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        out = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        out[f"{prefix}total"], out[f"{prefix}seen"] = self.total, list(self.seen)
        return out

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.total, self.seen = state_dict.pop(f"{prefix}total"), state_dict.pop(f"{prefix}seen")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_what_a_module_adds_to_its_state_dict_comes_back(go: Round) -> None:
    saved = Counter()
    saved.total += 5
    saved.seen += [torch.ones(2), torch.zeros(3)]
    fresh: Any = go(saved, Counter())
    assert torch.equal(fresh.w, saved.w)
    assert torch.equal(fresh.total, saved.total)
    assert [x.tolist() for x in fresh.seen] == [[1, 1], [0, 0, 0]]


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_metrics_that_are_persistent_go_on_counting(go: Round) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def metrics() -> Any:
        made = nn.ModuleDict({"mean": torchmetrics.MeanMetric(), "cat": torchmetrics.CatMetric()})
        for metric in made.values():
            metric.persistent(True)  # type: ignore[operator]
        return made

    saved = metrics()
    saved["mean"].update(torch.tensor([3.0, 5.0]))
    for x in ([1.0, 2.0], [4.0]):
        saved["cat"].update(torch.tensor(x))
    fresh: Any = go(saved, metrics())
    assert fresh["mean"].compute() == 4
    assert fresh["cat"].compute().tolist() == [1, 2, 4]


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.refresh()
        hooks: Any = self
        hooks.register_load_state_dict_post_hook(lambda module, keys: module.refresh())

    def refresh(self) -> None:
        self.cache = self.w.detach() * 2


def test_hooks_run_after_a_load(go: Round) -> None:
    saved = Cached()
    assert torch.equal(go(saved, Cached()).cache, saved.cache)  # type: ignore[arg-type]


class Swapping(nn.Module):
    """Hooks that store `a` and `b` under each other's name, `a` transposed; children are in it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.inner = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3)), nn.Linear(2, 2)
        hooks: Any = self
        hooks._register_state_dict_hook(self._exchange)
        hooks.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: self._exchange(module, state, prefix, None))

    @staticmethod
    def _exchange(module: Any, state: dict[str, Any], prefix: str, metadata: object) -> None:
        a, b = state[f"{prefix}a"], state[f"{prefix}b"]
        state[f"{prefix}a"], state[f"{prefix}b"] = b.t(), a.t()
        state[f"{prefix}inner.weight"] = state[f"{prefix}inner.weight"].flip(0)


def test_what_hooks_do_while_saving_is_undone_by_hooks_while_loading(go: Round) -> None:
    saved = Swapping()
    fresh = go(saved, Swapping())
    for name, tensor in saved.named_parameters():
        assert torch.equal(tensor, fresh.get_parameter(name)), name


class Versioned(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if (local_metadata.get("version") or 1) < 3 <= self._version:
            state_dict[f"{prefix}weight"] = -state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class NewerVersion(Versioned):
    _version = 3


def test_a_module_learns_the_version_that_was_stored(go: Round) -> None:
    saved = Versioned(2, 2)
    newer: Any = go(saved, NewerVersion(2, 2))
    assert torch.equal(newer.weight, -saved.weight)
    same: Any = go(newer, NewerVersion(2, 2))
    assert torch.equal(same.weight, newer.weight)


class Quantised(nn.Linear):
    """Adds to its state what nothing takes back, as Linear4bit of bitsandbytes does."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(1)


def test_state_that_nothing_takes_back_is_refused_by_name_and_changes_nothing(go: Round) -> None:
    saved, fresh = Quantised(2, 2), Quantised(2, 2)
    before = fresh.weight.clone()
    with pytest.raises(UnsupportedError, match=r"model/1\.weight\.absmax: Quantised"):
        go(saved, fresh)
    assert torch.equal(fresh.weight, before)


class Whole(nn.Module):
    """A model that overrides `load_state_dict`, which torch's users call."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.loads = nn.Parameter(torch.randn(3)), 0

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.loads += 1
        return super().load_state_dict(*args, **kwargs)


def test_the_models_own_load_state_dict_is_called(tmp_path: Path) -> None:
    saved, fresh = Whole(), Whole()
    ucformat.save(str(tmp_path / "ck"), {"model": saved})
    ucformat.load(str(tmp_path / "ck"), into={"model": torch.nn.parallel.DataParallel(fresh)})
    assert fresh.loads == 1
    assert torch.equal(saved.w, fresh.w)


class Picky(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        raise RuntimeError("not today")


def test_a_module_that_refuses_its_state_is_named(go: Round) -> None:
    with pytest.raises(UnsupportedError, match=r"model/1: Picky refused its state: RuntimeError: not today"):
        go(Picky(2, 2), Picky(2, 2))


class Growing(nn.Module):
    def __init__(self, n: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2))
        self.register_buffer("seen", torch.ones(n, dtype=dtype))


@pytest.mark.parametrize(("stored", "live"), [(4, 0), (0, 4)])
def test_a_buffer_of_another_size_is_refused_though_one_of_them_is_empty(go: Round, stored: int, live: int) -> None:
    fresh = Growing(live, torch.int64)
    before = fresh.w.clone()
    with pytest.raises(ShapeMismatchError, match="seen"):
        go(Growing(stored), fresh)
    assert torch.equal(fresh.w, before)


def test_an_empty_tensor_that_is_not_stored_is_missing(tmp_path: Path) -> None:
    ucformat.save(str(tmp_path / "ck"), {"model": {"w": torch.ones(2)}})
    with pytest.raises(NamesMismatchError, match="model/none"):
        ucformat.load(str(tmp_path / "ck"), into={"model": {"w": torch.ones(2), "none": torch.ones(0)}})


def test_observers_take_the_size_that_was_stored(go: Round) -> None:
    from torch.ao.quantization import PerChannelMinMaxObserver

    saved: Any = PerChannelMinMaxObserver()
    saved(torch.randn(4, 3))
    fresh = go(saved, PerChannelMinMaxObserver())
    assert torch.equal(fresh.min_val, saved.min_val)  # type: ignore[arg-type]


def test_counters_of_batch_norm_that_old_files_lack_stay_as_they_are(tmp_path: Path) -> None:
    saved, fresh = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    ucformat.save(str(tmp_path / "ck"), {"model": {k: v for k, v in saved.state_dict().items() if k != "num_batches_tracked"}})
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh})
    assert fresh.num_batches_tracked == 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = self.a
        self.c = nn.Linear(2, 2)


def test_tied_weights_that_are_stored_unequal_are_refused_before_anything_changes(tmp_path: Path) -> None:
    stored = {name: torch.full_like(x, i) for i, (name, x) in enumerate(Tied().state_dict().items())}
    ucformat.save(str(tmp_path / "ck"), {"model": stored})
    fresh = Tied()
    before = [x.clone() for x in fresh.state_dict().values()]
    with pytest.raises(ValueConflictError, match=r"model/b\.weight: tied to model/a\.weight .* on ranks 0"):
        ucformat.load(str(tmp_path / "ck"), into={"model": fresh})
    assert all(map(torch.equal, fresh.state_dict().values(), before))
    stored["b.weight"] = stored["a.weight"].clone()
    ucformat.save(str(tmp_path / "ck"), {"model": stored}, overwrite=True)
    ucformat.load(str(tmp_path / "ck"), into={"model": fresh})
    assert torch.equal(fresh.a.weight, stored["a.weight"])


class Broken:
    def state_dict(self) -> object:
        raise KeyError("epoch")

    def load_state_dict(self, state: object) -> None: ...


def test_an_objects_own_error_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"data/loader: Broken\.state_dict\(\) failed: KeyError: 'epoch'"):
        ucformat.save(str(tmp_path / "ck"), {"data": {"loader": Broken()}})
