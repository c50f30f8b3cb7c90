"""What a trainer and the process that protects its versions say to each other: one JSON object a line, over a pair of pipes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A rank of the group, and where its process serves its host's snapshots."""

    rank: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ProtectOptions:
    """What one process does."""

    directory: str
    """Of this host's slots."""
    rank: int
    run: str
    """Token of this start of the job."""
    key: bytes
    """Of the job: who does not have it is not served."""
    members: tuple[GroupMember, ...]
    """The group, this rank included, ascending."""
    timeout_s: float = 60.0
    """Until the other members hold a version; what takes longer is given up, since its slot is blocked meanwhile."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message."""

    options: ProtectOptions
    parent: int
    """Process id of the trainer: when the process has another parent, the trainer is dead."""


class Protect(msgspec.Struct, frozen=True, tag=True):
    """Make this rank's stripe for the version in a slot. Each order is answered by one event, in order."""

    step: int
    slot: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Another rank lacks this version: it needs no parity."""

    step: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process has started: it serves this host's slots, and takes orders."""


class Protected(msgspec.Struct, frozen=True, tag=True):
    """The stripe is complete."""

    step: int
    seconds: float
    nbytes: int


class Unprotected(msgspec.Struct, frozen=True, tag=True):
    """There is no stripe for this version, and will be none."""

    step: int
    why: str


class Working(msgspec.Struct, frozen=True, tag=True):
    """A version is being protected, and the process is well."""

    step: int


class Stranger(msgspec.Struct, frozen=True, tag=True):
    """Somebody without the key tried to connect, or connections are too many."""

    why: str


Command = Begin | Protect | Cancel
Event = Ready | Protected | Unprotected | Working | Stranger
COMMANDS = msgspec.json.Decoder(Command)
EVENTS = msgspec.json.Decoder(Event)
