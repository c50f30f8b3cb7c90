"""One exception per violation. Each carries the facts it is about and says what to do.

Everything that ucformat raises on purpose derives from `UcformatError`; the CLI prints these without a traceback.
"""

from __future__ import annotations

import copy
import pickle
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucformat.box import Box


_LONGEST_MESSAGE = 4000  # characters; a hostile file may hold names of megabytes
_CONTROLS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""What a terminal acts on instead of showing it: controls, escapes, changes of direction; and halves of characters."""


def printable(text: str) -> str:
    """`text` with everything that a terminal would act on, or UTF-8 can't hold, written as an escape."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


class _Brief(reprlib.Repr):
    """Like `repr`, in time and length that do not grow with the value."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, limit, limit

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 256 else f"<integer of {x.bit_length()} bits>"


_PATH_SHOWN = 400  # characters of a path in a message


def brief(value: object, limit: int = 80) -> str:
    """A short `repr` of anything a file may hold: never deep, never long, however often its parts are shared."""
    text = _Brief(limit).repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class UcformatError(Exception):
    """Base of all errors raised on purpose. They can be pickled, so that a rank can raise what another rank met.

    Messages are safe to print: neither endless nor with control characters.
    """

    clause: str = ""
    """Id of the clause of specs/format.md that a file violates, where it is a file of ucformat's own format."""
    failures: Mapping[int, str] = MappingProxyType({})
    """Rank → message, where several ranks acted together and some of them failed; else empty."""

    def __str__(self) -> str:
        text = "\n".join(map(printable, super().__str__().split("\n")))
        return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}… ({len(text)} characters)"

    def __reduce__(self) -> tuple[Callable[..., UcformatError], tuple[object, ...]]:
        return _rebuild, (type(self), self.args, {name: _portable(fact) for name, fact in vars(self).items()})

    def of_rank(self, rank: int, failures: Mapping[int, str]) -> UcformatError:
        """The same error for the other ranks to raise: same class, same facts, and the rank that met it in the message."""
        error = copy.copy(self)
        more = len(failures) - 1
        also = "" if not more else f" ({more} other rank{'s' if more > 1 else ''} failed, too)"
        error.args = (f"rank {rank}: {self}{also}",)
        error.failures = dict(failures)
        return error


