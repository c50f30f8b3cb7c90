"""Numbers of a model that names don't say: from a Hugging Face configuration, from Megatron's arguments, or given."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ucformat.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Numbers:
    """None where nothing says."""

    heads: int | None = None
    groups: int | None = None
    """Groups of queries that share keys and values."""
    head_dim: int | None = None
    vocab: int | None = None
    """Rows of the embedding that are tokens."""
    tied: bool | None = None
    """Whether embedding and output layer are one weight."""

    def updated(self, other: Numbers) -> Numbers:
        """With what `other` knows."""
        known = {name: value for name in _FIELDS if (value := getattr(other, name)) is not None}
        return replace(self, **known)


_FIELDS = ("heads", "groups", "head_dim", "vocab", "tied")


def from_config(config: Mapping[str, object]) -> Numbers:
    """Of a `config.json`."""
    heads = _count(config, "num_attention_heads", "n_head")
    hidden = _count(config, "hidden_size", "n_embd")
    head_dim = _count(config, "head_dim") or (hidden // heads if hidden and heads else None)
    tied = config.get("tie_word_embeddings")
    groups = _count(config, "num_key_value_heads") or heads
    return Numbers(heads, groups, head_dim, _count(config, "vocab_size"), tied if isinstance(tied, bool) else None)


def arguments(args: object) -> Mapping[str, object]:
    """Megatron's arguments by name, none where a checkpoint has none."""
    return vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}


def from_args(args: object) -> Numbers:
    """Of Megatron's arguments."""
    held = arguments(args)
    heads, hidden = _count(held, "num_attention_heads"), _count(held, "hidden_size")
    groups = _count(held, "num_query_groups") if held.get("group_query_attention", True) else heads
    head_dim = _count(held, "kv_channels") or (hidden // heads if hidden and heads else None)
    untied = held.get("untie_embeddings_and_output_weights")
    tied = not untied if isinstance(untied, bool) else None
    return Numbers(heads, groups or heads, head_dim, _count(held, "vocab_size"), tied)


def parse(text: str, where: str) -> tuple[str, Numbers]:
    """`llama`, or with numbers: `llama:heads=32,groups=8,head_dim=128,vocab=32000`. Raises UnsupportedError."""
    name, _, rest = text.partition(":")
    given: dict[str, int] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in _FIELDS[:-1] or not value.isdecimal() or not int(value):
            raise UnsupportedError(where, f"{part!r} is no number of a model family (known: {', '.join(_FIELDS[:-1])})")
        given[key] = int(value)
    return name, Numbers(given.get("heads"), given.get("groups"), given.get("head_dim"), given.get("vocab"))


def _count(held: Mapping[str, object], *names: str) -> int | None:
    found = (held.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)
