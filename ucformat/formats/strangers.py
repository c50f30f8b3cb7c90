"""What something is that no reader takes, in one line that says which folder to give, or which program to use, instead."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ucformat.errors import UcformatError
from ucformat.formats.source import Source
from ucformat.formats.target import shorten
from ucformat.storage.store import Store

_KINDS = {
    ".gguf": "a GGUF file of llama.cpp: convert the model it was made from, or save it from transformers "
    "(from_pretrained(folder, gguf_file=…), then save_pretrained)",
    ".ggml": "a GGML file of llama.cpp: convert the model it was made from",
    ".h5": "weights of TensorFlow or Keras: load them in transformers 4 with from_tf=True, and save them with save_pretrained",
    ".keras": "a Keras model: load it there and save its weights as safetensors",
    ".msgpack": "weights of Flax: load them in transformers 4 with from_flax=True, and save them with save_pretrained",
    ".onnx": "an ONNX graph: convert the model that it was exported from",
    ".tflite": "a TensorFlow Lite model: convert the model that it was exported from",
    ".nemo": "a NeMo archive: unpack it (tar -xf) and give the file or folder of weights in it",
}
_MAGIC = {b"GGUF": ".gguf", b"\x89HDF": ".h5"}
_TRAINER = re.compile(r"checkpoint-(\d{1,12})/")
_HUB = re.compile(r"(models|datasets|spaces)--.+/")
_BYTES = re.compile(r"global_step_\d{1,12}/")
_BYTECHECKPOINT = b"bytecheckpoint."  # how the classes in its metadata are called
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".distcp", "ucf.json", ".metadata")
_LOOKED_INTO = 64  # folders
_LEAD_BYTES = 256  # of a pickle: its class comes first


def describe(source: Source) -> str | None:
    """What `source` is, and what to give instead; None when that isn't known. Never raises on foreign input."""
    try:
        return _file(source.store, source.file) if source.file is not None else _directory(source.store)
    except UcformatError:
        return None


def _file(store: Store, name: str) -> str | None:
    lead = store.read(name, 0, min(4, store.size(name)))
    return _KINDS.get(_MAGIC.get(lead, _suffix(name)))


def _suffix(name: str) -> str:
    return "." + name.lower().rpartition(".")[2]


def _directory(store: Store) -> str | None:
    names = store.list()
    steps = sorted((int(match[1]) for name in names if (match := _TRAINER.fullmatch(name))), reverse=True)
    if steps:
        return f"the output directory of a Trainer: give one of the checkpoints in it, the newest is checkpoint-{steps[0]}"
    if {"snapshots/", "blobs/"}.issubset(names):
        return f"a model's folder in the cache of the Hub: give {_snapshot(store)}"
    cached = [name.rstrip("/") for name in names if _HUB.fullmatch(name)]
    if cached:
        return f"a cache of the Hub: give snapshots/<revision> in one of {shorten(cached)}"
    if "latest_checkpointed_iteration.txt" in names or {"model/", "extra_state/"}.issubset(names):
        inner = store if "model/" in names else next((store.sub(n.rstrip("/")) for n in names if _BYTES.fullmatch(n)), store)
        if _BYTECHECKPOINT in _lead(inner, "model/.metadata"):
            return "a ByteCheckpoint checkpoint: export it with its merge_bcp.py, and give the safetensors files"
    if {"weights/", "context/"}.issubset(names):
        return "a NeMo checkpoint: give the folder weights in it"
    if "model_config.yaml" in names and {"model_weights.ckpt", "model_weights/"} & set(names):
        return "an unpacked NeMo archive: give model_weights.ckpt or the folder model_weights in it"
    kinds = {_suffix(name): name for name in names if _suffix(name) in _KINDS}
    if kinds:
        suffix, name = min(kinds.items())
        return f"{name} is {_KINDS[suffix]}"
    inside = [
        name.rstrip("/") for name in names[:_LOOKED_INTO] if name.endswith("/") and _holds_weights(store.list(name.rstrip("/")))
    ]
    return f"its folders hold weights: give one of {shorten(inside)}" if inside else None


def _lead(store: Store, path: str) -> bytes:
    """The first bytes of a file, none where there is no such file."""
    return store.read(path, 0, min(_LEAD_BYTES, store.size(path))) if store.exists(path) else b""


def _snapshot(store: Store) -> str:
    """The revision that the cache takes for the main one, or any."""
    held = [name.rstrip("/") for name in store.list("snapshots")]
    main = store.read("refs/main").decode(errors="replace").strip() if store.exists("refs/main") else ""
    return f"snapshots/{main if main in held else held[-1] if held else '<revision>'}"


def _holds_weights(names: Sequence[str]) -> bool:
    return any(name.endswith(_WEIGHTS) for name in names)