def _rebuild(kind: type[UcformatError], args: tuple[object, ...], facts: dict[str, object]) -> UcformatError:
    """An error from its class, message and facts. Constructors take the facts, not the message, so none is called."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(facts)
    return error


def _portable(fact: Any) -> object:
    """A fact that another process can read: itself where it can be pickled, else as text."""
    try:
        pickle.dumps(fact)
    except Exception:
        return str(fact)
    return fact


def _where(file: str, start: int | None, stop: int | None) -> str:
    """`file` and the byte range [start, stop) where known, for messages."""
    if start is None:
        return file
    return f"{file}, bytes {start}-{'' if stop is None else stop}"


def _names(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class NotACheckpointError(UcformatError):
    """`path` holds nothing that any reader recognises, or nothing committed."""

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"{path}: not a checkpoint: {why}")


class AmbiguousFormatError(UcformatError):
    """Several readers recognise `path`, and none of them says that it goes before the others."""

    def __init__(self, path: str, formats: Sequence[str]) -> None:
        self.path, self.formats = path, tuple(formats)
        shown = " and ".join(self.formats)
        super().__init__(
            f"{path}: recognised by several readers: {shown}; uninstall the package of one, or let its READER say "
            f"which formats it `precedes`"
        )


class FormatError(UcformatError):
    """A file breaks its own format: truncated, malformed, hostile, or inconsistent with its index."""

    def __init__(self, file: str, why: str, start: int | None = None, stop: int | None = None, clause: str = "") -> None:
        self.file, self.why, self.start, self.stop, self.clause = file, why, start, stop, clause
        super().__init__(f"{_where(file, start, stop)}: {why}")


class SourceChangedError(FormatError):
    """A foreign file is not what it was when it was indexed: the index may lead to wrong bytes."""

    def __init__(self, file: str, why: str, start: int, stop: int) -> None:
        super().__init__(file, f"{why}: index it again (`ucconvert index`), or remove ucf.json to read it without", start, stop)


class UnsupportedError(UcformatError):
    """Recognised, and refused: the message says what it is and what would be needed."""

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"{path}: {why}")


class VersionError(UcformatError):
    """A checkpoint of a format version that this release does not understand."""

    clause = "envelope.version"

    def __init__(self, file: str, found: str, understood: str) -> None:
        self.file, self.found, self.understood = file, found, understood
        super().__init__(f"{file}: format version {found}, this release understands {understood}: update ucformat")


class MissingFileError(UcformatError):
    """A file that the checkpoint needs is not there."""

    clause = "file.missing"

    def __init__(self, file: str, why: str = "missing") -> None:
        self.file, self.why = file, why
        super().__init__(f"{file}: {why}")


class StorageError(UcformatError):
    """The storage failed while reading or writing: `cause` is its own error."""

    def __init__(self, file: str, cause: BaseException | str, start: int | None = None, stop: int | None = None) -> None:
        self.file, self.cause, self.start, self.stop = file, cause, start, stop
        super().__init__(f"{_where(file, start, stop)}: {cause}")


class ChecksumError(UcformatError):
    """Bytes [start, stop) of `file` are not those that were written; `tensors` lie in them."""

    def __init__(
        self, file: str, start: int, stop: int, tensors: Sequence[str] = (), what: str = "checksum", clause: str = "block.digest"
    ) -> None:
        self.file, self.start, self.stop, self.tensors, self.clause = file, start, stop, tuple(tensors), clause
        touched = f"; damages {_names(self.tensors)}" if self.tensors else ""
        super().__init__(f"{file}, bytes {start}-{stop}: {what} does not match{touched}")


class CoverageError(UcformatError):
    """No fragment holds `missing` of `tensor`: raised before the first read."""

    clause = "read.coverage"

    def __init__(self, tensor: str, missing: Box | None, where: str = "") -> None:
        self.tensor, self.missing = tensor, missing
        box = "nothing of it is stored" if missing is None else f"box {missing} is not stored"
        super().__init__(f"{where + ': ' if where else ''}tensor {tensor!r}: {box}")


class OverlapError(UcformatError):
    """Two fragments of `tensor` both hold `box`: which one is right cannot be known."""

    clause = "read.overlap"

    def __init__(self, tensor: str, box: Box, files: Sequence[str] = ()) -> None:
        self.tensor, self.box, self.files = tensor, box, tuple(files)
        held = f" by {_names(self.files)}" if self.files else ""
        super().__init__(f"tensor {tensor!r}: box {box} is stored more than once{held}")


class ShapeMismatchError(UcformatError):
    """The target's global shape of `tensor` is not the stored one."""

    def __init__(self, tensor: str, stored: Sequence[int], wanted: Sequence[int]) -> None:
        self.tensor, self.stored, self.wanted = tensor, tuple(stored), tuple(wanted)
        super().__init__(f"tensor {tensor!r}: stored with shape {list(stored)}, wanted with {list(wanted)}")


class DTypeMismatchError(UcformatError):
    """The target's dtype of `tensor` is not the stored one, and no cast was asked for."""

    def __init__(self, tensor: str, stored: str, wanted: str, hint: str = "pass cast=True to convert") -> None:
        self.tensor, self.stored, self.wanted = tensor, stored, wanted
        super().__init__(f"tensor {tensor!r}: stored as {stored}, wanted as {wanted}: {hint}")


class NamesMismatchError(UcformatError):
    """Target and checkpoint do not hold the same names."""

    def __init__(self, path: str, missing: Sequence[str], unexpected: Sequence[str], hint: str = "", why: str = "") -> None:
        self.path, self.missing, self.unexpected, self.hint, self.why = path, tuple(missing), tuple(unexpected), hint, why
        parts = [why] if why else []
        if missing:
            parts.append(f"wanted but not stored: {_names(self.missing)}")
        if unexpected:
            parts.append(f"stored but not wanted: {_names(self.unexpected)}")
        super().__init__(f"{path}: {'; '.join(parts)}{f': {hint}' if hint else ''}")


class UnsafePickleError(UcformatError):
    """A pickle would run `what`. Nothing was executed."""

    def __init__(self, file: str, what: str) -> None:
        self.file, self.what = file, what
        super().__init__(f"{file}: the pickle would run {what}: refused, nothing was executed")


