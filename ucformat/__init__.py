"""ucformat: checkpoints that load onto any layout, and a converter between formats.

ucformat.save("runs/a", state, step=100, keep=3)     # every rank calls; committed or absent
step = ucformat.load("runs/a", into=state)           # newest committed step, onto the layout `state` has now
ucformat.open("runs/a")["model/wte.weight"][0:8]     # reads just these bytes
ucformat.convert("runs/a", "out", to="hf")
"""

from ucformat.api import convert, load, open, save, steps  # noqa: A004  # the verb that users expect
from ucformat.errors import UcformatError
from ucformat.reshard.lazy import Checkpoint, LazyTensor
from ucformat.reshard.wrappers import FlatShard, Shard, rank_local

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
    "UcformatError",
]
__version__ = "0.1.0"
