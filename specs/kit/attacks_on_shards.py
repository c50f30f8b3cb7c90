"""Attacks on shards and slots, and what careless writers do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

from specs.kit.attack import ACCEPTED, INDEX, SHARD, attack, broken, edited, flipped, record_of, without
from specs.kit.golden import BASIC, Golden, slots
from specs.kit.write import Files, Hooks, Tree, compact, seal, tensor, write, write_slot


def shards() -> None:
    basic = write(BASIC)
    for at, what in ((4096, "the first byte of data"), (4096 + 201, "a byte of a tensor"), (8191, "a byte of padding")):
        attack("block.digest", f"a bit flipped: {what}", "checksum", flipped(basic, SHARD, at, 128), where=SHARD)
    swapped = dataclasses.replace(BASIC, tensors={"big": tensor("U8", (8192,), 1)})

    def swap(_: int, words: list[int]) -> None:
        words[0], words[1] = words[1], words[0]

    attack(
        "block.digest",
        "two words of the table exchanged",
        "checksum",
        write(dataclasses.replace(swapped, fields={}), Hooks(table=swap)),
        where=SHARD,
    )
    attack("table.digest", "a bit of the table flipped", "checksum", flipped(basic, SHARD, 8192), where=SHARD)
    attack("table.digest", "a bit behind the last block's word flipped", "checksum", flipped(basic, SHARD, 12287), where=SHARD)

    def dirty(_: int, words: list[int]) -> None:
        words[-1] = 7

    broken("table.padding", "words behind the last block that are not 0", ACCEPTED, SHARD, table=dirty)
    broken("table.padding", "a table that fills no page", ACCEPTED, SHARD, table=lambda _, words: words.pop())

    def header(clause: str, about: str, change: Callable[[Tree], object], expect: str = ACCEPTED, do: str = "read") -> None:
        broken(clause, about, expect, SHARD, do, shard_header=lambda _, tree: change(tree))

    def exchanged(tree: Tree) -> None:
        """The two parts of a tensor the other way round, by what the header says: data and note stay."""
        one, other = "model/w[0:4, 0:8]", "model/w[4:6, 0:8]"
        tree[one]["data_offsets"], tree[other]["data_offsets"] = [64, 192], [0, 64]

    header("rebuild.same", "two parts exchanged: the index does not say what the shard says", exchanged)
    header("header.pt", "no format in the metadata", lambda tree: tree["__metadata__"].pop("format"))
    header("rebuild.same", "padding that looks like a tensor", lambda tree: tree.update(pad=tree.pop("__ucf__.pad")))
    header("shard.reserved", "the table under another name", lambda tree: tree.update(blocks=tree.pop("__ucf__.blocks")))
    header("header.ucf", "no ucf metadata", lambda tree: tree["__metadata__"].pop("ucf"))
    header("header.ucf", "ucf metadata that is no JSON", lambda tree: tree["__metadata__"].update(ucf="{"))
    header(
        "header.ucf", "no ucf metadata, and the index is lost", lambda tree: tree["__metadata__"].pop("ucf"), "format", "rebuild"
    )
    header(
        "header.entry",
        "a dtype that does not exist, and the index is lost",
        lambda tree: tree["model/b"].update(dtype="F12"),
        "format",
        "rebuild",
    )
    header("header.tiling", "an entry less, and the index is lost", lambda tree: tree.pop("model/b"), "format", "rebuild")
    flip = flipped(basic, SHARD, 40)
    attack(
        "rebuild.header", "a bit of the header flipped, and the index is lost", "checksum format", flip, do="rebuild", where=SHARD
    )

    def note(clause: str, about: str, change: Callable[[Tree], object], expect: str = "format") -> None:
        broken(clause, about, expect, SHARD, "rebuild", note=lambda _, tree: change(tree["entries"]))

    part = "model/w[4:6, 0:8]"
    note("rebuild.box", "a box outside of the shape", lambda e: e[part].update(offset=[5, 0]))
    note("rebuild.box", "a box of other dimensions", lambda e: e[part].update(offset=[4]))
    note("rebuild.box", "another dtype than the entry's", lambda e: e[part].update(dtype="F64"))
    note("rebuild.box", "an unknown dtype", lambda e: e[part].update(dtype="F7"))
    note("rebuild.agree", "another shape than another entry says", lambda e: e[part].update(shape=[7, 8]), "conflict")
    note(
        "rebuild.agree",
        "another dtype than another entry says",
        lambda e: e[part].update(dtype="F32", tensor="model/b", offset=[0, 0], shape=[2, 8]),
        "conflict",
    )
    note("rebuild.tile", "a box that another entry has, too", lambda e: e[part].update(offset=[2, 0]), "overlap coverage")
    note(
        "rebuild.tile",
        "a shape that the boxes do not fill",
        lambda e: [one.update(shape=[8, 8]) for one in e.values()],
        "coverage",
    )


def snapshots(golden: Mapping[str, Golden]) -> None:
    draft, whole = slots(20)
    record_path, slot_path = "rank-00001/slot-0.json", "rank-00001/slot-0.safetensors"

    def slot(clause: str, about: str, files: Files, expect: str = "not-a-checkpoint", where: str = record_path) -> None:
        attack(clause, about, expect, files, base="snapshot", where=where)

    def changed(change: Callable[[Tree], object], rank: int = 1) -> Files:
        path = f"rank-{rank:05d}/slot-0.json"
        tree = json.loads(record_of(whole[path]))
        change(tree)
        return {**whole, path: seal(compact(tree))}

    slot("version.complete", "a rank without a version", without(whole, record_path), where="")
    slot("version.complete", "a world of three ranks", {**slots(20, world=3)[1]}, where="")
    slot("version.mixed", "ranks of two starts of the job", changed(lambda r: r.update(run="b")), where="")
    slot("version.mixed", "ranks at two steps", changed(lambda r: r.update(step=21)), where="")
    slot("slot.ignored", "a damaged record", flipped(whole, record_path, 100))
    slot("slot.ignored", "a record of a later version", edited(whole, record_path, lambda d: d.replace(b'"1.0"', b'"2.0"', 1)))
    for key, wrong in [
        ("rank", 2), ("rank", 0), ("world", 1), ("file", "slot-1.safetensors"), ("file", "../rank-00001/slot-0.safetensors"), ("size", 8192),
        ("step", -1), ("step", "20"), ("block_bytes", 0), ("data_start", 0), ("values", None), ("table_digest", "x"), ("coords", [1]),
    ]:  # fmt: skip
        if key == "values":
            slot("slot.ignored", "a record without values", changed(lambda r: r.pop("values")))
        else:
            slot("slot.ignored", f"{key} is {wrong!r}", changed(lambda r, key=key, wrong=wrong: r.update({key: wrong})))  # type: ignore[misc]
    slot("slot.ignored", "a slot that is cut short", edited(whole, slot_path, lambda d: d[:-1]))
    slot("slot.ignored", "a slot that is not there", without(whole, slot_path))
    slot("slot.header", "a bit of the header flipped", flipped(whole, slot_path, 20), where=slot_path)
    slot("slot.match", "other blocks than the header says", changed(lambda r: r.update(block_bytes=8192)), where=slot_path)
    slot("slot.digest", "a bit of data flipped", flipped(whole, slot_path, 4096), "checksum", slot_path)
    slot("slot.digest", "a bit of the table flipped", flipped(whole, slot_path, 8192), "checksum", slot_path)
    slot("version.equal", "ranks with two learning rates", changed(lambda r: r["values"].update(step=21)), where="")
    slot("version.equal", "ranks with 1 and 1.0", changed(lambda r: r["values"].update(step=20.0)), where="")
    slot("version.equal", "lists of other lengths", changed(lambda r: r["values"].update(list=["same"])), where="")
    slot(
        "version.equal", "other policies", changed(lambda r: r["values"]["rng"]["$rank_local"].update(policy="modulo")), where=""
    )
    slot("version.aliases", "a name tied to two tensors", changed(lambda r: r.update(aliases={"tied": "model/b"})), where="")
    slot("alias.target", "an alias of nothing", changed(lambda r: r.update(aliases={"other": "model/x"})), where="")
    one_less = dataclasses.replace(
        draft,
        tensors={
            **draft.tensors,
            "model/w": dataclasses.replace(draft.tensors["model/w"], boxes=draft.tensors["model/w"].boxes[:1]),
        },
    )
    twice = dataclasses.replace(
        draft,
        tensors={
            **draft.tensors,
            "model/w": dataclasses.replace(draft.tensors["model/w"], boxes=((0, (0, 0), (4, 8)), (1, (3, 0), (3, 8)))),
        },
    )
    for other, about in ((one_less, "rows that no rank holds"), (twice, "a row that two ranks hold")):
        fields = json.loads(record_of(whole[record_path]))
        kept = {key: fields[key] for key in ("step", "world", "values", "mesh", "coords", "created", "run")}
        slot("version.tile", about, {**whole, **write_slot(other, 1, kept)}, where="")


def writers() -> None:
    """What readers need not see, and a validator must."""
    reserved = dataclasses.replace(BASIC, tensors={**BASIC.tensors, "__ucf__.x": tensor("U8", (4,), 9)})
    attack("name.reserved", "a tensor with a reserved name", ACCEPTED, write(reserved), where=INDEX)
    packed = dataclasses.replace(BASIC, tensors={**BASIC.tensors, "f6": tensor("F6_E2M3", (2, 4), 9)})

    def half(_: int, tree: Tree) -> None:
        tree["f6"] = {"dtype": "U8", "shape": [2, 4], "data_offsets": tree["f6"]["data_offsets"]}

    attack("dtype.packed", "items of F6 that are no whole groups", ACCEPTED, write(packed, Hooks(shard_header=half)), where=INDEX)
    broken("shard.order", "small items before large ones", ACCEPTED, SHARD, order=lambda _, held: held.reverse())
