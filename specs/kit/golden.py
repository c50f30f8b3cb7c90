"""The golden checkpoints: what is in each, which clauses it is about, and slices that readers are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specs.kit.write import Draft, Files, Hooks, Tensor, Tree, contents, seal, tensor, write, write_slot, xxh
from specs.readers.python.ucf_reader import BYTES

Slice = tuple[str, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Golden:
    """Files, and what a reader must find in them."""

    about: str
    clauses: tuple[str, ...]
    files: Files
    expected: Tree
    slices: tuple[Tree, ...] = ()
    rebuild: bool = True
    """Whether the same must come out without the index."""


def golden(about: str, clauses: str, draft: Draft, slices: Sequence[Slice] = (), hooks: Hooks = Hooks()) -> Golden:  # noqa: B008  # frozen
    asked = tuple(
        {"tensor": name, "offset": list(o), "length": list(n), "items": draft.tensors[name].cut(o, n).hex()}
        for name, o, n in slices
    )
    return Golden(about, tuple(clauses.split()), write(draft, hooks), contents(draft), asked)


BASIC = Draft(
    {
        "model/w": tensor("F32", (6, 8), 1, [(0, (0, 0), (4, 8)), (0, (4, 0), (2, 8))]),
        "model/b": tensor("BF16", (5,), 2),
    },
    {"step": 3, "lr": 0.5},
    {"step": 3, "aliases": {"model/tied": "model/w"}},
    {"config.json": b'{"hidden_size": 8}\n'},
)
"""Small, and with all that an attack may want to break."""


def dtypes() -> Golden:
    tensors: dict[str, Tensor] = {}
    for seed, dtype in enumerate(BYTES):
        rows = [] if dtype.startswith("F6_") else [(seed % 2, (0, 0), (2, 12)), (1 - seed % 2, (2, 0), (3, 12))]
        tensors[f"model/{dtype}"] = tensor(dtype, (5, 12), seed, rows)
    tensors |= {
        "model/scalar": tensor("F64", (), 90),
        "model/empty": tensor("I32", (0, 3), 91),
        "model/none": tensor("BF16", (2, 0), 92),
    }
    slices: list[Slice] = [(f"model/{dtype}", (1, 3), (3, 6)) for dtype in BYTES]
    draft = Draft(tensors, shard_names=("00000", "00001"))
    return golden(
        "every dtype, cut into rows over two shards; no dimensions, and dimensions of length 0", "rebuild.same", draft, slices
    )


def boxes() -> Golden:
    cut = [(2, (0, 0, 0), (1, 2, 9)), (0, (0, 2, 0), (1, 3, 9)), (1, (1, 0, 0), (3, 5, 4)), (2, (1, 0, 4), (3, 5, 1)),
           (0, (1, 0, 5), (2, 5, 4)), (1, (3, 0, 5), (1, 5, 3)), (2, (3, 0, 8), (1, 5, 1))]  # fmt: skip
    tensors = {
        "boxes": tensor("I16", (4, 5, 9), 1, cut),
        "many blocks": tensor("F32", (40, 70), 2, [(0, (0, 0), (39, 70)), (1, (39, 0), (1, 33)), (2, (39, 33), (1, 37))]),
        "byte by byte": tensor("U8", (7,), 3, [(i % 3, (i,), (1,)) for i in reversed(range(7))]),
        "zero-d": tensor("F16", (), 4, [(2, (), ())]),
    }
    slices: list[Slice] = [
        ("boxes", (0, 1, 2), (4, 3, 6)),
        ("boxes", (3, 4, 8), (1, 1, 1)),
        ("boxes", (1, 1, 0), (0, 2, 9)),
        ("many blocks", (14, 60), (3, 10)),
        ("many blocks", (38, 0), (2, 70)),
        ("byte by byte", (2,), (4,)),
        ("zero-d", (), ()),
    ]
    draft = Draft(tensors, shard_names=("00000", "00001", "00002"))
    return golden(
        "uneven boxes over three shards, fragments that span several checksummed blocks", "read.coverage", draft, slices
    )


def training() -> Golden:
    """The four kinds of state: a model, its optimizer, values of the loop, and what each rank has for itself."""
    rng = {"policy": "error", "coords": [{"dp": 0}, {"dp": 1}], "values": [{"$tensor": "rng/0"}, {"$tensor": "rng/1"}]}
    group = {"lr": 0.001, "betas": {"$tuple": [0.9, 0.95]}, "weight_decay": 0.0, "params": ["wte", "head"]}
    values = {
        "optimizer": {"param_groups": [group]},
        "scheduler": {"last_epoch": 100, "_last_lr": [0.001], "base_lrs": [0.01]},
        "trainer": {"$namespace": {"epochs": 3, "done": False}},
        "rng": {"$rank_local": rng},
        "history": [{"$array": "history/0"}, None],
    }
    halves = [(0, (0, 0), (5, 4)), (1, (5, 0), (4, 4))]
    tensors = {
        "model/wte": tensor("BF16", (9, 4), 1, halves),
        "optimizer/wte/exp_avg": tensor("F32", (9, 4), 2, halves),
        "optimizer/wte/exp_avg_sq": tensor("F32", (9, 4), 3, halves),
        "optimizer/wte/step": tensor("F32", (), 4),
        "rng/0": tensor("U8", (16,), 5, [(0, (0,), (16,))]),
        "rng/1": tensor("U8", (16,), 6, [(1, (0,), (16,))]),
        "history/0": tensor("F64", (3,), 7),
    }
    fields = {
        "aliases": {"model/head": "model/wte"}, "step": 100, "mesh": {"dp": 2}, "origin": "deepspeed",
        "remarks": ["made for the kit"],
        "origin_layout": {"hf:": "model"}, "created": "2026-01-31T12:00:00+00:00",
    }  # fmt: skip
    files = {
        "config.json": b'{"model_type": "tiny"}',
        "1_Pooling/config.json": b"{}",
        "merges.txt": b"",
        "tokenizer.model": bytes(range(256)),
    }
    draft = Draft(tensors, values, fields, files, ("00000", "00001"))
    return golden(
        "four kinds of state: model, optimizer, values, rank-local; tied weights; companions", "companion.digest", draft
    )


def deep(levels: int) -> object:
    tree: object = "bottom"
    for i in range(levels):
        tree = {"$tuple": [tree]} if i % 3 == 0 else {"$dict": [[i, tree]]} if i % 3 == 1 else [tree]
    return tree


def all_values() -> Golden:
    values = {
        "plain": [None, True, False, 0, -1, 9223372036854775807, -9223372036854775808, "", "text \u0000 \u2028 \U0001f600"],
        "floats": [0.0, -0.0, 1.0, 5e-324, 1.7976931348623157e308, 0.1, 1e22, 123456789012345680.0, -2.5e-7],
        "order": {"z": 1, "a": 2, "": {}, "10": 3, "9": 4, "__proto__": 5},
        "empty": [[], {}, {"$tuple": []}, {"$ordered": []}, {"$set": []}, {"$frozenset": []}, {"$bytes": ""}],
        "tuple": {"$tuple": [1, "a", {"$tuple": [2.0]}]},
        "dict": {"$dict": [[0, "a"], ["$b", None], [{"$tuple": [1, 2]}, {"$dict": [[None, 1]]}], [{"$frozenset": [1]}, 2]]},
        "alike": {"$dict": [["1", 1], [1, 2], [{"$bytes": "MQ=="}, 3], [1.5, 4]]},
        "nans": {"$set": [{"$float": "nan"}, {"$tuple": [{"$float": "nan"}]}]},
        "ordered": {"$ordered": [["b", 1], ["a", {"$ordered": [[2, 1]]}]]},
        "sets": [{"$set": ["a", 1, None]}, {"$frozenset": [2.5, {"$tuple": []}]}],
        "big": [{"$int": "0x8000000000000000"}, {"$int": "-0x123456789abcdef0123456789"}],
        "odd floats": [{"$float": "nan"}, {"$float": "inf"}, {"$float": "-inf"}],
        "complex": [{"$complex": [1.0, -2.5]}, {"$complex": [{"$float": "nan"}, -0.0]}],
        "bytes": [{"$bytes": "AAH/"}, {"$str": "7aCA"}],
        "numpy": [
            {"$numpy": ["float32", "AACAPw=="]}, {"$numpy": ["bool", "AQ=="]}, {"$numpy": ["int8", "/w=="]},
            {"$numpy": ["uint16", "//8="]},
            {"$numpy": ["float16", "ADw="]}, {"$numpy": ["complex128", "AAAAAAAA8D8AAAAAAAAAwA=="]},
            {"$numpy": ["uint64", "//////////8="]},
        ],
        "torch": [{"$size": [2, 3]}, {"$size": []}, {"$dtype": "bfloat16"}, {"$device": "cuda:1"}, {"$device": "cpu"}],
        "paths": [{"$path": ["PurePosixPath", "a/b"]}, {"$path": ["PureWindowsPath", "C:\\a"]}],
        "namespace": {"$namespace": {"lr": 0.1, "nested": {"$namespace": {}}}},
        "references": [{"$tensor": "references/0"}, {"$array": "references/1"}],
        "rank-local": [
            {"$rank_local": {"policy": "error", "coords": [{"dp": 0}, None], "values": [7, [8]]}},
            {"$rank_local": {"policy": "modulo", "coords": [None], "values": [{"a": 1}], "first": 3}},
        ],
        "opaque": {"$opaque": {"class": "os.system", "state": {"$tuple": ["echo never run"]}}},
        "deep": deep(100),
    }  # fmt: skip
    draft = Draft({"references/0": tensor("I64", (2,), 1), "references/1": tensor("I64", (1,), 2)}, values)
    return golden(
        "every kind of value, numbers at the ends of their ranges, members in an order of no meaning",
        "values.inert values.depth",
        draft,
    )


def names() -> Golden:
    odd = [
        "__metadata__",
        "a/b%2Fc%25",
        "w",
        "w[0:1]",
        "ä/\u6f22/\U0001f600",
        'quote"back\\slash',
        "tab\tnewline\n",
        "~",
        "\u007f",
        "\uffff",
    ]
    tensors = {name: tensor("I8", (3,), i) for i, name in enumerate(odd)}
    tensors["w"] = tensor("I8", (3,), 50, [(0, (0,), (1,)), (0, (1,), (2,))])
    tensors["w[0:1]"] = tensor("I8", (1,), 51)
    return golden("names of every kind, one of them the key of another one's part", "name.unicode", Draft(tensors))


def parts() -> Golden:
    """One writer that needed several files, another that had nothing to write."""
    cut = [(0, (0,), (2000,)), (1, (2000,), (1,)), (2, (2001,), (999,))]
    draft = Draft(
        {"a": tensor("F32", (3000,), 1, cut), "b": tensor("U8", (8192,), 2, [(4, (0,), (8192,))])},
        shard_names=("00000", "00000-1", "00000-2", "00001", "00002"),
        block=8192,
    )
    return golden(
        "a shard in several files, a shard without tensors, another size of blocks", "file.missing", draft, [("a", (1999,), (4,))]
    )


def newer() -> Golden:
    """What a later minor version may add, and what interrupted writers may leave."""

    def columns(columns: dict[str, tuple[str, list[int], list[int]]]) -> None:
        columns["fragment.codec"] = ("I32", [2, 1], [1, 2])
        columns["x"] = ("F64", [0], [])

    def record(record: Tree) -> None:
        record["later"] = {"any": ["thing"], "values": {"$unknown": 1}}
        record["shards"][0]["codec"] = None

    about = "a later minor version: unknown fields and columns; files that are not listed"
    draft = dataclasses.replace(BASIC, version="1.7")
    made = golden(about, "record.unknown index.unknown file.unlisted", draft, hooks=Hooks(columns=columns, record=record))
    stray = {
        "shards.000000000000/00000.safetensors": b"left by a writer that was killed",
        "shards.3f9c2a71d04b/00001.safetensors": b"not listed",
        "notes.txt": b"free",
        "rank-00000/slot-0.json": b"not a snapshot",
        "step-00000009/ucf.json": b"not a run",
    }
    return dataclasses.replace(made, files={**made.files, **stray}, rebuild=False)


def step(number: int) -> Draft:
    return Draft({"w": tensor("I32", (3,), number)}, {"step": number}, {"step": number})


def run(rolled_back: Sequence[int], meant: int, about: str, clauses: str) -> Golden:
    files = {f"step-{n:08d}/{path}": data for n in (90, 100, 123456789) for path, data in write(step(n)).items()}
    files |= {
        "step-00000200/shards.0a0b0c0d0e0f/00000.safetensors": b"not committed",
        "step-300/ucf.json": b"too few digits",
        "step-000000400/ucf.json": b"too many",
        "step-00000500": b"no directory",
        "train.log": b"free",
    }
    if rolled_back:
        files["rollback.json"] = seal(b'{"passed_over":%s}' % str([*rolled_back]).replace(" ", "").encode())
    return Golden(about, tuple(clauses.split()), files, contents(step(meant)), rebuild=False)


def slots(
    number: int, at: str = "12:00", run: str = "a", world: int = 2, hashed: bool = True, slot: int = 0
) -> tuple[Draft, Files]:
    """A version of two ranks."""
    draft = Draft(
        {
            "model/w": tensor("F32", (6, 8), number, [(0, (0, 0), (4, 8)), (1, (4, 0), (2, 8))]),
            "model/b": tensor("BF16", (5,), number + 1, [(1, (0,), (5,))]),
            "model/none": tensor("F32", (0, 2), 0),
        },
        fields={"step": number, "mesh": {"dp": 2}, "aliases": {"tied": "model/w", "tied twice": "model/w"}},
    )
    groups = [{"lr": 0.1, "params": ["model/w"]}], [{"lr": 0.1, "params": ["model/w", "model/b"]}, {"lr": 0.2, "params": []}]
    files: Files = {}
    for rank in range(2):
        local = {"$rank_local": {"policy": "error", "coords": [{"dp": rank}], "values": [rank * 7], "first": rank}}
        values = {
            "step": number, "only" if rank else "both": [1, {"$tuple": [2.5]}],
            "optimizer": {"param_groups": groups[rank]}, "rng": local,
            "list": [{"a" if rank else "b": 1}, "same"],
            "pairs": {"$dict": [[rank, "x"], ["k", {"$namespace": {f"n{rank}": 0}}]]},
        }  # fmt: skip
        fields = {
            "step": number, "world": world, "values": values, "aliases": {"tied twice": "tied"} if rank else {"tied": "model/w"},
            "mesh": {"dp": 2}, "coords": {"dp": rank}, "created": f"2026-01-31T{at}:00.00000{rank}+00:00", "run": run,
        }  # fmt: skip

        def unhashed(record: Tree, rank: int = rank) -> None:
            if not hashed and rank:
                record["table_digest"] = None

        def empty(_: int, words: list[int], rank: int = rank) -> None:
            if not hashed and rank:
                words[:] = [0] * len(words)

        files |= write_slot(draft, rank, fields, Hooks(record=unhashed, table=empty), slot=slot)
    return draft, files


def merged(number: int) -> Tree:
    """What the values of both ranks are together."""
    return {
        "step": number,
        "both": [1, {"$tuple": [2.5]}],
        "optimizer": {"param_groups": [{"lr": 0.1, "params": ["model/w", "model/b"]}, {"lr": 0.2, "params": []}]},
        "rng": {"$rank_local": {"policy": "error", "coords": [{"dp": 0}, {"dp": 1}], "values": [0, 7]}},
        "list": [{"b": 1, "a": 1}, "same"],
        "pairs": {"$dict": [[0, "x"], ["k", {"$namespace": {"n0": 0, "n1": 0}}], [1, "x"]]},
        "only": [1, {"$tuple": [2.5]}],
    }


def snapshot() -> Golden:
    draft, files = slots(20)
    older, newer_run = slots(19, slot=1)[1], slots(21, run="b", slot=2)[1]
    files |= older | {path: data for path, data in newer_run.items() if path.startswith("rank-00000")}  # rank 1 lacks step 21
    files |= {path: data for path, data in slots(21, run="c", slot=3)[1].items() if path.startswith("rank-00001")}
    files |= {f"{path}": data for path, data in slots(22, world=3, slot=4)[1].items()}
    files |= {
        "rank-00000/slot-07.json": files["rank-00000/slot-0.json"],
        "rank-00000/slot-9.json": files["rank-00000/slot-0.json"],
        "rank-00001/slot-8.json": b"{",
        "rank-00001/slot-8.safetensors": b"being filled",
        "rank-00001/lock": b"",
        "notes.txt": b"free",
    }
    expected = {**contents(draft), "values": merged(20)}
    clauses = "slot.unlisted version.mixed version.newest slot.ignored version.merge"
    return Golden(
        "two ranks with several versions, of which the newest complete one is meant",
        tuple(clauses.split()),
        files,
        expected,
        rebuild=False,
    )


def unhashed() -> Golden:
    draft, files = slots(20, hashed=False)
    again = slots(20, at="11:59", slot=1)[1]  # the same step, taken before
    files |= again
    expected = {**contents(draft), "values": merged(20), "verified": False}
    clauses = ("slot.unverified", "version.newest")
    return Golden("a slot without checksums; a step that was taken twice", clauses, files, expected, rebuild=False)


GOLDEN: dict[str, Callable[[], Golden]] = {
    "basic": lambda: golden("two tensors, a tied name, a companion", "rebuild.same", BASIC, [("model/w", (3, 2), (2, 5))]),
    "dtypes": dtypes,
    "boxes": boxes,
    "training": training,
    "values": all_values,
    "names": names,
    "parts": parts,
    "empty": lambda: golden("no tensors, no values, no shards", "rebuild.same", Draft({}, shard_names=())),
    "newer-minor": newer,
    "run": lambda: run([], 123456789, "the highest step of a run; names that mean no step", "run.newest"),
    "run-rolled-back": lambda: run([123456789, 200], 100, "a run that went back: steps that are passed over", "run.rollback"),
    "run-all-passed-over": lambda: run([90, 100, 123456789], 123456789, "a run whose steps are all passed over", "run.rollback"),
    "snapshot": snapshot,
    "snapshot-unhashed": unhashed,
}


def expected_json(made: Golden) -> dict[str, Any]:
    """What `expected.json` says."""
    return {
        "about": made.about,
        "clauses": list(made.clauses),
        "digests": {path: xxh(data) for path, data in sorted(made.files.items())},
        "read": made.expected,
        "slices": list(made.slices),
        "rebuild": made.rebuild,
    }
