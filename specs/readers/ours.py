"""ucformat itself under the conformance kit: `python -m specs.readers.ours` answers its requests.

With `--without-torch`, torch can't be imported: reading checkpoints does not need it.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucformat import errors, formats, values
from ucformat.box import Box
from ucformat.catalog import Catalog
from ucformat.formats import native
from ucformat.formats.native.reindex import rebuilt
from ucformat.formats.native.shard import hex_digest
from ucformat.formats.source import locate
from ucformat.reshard.reading.lazy import read_bits

KINDS: dict[type[errors.UcformatError], str] = {
    errors.NotACheckpointError: "not-a-checkpoint",
    errors.MissingFileError: "missing",
    errors.VersionError: "version",
    errors.ChecksumError: "checksum",
    errors.FormatError: "format",
    errors.CoverageError: "coverage",
    errors.OverlapError: "overlap",
    errors.ValueConflictError: "conflict",
}


class Blocked:
    """Makes torch as absent as if it were not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def items_of(bits: NDArray[Any]) -> str:
    return np.ascontiguousarray(bits).tobytes().hex()


def companions(catalog: Catalog) -> dict[str, str]:
    found: dict[str, str] = {}
    if not native.is_committed(catalog.store):
        return found
    for item in native.read_record(catalog.store).companions:
        where, data = f"{catalog.store.url}/{item.file}", catalog.store.read(item.file)
        if len(data) != item.size:
            raise errors.FormatError(where, "another size")
        if hex_digest(data) != item.digest:
            raise errors.ChecksumError(where, 0, len(data))
        found[item.file.partition("/")[2]] = data.hex()
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "rebuild":
        catalog = rebuilt(native.find(locate(request["path"])))
    else:
        catalog = formats.open_catalog(request["path"])
    if request["do"] == "slice":
        box = Box(tuple(request["offset"]), tuple(request["length"]))
        return {"items": items_of(read_bits(catalog, [(request["tensor"], box)])[0])}
    found = read_bits(catalog, [(spec.name, None) for spec in catalog.tensors])
    return {
        "tensors": {
            spec.name: {"dtype": spec.dtype, "shape": list(spec.shape), "items": items_of(bits)}
            for spec, bits in zip(catalog.tensors, found, strict=True)
        },
        "aliases": dict(catalog.aliases),
        "values": json.loads(values.encode(catalog.values)),
        "step": catalog.notes.step,
        "mesh": catalog.notes.mesh,
        "companions": companions(catalog),
        "verified": all(file.checks is not None for file in catalog.files),
    }


def main() -> None:
    logging.disable()
    if "--without-torch" in sys.argv:
        assert "torch" not in sys.modules
        sys.meta_path.insert(0, Blocked())
    for line in sys.stdin:
        try:
            out = answer(json.loads(line))
        except errors.UcformatError as error:
            out = {"error": KINDS.get(type(error), type(error).__name__), "message": str(error)}
        print(json.dumps(out), flush=True)  # noqa: T201  # the protocol


if __name__ == "__main__":
    main()
