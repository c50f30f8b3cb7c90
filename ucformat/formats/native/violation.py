"""One violation of the specification, as `validate` reports it."""

from __future__ import annotations

from dataclasses import dataclass

from ucformat.errors import UcformatError


@dataclass(frozen=True, slots=True)
class Violation:
    """A clause of specs/format.md, and where a file violates it: bytes [start, stop) where they are known."""

    clause: str
    file: str
    start: int | None = None
    stop: int | None = None
    why: str = ""

    def __str__(self) -> str:
        place = "" if self.start is None else f", bytes {self.start}-{'' if self.stop is None else self.stop}"
        return f"{self.file}{place}: [{self.clause}] {self.why}"


def of_error(error: UcformatError, file: str, clause: str = "") -> Violation:
    """What a reader found."""
    start, stop = getattr(error, "start", None), getattr(error, "stop", None)
    why = getattr(error, "why", "") or str(error).removeprefix(f"{file}: ")
    return Violation(clause or error.clause or "unknown", getattr(error, "file", "") or file, start, stop, why)
