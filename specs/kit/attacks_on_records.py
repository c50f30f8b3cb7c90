"""Attacks on paths, runs, envelopes and commit records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specs.kit.attack import (
    ACCEPTED,
    COMPANION,
    INDEX,
    RECORD,
    SHARD,
    attack,
    broken,
    edited,
    flipped,
    record,
    record_of,
    text,
    without,
)
from specs.kit.golden import BASIC, Golden
from specs.kit.write import seal, write


def files_and_paths() -> None:
    basic = write(BASIC)
    attack("file.commit", "nothing was committed", "not-a-checkpoint", without(basic, RECORD))
    for path in (INDEX, SHARD, COMPANION):
        attack("file.missing", f"a listed file is not there: {path}", "missing", without(basic, path), where=path)
    attack("file.size", "a shard that is cut short", "format", edited(basic, SHARD, lambda d: d[:-1]), where=SHARD)
    attack("file.size", "an index with bytes behind it", "format", edited(basic, INDEX, lambda d: d + b"\0"), where=INDEX)
    attack("file.size", "a companion that is longer", "format", edited(basic, COMPANION, lambda d: d + b" "), where=COMPANION)
    attack("companion.digest", "a companion with a bit flipped", "checksum", flipped(basic, COMPANION, 3), where=COMPANION)
    for path in (
        "",
        "/etc/passwd",
        "../other/00000.safetensors",
        "shards.3f9c2a71d04b/../../x",
        "./x",
        "a//b",
        "a\\b",
        "a\0b",
        "x/",
        ".",
    ):
        record("path.safe", f"a shard at {path!r}", lambda r, path=path: r["shards"][0].update(file=path))  # type: ignore[misc]
    record("path.safe", "the index outside of the checkpoint", lambda r: r["index"].update(file="../index.safetensors"))
    record("path.safe", "a companion outside of the checkpoint", lambda r: r["companions"][0].update(file="companions/../../x"))


def runs(golden: Mapping[str, Golden]) -> None:
    run, rolled = golden["run"].files, golden["run-rolled-back"].files
    newest = "step-123456789/ucf.json"
    attack("run.no-fallback", "the newest step is damaged", "checksum", flipped(run, newest, 80), base="run", where=newest)
    lost = next(path for path in run if path.startswith("step-123456789/") and path.endswith("index.safetensors"))
    attack("run.no-fallback", "the newest step has lost a file", "missing", without(run, lost), base="run", where=lost)
    kwargs: dict[str, Any] = {"base": "run-rolled-back", "where": "rollback.json"}
    attack(
        "run.rollback-damaged",
        "a bit flipped",
        "checksum",
        edited(rolled, "rollback.json", lambda d: d.replace(b"200", b"100", 1)),
        **kwargs,
    )
    for raw in (b'{"passed_over":7}', b'{"passed_over":[1.5]}', b"{}"):
        attack("run.rollback-damaged", f"says {raw.decode()}", "format", {**rolled, "rollback.json": seal(raw)}, **kwargs)


def envelopes() -> None:
    basic = write(BASIC)

    def sealed(clause: str, about: str, expect: str, change: Callable[[bytes], bytes]) -> None:
        attack(clause, about, expect, edited(basic, RECORD, change))

    sealed("envelope.json", "an empty file", "format not-a-checkpoint", lambda d: b"")
    sealed("envelope.json", "cut off", "format not-a-checkpoint", lambda d: d[: len(d) // 2])
    sealed("envelope.json", "an array", "format", lambda d: b"[" + d + b"]")
    sealed("envelope.json", "text behind it", "format", lambda d: d + b"{}")
    sealed("envelope.json", "bytes that are not UTF-8", "format checksum", lambda d: d.replace(b"0000", b"\xff\xfe00", 1))
    sealed("envelope.json", "a version that is a number", "format", lambda d: d.replace(b'"1.0"', b"1.0", 1))
    sealed("envelope.json", "no digest", "format", lambda d: d.replace(b'"digest"', b'"digist"', 1))
    sealed("envelope.json", "a digest in capitals", "format", lambda d: d[:22] + d[22:39].upper() + d[39:])
    sealed("envelope.json", "no record", "format", lambda d: d.replace(b'"record"', b'"records"', 1))
    sealed(
        "envelope.version",
        "a later major version of which nothing else is known",
        "version",
        lambda d: b'{"ucf":"2.0","all":["new"]}',
    )
    sealed("envelope.version", "a later major version", "version", lambda d: d.replace(b'"1.0"', b'"10.1"', 1))
    sealed(
        "envelope.version", "a later major version, damaged", "version", lambda d: d.replace(b'"1.0"', b'"3"', 1)[:-9] + b'x"}}\n'
    )
    sealed("envelope.version", "no number", "version", lambda d: d.replace(b'"1.0"', b'"one"', 1))
    sealed("envelope.digest", "a bit of the record flipped", "checksum", lambda d: d.replace(b'"step":3', b'"step":2', 1))
    sealed(
        "envelope.digest",
        "another digest",
        "checksum",
        lambda d: d.replace(b'"digest":"', b'"digest":"0', 1).replace(d[33:37], d[34:37], 1),
    )
    sealed("envelope.digest", "a member behind the record", "checksum format", lambda d: d[:-2] + b',"more":1}\n')
    sealed(
        "envelope.form",
        "members in another order",
        "format checksum accepted",
        lambda d: b'{"record":' + record_of(d) + b"," + d[1 : d.index(b',"record"')] + b"}\n",
    )
    spaced = seal(b" " + record_of(basic[RECORD]))
    attack("envelope.form", "white space between members", ACCEPTED, {**basic, RECORD: spaced})
    attack("envelope.form", "no newline at the end", ACCEPTED, edited(basic, RECORD, lambda d: d[:-1]))


def records() -> None:
    for key in ("index", "shards", "block_bytes", "values"):
        record("record.required", f"no {key}", lambda r, key=key: r.pop(key))  # type: ignore[misc]
    for key in ("file", "size", "data_start", "table_start", "header_digest", "table_digest"):
        record("record.required", f"a shard without {key}", lambda r, key=key: r["shards"][0].pop(key))  # type: ignore[misc]
    record("record.required", "an index without digest", lambda r: r["index"].pop("digest"))
    broken("record.types", "an array in place of the record", raw=lambda raw: b"[%s]" % raw)
    for key, wrong in [
        ("shards", {}), ("shards", [1]), ("index", "x"), ("block_bytes", "4096"), ("block_bytes", 4096.5), ("aliases", [["a", "b"]]),
        ("aliases", {"a": 1}), ("step", -1), ("step", "3"), ("step", 1.5), ("step", True), ("step", 1 << 63), ("mesh", {"dp": "2"}),
        ("origin", 1), ("remarks", "one"), ("remarks", [1]), ("origin_layout", {"a": 1}), ("companions", {}), ("created", 0),
        ("writer", None),
    ]:  # fmt: skip
        record("record.types", f"{key} is {wrong!r}", lambda r, key=key, wrong=wrong: r.update({key: wrong}))  # type: ignore[misc]
    for key, wrong in [
        ("size", -1),
        ("size", 1 << 63),
        ("data_start", 4096.0),
        ("header_digest", "xyz"),
        ("table_digest", None),
        ("file", 7),
    ]:
        about = f"{key} of a shard is {wrong!r}"
        record("record.types", about, lambda r, key=key, wrong=wrong: r["shards"][0].update({key: wrong}))  # type: ignore[misc]
    text("record.twice", "step twice", '"step":3,"aliases"', '"step":3,"step":3,"aliases"')
    text("record.twice", "values twice", '"values":', '"values":{},"values":')
    text("record.twice", "a member of a shard twice", '"data_start":4096', '"data_start":4096,"data_start":4096')
    text("record.twice", "an unknown member twice", '"step":3,"aliases"', '"x":1,"x":1,"step":3,"aliases"')
    for size in (0, 1, 4095, 4097):
        record("record.block-bytes", f"blocks of {size}", lambda r, size=size: r.update(block_bytes=size))  # type: ignore[misc]
    for key, wrong in [
        ("data_start", 0),
        ("data_start", 8193),
        ("table_start", 4095),
        ("table_start", 12288),
        ("table_start", 16384),
    ]:
        record("record.shard", f"{key} is {wrong}", lambda r, key=key, wrong=wrong: r["shards"][0].update({key: wrong}))  # type: ignore[misc]
    record("record.shard", "a table of broken words", lambda r: r["shards"][0].update(table_start=8188))
    record("alias.target", "an alias of nothing", lambda r: r.update(aliases={"model/tied": "model/x"}))
    record("alias.target", "an alias of an alias", lambda r: r.update(aliases={"a": "b", "b": "model/w"}))
    record("alias.name", "an alias with the name of a tensor", lambda r: r.update(aliases={"model/b": "model/w"}))
