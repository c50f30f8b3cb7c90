"""A live training state as boxes in memory. Save, load and snapshots walk it; it reads and writes no file."""
