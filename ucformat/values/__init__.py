"""Everything in a state that is no tensor: the value tree, and its JSON. Formats and reshard use it; it knows neither."""

from ucformat.values.codec import ArrayRef, Opaque, RankLocal, TensorRef, encode
from ucformat.values.decoding import decode
from ucformat.values.tree import escape, join, join_name, merge, prune, refs, split, split_name, unite_aliases
from ucformat.values.walk import changed, nodes

__all__ = [
    "ArrayRef",
    "Opaque",
    "RankLocal",
    "TensorRef",
    "changed",
    "decode",
    "encode",
    "escape",
    "join",
    "join_name",
    "merge",
    "nodes",
    "prune",
    "refs",
    "split",
    "split_name",
    "unite_aliases",
]
