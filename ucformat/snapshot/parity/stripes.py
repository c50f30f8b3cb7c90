"""Where the parity of a group's slots lies, as in RAID-5. Pure.

Each of the g members' slots is seen as g - 1 chunks of equal size, padded with zeros. Stripe j is one chunk of each member but j,
and member j keeps their XOR: so each holds 1/(g - 1) of a slot more, and each chunk of a lost member lies XORed with chunks
of others on the members that are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PAGE = 4096  # bytes; chunks end there, so that whole pages are read


def chunk_bytes(sizes: Sequence[int]) -> int:
    """Bytes of each chunk, and of each stripe, for slots of these sizes."""
    parts = len(sizes) - 1
    return -(-max(sizes) // (parts * PAGE)) * PAGE


def chunk_in(stripe: int, member: int) -> int:
    """Which chunk of `member` is in a stripe, which is not its own."""
    return stripe if stripe < member else stripe - 1


def stripe_of(chunk: int, member: int) -> int:
    """The stripe that a chunk of `member` is in."""
    return chunk if chunk < member else chunk + 1


@dataclass(frozen=True, slots=True)
class LostRange:
    """Bytes [start, stop) of a lost slot, which lie at `at` of a stripe and in the others' chunks at the same place."""

    start: int
    stop: int
    stripe: int
    at: int

    def of(self, member: int, chunk: int, size: int) -> tuple[int, int]:
        """[start, stop) of the bytes of another member's slot that are XORed with these: fewer where that slot ends before."""
        start = chunk_in(self.stripe, member) * chunk + self.at
        return min(start, size), min(start + self.stop - self.start, size)


def cut(lost: int, start: int, stop: int, chunk: int) -> Iterator[LostRange]:
    """Bytes [start, stop) of a lost member's slot, by stripe."""
    while start < stop:
        number, at = divmod(start, chunk)
        upto = min(stop, (number + 1) * chunk)
        yield LostRange(start, upto, stripe_of(number, lost), at)
        start = upto
