"""Byte ranges in, whole files out, at any path or URL. Formats, reshard and snapshots read and write through a `Store`."""
