"""The words in which attacks are written: what is wrong, the clause it violates, and the error that is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specs.kit.golden import BASIC, Golden
from specs.kit.write import Files, Hooks, Tree, write

ACCEPTED = "accepted"
RECORD, INDEX, SHARD = "ucf.json", "shards.3f9c2a71d04b/index.safetensors", "shards.3f9c2a71d04b/00000.safetensors"
COMPANION = "companions.3f9c2a71d04b/config.json"


@dataclass(frozen=True)
class Attack:
    """What is wrong, and what readers and the validator must say."""

    name: str
    about: str
    clause: str
    expect: tuple[str, ...]
    files: Files
    base: str = "basic"
    do: str = "read"
    where: str = RECORD
    """The file that the validator must name."""


ATTACKS: list[Attack] = []


def attack(
    clause: str, about: str, expect: str, files: Files, *, base: str = "basic", do: str = "read", where: str = RECORD
) -> None:
    number = sum(one.clause == clause for one in ATTACKS)
    name = f"{clause}-{number + 1}"
    ATTACKS.append(Attack(name, about, clause, tuple(expect.split()), files, base, do, where))


def broken(clause: str, about: str, expect: str = "format", where: str = RECORD, do: str = "read", **hooks: Any) -> None:
    """The basic checkpoint, written with something changed before it is sealed."""
    attack(clause, about, expect, write(BASIC, Hooks(**hooks)), where=where, do=do)


def record(clause: str, about: str, change: Callable[[Tree], object], expect: str = "format", where: str = RECORD) -> None:
    broken(clause, about, expect, where, record=change)


def text(clause: str, about: str, old: str, new: str, expect: str = "format") -> None:
    """A change of the record's text, before it is sealed."""

    def change(raw: bytes) -> bytes:
        assert old.encode() in raw, old
        return raw.replace(old.encode(), new.encode(), 1)

    broken(clause, about, expect, raw=change)


def value(clause: str, about: str, json_text: str, expect: str = "format") -> None:
    text(clause, about, '"lr":0.5', f'"lr":{json_text}', expect)


def edited(files: Files, path: str, change: Callable[[bytes], bytes]) -> Files:
    return {**files, path: change(files[path])}


def flipped(files: Files, path: str, at: int, bit: int = 1) -> Files:
    return edited(files, path, lambda data: data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])


def without(files: Files, *paths: str) -> Files:
    return {path: data for path, data in files.items() if path not in paths}


def record_of(data: bytes) -> bytes:
    return data[data.index(b'"record":') + 9 : data.rindex(b"}")]


def attack_json(attack: Attack, golden: Mapping[str, Golden]) -> dict[str, Any]:
    """What `attacks/NAME.json` says: the edits that make its checkpoint of the golden one."""
    before, edits = golden[attack.base].files, []
    for path in sorted({*before, *attack.files}):
        old, new = before.get(path), attack.files.get(path)
        if new is None:
            edits.append({"file": path, "remove": True})
        elif old != new:
            edits.append(edit(path, old, new))
    return {
        "about": attack.about,
        "clause": attack.clause,
        "base": attack.base,
        "do": attack.do,
        "expect": list(attack.expect),
        "file": attack.where,
        "edits": edits,
    }


def edit(path: str, old: bytes | None, new: bytes) -> dict[str, Any]:
    if old is not None and new == old[: len(new)]:
        return {"file": path, "size": len(new)}
    if old is None or path.endswith(".json"):
        try:
            return {"file": path, "text": new.decode()}
        except UnicodeDecodeError:
            pass
    old = old or b""
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    room = min(len(old), len(new)) - same
    tail = next((i for i, (a, b) in enumerate(zip(reversed(old), reversed(new), strict=False)) if a != b), room)
    tail = min(tail, room)
    return {"file": path, "at": same, "instead_of": len(old) - same - tail, "hex": new[same : len(new) - tail].hex()}
