"""torch, loaded when it is first used: looking into checkpoints and reading arrays of them do without, and start at once.

    from ucformat.lazy_torch import torch

Modules whose work is on live training state import torch itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError

if TYPE_CHECKING:
    import torch as torch  # noqa: PLC0414  # re-exported
else:

    class _Torch:
        """Stands for the module, and becomes as fast as it: what was asked for once is an attribute of its own."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(loaded(), name)
            setattr(self, name, found)
            return found

    torch = _Torch()


def loaded() -> Any:
    """The module. Raises UnsupportedError where it is not installed."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if (error.name or "torch").partition(".")[0] != "torch":
            raise
        raise UnsupportedError(
            "torch", "needed for this, and not installed: pip install torch, or read arrays: checkpoint[name].numpy[...]"
        ) from error
