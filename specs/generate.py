"""Writes specs/*.schema.json from the types that the code reads and writes: `python -m specs.generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ucformat.containers.envelope import VERSION, Envelope
from ucformat.formats.native.manifest import Record
from ucformat.formats.native.shard import ShardNote
from ucformat.formats.snapshot import SlotRecord
from ucformat.layout.language import Layout
from ucformat.values.decoding import TAGS

SCHEMA = Path(__file__).with_name("ucf.schema.json")
LAYOUT_SCHEMA = Path(__file__).with_name("layout.schema.json")


def schema() -> dict[str, Any]:
    """JSON Schema of `ucf.json`; `$defs` has `ShardNote`, of a shard's `__metadata__.ucf`, and `SlotFile`, of a slot's record."""
    _, found = msgspec.json.schema_components([Envelope, Record, ShardNote, SlotRecord], ref_template="#/$defs/{name}")
    defs: dict[str, Any] = dict(found)
    envelope = defs.pop("Envelope")
    defs["SlotFile"] = {
        **envelope,
        "title": "SlotFile",
        "description": "The file `slot-K.json`, in the envelope of `ucf.json`.",
        "properties": {**envelope["properties"], "record": {"$ref": "#/$defs/SlotRecord"}},
    }
    envelope["properties"]["record"] = {"$ref": "#/$defs/Record"}
    for record in ("Record", "SlotRecord"):
        defs[record]["properties"]["values"] = {"$ref": "#/$defs/Value"}
    defs["Value"] = _value()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"ucf.json, format version {VERSION}",
        **{key: envelope[key] for key in ("description", "type", "properties", "required")},
        "$defs": dict(sorted(defs.items())),
    }


def _value() -> dict[str, Any]:
    """A value tree: JSON, in which objects with one key out of the tags stand for what JSON lacks."""
    value = {"$ref": "#/$defs/Value"}
    return {
        "title": "Value",
        "description": "A value tree; section 6 of the specification says what each tag holds.",
        "anyOf": [
            {"type": ["null", "boolean", "number", "string"]},
            {"type": "array", "items": value},
            {"type": "object", "propertyNames": {"pattern": "^(?!\\$)"}, "additionalProperties": value},
            {
                "type": "object",
                "minProperties": 1,
                "maxProperties": 1,
                "propertyNames": {"enum": sorted(TAGS)},
                "additionalProperties": value,
            },
        ],
    }


def text() -> str:
    """The content of the schema file."""
    return json.dumps(schema(), indent=2) + "\n"


def layout_text() -> str:
    """The content of the schema file of layout files."""
    (_,), found = msgspec.json.schema_components([Layout], ref_template="#/$defs/{name}")
    defs: dict[str, Any] = dict(found)
    layout = {**defs.pop("Layout"), "title": "Layout file, version 1 of the language"}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**head, **layout, "$defs": dict(sorted(defs.items()))}, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text())
    LAYOUT_SCHEMA.write_text(layout_text())
