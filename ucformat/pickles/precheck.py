"""A look over a pickle's opcodes before it is decoded: declared lengths, memo indices and opcodes must be sane.

The unpickler allocates what a pickle declares: a five-byte opcode may ask for a memo of 32 GiB, an eight-byte length
for any amount. One pass over the opcodes costs far less than decoding, and everything after it is bounded by the
length of the pickle.

The same pass finds where dicts and sets are made: the decoder hashes their keys in C, where a tuple that is nested a million
deep overflows the stack, and one whose parts are shared takes for ever. See `Scan.data`.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ucformat.errors import FormatError

MEMO_FLOOR = 1 << 20  # memo indices below this cost 16 MiB at most, whatever the pickle's length
_RUN_OPS = 4096  # matched at a time: the regular expression engine remembers each one in case it must go back
_CONTAINERS_FLOOR = 1 << 20  # dicts and sets below this cost 100 MB at most
_BYTES_PER_CONTAINER = 8  # no honest pickle holds more dicts than one in so many bytes: each has keys

_REFUSED = {"PERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
"""Opcodes that no checkpoint needs and whose meaning depends on the process that reads."""
_MEMO = {"PUT", "LONG_BINPUT"}
_FRESH = {"EMPTY_DICT": 0, "EMPTY_SET": 1}
_HASHING = {"DICT", "FROZENSET"}
"""Opcodes that make something of what is on the stack, and hash it."""
_NEXT_BUFFER = 0x97
_LENGTH_BYTES = {-2: 1, -3: 4, -4: 4, -5: 8}
"""pickletools' codes of arguments that start with their own length, to the bytes of that length."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a look over a pickle found."""

    length: int
    """Bytes of the pickle, STOP included."""
    data: bytes | bytearray
    """The pickle, with NEXT_BUFFER in place of each opcode that makes an empty dict or set: the reader hands out its own."""
    fresh: bytes
    """What these are to be, in their order: 0 a dict, 1 a set."""
    hashes: bool
    """It holds opcodes (rare ones) that hash what they make: the decoder in C must not run them."""


def _argument(op: pickletools.OpcodeInfo) -> int:
    return 0 if op.arg is None else op.arg.n


def _pattern(ops: Iterable[pickletools.OpcodeInfo]) -> bytes:
    """A class of the opcodes' bytes."""
    return b"[" + b"".join(re.escape(op.code.encode("latin1")) for op in ops) + b"]"


def _run() -> re.Pattern[bytes]:
    """Matches a run of opcodes with arguments of fixed width, LONG_BINPUT with small indices included."""
    looked_at = _REFUSED | _MEMO | _HASHING | _FRESH.keys() | {"STOP"}
    plain = [op for op in pickletools.opcodes if op.name not in looked_at and _argument(op) >= 0]
    parts = [
        _pattern(op for op in plain if _argument(op) == width) + b".{%d}" % width for width in sorted(set(map(_argument, plain)))
    ]
    small_put = rb"r..[\x00-\x0f]\x00"
    return re.compile(b"(?:" + b"|".join([*parts, small_put]) + b"){1,%d}" % _RUN_OPS, re.DOTALL)


_RUN = _run()
_OTHERS = {op.code.encode("latin1")[0]: (op.name, _argument(op)) for op in pickletools.opcodes}


def scan(data: bytes, file: str) -> Scan:
    """Look over the pickle at the start of `data`. Raises FormatError when it is malformed."""
    at, size = 0, len(data)
    patched: bytes | bytearray = data
    fresh, hashes = bytearray(), False
    while True:
        run = _RUN.match(data, at)
        at = at if run is None else run.end()
        if at >= size:
            raise FormatError(file, "truncated pickle", at, size)
        known = _OTHERS.get(data[at])
        if known is None or known[0] in _REFUSED:
            raise FormatError(file, f"the pickle holds opcode {data[at]:#04x}, which no checkpoint needs", at, at + 1)
        name, width = known
        if name == "STOP":
            return Scan(at + 1, patched, bytes(fresh), hashes)
        if name in _FRESH:
            patched = bytearray(data) if isinstance(patched, bytes) else patched
            patched[at] = _NEXT_BUFFER
            fresh.append(_FRESH[name])
            if len(fresh) > max(_CONTAINERS_FLOOR, size // _BYTES_PER_CONTAINER):
                raise FormatError(file, f"more than {len(fresh) - 1} dicts and sets in a pickle of {size} bytes", at, at + 1)
        hashes |= name in _HASHING
        stop = _end(data, at + 1, width)
        if stop > size:
            raise FormatError(file, f"the pickle declares {stop - at} bytes for {name}, and {size - at} are left", at, size)
        if name in _MEMO:
            _check_memo(data[at + 1 : stop], name, file, at, size)
        at = stop


def _end(data: bytes, at: int, width: int) -> int:
    """Where the argument that starts at `at` ends; past the end of `data` when it is cut off."""
    beyond = len(data) + 1
    if width >= 0:
        return at + width
    if width in _LENGTH_BYTES:
        count = _LENGTH_BYTES[width]
        length = int.from_bytes(data[at : at + count], "little")
        return at + count + length if at + count <= len(data) else beyond
    lines = 2 if data[at - 1 : at] in (b"c", b"i") else 1
    for _ in range(lines):
        found = data.find(b"\n", at)
        if found < 0:
            return beyond
        at = found + 1
    return at


def _check_memo(argument: bytes, name: str, file: str, at: int, size: int) -> None:
    try:
        index = int(argument) if name == "PUT" else int.from_bytes(argument, "little")
    except ValueError:
        raise FormatError(file, "the pickle holds a memo index that is no number", at, at + len(argument)) from None
    if not 0 <= index < max(MEMO_FLOOR, size):
        raise FormatError(file, f"the pickle of {size} bytes uses memo index {index}", at, at + len(argument))
