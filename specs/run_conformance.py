"""Puts a reader of the ucf checkpoint format through the conformance kit: `python specs/run_conformance.py --reader CMD`.

CMD is started once and answers requests, a JSON object per line, as specs/conformance/README.md says. This file needs only the
standard library, and the folders `conformance` and `attacks` beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GOLDEN, ATTACKS = HERE / "conformance", HERE / "attacks"
Tree = dict[str, Any]
Ask = Callable[[Tree], Tree]


@dataclass
class Tally:
    """What was tried, and what failed."""

    tried: int = 0
    skipped: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)

    def check(self, name: str, why: str | None) -> None:
        self.tried += 1
        if why is not None:
            self.failures.append(f"{name}: {why}")


@contextmanager
def started(command: Sequence[str], cwd: str | None = None) -> Iterator[Ask]:
    """A reader that runs: a function from requests to answers."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd, encoding="utf-8")  # noqa: S603

    def ask(request: Tree) -> Tree:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the reader ended (exit status {process.wait()}) at {json.dumps(request)}")
        answer: Tree = json.loads(line)
        return answer

    try:
        yield ask
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait()
        process.stdout.close()


def difference(found: Any, wanted: Any, path: str = "") -> str | None:
    """Where two JSON trees differ: 1 is not 1.0, 0.0 not -0.0, and members have an order among values."""
    if type(found) is not type(wanted):
        return f"{path or 'answer'}: {short(found)}, not {short(wanted)}"
    if isinstance(wanted, dict):
        if path.startswith("/values") and list(found) != list(wanted):
            return f"{path}: members {short(list(found))}, not {short(list(wanted))}"
        if found.keys() != wanted.keys():
            return f"{path or 'answer'}: differs in {short(sorted(found.keys() ^ wanted.keys()))}"
        return next(filter(None, (difference(found[key], wanted[key], f"{path}/{key}") for key in wanted)), None)
    if isinstance(wanted, list) and len(found) == len(wanted):
        return next(
            filter(None, (difference(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(found, wanted, strict=True)))), None
        )
    return None if repr(found) == repr(wanted) else f"{path or 'answer'}: {short(found)}, not {short(wanted)}"


def short(x: object) -> str:
    text = json.dumps(x)
    return text if len(text) < 100 else text[:97] + "..."


