"""Folders below a model's directory that hold weights of their own: modules of sentence-transformers, parts of a pipeline.

Only those count that a file of the library names: a model that merely lies in a folder of another one is no part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ucformat.errors import FormatError, UnsupportedError
from ucformat.storage.store import Store, safe_path

PIPELINE = "model_index.json"
MODULES = "modules.json"
ROUTERS = ("router_config.json", "config.json")  # the second one was that of `Asym`, before there was a Router
_MAX_BYTES = 16 << 20  # of a file that names folders
_MAX_FOLDERS = 1000
_MAX_DEPTH = 4
_NUMBERED = re.compile(r"(.+)_\d{1,4}/")  # further ControlNets of one pipeline: controlnet, controlnet_1, …


def parts(store: Store, folder: str = "", depth: int = 1) -> tuple[str, ...]:
    """Folders that are parts of the model at `folder`, not `folder` itself; relative to `store`, without a `/` at the end.

    Whether there are weights in them is not looked at. Raises FormatError for a malformed file or one that leads elsewhere.
    """
    names = store.list(folder)
    found: set[str] = set()
    for name in _named(store, folder, names):
        if "/" in name or name + "/" in names:
            path = f"{folder}/{name}" if folder else name
            found.update((path, *(parts(store, path, depth + 1) if depth < _MAX_DEPTH else ())))
    if len(found) > _MAX_FOLDERS:
        raise UnsupportedError(f"{store.url}/{folder}", f"more than {_MAX_FOLDERS} folders are said to be parts of the model")
    return tuple(sorted(found))


def _named(store: Store, folder: str, names: Sequence[str]) -> Iterator[str]:
    """What the files in `folder` name as parts, relative to it."""
    prefix = folder + "/" if folder else ""
    if MODULES in names:
        modules = _json(store, prefix + MODULES)
        for module in modules if isinstance(modules, list) else ():
            path = module.get("path") if isinstance(module, dict) else None
            if isinstance(path, str) and path.strip("/"):
                yield safe_path(path.strip("/"), f"{store.url}/{prefix}{MODULES}")
    if PIPELINE in names:
        yield from _components(_json(store, prefix + PIPELINE), names, f"{store.url}/{prefix}{PIPELINE}")
    router = next((name for name in ROUTERS if name in names), None)
    if router is not None:
        config = _json(store, prefix + router, strict=router == ROUTERS[0])
        if isinstance(config, dict) and isinstance(config.get("types"), dict) and isinstance(config.get("structure"), dict):
            yield from (safe_path(name, f"{store.url}/{prefix}{router}") for name in config["types"])


def _components(index: object, names: Sequence[str], where: str) -> Iterator[str]:
    """The folders of a pipeline's components; of some there are several, with numbers."""
    if not isinstance(index, dict):
        return
    named = {key for key, value in index.items() if key and not key.startswith("_") and isinstance(value, list)}
    yield from (safe_path(name, where) for name in sorted(named))
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None and match[1] in named:
            yield name.rstrip("/")


def _json(store: Store, path: str, *, strict: bool = True) -> Any:
    """The content of a file; unless `strict`, None for one that says nothing of folders, being malformed."""
    size, where = store.size(path), f"{store.url}/{path}"
    if size > _MAX_BYTES:
        raise FormatError(where, f"{size} bytes: the limit is {_MAX_BYTES}")
    try:
        return json.loads(store.read(path).decode())
    except (ValueError, RecursionError) as error:
        if not strict:
            return None
        raise FormatError(where, f"malformed: {error}", 0, size) from error
