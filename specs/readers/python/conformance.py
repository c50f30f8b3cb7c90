"""Answers the requests of the conformance kit (specs/conformance/README.md): `python -m specs.readers.python.conformance`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from specs.readers.python.ucf_json import RefusedError, need
from specs.readers.python.ucf_reader import Checkpoint, fetch, xxh
from specs.readers.python.ucf_snapshot import open_any


def companions(opened: Checkpoint) -> dict[str, str]:
    found = {}
    for item in opened.record.get("companions", []):
        data = fetch(opened.root / item["file"], size=item["size"])
        need(xxh(data) == item["digest"], f"{item['file']}: digest", "checksum")
        found[item["file"].partition("/")[2]] = data.hex()
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    opened = open_any(Path(request["path"]), rebuild=request["do"] == "rebuild")
    if request["do"] == "slice":
        return {"items": opened.read(request["tensor"], request["offset"], request["length"])[2].hex()}
    read = {name: opened.read(name) for name in opened.tensors}
    return {
        "tensors": {name: {"dtype": dtype, "shape": shape, "items": items.hex()} for name, (dtype, shape, items) in read.items()},
        "aliases": opened.aliases,
        "values": opened.values,
        "step": opened.record.get("step"),
        "mesh": opened.record.get("mesh", {}),
        "companions": companions(opened),
        "verified": opened.verified,
    }


def main() -> None:
    for line in sys.stdin:
        try:
            out = answer(json.loads(line))
        except RefusedError as error:
            out = {"error": error.kind, "message": str(error)}
        print(json.dumps(out), flush=True)  # noqa: T201  # the protocol


if __name__ == "__main__":
    main()
