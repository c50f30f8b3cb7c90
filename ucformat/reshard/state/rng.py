"""Random number generators in a state: what they will give next is stored exactly, and set again in place."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ucformat.errors import UnsupportedError

KIND, STATE = "generator", "state"


def is_generator(x: object) -> bool:
    """`torch.Generator`, numpy's `Generator`, bit generators and `RandomState`, `random.Random`."""
    return isinstance(x, (torch.Generator, np.random.BitGenerator)) or type(x) in {
        np.random.Generator,
        np.random.RandomState,
        random.Random,
    }


def state_of(x: Any) -> dict[str, Any]:
    """The kind of the generator, and its state as plain values, tensors and arrays."""
    if isinstance(x, torch.Generator):
        state: Any = x.get_state()
    elif isinstance(x, random.Random):
        state = x.getstate()
    elif isinstance(x, np.random.RandomState):
        state = x.get_state(legacy=False)
    else:
        state = _bits(x).state
    return {KIND: _kind(x), STATE: state}


def check(x: Any, stored: object, path: str) -> None:
    """Raise UnsupportedError when `stored` is no state of a generator of the same kind."""
    if not isinstance(stored, dict) or set(stored) != {KIND, STATE}:
        raise UnsupportedError(path, f"a {_kind(x)} here, and stored is no state of a generator: store and load the same kind")
    if stored[KIND] != _kind(x):
        raise UnsupportedError(path, f"a {_kind(x)} here, and a {stored[KIND]} is stored: make a generator of that kind")


def restore(x: Any, stored: Any) -> None:
    """Set the state of `x`. Raises UnsupportedError when it does not take it."""
    check(x, stored, _kind(x))
    state = stored[STATE]
    try:
        if isinstance(x, torch.Generator):
            x.set_state(state)
        elif isinstance(x, random.Random):
            x.setstate(state)
        elif isinstance(x, np.random.RandomState):
            x.set_state(_with_arrays(state))
        else:
            _bits(x).state = _with_arrays(state)
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise UnsupportedError(_kind(x), f"can't be set to the state that is stored: {error}") from error


def _with_arrays(state: Any) -> Any:
    """`state` with arrays where a `torch.save` file, which holds no arrays, has tensors."""
    if isinstance(state, dict):
        return {key: _with_arrays(item) for key, item in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state


def _bits(x: Any) -> Any:
    return x.bit_generator if isinstance(x, np.random.Generator) else x


def _kind(x: Any) -> str:
    """Which state fits: that of a CUDA generator does not fit one of the CPU, nor PCG64's Philox."""
    if isinstance(x, torch.Generator):
        return f"torch.Generator({x.device.type})"
    if isinstance(x, random.Random):
        return "random.Random"
    name = f"numpy.random.{type(x).__name__}"
    return f"{name}({type(_bits(x)).__name__})" if isinstance(x, np.random.Generator) else name
