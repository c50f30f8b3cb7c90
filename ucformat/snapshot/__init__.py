"""Snapshots of running training: not built yet."""
