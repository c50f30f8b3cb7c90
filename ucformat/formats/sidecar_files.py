"""Files that travel with a model beside its weights: configuration, tokenizer, program code, licence.

Without them a converted checkpoint is just numbers: `transformers` needs `config.json` to load it. Every writer of a
directory carries them: a Hugging Face directory keeps them in their places, any other format under `companions/`
(`prefix=PREFIX`), so that HF → native → DCP → HF still loads. `gather` decides what goes along and says what stays;
writers call, on one rank and before they commit,

    sidecar_files.carry(job.companions, staging_store, sidecar_files.PREFIX, job.dtype)

Everything small goes along that is neither weights nor a pickle nor a program in machine code.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ucformat.errors import ChecksumError, FormatError
from ucformat.formats import modelconfig
from ucformat.formats.native.manifest import MANIFEST, decode_record
from ucformat.formats.native.shard import hex_digest
from ucformat.formats.source import Source
from ucformat.formats.target import Companion, Companions, shorten
from ucformat.storage.store import Store, safe_path

PREFIX = "companions/"
MAX_BYTES = 64 << 20  # per file; the largest tokenizers have about 35 MB, and more than this is data, not description
MAX_FILES = 2000  # a model's folder has some dozens
_MAX_DEPTH = 4

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
    "*.spm",
    "*.codes",  # byte-pair encoding
    "*.tiktoken",
    "tekken.json",
    "modules.json",
    "model_index.json",
    "configuration*.py",
    "modeling*.py",
    "tokenization*.py",
)
"""Names that libraries look for: these belong to the checkpoint beside them, and are taken beside one of any format."""
_DOCUMENTS = ("README*", "LICENSE*", "LICENCE*", "NOTICE*")  # people write these, too: they travel, and are not thrown away
_PREFIX = re.compile(r"companions(\.[0-9A-Za-z_-]+)?/")
_FOLDERS = ("[0-9]*_*/", "additional_chat_templates/")  # sentence-transformers' modules, as 1_Pooling; transformers' templates
_WEIGHTS = (
    *("*.safetensors", "*.index.json", "*.index.*.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.hdf5", "*.keras"),
    *("*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.ggml", "*.pkl", "*.pickle", "*.joblib", "*.distcp", "*.nemo"),
    *("*.tflite", "*.pb", "*.mlmodel", "*.engine", "*.ot", "*.safetensors.*", ".metadata", "ucf.json", "ucf_notes.json"),
    *("*.so", "*.dll", "*.dylib", "*.exe", "*.pyc", "*.part"),
)
"""Weights, pickles, machine code, and the records of checkpoints; compared in lower case."""
_MAGIC = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"GGUF", b"\x89HDF")
"""How pickles, programs and weights begin whatever their names are."""
MODEL_SIGNS = ("*config*.json", "model_index.json", "modules.json", "params.json")
"""Files by which a directory is that of a model, rather than one in which weights happen to lie."""
_NO_PART = ("checkpoint-*/", "step-*/", "runs/", "logs/", "wandb/", "__pycache__/", ".*")  # what training and tools leave


def is_companion(name: str) -> bool:
    """Whether a file of this name (without folder) is known to describe a model rather than to hold its weights."""
    return _matches(name, _NAMES + _DOCUMENTS) and not _is_weights(name)


def owner(names: Sequence[str], folders: Sequence[str] = ()) -> Callable[[str], bool]:
    """Which paths in a directory with these `names` are companions of the checkpoint there, and go when it is replaced.

    Those under `companions/` when it is there, else files of well-known names at the top and in `folders`, which are parts of
    the model; but for documents, which stay until others of the same name come.
    """
    if any(map(_PREFIX.fullmatch, names)):
        return lambda path: _PREFIX.match(path) is not None

    def beside(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        near = not folder or folder in folders or ("/" not in folder and _matches(folder + "/", _FOLDERS))
        return near and (is_companion(name) or folder + "/" == _FOLDERS[1]) and not _matches(name, _DOCUMENTS)

    return beside


def gather(
    source: Source, folders: Sequence[str] | None = None, weights: Collection[str] = (), *, named: bool = False
) -> Companions:
    """What goes along with the checkpoint at `source`, and remarks on what stays.

    The files that a commit record lists, or that lie under `companions/`, when there are any. Else, where `folders` says which
    folders are parts of a model, everything in the model's directory that is small and describes it (`weights` are read already).
    Else files of well-known names. A single file that is no safetensors has none: what lies beside a `.pt` in somebody's folder
    need not belong to it. `named`: a user said that these are the model's files.
    """
    if source.file is not None and ".safetensors" not in source.file:
        return Companions()
    store, names = source.store, source.store.list()
    found = _recorded(store) if MANIFEST in names else []
    if not found and PREFIX in names:
        found = [_Found(PREFIX + path, path) for path in _walk(store, PREFIX)]
    if found:
        return _sort_out(store, found)
    of_model = named or any(_matches(name, MODEL_SIGNS) for name in names)
    if folders is None or not of_model:
        return _sort_out(store, [_Found(path, path) for path in _well_known(store, names)])
    paths, skipped = _of_model(store, folders)
    if source.file is not None:  # one of several sets of weights, or one part: the others are not asked for
        weights = {*weights, *(path for path in paths if _is_weights(path.rpartition("/")[2]))}
    # other sets of safetensors are the reader's to mention
    known = [path for path in paths if path not in weights and not path.endswith((".safetensors", ".safetensors.index.json"))]
    return _sort_out(store, [_Found(path, path) for path in known], skipped)


def check_names(companions: Companions, taken: Collection[str]) -> None:
    """Raise FormatError for a companion that would take the place of one of the files `taken`, or of a folder of theirs."""
    ours = {path.casefold() for path in taken}  # some file systems don't tell cases apart
    for item in companions.files:
        path = item.path.casefold()
        if path in ours or any(path.startswith(f"{one}/") or one.startswith(f"{path}/") for one in ours):
            where = "" if companions.store is None else f"{companions.store.url}/"
            raise FormatError(f"{where}{item.stored}", f"a companion file {item.path!r} would take the place of weights")


def carry(companions: Companions, store: Store, prefix: str = "", dtype: str | None = None) -> tuple[str, ...]:
    """Copy companions to `prefix` (a folder's name and `/`) in `store`; their paths there.

    `dtype`: what the model's weights were converted to, which its configuration then says. Raises ChecksumError for a file
    that is not the one that was committed.
    """
    written: list[str] = []
    for item in companions.files:
        assert companions.store is not None
        data = companions.store.read(item.stored)
        if item.digest and hex_digest(data) != item.digest:
            raise ChecksumError(f"{companions.store.url}/{item.stored}", 0, len(data), what="digest of the file")
        config = item.path.rpartition("/")[2] == modelconfig.CONFIG
        told = modelconfig.with_dtype(data, dtype) if config and dtype is not None else data
        written.append(safe_path(prefix + item.path))
        store.put(written[-1], told)
    return tuple(written)


def configs(companions: Companions) -> dict[str, dict[str, Any]]:
    """What each `config.json` says, by its folder (empty for the top)."""
    found: dict[str, dict[str, Any]] = {}
    for item in companions.files:
        folder, _, name = item.path.rpartition("/")
        if name == modelconfig.CONFIG and companions.store is not None:
            found[folder] = modelconfig.parse(companions.store.read(item.stored))
    return found


@dataclass(frozen=True, slots=True)
class _Found:
    """A file that may go along."""

    stored: str
    path: str
    digest: str = ""


def _recorded(store: Store) -> list[_Found]:
    """The companions that a native checkpoint was committed with: an interrupted replacement may have left others."""
    record = decode_record(store.read(MANIFEST), f"{store.url}/{MANIFEST}")
    return [_Found(item.file, item.file.partition("/")[2] or item.file, item.digest) for item in record.companions]


def _well_known(store: Store, names: Sequence[str]) -> Iterator[str]:
    """Files of well-known names, at the top and in well-known folders."""
    yield from (name for name in names if not name.endswith("/") and is_companion(name))
    for folder in names:
        if folder.endswith("/") and _matches(folder, _FOLDERS):
            yield from (folder + name for name in store.list(folder.rstrip("/")) if is_companion(name))


def _of_model(store: Store, parts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Paths of a model's files, and folders that are no part of it."""
    paths: list[str] = []
    skipped: list[str] = []

    def enter(folder: str, depth: int) -> None:
        for name in store.list(folder.rstrip("/")):
            if not name.endswith("/"):
                (skipped if name.startswith(".") else paths).append(folder + name)
            elif _goes_along(store, folder + name, parts) and depth < _MAX_DEPTH:
                enter(folder + name, depth + 1)
            else:
                skipped.append(folder + name)

    enter("", 0)
    return paths, skipped


def _goes_along(store: Store, folder: str, parts: Sequence[str]) -> bool:
    """Whether a folder belongs to the model: a part of it, or one without weights of its own."""
    if any((part + "/").startswith(folder) for part in parts):
        return True
    name = folder.rstrip("/").rpartition("/")[2] + "/"
    return not _matches(name, _NO_PART) and not any(_is_weights(inner) for inner in store.list(folder.rstrip("/")))


def _sort_out(store: Store, found: Sequence[_Found], skipped: Sequence[str] = ()) -> Companions:
    """Those that may travel, and remarks on the others."""
    kept: list[Companion] = []
    weights: list[str] = []
    large: list[str] = []
    for item in sorted(found, key=lambda item: item.path):
        name = safe_path(item.path, store.url).rpartition("/")[2]
        size = store.size(item.stored)
        if _is_weights(name) or store.read(item.stored, 0, min(size, 4)).startswith(_MAGIC):
            weights.append(item.path)
        elif size > MAX_BYTES or len(kept) >= MAX_FILES:
            large.append(f"{item.path} ({size:,} bytes)")
        else:
            kept.append(Companion(item.stored, item.path, size, item.digest))
    code = [item.path for item in kept if item.path.endswith(".py")]
    remarks = (
        *([f"not copied, being weights, pickles or machine code: {shorten(weights)}"] if weights else []),
        *([f"not copied, being too large (above {MAX_BYTES:,} bytes) or too many: {shorten(large)}"] if large else []),
        *([f"not copied, being no part of the model: {shorten(skipped)}"] if skipped else []),
        *([f"copied with the model, Python code that trust_remote_code=True would run: {shorten(code)}"] if code else []),
    )
    return Companions(store, tuple(kept), remarks)


def _walk(store: Store, folder: str, depth: int = _MAX_DEPTH) -> Iterator[str]:
    """Paths of files below `folder`, relative to it, at most `depth` folders down."""
    for name in store.list(folder.rstrip("/")):
        if not name.endswith("/"):
            yield name
        elif depth > 1:
            yield from (name + below for below in _walk(store, folder + name, depth - 1))


def _is_weights(name: str) -> bool:
    return _matches(name.lower(), _WEIGHTS)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
