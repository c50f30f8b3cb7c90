"""Names of weight files: `<stem>.safetensors`, `<stem>-00001-of-00002.safetensors` and their index.

Each library looks for its own stem, so the one that a checkpoint was read under is remembered, and written again.
"""

from __future__ import annotations

import re

DEFAULT = "model"
STEMS = (
    "model",  # transformers, sentence-transformers, timm
    "diffusion_pytorch_model",  # diffusers
    "pytorch_model",
    "open_clip_model",  # OpenCLIP
    "adapter_model",  # PEFT
    "pytorch_lora_weights",  # diffusers' LoRA
    "consolidated",  # Mistral's own programs
)
"""Names that libraries look for, in order of preference, where a directory holds several sets of weights."""
ADAPTER = "adapter_model"
ADAPTER_CONFIG = "adapter_config.json"
NEVER_SHARDED = frozenset({"open_clip_model", "adapter_model", "pytorch_lora_weights"})
"""Their libraries read a single file only."""
UNDESCRIBED = frozenset({"pytorch_lora_weights"})
"""Their libraries need no configuration beside them."""

_PICKLED = {"pytorch_model": "model", "open_clip_pytorch_model": "open_clip_model"}  # stems of .bin files, where they differ
PICKLED_STEMS = ("pytorch_model", "diffusion_pytorch_model", "adapter_model", "open_clip_pytorch_model", "pytorch_lora_weights")
_VARIANT = re.compile(r"[A-Za-z0-9_]{1,40}")  # `fp16` in `diffusion_pytorch_model.fp16.safetensors`


def is_known(stem: str) -> bool:
    """Whether a library looks for weights of this name, possibly as a variant: `model.fp16`."""
    base, dot, variant = stem.partition(".")
    return base in STEMS and (not dot or _VARIANT.fullmatch(variant) is not None)


def of_pickled(stem: str) -> str:
    """The stem of safetensors files that a library looks for where it also takes `<stem>.bin`."""
    base, dot, variant = stem.partition(".")
    return _PICKLED.get(base, base) + dot + variant


def index_name(stem: str) -> str:
    """The index of a sharded set: `model.safetensors.index.json`, of a variant `model.safetensors.index.fp16.json`."""
    base, dot, variant = stem.partition(".")
    return f"{base}.safetensors.index{dot}{variant}.json"
