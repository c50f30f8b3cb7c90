"""Optimizer state of local parameters, before they are joined."""

from __future__ import annotations

from dataclasses import dataclass, field

from ucformat.formats.megatron.joins import Shard
from ucformat.views import View

_BUFFERS = ("expert_bias", "inv_freq", "local_tokens_per_expert")
"""Entries of a state dict that are no parameters."""


@dataclass(slots=True)
class FlatState:
    """State of local parameters, found in the ranks' files: kind → shard → view."""

    views: dict[str, dict[Shard, View]] = field(default_factory=dict)

    def add(self, kind: str, shard: Shard, view: View) -> None:
        self.views.setdefault(kind, {})[shard] = view


def is_parameter(name: str) -> bool:
    """Whether an entry of a state dict is a parameter, and no buffer."""
    return name.rpartition(".")[2] not in _BUFFERS
