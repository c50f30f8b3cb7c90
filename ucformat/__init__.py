"""ucformat: checkpoints that load onto any layout, and a converter between formats.

ucformat.save("runs/a", state, step=100, keep=3)     # every rank calls; committed or absent
step = ucformat.load("runs/a", into=state)           # newest committed step, onto the layout `state` has now
ucformat.open("runs/a")["model/wte.weight"][0:8]     # reads just these bytes
ucformat.convert("runs/a", "out", to="hf")
snap = ucformat.Snapshotter(state, directory="/dev/shm/run")   # keeps every step in memory, see docs/snapshots.md
"""

from typing import TYPE_CHECKING

from ucformat.api import convert, load, open, save, steps  # noqa: A004  # the verb that users expect
from ucformat.errors import UcformatError
from ucformat.reshard.lazy import Checkpoint, LazyTensor
from ucformat.reshard.wrappers import FlatShard, Shard, rank_local

if TYPE_CHECKING:
    from ucformat.snapshot.persistence import Persist
    from ucformat.snapshot.snapshotter import Snapshotter

__all__ = [
    "save",
    "load",
    "open",
    "convert",
    "steps",
    "Shard",
    "FlatShard",
    "rank_local",
    "Checkpoint",
    "LazyTensor",
    "Snapshotter",
    "Persist",
    "UcformatError",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """The snapshot engine is loaded when it is asked for: it brings torch's pipelining with it."""
    if name == "Snapshotter":
        from ucformat.snapshot.snapshotter import Snapshotter

        return Snapshotter
    if name == "Persist":
        from ucformat.snapshot.persistence import Persist

        return Persist
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
