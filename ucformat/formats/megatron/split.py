"""How Megatron cuts each parameter over the tensor parallel group, and how the shards join again, as views.

A parameter that no rule knows is refused by name where it would have to be joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ucformat.errors import FormatError, UnsupportedError
from ucformat.pickles.unpickle import StoredTensor
from ucformat.views import View, concat

How = Callable[[Sequence[View]], View]
"""From the shards of a parameter, in the order of their ranks, to the parameter."""

REPLICATED, ROWS, COLUMNS, GATED = "replicated", "rows", "columns", "gated"

_RULES = (
    (r"(?:.*\.)?linear_fc1\.(?:weight|bias)", GATED),
    (r"(?:.*\.)?(?:linear_proj|linear_fc2)\.weight", COLUMNS),
    (r"(?:.*\.)?(?:linear_proj|linear_fc2)\.bias", REPLICATED),
    (
        r"(?:.*\.)?(?:linear_qkv|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj)\.(?:weight|bias)",
        ROWS,
    ),
    (r"(?:.*\.)?core_attention\.softmax_offset", ROWS),
    (r"(?:.*\.)?(?:word_embeddings|output_layer)\.(?:weight|bias)", ROWS),
    (r"(?:.*\.)?(?:position_embeddings|tokentype_embeddings)\.weight", REPLICATED),
    (r"(?:.*\.)?(?:linear_q_down_proj|linear_kv_down_proj)\.(?:weight|bias)", REPLICATED),
    (r"(?:.*\.)?router\..+|(?:.*\.)?shared_experts\.gate_weight", REPLICATED),
    (r"(?:.*\.)?[a-z_]*norm[a-z_]*\.(?:weight|bias)", REPLICATED),
    (r"(?:.*\.)?(?:rotary_emb|rotary_pos_emb)\.inv_freq", REPLICATED),
)
"""First match counts. An MLP's first layer is gated only where its shape says so: see `is_gated`."""
_COMPILED = [(re.compile(pattern), kind) for pattern, kind in _RULES]


def rule_of(name: str) -> str | None:
    """How a parameter is cut, or None when no rule says."""
    return next((kind for pattern, kind in _COMPILED if pattern.fullmatch(name)), None)


def how_to_join(name: str, tensors: Mapping[str, StoredTensor], shards: int, file: str) -> How:
    """How `shards` shards of a parameter join; `tensors` are those of one rank. Raises UnsupportedError, FormatError."""
    kind = rule_of(name)
    if kind == GATED:
        kind = GATED if is_gated(name, tensors, file) else ROWS
    if shards == 1:
        return _first
    if kind is None:
        raise UnsupportedError(
            file, f"nothing says how {name} of shape {list(tensors[name].shape)} is cut over {shards} tensor ranks"
        )
    return {REPLICATED: _first, ROWS: concat, COLUMNS: _columns, GATED: gated}[kind]


def is_replicated(name: str) -> bool:
    """Whether all tensor ranks hold the whole parameter."""
    return rule_of(name) == REPLICATED


def is_gated(name: str, tensors: Mapping[str, StoredTensor], file: str) -> bool:
    """Whether an MLP's first layer holds gate and up rows: then it has twice the rows that its second layer has columns.

    Raises FormatError when it has neither as many nor twice as many, or when there is no second layer.
    """
    rows = tensors[name].shape[0]
    second = tensors.get(re.sub(r"linear_fc1\.(?:weight|bias)$", "linear_fc2.weight", name))
    columns = second.shape[1] if second is not None and len(second.shape) == 2 else 0
    if not columns or rows not in (columns, 2 * columns):
        raise FormatError(file, f"{name} has {rows} rows, and the layer behind it {columns} columns")
    return rows == 2 * columns


def _first(views: Sequence[View]) -> View:
    return views[0]


def _columns(views: Sequence[View]) -> View:
    return concat(views, views[0].ndim - 1)


def gated(views: Sequence[View]) -> View:
    """Shards that each hold their gate rows and then their up rows: all gate rows, then all up rows."""
    halves = [view.split([view.shape[0] // 2] * 2) for view in views]
    return concat([half[0] for half in halves] + [half[1] for half in halves])


def grouped_expert(which: int, expert: int, experts: int, hidden: int, gate: bool, views: Sequence[View]) -> View:
    """One expert out of parameters that hold all local ones, transposed: `weight1` is [expert, hidden, rows of the first layer]
    whatever shape it is stored in, `weight2` [expert, columns of the second layer, hidden].
    """
    shards = []
    for view in views:
        width = view.numel // experts // hidden
        sizes = (experts, hidden, width) if which == 1 else (experts, width, hidden)
        shards.append(view.reshape(*sizes).select(0, expert).transpose())
    if which == 2:
        return _columns(shards)
    return gated(shards) if gate and len(shards) > 1 else concat(shards)


def by_head(version: float, parts: int, heads: int, view: View) -> View:
    """Rows of a rank's fused query, key and value as checkpoints below version 2 have them, in today's order: head by head,
    `parts` kinds of rows each.
    """
    width = view.shape[0] // (parts * heads)
    if version < 1:
        split = view.unflatten(0, (parts, heads, width))
        order = (1, 0, 2)
    else:
        split = view.unflatten(0, (heads, width, parts))
        order = (0, 2, 1)
    return split.permute(*order, *range(3, split.ndim)).flatten(0, 3)


def reordered(version: float, parts: int, heads: int, join: How) -> How:
    """The join of shards whose rows are in an old order."""
    each = partial(by_head, version, parts, heads)
    return lambda views: join([each(view) for view in views])
