"""One name for each parameter, however a release of Megatron or its layers calls it.

The name is that in the state dict of the whole model on one rank, with layer norms and experts as modules of their own:
`decoder.layers.<i>.input_layernorm.weight`, `decoder.layers.<i>.mlp.experts.local_experts.<e>.linear_fc1.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

LAYER = re.compile(r"(?P<stack>(?:.*?\.)?layers)\.(?P<index>\d+)\.(?P<rest>.+)", re.DOTALL)
"""A parameter of a layer; `stack` is the outermost list of layers."""

_OLD_PARTS = (
    (r"\binput_norm\.", "input_layernorm."),
    (r"\bpost_attention_(?:layer)?norm\.", "pre_mlp_layernorm."),
    (r"(?<=\.)attention\.", "self_attention."),
    (r"\bquery_key_value\.", "linear_qkv."),
    (r"\bkey_value\.", "linear_kv."),
    (r"(?<=self_attention\.)query\.", "linear_q."),
    (r"(?<=attention\.)dense\.", "linear_proj."),
    (r"\bdense_h_to_4h\.", "linear_fc1."),
    (r"\bdense_4h_to_h\.", "linear_fc2."),
    (r"\bfinal_norm\.", "final_layernorm."),
)
"""How releases before Megatron-core called modules, and how it calls them."""
_FUSED = (
    (r"\bself_attention\.linear_qkv\.layer_norm_(?=weight|bias)", "input_layernorm."),
    (r"\bself_attention\.linear_q_up_proj\.layer_norm_(?=weight|bias)", "self_attention.q_layernorm."),
    (r"\bself_attention\.linear_kv_up_proj\.layer_norm_(?=weight|bias)", "self_attention.kv_layernorm."),
    (r"\bmlp\.linear_fc1\.layer_norm_(?=weight|bias)", "pre_mlp_layernorm."),
)
"""Layer norms that Transformer Engine fuses into the layer behind them, and that every distributed checkpoint names so."""
_GROUPED = re.compile(r"(?P<before>.*\bmlp\.experts)\.(?P<layer>linear_fc[12])\.(?P<what>weight|bias)(?P<expert>\d+)")
"""Experts as Transformer Engine's grouped layers number them."""
_EXPERT = re.compile(r"(?P<before>.*\bmlp\.experts)\.local_experts\.(?P<expert>\d+)\.(?P<rest>.+)")
STACKED_EXPERTS = re.compile(r"(?P<before>.*\bmlp\.experts)\.weight(?P<which>[12])")
"""All local experts in one parameter, as the old grouped layers have them."""
_CORE_SUBSTITUTIONS = [(re.compile(pattern), text) for pattern, text in _FUSED]
_OLD_SUBSTITUTIONS = [(re.compile(pattern), text) for pattern, text in _OLD_PARTS]


def plain(name: str) -> str:
    """The name with layer norms as modules of their own and experts by number."""
    for pattern, text in _CORE_SUBSTITUTIONS:
        name = pattern.sub(text, name)
    grouped = _GROUPED.fullmatch(name)
    if grouped:
        name = f"{grouped['before']}.local_experts.{grouped['expert']}.{grouped['layer']}.{grouped['what']}"
    return name


def with_layer(name: str, first: Mapping[str, int]) -> str:
    """The name with the layer's number counted from the first of the model; `first` are those of this part, by stack."""
    match = LAYER.fullmatch(name)
    if match is None or match["stack"] not in first:
        return name
    return f"{match['stack']}.{int(match['index']) + first[match['stack']]}.{match['rest']}"


def expert_of(name: str) -> tuple[str, int, str] | None:
    """What stands before an expert's number, the number, and what stands behind it; None for other parameters."""
    match = _EXPERT.fullmatch(name)
    return (match["before"], int(match["expert"]), match["rest"]) if match else None


def with_expert(name: str, first: int) -> str:
    """The name with the expert's number counted from the first expert of the model."""
    found = expert_of(name)
    return name if found is None else f"{found[0]}.local_experts.{found[1] + first}.{found[2]}"


def flattened(tree: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Entries of a state dict by dotted name; releases before Megatron-core nest dicts."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            yield from flattened(value, name)
        else:
            yield name, value


def is_old(tree: Mapping[object, object]) -> bool:
    """Whether a state dict is one of the releases before Megatron-core."""
    return isinstance(tree.get("language_model"), dict)


def modern(name: str, *, two_stacks: bool) -> str:
    """The name that Megatron-core has for a parameter of an older release. `two_stacks`: an encoder and a decoder."""
    head, _, rest = name.partition(".")
    if head in ("word_embeddings_for_head", "word_embeddings"):
        return f"output_layer.{rest}"
    name = rest if head == "language_model" else name
    head, _, rest = name.partition(".")
    if head in ("encoder", "transformer") and not two_stacks:
        name = f"decoder.{rest}"
    for pattern, text in _OLD_SUBSTITUTIONS:
        name = pattern.sub(text, name)
    return name