def run_golden(ask: Ask, folder: Path, tally: Tally) -> None:
    """One golden checkpoint: all of it, slices, and all of it again without the index."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    path = str(folder / "checkpoint")
    tally.check(folder.name, difference(ask({"do": "read", "path": path}), expected["read"]))
    for item in expected["slices"]:
        asked = {key: item[key] for key in ("tensor", "offset", "length")}
        found = ask({"do": "slice", "path": path, **asked})
        tally.check(f"{folder.name} {asked}", difference(found, {"items": item["items"]}))
    if expected["rebuild"]:
        found = ask({"do": "rebuild", "path": path})
        if found.get("error") == "unsupported":
            tally.skipped += 1
        else:
            tally.check(f"{folder.name} from its shards", difference(found, expected["read"]))


def materialise(attack: Tree, folder: Path) -> None:
    """Write the damaged checkpoint of an attack: its golden one with the edits."""
    shutil.copytree(GOLDEN / attack["base"] / "checkpoint", folder)
    for edit in attack["edits"]:
        path = folder / edit["file"]
        if edit.get("remove"):
            path.unlink()
        elif "text" in edit:
            path.write_bytes(edit["text"].encode("utf-8"))
        elif "hex" in edit:
            data = bytearray(path.read_bytes())
            data[edit["at"] : edit["at"] + edit.get("instead_of", len(edit["hex"]) // 2)] = bytes.fromhex(edit["hex"])
            path.write_bytes(data)
        else:
            with path.open("r+b") as file:
                file.truncate(edit["size"])


def run_attack(ask: Ask, attack: Tree, folder: Path, tally: Tally) -> None:
    materialise(attack, folder)
    found = ask({"do": attack["do"], "path": str(folder), **attack.get("slice", {})})
    got = found.get("error", "accepted")
    if got == "unsupported":
        tally.skipped += 1
        return
    why = None if got in attack["expect"] else f"{got}, not {' or '.join(attack['expect'])} ({attack['about']})"
    tally.check(f"attack {attack['name']} on {attack['clause']}", why)


def attacks() -> list[Tree]:
    return [{"name": path.stem, **json.loads(path.read_text(encoding="utf-8"))} for path in sorted(ATTACKS.glob("*.json"))]


def run_mutations(ask: Ask, folder: Path, count: int, seed: int, scratch: Path, tally: Tally) -> None:
    """Change bytes of a golden checkpoint, one file at a time: an error, or equal contents; never other ones."""
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))["read"]
    copy = scratch / folder.name
    shutil.copytree(folder / "checkpoint", copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
    pick = random.Random(f"{seed} {folder.name}")
    weights = [path.stat().st_size ** 0.5 for path in files]  # small files decide most
    for _ in range(count):
        (path,) = pick.choices(files, weights)
        data = path.read_bytes()
        at = pick.randrange(len(data))
        kind = pick.choice(["flip", "byte", "cut", "insert", "zeros"])
        damaged = {
            "flip": data[:at] + bytes([data[at] ^ (1 << pick.randrange(8))]) + data[at + 1 :],
            "byte": data[:at] + bytes([pick.randrange(256)]) + data[at + 1 :],
            "cut": data[:at] + data[at + pick.randrange(1, 9) :],
            "insert": data[:at] + bytes([pick.choice(b'"{}[]0,: \x00$')]) + data[at:],
            "zeros": data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :],
        }[kind]
        path.write_bytes(damaged)
        found = ask({"do": "read", "path": str(copy)})
        refused = "error" in found
        tally.refused += refused
        why = None if refused else difference(found, expected)
        torn = data.startswith(damaged) and path.name == "ucf.json"  # may be taken for none, and an older step is the newest then
        if why is not None and (older(found, folder) or torn):
            why = None
        tally.check(f"{folder.name}: {kind} at byte {at} of {path.relative_to(copy)}", why)
        path.write_bytes(data)


def older(found: Tree, folder: Path) -> bool:
    """Whether a snapshot's reader went back to a version before, as it may; its contents are those of that version."""
    path = folder / "versions.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return any(difference(found, version) is None for version in known)


def run(command: Sequence[str], mutations: int = 0, seed: int = 1, only: str = "", cwd: str | None = None) -> Tally:
    """All of the kit."""
    tally = Tally()
    golden = [path.parent for path in sorted(GOLDEN.glob("*/expected.json")) if only in path.parent.name]
    with started(command, cwd) as ask, tempfile.TemporaryDirectory() as scratch:
        for folder in golden:
            run_golden(ask, folder, tally)
        for attack in attacks():
            if only in attack["name"]:
                run_attack(ask, attack, Path(scratch) / attack["name"], tally)
        for folder in golden if mutations else []:
            run_mutations(ask, folder, mutations, seed, Path(scratch), tally)
    return tally


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Put a reader through the conformance kit of the ucf checkpoint format.")
    parser.add_argument("--reader", help="command that answers requests, see specs/conformance/README.md")
    parser.add_argument("--mutations", type=int, default=0, help="damage each golden checkpoint that many times, too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="names that contain this text")
    parser.add_argument("--write", metavar="DIR", help="instead, write the checkpoints of all attacks, to look at")
    options = parser.parse_args()
    if options.write:
        for attack in attacks():
            materialise(attack, Path(options.write) / attack["name"])
        return
    if not options.reader:
        parser.error("--reader is needed")
    tally = run(shlex.split(options.reader), options.mutations, options.seed, options.only)
    for failure in tally.failures:
        print("FAILED", failure)  # noqa: T201
    refused = f", {tally.refused} of the mutations refused" if options.mutations else ""
    print(f"{tally.tried} tried, {len(tally.failures)} failed, {tally.skipped} unsupported{refused}")  # noqa: T201
    sys.exit(bool(tally.failures))


if __name__ == "__main__":
    main()
