"""Calls that torch.compile does not trace: a compiled function has a graph break at each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Uncompiled(Generic[_P, _R]):
    """A function under `torch.compiler.disable`, which is asked for only when something is compiled.

    `disable` imports `torch._dynamo`, and that import keeps alive the process group that exists by then.
    """

    def __init__(self, function: Callable[_P, _R]) -> None:
        self._function: Callable[..., Any] = function
        self._disabled = False

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not self._disabled and "torch._dynamo" in sys.modules:
            self._function, self._disabled = torch.compiler.disable(self._function), True
        return self._function(*args, **kwargs)  # type: ignore[no-any-return]

    # what `disable` sets on a function: it is called, never traced into
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]
