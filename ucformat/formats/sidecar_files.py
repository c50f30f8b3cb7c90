"""Files that travel with a model beside its weights: configuration, tokenizer, licence.

Without them a converted checkpoint is just numbers: `transformers` needs `config.json` to load it. Every writer of a
directory carries them: a Hugging Face directory keeps them at its top, any other format under `companions/`
(`prefix=PREFIX`), so that HF → native → DCP → HF still loads. Writers call, on one rank and before they commit,

    remarks = companions.carry(job.source, staging_store, companions.PREFIX, job.dtype)

which copies what `job.source` has (nothing when it is None or has none) and says what was left behind.
Weights are never companions, nor is anything that would run when it is merely loaded (pickles).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ucformat.formats import modelconfig
from ucformat.formats.native.manifest import MANIFEST, decode_record
from ucformat.formats.source import Source
from ucformat.storage.store import Store, safe_path

PREFIX = "companions/"
MAX_BYTES = 64 << 20  # per file; the largest tokenizers have about 35 MB, and more than this is data, not description

_NAMES = (
    "config.json",
    "*_config.json",  # generation, tokenizer, preprocessor, processor, sentence_bert, quantize…
    "config_*.json",  # config_sentence_transformers
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
    "*.model",  # sentencepiece
    "*.tiktoken",
    "modules.json",
    "model_index.json",
    "configuration*.py",
    "modeling*.py",
    "tokenization*.py",
)
_DOCUMENTS = ("README*", "LICENSE*", "LICENCE*", "NOTICE*")  # people write these, too: they travel, and are not thrown away
_PREFIX = re.compile(r"companions(\.\d+)?/")
_FOLDERS = "[0-9]*_*/"  # sentence-transformers' modules: 1_Pooling, 2_Normalize
_WEIGHTS = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.pkl")


@dataclass(frozen=True, slots=True)
class Companion:
    """One file: where it lies in the source's store, and its path relative to a model directory."""

    stored: str
    path: str
    size: int


def is_companion(name: str) -> bool:
    """Whether a file of this name (without folder) describes a model rather than holding its weights."""
    return _matches(name, _NAMES + _DOCUMENTS) and not _matches(name, _WEIGHTS)


def owner(names: Sequence[str]) -> Callable[[str], bool]:
    """Which paths in a directory with these `names` are companions of the checkpoint there, and go when it is replaced.

    As in `found`: those under `companions/` when it is there, else files of well-known names, but for documents, which stay
    until others of the same name come.
    """
    if any(map(_PREFIX.fullmatch, names)):
        return lambda path: _PREFIX.match(path) is not None

    def beside(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        near = not folder or ("/" not in folder and fnmatch.fnmatchcase(folder + "/", _FOLDERS))
        return near and is_companion(name) and not _matches(name, _DOCUMENTS)

    return beside


def found(source: Source) -> tuple[Companion, ...]:
    """The companions of a source of any format, sorted by path.

    Those that a commit record lists, or that lie under `companions/`, when there are any, else files of well-known names
    beside the checkpoint. A single file that is no safetensors has none: what lies beside a `.pt` in somebody's folder
    need not belong to it.
    """
    if source.file is not None and ".safetensors" not in source.file:
        return ()
    names = source.store.list()
    recorded = _recorded(source.store) if MANIFEST in names else []
    if recorded:
        paths = [(stored, stored.partition("/")[2]) for stored in recorded]
    elif PREFIX in names:
        paths = [(PREFIX + path, path) for path in walk(source.store, PREFIX)]
    else:
        top = [name for name in names if not name.endswith("/") and is_companion(name)]
        nested = [
            folder + name
            for folder in names
            if fnmatch.fnmatchcase(folder, _FOLDERS)
            for name in source.store.list(folder.rstrip("/"))
            if is_companion(name)
        ]
        paths = [(path, path) for path in (*top, *nested)]
    return tuple(Companion(stored, path, source.store.size(stored)) for stored, path in sorted(paths))


def carry(source: Source | None, store: Store, prefix: str = "", dtype: str | None = None) -> tuple[str, ...]:
    """Copy the companions of `source` to `prefix` (a folder's name and `/`) in `store`; remarks on those too large to be one.

    `dtype`: what the model's weights were converted to, which its configuration then says.
    """
    if source is None:
        return ()
    remarks: list[str] = []
    for item in found(source):
        if item.size > MAX_BYTES:
            remarks.append(f"{item.stored}: {item.size} bytes is too large for a companion file: not copied")
            continue
        data = source.store.read(item.stored)
        told = data if dtype is None or item.path != modelconfig.CONFIG else modelconfig.with_dtype(data, dtype)
        store.put(safe_path(prefix + item.path), told)
    return tuple(remarks)


def _recorded(store: Store) -> list[str]:
    """The companions that a native checkpoint was committed with: an interrupted replacement may have left others."""
    record = decode_record(store.read(MANIFEST), f"{store.url}/{MANIFEST}")
    return [item.file for item in record.companions]


def walk(store: Store, folder: str, depth: int = 2) -> Iterator[str]:
    """Paths of files below `folder`, relative to it, at most `depth` folders down; weights are never among them."""
    for name in store.list(folder.rstrip("/")):
        if not name.endswith("/"):
            if not _matches(name, _WEIGHTS):
                yield name
        elif depth > 1:
            yield from (name + below for below in walk(store, folder + name, depth - 1))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