class UnrepresentableError(UcformatError):
    """A value in the state can't be written exactly: `path` says where it is."""

    def __init__(self, path: str, kind: str, hint: str = "convert it to plain values or leave it out") -> None:
        self.path, self.kind = path, kind
        shown = path if len(path) <= _PATH_SHOWN else f"{path[: _PATH_SHOWN // 2]}…{path[-_PATH_SHOWN // 2 :]}"
        super().__init__(f"state at {shown or '<top>'}: a {kind} can't be stored: {hint}")


class ValueConflictError(UcformatError):
    """Ranks hold different things under one path that is not rank-local."""

    def __init__(
        self,
        path: str,
        ranks: Sequence[int],
        what: str = "values differ",
        hint: str = "wrap it in ucformat.rank_local(...) if each rank has its own",
    ) -> None:
        self.path, self.ranks = path, tuple(ranks)
        where = f" on ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        super().__init__(f"state at {path}: {what}{where}: {hint}")


class RankLocalError(UcformatError):
    """Rank-local state of another world, and no policy that says what to do with it."""

    def __init__(self, path: str, saved: int, now: int) -> None:
        self.path, self.saved, self.now = path, saved, now
        super().__init__(
            f"state at {path}: rank-local, saved by {saved} ranks and wanted by {now}: "
            "declare what then holds with rank_local(..., on_resize='modulo' | 'keep' | 'gather')"
        )


class ExistsError(UcformatError):
    """Something is at `path` already: a checkpoint, or files that ucformat did not write. Nothing was changed."""

    def __init__(self, path: str, why: str = "already exists", how: str = "pass overwrite=True (--overwrite)") -> None:
        self.path, self.why = path, why
        super().__init__(f"{path}: {why}: choose another path{' or ' + how if how else ''}")


class ConflictError(UcformatError):
    """Another process wrote to `path` at the same time and came first. Its checkpoint stands; nothing of this one was kept."""

    def __init__(self, path: str, why: str = "another process committed a checkpoint here meanwhile") -> None:
        self.path, self.why = path, why
        super().__init__(f"{path}: {why}; this one was discarded: give every job a path of its own")


class RankFailedError(UcformatError):
    """Other ranks died, did not answer, or met an error that is not ucformat's, so nothing was committed.

    `failures` maps rank to message. Ranks that did not answer are suspected to have died.
    """

    def __init__(self, what: str, failures: Mapping[int, str], why: str = "") -> None:
        self.what, self.failures, self.why = what, dict(failures), why
        shown = [f"rank {rank}: {message}" for rank, message in sorted(self.failures.items())[:4]]
        more = "" if len(self.failures) <= 4 else f" and {len(self.failures) - 4} more"
        super().__init__(f"{what} failed: {'; '.join([*shown, *([why] if why else [])])}{more}")


class LayoutError(UcformatError):
    """A declared layout that can't be read, or that does not fit a tensor."""

    def __init__(self, layout: str, why: str) -> None:
        self.layout, self.why = layout, why
        super().__init__(f"layout {layout}: {why}")


class SnapshotMemoryError(UcformatError):
    """The slots of a snapshot do not fit: found out before anything was allocated, `limit` says what sets the limit."""

    def __init__(self, directory: str, needed: int, free: int, limit: str, hint: str = "") -> None:
        self.directory, self.needed, self.free, self.limit = directory, needed, free, limit
        super().__init__(
            f"{directory}: the slots of this rank need {needed:,} bytes more, {max(free, 0):,} are free ({limit}): "
            f"choose fewer slots, or a directory with more room{hint}"
        )


class SnapshotInUseError(UcformatError):
    """Another living process fills the slots in `directory`."""

    def __init__(self, directory: str, holder: str) -> None:
        self.directory, self.holder = directory, holder
        super().__init__(f"{directory}: in use by {holder or 'another process'}: give every job a directory of its own")


class CheckpointChangedError(UcformatError):
    """`path` was replaced while it was read: what was read must not be used."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path}: replaced while it was read: read it again")


class SnapshotChangedError(CheckpointChangedError):
    """A running job gave a slot to another version while step `step` was read from it: what was read must not be used."""

    def __init__(self, file: str, step: int) -> None:
        self.file, self.path, self.step = file, file, step
        UcformatError.__init__(
            self,
            f"{file}: given to another version while step {step} was read: open the directory again for the newest version; "
            "stop the job, or give it more slots, when reading takes longer than its steps",
        )
