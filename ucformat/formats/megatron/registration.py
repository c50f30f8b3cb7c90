"""The order in which Megatron-core's modules register their parameters: distributed checkpoints don't say, and buffers follow it.

Two things are left open, and tried in turn: whether layer norms are fused into the layer behind them (then they come right
before its weight), and how experts are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ucformat.formats.megatron.names import LAYER, expert_of

_OUTSIDE = ("embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings")
_BEHIND = ("final_layernorm", "final_norm", "mtp", "output_layer")
_LAYER_ORDER = (
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "fused input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_cross_attn_layernorm",
    "cross_attention",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)

Experts = Literal["sequential", "grouped", "stacked"]
"""One expert after another; the first layers of all, then the second ones; each layer of all as one parameter, transposed."""


@dataclass(frozen=True, slots=True)
class Order:
    """One of the orders that are possible."""

    fused: bool
    experts: Experts

    def sorted(self, names: Iterable[str]) -> list[str]:
        """Parameters of a model part in this order. Those that are not known come behind the others of their layer."""
        return sorted(names, key=self._key)

    def _key(self, name: str) -> tuple[object, ...]:
        match = LAYER.fullmatch(name)
        if match is None or match["stack"].startswith("mtp"):
            outside = _index(_OUTSIDE, name) if name.startswith("embedding.") else len(_OUTSIDE) + 1
            behind = next((i for i, part in enumerate(_BEHIND) if part in name.split(".")), len(_BEHIND))
            return outside, behind, 0, 0, (0, 0), _last(name), name
        rest = match["rest"]
        at = _index(_LAYER_ORDER, rest)
        if self.fused and rest.startswith("input_layernorm."):
            at = _LAYER_ORDER.index("fused input_layernorm")
        found = expert_of(name)
        expert = (0, 0)
        if found is not None:
            second = int("linear_fc2" in found[2])
            expert = (found[1], second) if self.experts == "sequential" else (second, found[1])
        return len(_OUTSIDE), 0, int(match["index"]), at, expert, _last(name), name


def orders(*, experts: bool) -> Sequence[Order]:
    """All orders that are possible, the most common first."""
    kinds: tuple[Experts, ...] = ("sequential", "grouped", "stacked") if experts else ("sequential",)
    return [Order(fused, kind) for kind in kinds for fused in (True, False)]


def _index(parts: Sequence[str], name: str) -> int:
    return next((i for i, part in enumerate(parts) if name == part or name.startswith(f"{part}.")), len(parts))


def _last(name: str) -> int:
    """Weights come before biases."""
    return int(name.endswith(".bias"))
