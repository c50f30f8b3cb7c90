"""What a trainer and its keeper say to each other: one JSON object a line, over a pair of pipes.

The trainer sends `Begin`, then `Order`s, at the end `Stop`; the keeper answers with events. No objects are pickled, and
neither side imports what the other runs.
"""

from __future__ import annotations

import os
import re
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

RETRIES = 5  # with pauses that double, about half a minute of trouble before a version is given up
TIMEOUT_S = 1800.0  # a version of a large rank on a slow object store
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")  # it becomes part of file names
_READ_BYTES = 1 << 16  # a pipe holds no more

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """What one keeper does. Raises ValueError for numbers or tokens that make no sense."""

    directory: str
    """Directory of the slots of all ranks of this host (this rank's own are in `rank-<5 digits>`)."""
    rank: int
    world: int
    run: str
    """Token of one start of the job, or of what goes on from a restored state: equal on its ranks, different from every other.
    It keeps what a former one left half done in a step's directory from being taken for a part of this one's version."""
    persist_url: str | None = None
    """Run directory, at any fsspec URL; None when nothing is to be persisted."""
    keep: int | None = None
    """Persisted versions that stay, counted back from the newest; None for all."""
    keep_every: int | None = None
    """Steps that are multiples of this stay for ever, whatever `keep` says."""
    retries: int = RETRIES
    """How often an operation of the storage is repeated after it failed."""
    timeout_s: float = TIMEOUT_S
    """From the start of persisting a version to its commit; what takes longer is given up."""
    imports: tuple[str, ...] = ()
    """Modules that the keeper imports first, such as one that registers a file system with fsspec."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world} ranks")
        if not _RUN.fullmatch(self.run):
            raise ValueError(f"run token {self.run!r}: up to 64 letters, digits, '-' and '_'")
        if self.keep is not None and self.keep < 1:
            raise ValueError("keep is at least 1: the newest checkpoint always stays")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every={self.keep_every} is no number of steps")
        if self.retries < 0 or not self.timeout_s > 0:
            raise ValueError(f"retries={self.retries} and timeout_s={self.timeout_s} must be positive")


# -- to the keeper -----------------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message."""

    options: KeeperOptions
    parent: int
    """Process id of the trainer: when the keeper has another parent, the trainer is dead."""


class Order(msgspec.Struct, frozen=True, tag=True):
    """Hash a slot, and persist it if asked."""

    step: int
    slot: int | None
    """None: this rank's shard of the version is stored already, and only its commit is outstanding."""
    persist: bool
    nbytes: int = 0
    """Bytes of the shard that is stored."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Finish what was ordered, then exit."""


Command = Begin | Order | Stop


# -- from the keeper ---------------------------------------------------------------------------------------------------


class Hashed(msgspec.Struct, frozen=True, tag=True):
    """The block checksums of a slot are in its file, and its record knows them."""

    step: int
    slot: int
    seconds: float


class Stored(msgspec.Struct, frozen=True, tag=True):
    """The shard of this rank is durable: its slot is no longer needed. The commit is still to come."""

    step: int
    slot: int
    seconds: float
    nbytes: int


class Persisted(msgspec.Struct, frozen=True, tag=True):
    """A version is committed: all ranks' shards are durable and `ucf.json` is there."""

    step: int
    seconds: float
    """From the start of persisting here to the sight of the commit."""
    nbytes: int
    """Of this rank's shard."""


class Skipped(msgspec.Struct, frozen=True, tag=True):
    """A version was not hashed or persisted, though nothing failed."""

    step: int
    why: str
    missed: bool = True
    """It was to be persisted, and storage is without it."""


class Pruned(msgspec.Struct, frozen=True, tag=True):
    """Older versions were removed, after this one was committed."""

    step: int
    removed: tuple[int, ...]


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Something failed that is tried again, or that costs nothing but space."""

    step: int
    message: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An order came to nothing. No half of its version can be opened."""

    step: int
    message: str


class Restarted(msgspec.Struct, frozen=True, tag=True):
    """The keeper was found dead, and a new one took over what it had left."""

    count: int
    message: str


Event = Hashed | Stored | Persisted | Skipped | Pruned | Trouble | Failed | Restarted

COMMANDS: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
EVENTS: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


# -- pipes -------------------------------------------------------------------------------------------------------------


class Inbox(Generic[T]):
    """Messages that arrive on a pipe."""

    def __init__(self, fd: int, decode: Callable[[bytes], T]) -> None:
        os.set_blocking(fd, False)
        self._fd, self._decode, self._rest = fd, decode, b""
        self._ready: deque[bytes] = deque()
        self._ended = False

    @property
    def closed(self) -> bool:
        """Whether the writer is gone and all it said was taken."""
        return self._ended and not self._ready

    def wait(self, seconds: float) -> None:
        """Return when something is there, the writer is gone, or the time is over."""
        if self._ready or self._ended:
            return
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)

    def take(self, limit: int | None = None) -> list[T]:
        """Messages that have arrived. Half a message, from a writer that died in it, is dropped."""
        while not self._ended:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                break
            self._ended = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._ready += lines
        count = len(self._ready) if limit is None else min(limit, len(self._ready))
        return [self._decode(self._ready.popleft()) for _ in range(count)]


def send(fd: int, message: msgspec.Struct) -> bool:
    """Write a message; False when the pipe is full (if it does not block) or nobody reads it any more."""
    view = memoryview(msgspec.json.encode(message) + b"\n")
    try:
        while view:
            view = view[os.write(fd, view) :]
    except (BlockingIOError, BrokenPipeError):
        return False
    return True
