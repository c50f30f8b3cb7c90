"""Which ranks protect one another: groups whose members lie in different failure domains. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_MEMBERS = 8  # of a group: 1/7 more memory, and reading a lost slot takes seven other hosts


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of ranks, each ascending."""

    groups: tuple[tuple[int, ...], ...]
    alone: tuple[int, ...]
    """Ranks for which there is no partner in another domain: nothing protects them."""

    def of(self, rank: int) -> tuple[int, ...]:
        """The group of a rank; empty when it is alone."""
        return next((group for group in self.groups if rank in group), ())


def form_groups(domains: Sequence[str], members: int = MAX_MEMBERS) -> Grouping:
    """Groups of at most about `members` ranks whose `domains` (by rank) all differ, so that a lost domain costs each one member.

    Sizes differ by one where that can be, so 9 domains make 5 and 4. Where domains have different numbers of ranks, what is left
    of the larger ones joins groups that lack them.
    """
    if members < 2:
        raise ValueError(f"groups need at least 2 members, not {members}")
    waiting: dict[str, list[int]] = {}
    for rank, domain in enumerate(domains):
        waiting.setdefault(domain, []).append(rank)
    groups: list[list[int]] = []
    while len(layer := _layer(waiting)) > 1:
        count = -(-len(layer) // members)
        if len(layer) < 2 * count:  # never a group of one
            count = max(1, len(layer) // 2)
        groups += [layer[i::count] for i in range(count)]
    alone = [rank for rank in layer if not _joins(rank, domains, groups)]
    for ranks in waiting.values():
        alone += [rank for rank in ranks if not _joins(rank, domains, groups)]
    return Grouping(tuple(tuple(sorted(group)) for group in groups), tuple(sorted(alone)))


def _layer(waiting: dict[str, list[int]]) -> list[int]:
    """The next rank of each domain that has one."""
    return [ranks.pop(0) for ranks in waiting.values() if ranks]


def _joins(rank: int, domains: Sequence[str], groups: list[list[int]]) -> bool:
    """Put a rank into the smallest group without its domain, if there is any."""
    fitting = [group for group in groups if domains[rank] not in {domains[other] for other in group}]
    if fitting:
        min(fitting, key=len).append(rank)
    return bool(fitting)
