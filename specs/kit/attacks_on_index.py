"""Attacks on the index: its columns, and its header."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from specs.kit.attack import ACCEPTED, INDEX, attack, broken, flipped
from specs.kit.golden import BASIC
from specs.kit.write import Column, Tree, write


def columns(clause: str, about: str, expect: str = "format", **changed: Any) -> None:
    """The index with columns changed: a function of the numbers, or of the whole column where it takes three."""

    def change(found: dict[str, Column]) -> None:
        for key, how in changed.items():
            name = key.replace("__", ".")
            new = how(*found[name])
            if new is None:
                del found[name]
            else:
                found[name] = new

    broken(clause, about, expect, INDEX, columns=change)


def numbers(change: Callable[[list[int]], list[int]], dtype: str | None = None) -> Callable[[str, list[int], list[int]], Column]:
    def apply(old: str, shape: list[int], column: list[int]) -> Column:
        new = change(list(column))
        return dtype or old, shape if len(new) == len(column) else [len(new), *shape[1:]], new

    return apply


def put(at: int, number: int, dtype: str | None = "U64") -> Callable[[str, list[int], list[int]], Column]:
    return numbers(lambda column: [*column[:at], number, *column[at + 1 :]], dtype)


def indices() -> None:
    basic = write(BASIC)
    attack("index.digest", "a bit of the header flipped", "checksum", flipped(basic, INDEX, 30), where=INDEX)
    attack("index.digest", "a bit of a column flipped", "checksum", flipped(basic, INDEX, len(basic[INDEX]) - 1), where=INDEX)
    for name in ("tensor.name", "tensor.ndim", "tensor.fragments", "fragment.start", "fragment.length"):
        columns("index.columns", f"no {name}", "format", **{name.replace(".", "__"): lambda *_: None})
    columns("index.columns", "a column of signed numbers", tensor__ndim=lambda dtype, shape, column: ("I8", shape, column))
    columns("index.columns", "more fragments than rows", tensor__fragments=numbers(lambda c: [c[0] + 1, *c[1:]]))
    columns("index.columns", "fewer fragments than rows", tensor__fragments=numbers(lambda c: [*c[:-1], c[-1] - 1]))
    columns("index.columns", "more lengths than there are", tensor__ndim=numbers(lambda c: [c[0] + 1, *c[1:]]))
    columns("index.columns", "names that are longer than their text", tensor__name_bytes=numbers(lambda c: [c[0] + 1, *c[1:]]))
    columns("index.columns", "a count too many", tensor__dtype=numbers(lambda c: [*c, 0]))
    columns("index.columns", "a row too many in one column", fragment__start=numbers(lambda c: [*c, 4096]))
    columns("index.columns", "boxes without dimensions", fragment__offset=lambda d, s, c: (d, [len(c)], c))

    def widened(fill: int) -> Callable[[str, list[int], list[int]], Column]:
        def apply(dtype: str, shape: list[int], column: list[int]) -> Column:
            return dtype, [shape[0], 65], [n for i in range(shape[0]) for n in (*column[2 * i : 2 * i + 2], *[fill] * 63)]

        return apply

    columns("index.columns", "boxes of 65 dimensions", fragment__offset=widened(0), fragment__length=widened(1))
    columns("index.names", "a name twice", tensor__name=numbers(lambda c: list(b"model/bmodel/b")))
    columns("index.names", "names in another order", tensor__name=numbers(lambda c: list(b"model/wmodel/b")))
    columns("index.names", "a name that is not UTF-8", tensor__name=numbers(lambda c: [*c[:-1], 0xFF]))
    columns("index.names", "half a character in a name", tensor__name=numbers(lambda c: [*c[:-3], 0xED, 0xA0, 0x80]))
    broken("index.dtype", "an unknown dtype", "format", INDEX, index_note=lambda n: n.update(dtypes=["BF16", "F12"]))
    columns("index.dtype", "a code without a name", tensor__dtype=put(1, 2, None))
    broken("index.dtype", "no dtypes", "format", INDEX, index_note=lambda n: n.pop("dtypes"))
    for shape, what in (
        ([1 << 30, 1 << 30], "2^60 items"),
        ([1 << 63, 1], "a length of 2^63"),
        ([1 << 32, 1 << 32], "2^64 items"),
        ([1 << 40] * 2, "2^80 items"),
    ):
        columns("index.size", what, tensor__shape=numbers(lambda c, shape=shape: [c[0], *shape], "U64"))  # type: ignore[misc]
    columns("index.box", "a box that ends outside of its tensor", fragment__offset=put(4, 5, None))
    columns("index.box", "a box that begins outside of its tensor", fragment__offset=put(4, 6, None))
    columns("index.box", "an empty box", fragment__length=put(4, 0, None))
    columns("index.box", "an offset of 2^63 - 1", fragment__offset=put(4, (1 << 63) - 1))
    columns("index.box", "an offset of 2^64 - 1", fragment__offset=put(4, (1 << 64) - 1))
    columns("index.box", "a length of 2^63", fragment__length=put(5, 1 << 63))
    columns("index.box", "an offset in a dimension that its tensor does not have", fragment__offset=put(1, 1, None))
    columns("index.box", "a length in a dimension that its tensor does not have", fragment__length=put(1, 2, None))
    columns("index.shard", "a shard that does not exist", fragment__shard=put(1, 1, None))
    columns("index.shard", "shard 2^32", fragment__shard=put(1, 1 << 32))
    columns("index.shard", "shard 2^64 - 1", fragment__shard=put(1, (1 << 64) - 1))
    for at, what in (
        (0, "the header"),
        (4095, "a byte before the data"),
        (8192 - 15, "a byte of the table"),
        ((1 << 64) - 1, "byte 2^64 - 1"),
        ((1 << 63) - 16, "near 2^63"),
    ):
        columns("index.bytes", f"a fragment at {what}", fragment__start=put(2, at))
    columns("index.shared", "two fragments at one place", fragment__start=numbers(lambda c: [c[0], c[2], c[2]]))
    columns("index.shared", "two fragments that share bytes", fragment__start=numbers(lambda c: [c[0], c[1], c[2] - 4]))

    def dropped(found: dict[str, Column]) -> None:
        for name, keep in (
            ("tensor.fragments", [1, 1]),
            ("fragment.shard", None),
            ("fragment.start", None),
            ("fragment.offset", None),
            ("fragment.length", None),
        ):
            dtype, shape, column = found[name]
            found[name] = (dtype, shape, keep) if keep else (dtype, [2, *shape[1:]], column[: 2 * math.prod(shape[1:])])

    broken("read.coverage", "rows that no fragment holds", "coverage", INDEX, columns=dropped)
    columns("read.coverage", "no fragments at all, of an enormous tensor", "coverage", tensor__shape=numbers(lambda c: [c[0], 1 << 50, 8], "U64"))  # fmt: skip
    columns(
        "read.overlap",
        "rows that two fragments hold",
        "overlap",
        fragment__offset=put(4, 3, None),
        tensor__shape=numbers(lambda c: [c[0], 5, 8]),
    )


def index_headers() -> None:
    def header(clause: str, about: str, change: Callable[[Tree], object], expect: str = "format") -> None:
        broken(clause, about, expect, INDEX, index_header=change)

    def raw(clause: str, about: str, change: Callable[[bytes], bytes], expect: str = "format") -> None:
        broken(clause, about, expect, INDEX, index_raw=change)

    def json_text(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
        """A change of the header's text that keeps its length, out of the spaces at its end."""

        def change(data: bytes) -> bytes:
            end = 8 + int.from_bytes(data[:8], "little")
            assert old in data[:end], old
            head = data[8:end].replace(old, new, 1).rstrip(b" ")
            return data[:8] + head + b" " * (end - 8 - len(head)) + data[end:]

        return change

    def length(n: int) -> Callable[[bytes], bytes]:
        return lambda data: n.to_bytes(8, "little") + data[8:]

    raw("header.length", "a header of 100,000,001 bytes", length(100_000_001))
    raw("header.length", "a header that is longer than the file", length(5000))
    raw("header.length", "a header of 2^64 - 1 bytes", length((1 << 64) - 1))
    raw("header.length", "a file of 7 bytes", lambda data: data[:7])
    raw("header.json", "an array", json_text(b'{"__meta', b'[{"__meta'))
    raw(
        "header.json",
        "a space before it",
        lambda data: (
            data[:8] + b" " + data[8 : 7 + int.from_bytes(data[:8], "little")] + data[8 + int.from_bytes(data[:8], "little") :]
        ),
    )
    raw("header.json", "not UTF-8", json_text(b"format", b"for\xffmat"))
    raw("header.json", "NaN", json_text(b'"tensor.ndim":{', b'"tensor.ndim":{"x":NaN,'))
    raw("header.twice", "an entry twice", json_text(b'"tensor.ndim":{', b'"tensor.ndim":{},"tensor.ndim":{'))
    raw("header.twice", "a member of an entry twice", json_text(b'"tensor.ndim":{', b'"tensor.ndim":{"dtype":"U8",'))
    raw("header.twice", "__metadata__ twice", json_text(b'{"__metadata__":', b'{"__metadata__":{},"__metadata__":'))
    header("header.ucf", "no metadata", lambda tree: tree.pop("__metadata__"))
    header("header.ucf", "no ucf metadata", lambda tree: tree["__metadata__"].pop("ucf"))
    header("header.ucf", "ucf metadata that is no JSON", lambda tree: tree["__metadata__"].update(ucf="["))
    header("header.ucf", "metadata that is no text", lambda tree: tree["__metadata__"].update(x=1))
    header("header.pt", "another format", lambda tree: tree["__metadata__"].update(format="np"), ACCEPTED)
    header("header.entry", "an unknown dtype", lambda tree: tree.update(x={"dtype": "F12", "shape": [0], "data_offsets": [0, 0]}))
    header("header.entry", "no dtype", lambda tree: tree.update(x={"shape": [0], "data_offsets": [0, 0]}))
    header(
        "header.entry", "65 dimensions", lambda tree: tree.update(x={"dtype": "U8", "shape": [0] * 65, "data_offsets": [0, 0]})
    )
    header("header.entry", "a byte count that is not that of the shape", lambda tree: tree["tensor.ndim"].update(shape=[3]))
    header(
        "header.entry", "a shape of true", lambda tree: tree.update(x={"dtype": "U8", "shape": [True], "data_offsets": [0, 1]})
    )
    header(
        "header.entry", "a negative length", lambda tree: tree.update(x={"dtype": "U8", "shape": [-1, 0], "data_offsets": [0, 0]})
    )
    header("header.entry", "three offsets", lambda tree: tree.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0, 0]}))
    header("header.entry", "half a byte of F4", lambda tree: tree.update(x={"dtype": "F4", "shape": [1], "data_offsets": [0, 0]}))
    header(
        "header.tiling", "entries that overlap", lambda tree: tree.update(x={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]})
    )
    header(
        "header.tiling",
        "an entry beyond the file",
        lambda tree: tree.update(x={"dtype": "U8", "shape": [4], "data_offsets": [9000, 9004]}),
    )
    raw("header.tiling", "bytes behind the last entry", lambda data: data + bytes(8))
    raw(
        "header.aligned",
        "data that starts at byte 4097",
        lambda data: (1 + int.from_bytes(data[:8], "little")).to_bytes(8, "little") + data[8:4096] + b" " + data[4096:],
        ACCEPTED,
    )

    def gap(data: bytes) -> bytes:
        return data + bytes(8)

    def moved(tree: Tree) -> None:
        last = max(tree, key=lambda name: tree[name].get("data_offsets", [-1]))
        tree[last]["data_offsets"] = [n + 8 for n in tree[last]["data_offsets"]]

    broken("header.tiling", "a gap before the last entry", "format", INDEX, index_raw=gap, index_header=moved)
