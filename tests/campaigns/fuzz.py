"""Hostile metadata: headers, indices, records, zip directories, pickles. Nothing but typed errors, soon, in little memory.

Mutations are made below the checksums: digests and CRCs are computed anew, so that parsers see what an attacker would send.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import ucformat
from tests.campaigns.damage import damaged
from tests.campaigns.samples import Sample
from ucformat.containers.envelope import seal
from ucformat.errors import UcformatError
from ucformat.formats.native.shard import hex_digest
from ucformat.pickles.unpickle import to_values, unpickle
from ucformat.reshard.verify import verify
from ucformat.values import encode

BAD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**33, 2**62, 2**63, 2**64, 10**30, 1.5, float("nan"), float("inf"), -0.0, "", "\0", "\ud800",
    "../x", "/etc/passwd", "a" * 5000, "\x1b[2J", "F32", "U8", "native", [], {}, [[]], [0, 2**33], [2**40] * 8, {"$tuple": 1},
    {"$opaque": {"class": "x", "state": {}}}, {"$dict": [[1, 2], [1, 2]]}, "00000", [None], {"": {}},
]  # fmt: skip


def mutate(random: Random, tree: Any, depth: int = 0) -> Any:
    """A JSON tree with something changed somewhere."""
    if depth > 60 or random.random() < 0.15:
        return random.choice(BAD)
    if isinstance(tree, dict) and tree:
        tree, key = dict(tree), random.choice(list(tree))
        action = random.random()
        if action < 0.1:
            del tree[key]
        elif action < 0.2:
            tree[random.choice([k for k in [*map(str, BAD), *tree] if isinstance(k, str)])] = tree[key]
        else:
            tree[key] = mutate(random, tree[key], depth + 1)
        return tree
    if isinstance(tree, list) and tree:
        tree, at = list(tree), random.randrange(len(tree))
        action = random.random()
        if action < 0.1:
            del tree[at]
        elif action < 0.2:
            tree.insert(at, random.choice(tree))
        else:
            tree[at] = mutate(random, tree[at], depth + 1)
        return tree
    if type(tree) is int and random.random() < 0.5:
        return tree + random.choice([-1, 1, 7, 4096, -4096, 2**32])
    return random.choice(BAD)


def json_text(random: Random, data: bytes) -> bytes:
    """JSON, mutated as a tree, or as text, or nested deeply."""
    way = random.random()
    if way < 0.1:
        return damaged(random, data)
    if way < 0.13:
        return b"[" * 100_000 if random.random() < 0.5 else b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    tree = json.loads(data)
    for _ in range(random.choice([1, 1, 2, 5])):
        tree = mutate(random, tree)
    return json.dumps(tree, ensure_ascii=True).encode()


def header(random: Random, data: bytes) -> bytes:
    """A safetensors file with a mutated header, its length made to fit."""
    length = int.from_bytes(data[:8], "little")
    if random.random() < 0.1:
        return damaged(random, data)
    text = json_text(random, data[8 : 8 + length].rstrip())
    text += b" " * (length - len(text)) if random.random() < 0.7 else b""
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def zipped(random: Random, data: bytes) -> bytes:
    """A zip whose directory, or one of whose records, is mutated; CRCs fit."""
    if random.random() < 0.4:
        tail = data[-2000:] if len(data) > 2000 else data
        return data[: len(data) - len(tail)] + damaged(random, tail)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError):
        return damaged(random, data)
    pickles = [name for name in records if name.endswith(".pkl")]
    name = random.choice(pickles if pickles and random.random() < 0.9 else sorted(records))
    records[name] = pickled(random, records[name])
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if random.random() < 0.03 else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", method) as archive:
        for key, value in records.items():
            archive.writestr(key, value)
    return out.getvalue()


_OPS = b"()]}.\x85\x86\x87tladsube0122hqRQNKJ\x81\x8f\x90\x91\x93\x94\x88\x89\x92b"
_ATOMS = [
    b"K\x01", b"K\xff", b"N", b"\x88", b"X\x01\x00\x00\x00a", b"\x8c\x01b", b"C\x02xy", b"J\xff\xff\xff\xff", b"]", b"}", b")",
    b"\x8f", b"(", b"G?\xf0\x00\x00\x00\x00\x00\x00", b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"2", b"h\x00", b"h\x01", b"\x94",
]  # fmt: skip
_NAMES = [
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch FloatStorage", "collections OrderedDict",
    "torch Size", "torch device", "numpy dtype", "numpy.core.multiarray _reconstruct", "numpy.core.multiarray scalar",
    "numpy.core.numeric _frombuffer", "builtins set", "builtins frozenset", "builtins bytearray", "builtins getattr",
    "_codecs encode", "collections defaultdict", "pathlib PosixPath", "argparse Namespace", "pkg Thing", "builtins complex",
    "copyreg _reconstructor", "torch._tensor _rebuild_from_type_v2", "torch._utils _rebuild_wrapper_subclass", "torch float32",
    "torch._utils _rebuild_sparse_tensor", "torch.storage UntypedStorage", "functools partial", "os system",
]  # fmt: skip
_TAILS = [b"\x85R", *(bytes([op]) for op in b"\x85\x86\x87tRsuea\x90\x91b\x810dlQ")]


def opcodes(random: Random, count: int) -> bytes:
    """Pickle opcodes that more or less fit together."""
    out = []
    for _ in range(count):
        draw = random.random()
        if draw < 0.5:
            out.append(random.choice(_ATOMS))
        elif draw < 0.65:
            out.append(b"c" + random.choice(_NAMES).replace(" ", "\n").encode() + b"\n")
        elif draw < 0.97:
            out.append(random.choice(_TAILS))
        else:
            out.append(random.choice([b"2\x86", b"\x85", b"2\x87"]) * random.choice([3, 40, 2000]))
    return b"".join(out)


def pickled(random: Random, data: bytes) -> bytes:
    """A pickle with opcodes changed, inserted or moved."""
    raw = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        at = random.randrange(len(raw)) if raw else 0
        action = random.random()
        if action < 0.3 and raw:
            raw[at] = random.choice(_OPS) if random.random() < 0.7 else random.randrange(256)
        elif action < 0.7:
            raw[at:at] = opcodes(random, random.randrange(1, 6))
        elif action < 0.85 and raw:
            stop = min(len(raw), at + random.choice([1, 2, 8, 50]))
            del raw[at:stop]
        else:
            piece = raw[at : at + random.choice([4, 16, 64])]
            to = random.randrange(len(raw) + 1)
            raw[to:to] = piece
    return bytes(raw)


class Pickles:
    """A trial: decode a few hundred random pickles and write down what they hold."""

    def __init__(self, seeds: list[bytes]) -> None:
        self.seeds = seeds

    def __call__(self, random: Random) -> str:
        if random.random() < 0.5:
            data = pickled(random, random.choice(self.seeds))
        else:
            data = b"\x80\x02" + opcodes(random, random.randrange(4, 60)) + b"."
        try:
            tree = to_values(unpickle(data, "f", lambda pid: pid), "f", max_nodes=1_000_000)
            encode(tree) if not isinstance(tree, bytes) else None
        except UcformatError as error:
            if len(str(error)) > 5000:
                return f"memory: a message of {len(str(error))} characters"
        return ""


class Fuzz:
    """A trial: mutate the metadata of a sample, then open, list, verify and read it."""

    def __init__(self, samples: dict[str, Sample], work: Path) -> None:
        self.samples, self.work = samples, work

    def __call__(self, random: Random) -> str:
        sample = self.samples[random.choice(sorted(self.samples))]
        files = dict(sample.files)
        name = random.choice(sorted(files))
        files[name] = self.hostile(random, name, files[name])
        if name.endswith("index.safetensors") and "ucf.json" in files and random.random() < 0.9:
            files["ucf.json"] = _reseal(files["ucf.json"], files[name])
        directory = Path(tempfile.mkdtemp(dir=self.work))
        try:
            where = Sample(sample.kind, sample.entry, files, {}, b"").write(directory)
            opened = ucformat.open(where)
            repr(opened)
            encode(opened.catalog.values)
            if sum(spec.nbytes for spec in opened.catalog.tensors) < 1 << 28:
                verify(opened.catalog)
                for key in opened:
                    opened[key].read()
        except UcformatError as error:
            if len(str(error)) > 5000:
                return f"memory: a message of {len(str(error))} characters"
        finally:
            shutil.rmtree(directory)
        return ""

    def hostile(self, random: Random, name: str, data: bytes) -> bytes:
        """The file, mutated as its format allows."""
        if name.endswith("ucf.json"):
            record = json.loads(data)["record"]
            for _ in range(random.choice([1, 1, 3])):
                record = mutate(random, record)
            return seal(json.dumps(record).encode()) if random.random() < 0.9 else json_text(random, data)
        if name.endswith(".json"):
            return json_text(random, data)
        if name.endswith(".safetensors"):
            return header(random, data)
        if name.endswith(".metadata"):
            return pickled(random, data)
        if data[:2] == b"PK":
            return zipped(random, data)
        return damaged(random, data)


def _reseal(manifest: bytes, index: bytes) -> bytes:
    record = json.loads(manifest)["record"]
    record["index"].update(size=len(index), digest=hex_digest(index))
    return seal(json.dumps(record).encode())


def pickle_seeds(samples: dict[str, Sample]) -> list[bytes]:
    """Honest pickles to start from."""
    seeds = [pickle.dumps({"a": (1, [2, {3, (4, 5)}]), "b": frozenset([1])}, protocol=protocol) for protocol in (0, 2, 4)]
    for sample in samples.values():
        for name, data in sample.files.items():
            if name.endswith(".metadata"):
                seeds.append(data)
            elif data[:2] == b"PK" and struct.unpack_from("<H", data, 8) == (0,):
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    seeds += [archive.read(entry) for entry in archive.namelist() if entry.endswith("data.pkl")]
    return [seed for seed in seeds if len(seed) < 1 << 16]
