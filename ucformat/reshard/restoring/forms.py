"""Which states an optimizer keeps for a parameter, and whether stored ones are of that form.

torch's optimizers are known by name; of others, what a live one already holds tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ucformat.catalog import TensorSpec
from ucformat.errors import ShapeMismatchError, UnsupportedError
from ucformat.naming import MASTER
from ucformat.reshard.state.module import Owned
from ucformat.reshard.state.optimizer import Named

SCALARS = frozenset({"step", "eta", "mu", "mu_product"})

_FORMS: dict[str, tuple[str, ...]] = {
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adafactor": ("step", "row_var", "col_var"),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "ASGD": ("step", "eta", "mu", "ax"),
    "Muon": ("momentum_buffer",),
    "NAdam": ("step", "exp_avg", "exp_avg_sq", "mu_product"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg", "momentum_buffer", "grad_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SGD": ("momentum_buffer",),
    "SparseAdam": ("step", "exp_avg", "exp_avg_sq"),
}
"""What torch's optimizers keep for each parameter. LBFGS keeps lists for all of them together."""

_ONLY_WITH = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered", "momentum_buffer": "momentum"}
"""States that must be there only where a hyper-parameter is set."""


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that does the steps: wrappers that skip `super().__init__` have another one, and no state of their own."""
    while "state" not in optimizer.__dict__:
        inner = [x for x in map(optimizer.__dict__.get, ("optimizer", "optim")) if isinstance(x, torch.optim.Optimizer)]
        if not inner:
            break
        optimizer = inner[0]
    return optimizer


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(innermost(optimizer)).__module__.startswith("torch.optim")


def check(
    item: Named,
    parameter: torch.Tensor,
    owned: Owned,
    hyper: Mapping[str, Any],
    stored: Mapping[str, TensorSpec | None],
) -> None:
    """Compare the stored states of one parameter, tensors with their specs, with what its optimizer can go on from.

    `hyper` are the hyper-parameters that it will have. Raises UnsupportedError naming the states, ShapeMismatchError.
    """
    names = stored.keys() - {MASTER}
    inner = innermost(item.optimizer)
    if not names or (item.through and inner is item.optimizer):  # its own load_state_dict or hooks see to it
        return
    if is_torchs(inner):
        wanted = _wanted(type(inner).__name__, parameter, owned, hyper)
        if wanted is not None:
            _compare(item, owned, inner, wanted, stored, hyper)
        return
    live = inner.state.get(parameter, {}).keys()
    if live and live - SCALARS and not names - SCALARS & live:
        raise UnsupportedError(
            f"{item.key}/{owned.fqn}",
            f"stored are the states {', '.join(sorted(names))}, {_called(inner)} has {', '.join(sorted(live))}: "
            "they are of another optimizer",
        )


def _wanted(kind: str, parameter: torch.Tensor, owned: Owned, hyper: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of the states that a torch optimizer may hold; None when they are no matter of one parameter."""
    names = _FORMS.get(kind)
    if names is None:
        return None
    shape = owned.leaf.shape
    if kind == "Adafactor" and parameter.dim() < 2:  # flat shards of FSDP1 among them
        return {"step": (), "variance": shape}
    if kind == "Adafactor":
        return {"step": (), "row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    return {name: () if name in SCALARS else shape for name in names}


def _compare(
    item: Named,
    owned: Owned,
    inner: torch.optim.Optimizer,
    wanted: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, TensorSpec | None],
    hyper: Mapping[str, Any],
) -> None:
    always = type(inner).__name__ != "SGD"  # which makes its momentum when it finds none
    needed = {name for name in wanted if name not in _ONLY_WITH or (always and hyper.get(_ONLY_WITH[name]))}
    if stored.keys() - wanted.keys() - {MASTER} or needed - stored.keys():
        raise UnsupportedError(
            f"{item.key}/{owned.fqn}",
            f"stored are the states {', '.join(sorted(stored))}, {_called(inner)} keeps {', '.join(sorted(wanted))} for such a "
            "parameter: they are of another optimizer, or of one whose parameters were flat (ZeRO, FSDP1)",
        )
    for name, shape in wanted.items():
        spec = stored.get(name)
        if spec is not None and spec.shape != shape and not (shape == () and spec.shape == (1,)):
            raise ShapeMismatchError(spec.name, spec.shape, shape)


def _called(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
