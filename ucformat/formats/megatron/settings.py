"""What a run's arguments say. They are evidence where files leave something open, and are compared with what files show."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

from ucformat.pickles.unpickle import Inert

_INTERLEAVED = ("glu_interleave_size", "moe_glu_interleave_size", "moe_mlp_glu_interleave_size")
"""Arguments under which gate and up rows of an MLP alternate."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments by name; empty where a checkpoint has none."""

    held: Mapping[str, object] = field(default_factory=dict)

    @staticmethod
    def of(args: object) -> Settings:
        """Of the entry `args` of a checkpoint: a namespace, or whatever else a program kept there."""
        if isinstance(args, argparse.Namespace):
            return Settings(vars(args))
        if isinstance(args, Inert):
            return Settings(dict(args.attributes))
        return Settings({key: value for key, value in args.items() if isinstance(key, str)} if isinstance(args, dict) else {})

    def number(self, name: str) -> int | None:
        """A count of at least 1, or None where it isn't given."""
        value = self.held.get(name)
        return value if type(value) is int and value > 0 else None

    def flag(self, name: str) -> bool | None:
        """A yes or no, or None where it isn't given."""
        value = self.held.get(name)
        return value if isinstance(value, bool) else None

    @property
    def tied(self) -> bool | None:
        """Whether embedding and output layer share their weight."""
        untied = self.flag("untie_embeddings_and_output_weights")
        return None if untied is None else not untied

    @property
    def interleaved(self) -> str | None:
        """The argument that says that gate and up rows alternate, if any does."""
        return next((name for name in _INTERLEAVED if self.held.get(name)), None)
